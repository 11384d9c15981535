"""What decoding needs of a model and of a way to draft: protocols and the values that pass between them.

Everything is batched over B images. A session owns preallocated caches for one shape and is used for one batch at a
time; with guidance it holds two rows per image. Features of the target are passed to the drafter unread.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from lantern_bench.decoding.tree import DraftTree


class Logits(NamedTuple):
    """The target's answer at N nodes of B images.

    cond, uncond: logits [B, N, V]; uncond is None without guidance. features: final-norm hidden states
    [rows, N, width], rows = 2B with guidance (conditional rows first), B without.
    """

    cond: Tensor
    uncond: Tensor | None
    features: Tensor


class DrafterLogits(NamedTuple):
    """The drafter's answer at n nodes of B images: logits [B, n, V], uncond None without guidance."""

    cond: Tensor
    uncond: Tensor | None


class TargetSession(Protocol):
    """The target for one batch of images; `score` and `commit` may be compiled, and have fixed shapes."""

    def prefill(self, condition: Any) -> Logits:
        """Start B images: logits of the last prefix position (N = 1), features of the whole prefix."""

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        """Run one forward over the N nodes of a draft tree, root first, behind the committed tokens.

        tokens, depths: int64 [B, N]. attention: bool [B, N, N], node (row) sees node (column).
        """

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the first `counts` [B] nodes of `path` [B, D + 1] of the last `score`; the others are filler."""


class DrafterSession(Protocol):
    """The drafter for one batch of images (EAGLE: features of the target in, logits of its head out)."""

    def prefill(self, condition: Any, features: Tensor) -> None:
        """Start from the prefix features [rows, P, width]; `observe` gets the last again, with the first token."""

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        """Feed committed tokens [B, n] with the true features [rows, n, width] that predicted them.

        The first `counts` [B] count, the others are filler. Returns drafts for the new root, n = 1.
        """

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        """Expand n nodes one level deeper, tokens [B, n].

        origin [B, n]: the slot of each node's parent among the nodes of the call before (0, the root, in the first).
        seen: bool [B, n, total], which of all nodes extended since `observe` each one attends to, itself included.
        """


@runtime_checkable
class KeepsCache(Protocol):
    """A session, of target or drafter, whose cache keeps more than it shows."""

    def clear(self) -> None:
        """Fill the cache with zeros, after NaN: attention gives hidden positions the weight 0, and 0 * NaN is NaN."""


class Target(Protocol):
    """A model whose distribution is to be sampled."""

    vocab_size: int
    image_tokens: int

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""

    def session(self, batch: int, guided: bool, nodes: int) -> TargetSession:
        """A session for B images and trees of at most `nodes` nodes, root included; caches are reused."""


@runtime_checkable
class GuidesFeatures(Protocol):
    """A session with a linear head: it may guide the features and compute the logits of one row."""

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `score`, the logits float32 [B, N, V] guided by `cfg_scale`, and the features [rows, N, width]."""


@runtime_checkable
class WithForcedTokens(Protocol):
    """A target with forced tokens: all behind the first `choices` of its vocabulary.

    Its logits and its drafter's make a forced token certain at its positions and impossible elsewhere.
    """

    @property
    def n_codes(self) -> int:
        """How many tokens are not forced."""

    def forced(self, places: Tensor) -> Tensor:
        """The tokens that are forced at `places` int64 [...] of an image, -1 where none is."""


@runtime_checkable
class ScoresFresh(Protocol):
    """A target that also computes whole images without its cache, which `check-model` compares its sessions with."""

    def logits_without_cache(self, condition: Any, tokens: Tensor, guided: bool) -> tuple[Tensor, Tensor | None]:
        """The logits [B, N, V] that predict tokens int64 [B, N], with and without the prompt; as `score` otherwise."""


class Drafter(Protocol):
    """A model that proposes."""

    def session(self, batch: int, guided: bool, nodes: int) -> DrafterSession:
        """A session for B images that extends at most `nodes` nodes a step; caches are reused."""


class PixelDecoder(Protocol):
    """Tokens to pictures."""

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3] on the CPU."""


Drafted: TypeAlias = tuple[Any, ...]
"""The tensors (or None) that a draft computed, for its `DraftMethod` to read, without what all drafts share."""


class DraftMethod(Protocol):
    """One way to draft: `nodes` of the tree with its root, `depth` of the deepest, `forwards` of the drafter a step.

    `noises` is how many vectors of Exp(1) noise over the vocabulary a step takes, `fanout` the most children of a node.
    A draft is one program of fixed shapes: no Python decision may depend on a tensor's values.
    """

    nodes: int
    depth: int
    forwards: int
    noises: int
    fanout: int

    def draft(
        self,
        session: DrafterSession | None,
        drafts: DrafterLogits | None,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,
    ) -> Drafted:
        """Draft below the tokens `root` [B], whose children `drafts` describes.

        `noise` float32 [B, noises, V], `depth_limit` int64 [B]. session, drafts: None for a drafting without a drafter.
        """

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the target scores: tokens, depths [B, M] and attention [B, M, M]."""

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that verification walks."""


@runtime_checkable
class VerifiesItself(Protocol):
    """A `DraftMethod` with a walk of its own at temperatures above 0."""

    def verify(self, *arguments: Any) -> Any:
        """Take and return what `verify` of acceptance/walk.py does."""


class LastStep(NamedTuple):
    """What a step found, for draftings that make the next draft from it.

    p: float32 [B, M, V], the target's distributions at the nodes of the tree (of the guided logits at temperature 1
    in greedy decoding). path, accepted, tokens: as in `Verdict`. position: int64 [B], tokens committed with this step.
    active: bool [B], False for images that were complete before it.
    """

    tree: DraftTree
    p: Tensor
    path: Tensor
    accepted: Tensor
    tokens: Tensor
    position: Tensor
    active: Tensor


@runtime_checkable
class KeepsState(Protocol):
    """A `DraftMethod` that drafts from what the last step found.

    Its state is in tensors made when it is built, for one batch size; both methods write into them in place.
    """

    def start_images(self, p: Tensor) -> None:
        """New images start; `p` float32 [B, V] is the distribution of their first token."""

    def after_step(self, step: LastStep) -> None:
        """A step was verified; runs in the same program."""
