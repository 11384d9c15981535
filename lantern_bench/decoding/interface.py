"""What decoding needs of a model: three protocols and the values that pass between them.

Everything is batched over B images. A session owns preallocated caches for one shape and is used for one batch at a
time; with guidance it carries two rows an image inside, which nobody outside sees. Features are opaque here: what the
target gives is handed to the drafter. No architecture and no file lives in this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from lantern_bench.decoding.tree import DraftTree


class Scores(NamedTuple):
    """The target's answer at N nodes of B images.

    cond, uncond: logits [B, N, V]; uncond is None without guidance. features: final-norm hidden states
    [rows, N, width], rows = 2B with guidance (conditional rows first), B without.
    """

    cond: Tensor
    uncond: Tensor | None
    features: Tensor


class Drafts(NamedTuple):
    """The drafter's answer at n nodes of B images: logits [B, n, V], uncond None without guidance."""

    cond: Tensor
    uncond: Tensor | None


class TargetSession(Protocol):
    """The target at work on one batch of images.

    `score` and `commit` may be compiled: what changes from step to step is in tensors of fixed shapes.
    """

    def prefill(self, condition: Any) -> Scores:
        """Start B images afresh from their condition; scores of the last prefix position (N = 1) for the logits.

        The features cover the whole prefix.
        """

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Scores:
        """One forward over the N nodes of a draft tree, root first, on top of what is committed.

        tokens, depths: int64 [B, N]. attention: bool [B, N, N], node (row) sees node (column).
        """

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the first `counts` [B] nodes of `path` [B, D + 1] of the last `score`; the rest is filler."""


class DrafterSession(Protocol):
    """The drafter at work on one batch of images (EAGLE: features of the target in, logits of its head out)."""

    def prefill(self, condition: Any, features: Tensor) -> None:
        """Start afresh from the prefix features [rows, P, width].

        The last of them predicts the first token and comes with it through `observe`.
        """

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> Drafts:
        """Feed committed tokens [B, n] with the true features [rows, n, width] that predicted them.

        `counts` [B] of them count, the rest is filler. Drafts for the new root, n = 1.
        """

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Drafts:
        """Expand n nodes one level deeper, tokens [B, n].

        origin [B, n]: the slot of each node's parent among the nodes of the call before (0, the root, in the first).
        seen: bool [B, n, total], which of all nodes extended since `observe` each one attends to, itself included.
        """


class Target(Protocol):
    """A model whose distribution is to be sampled."""

    vocab_size: int
    image_tokens: int

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def session(self, batch: int, guided: bool, nodes: int) -> TargetSession:
        """A session for B images and trees of at most `nodes` nodes, root included; caches are reused."""


@runtime_checkable
class GuidesFeatures(Protocol):
    """A session whose head is linear: it may guide the features, and need not compute the logits of both rows."""

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `score`, the logits float32 [B, N, V] guided by `cfg_scale`, and the features [rows, N, width]."""


@runtime_checkable
class WithForcedTokens(Protocol):
    """A target that may have tokens nobody chooses: all behind the first `choices` of its vocabulary.

    Its logits make them certain where they stand and impossible elsewhere, and so do its drafter's.
    """

    @property
    def choices(self) -> int:
        """How many tokens are ever chosen."""


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
        self, session: DrafterSession | None, drafts: Drafts | None, root: Tensor, noise: Tensor, depth_limit: Tensor
    ) -> Drafted:
        """Draft below the tokens `root` [B], whose children `drafts` describes.

        `noise` float32 [B, noises, V], `depth_limit` int64 [B]. session, drafts: None for a drafting without a drafter.
        """

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """What the target is shown: tokens, depths [B, M] and attention [B, M, M]."""

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that verification walks."""


class LastStep(NamedTuple):
    """What a step found, for draftings that make the next draft from it.

    p: float32 [B, M, V], the target's distributions at the nodes of the tree (of the guided logits at temperature 1
    in greedy decoding). path: int64 [B, D + 1], node numbers from the root to the last accepted node, then -1.
    accepted: int64 [B]. tokens: int64 [B, D + 1], the accepted drafts, then the last token, then 0. position: int64
    [B], tokens committed with this step. active: bool [B], False for images that were complete before it.
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

    def begin(self, p: Tensor) -> None:
        """New images start; `p` float32 [B, V] is the distribution of their first token."""

    def learn(self, step: LastStep) -> None:
        """A step was verified; runs in the same program."""
