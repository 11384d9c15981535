"""THE transformer with a condition before it, as the target that `decoding.protocol` asks for; and forced tokens.

The ends of an image's rows (Lumina-mGPT) are forced tokens: certain in their places and impossible elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lantern_bench.decoding.protocol import Logits
from lantern_bench.decoding.sampling import guide
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.attention import KVCache
from lantern_bench.models.transformer.conditioning import (
    CaptionFeatures,
    ClassLabel,
    Condition,
    PromptTokens,
    WordCaption,
    visible_rows,
)
from lantern_bench.models.transformer.layers import Transformer


def force_line_ends(logits: Tensor, places: Tensor, config: TransformerConfig) -> Tensor:
    """Force the ends of rows in logits [groups * B, n, V] of the tokens at `places` int64 [B, n] of their images.

    Both rows of guidance get the same values, so that no scale moves them. The lowest finite number stands for
    impossible, because guidance makes NaN of two infinities.
    """
    if not config.line_ends:
        return logits
    ends = ((places + 1) % config.line_length == 0).repeat(len(logits) // len(places), 1)[:, :, None]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(ends, 0.0).masked_fill(ends != is_end, torch.finfo(logits.dtype).min)


def without_line_ends(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens int [B, rows * (columns + 1)] -> codes int [B, rows * columns], without the ends of rows."""
    rows, columns = grid
    return tokens.reshape(len(tokens), rows, columns + 1)[:, :, :columns].flatten(1)


def with_line_ends(codes: Tensor, grid: tuple[int, int], end: int) -> Tensor:
    """The inverse of `without_line_ends`: puts the token `end` behind each row."""
    lines = codes.reshape(len(codes), *grid)
    return torch.cat([lines, torch.full_like(lines[:, :, :1], end)], dim=2).flatten(1)


def causal_seen(batch: int, n: int, device: torch.device) -> Tensor:
    """The causal mask of n positions: bool [B, n, n], lower triangular."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril_().expand(batch, -1, -1)


def padding_of(visible: Tensor, rows: int, config: TransformerConfig) -> Tensor:
    """The padding of each row, [rows, 1], by which positions in a sequence move back; 0 for positions on a grid.

    `visible` bool [B or rows, P] as in `KVCache.hide`.
    """
    if config.positions == "grid":
        return torch.zeros(rows, 1, dtype=torch.int64, device=visible.device)
    return (~visible).sum(dim=1).repeat(rows // len(visible))[:, None]


class CachedTarget(nn.Module):
    """What targets with this package's cache share; `transformer` may be another library's."""

    config: TransformerConfig
    transformer: Transformer
    cls_embedding: Any
    vocab_size: int
    image_tokens: int
    _sessions: dict[tuple[int, bool, int], TransformerSession]

    @property
    def n_codes(self) -> int:
        """The number of tokens that can be chosen: all but forced ones."""
        return self.vocab_size - self.config.line_ends

    @property
    def line_length(self) -> int:
        """Tokens of one row of a picture, a forced one included."""
        return self.config.line_length

    def forced(self, places: Tensor) -> Tensor:
        """The tokens that are forced at `places` int64 [...] of an image, -1 where none is."""
        if not self.config.line_ends:
            return torch.full_like(places, -1)
        return torch.where((places + 1) % self.line_length == 0, self.vocab_size - 1, -1)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.transformer.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, except the head's, which is float32."""
        return self.transformer.norm.weight.dtype

    def session(self, batch: int, guided: bool, nodes: int) -> TransformerSession:
        """The session of this shape; its caches are made at the first call and reused."""
        shape = (batch, guided, nodes)
        if shape not in self._sessions:
            self._sessions[shape] = self._new_session(*shape)
        return self._sessions[shape]

    def _new_session(self, *shape: Any) -> TransformerSession:
        return TransformerSession(self, *shape)

    def prefix(self, condition: Condition, guided: bool) -> Tensor:
        """Prefix embeddings [rows, P, dim], conditional rows first."""
        return self.cls_embedding.rows(condition.values.to(self.device), guided)


class TransformerTarget(CachedTarget):
    """Transformer, condition embedding and the sessions that decode with them."""

    def __init__(
        self, config: TransformerConfig, condition: ClassLabel | CaptionFeatures | WordCaption | None = None
    ) -> None:
        """`condition` None: prompts in the transformer's own vocabulary."""
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.cls_embedding = PromptTokens(self.transformer.tok_embeddings) if condition is None else condition
        self.vocab_size = config.vocab_size
        self.image_tokens = config.image_tokens
        self._sessions = {}

    def _new_session(self, *shape: Any) -> TransformerSession:
        return _Session(self, *shape)

    @torch.inference_mode()
    def logits_without_cache(self, condition: Condition, tokens: Tensor, guided: bool) -> tuple[Tensor, Tensor | None]:
        """The logits [B, N, V] that predict tokens int64 [B, N], with and without the prompt, computed without a cache.

        Unconditional logits are None where not `guided`.
        """
        batch, x = len(tokens), self.prefix(condition, guided)
        rows, first = len(x), x.shape[1] - 1
        visible = visible_rows(condition.valid.to(x.device), 1 + guided)
        visible = visible.repeat(rows // len(visible), 1)
        embedded = self.transformer.tok_embeddings(tokens[:, :-1].to(x.device)).repeat(1 + guided, 1, 1)
        x = torch.cat([x, embedded], dim=1)
        mask = prefix_mask(visible, x.shape[1]).to(x.dtype)
        features = self.transformer(x, mask, positions_of(visible, x.shape[1], self.config))
        places = torch.arange(tokens.shape[1], device=x.device).expand(batch, -1)
        logits = force_line_ends(self.transformer.output(features[:, first:]), places, self.config)
        return logits[:batch], logits[batch:] if guided else None


def prefix_mask(valid: Tensor, length: int) -> Tensor:
    """The additive mask [B, 1, n, n] of whole sequences: causal; padding sees only padding (`valid` bool [B, P])."""
    behind = valid.new_ones(len(valid), length - valid.shape[1])
    allowed = prefix_seen(torch.cat([valid, behind], dim=1), length)
    return torch.zeros(allowed.shape, device=valid.device).masked_fill_(~allowed, -torch.inf)[:, None]


def positions_of(valid: Tensor, length: int, config: TransformerConfig) -> Tensor | None:
    """Positions int64 [B, length] behind the padding, for models that count them; None for those on a grid."""
    places = torch.arange(length, device=valid.device)
    return None if config.positions == "grid" else (places - padding_of(valid, len(valid), config)).clamp_min(0)


class CachedSession:
    """What decode sessions of targets and drafters share: cache, padding and positions."""

    def __init__(
        self, config: TransformerConfig, layers: int, shape: tuple[int, bool, int], spare: int, weight: Tensor
    ) -> None:
        """`shape`: batch, guided, nodes; `spare`: how many trees of `nodes` have room behind the image.

        `weight` has the type and the device of the cache.
        """
        self._config = config
        self._batch, self._guided, nodes = shape
        self._groups = 2 if self._guided else 1
        capacity, heads = config.prefix + config.image_tokens + spare * nodes, config.kv_heads or config.heads
        dtype, device = weight.dtype, weight.device
        self.cache = KVCache(layers, self._groups, self._batch, capacity, heads, config.head_dim, dtype, device)
        self._prefix = torch.zeros((), dtype=torch.int64, device=device)
        self._padding = torch.zeros(self._groups * self._batch, 1, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Fill the cache with zeros."""
        self.cache.clear()

    def _begin(self, condition: Condition, prefix: int, device: torch.device) -> Tensor:
        """Forget the last image; return which positions of the condition are visible, bool [B or rows, P]."""
        visible = visible_rows(condition.valid.to(device), self._groups)
        self.cache.reset()
        self._prefix.fill_(prefix)
        self._padding.copy_(padding_of(visible, self._groups * self._batch, self._config))
        return visible

    def _commit_prefix(self, visible: Tensor, n: int) -> None:
        self.cache.hide(visible)
        self.cache.advance(torch.full_like(self.cache.lengths, n))

    def _rotary_positions(self, positions: Tensor) -> Tensor:
        """The rows of the rotary table for positions [B, n] in the cache."""
        if self._config.positions == "sequence":
            return (self.cache.per_row(positions) - self._padding).clamp_min(0)
        return positions if self._batch == 1 else self.cache.per_row(positions)

    def _split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Conditional and unconditional logits [B, n, V]."""
        return (logits[: self._batch], logits[self._batch :]) if self._guided else (logits, None)


def prefix_seen(visible: Tensor, n: int) -> Tensor:
    """The causal mask of n prefix positions, in which padding sees only padding: bool [B or rows, n, n].

    That padding sees the padding before it changes no logits: only drafters with `mask_padding` False read its rows,
    and those rows are as the LANTERN code makes them in half precision (docs/algorithms.md, section 9, B4).
    """
    alike = visible[:, None, :n] == visible[:, :n, None]
    return causal_seen(len(visible), n, visible.device) & alike


class TransformerSession(CachedSession):
    """A session of a target whose head may be anything."""

    def __init__(self, target: CachedTarget, *shape: Any) -> None:
        # An image of a batch that is complete idles behind its end until the others are.
        super().__init__(target.config, target.config.layers, shape, 2, target.transformer.norm.weight)
        self._target = target

    def prefill(self, condition: Condition) -> Logits:
        """As `TargetSession.prefill`."""
        x = self._target.prefix(condition, self._guided)
        n = x.shape[1]
        visible = self._begin(condition, n, x.device)
        features = self._forward(x, torch.arange(n, device=x.device).expand(self._batch, -1), prefix_seen(visible, n))
        self._commit_prefix(visible, n)
        head = self._head(features[:, -1:], torch.zeros_like(self.cache.lengths)[:, None])
        return Logits(*self._split(head), features)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        """As `TargetSession.score`."""
        features, places = self._features(tokens, depths, attention)
        return Logits(*self._split(self._head(features, places)), features)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """As `TargetSession.commit`."""
        if path.shape[1] == 1:
            self.cache.advance(counts)
        else:
            self.cache.keep(path, counts)

    def _features(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the nodes of a tree, and which tokens of the image they predict [B, n]."""
        x = self.cache.per_row(self._target.transformer.tok_embeddings(tokens))
        positions = self.cache.lengths[:, None] + depths
        return self._forward(x, positions, attention), positions - self._prefix + 1

    def _forward(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        mask = self.cache.mask(seen, x.dtype)
        slots = self.cache.slots(0, x.shape[1])
        return self._target.transformer.step(x, self._rotary_positions(positions), self.cache, slots, mask)

    def _head(self, features: Tensor, places: Tensor) -> Tensor:
        """The logits of `features` [rows, n, dim], which predict the image tokens at `places` [B, n]."""
        return force_line_ends(self._target.transformer.output(features), places, self._target.config)


class _Session(TransformerSession):
    """A session of a linear head."""

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `GuidesFeatures.score_guided`."""
        features, places = self._features(tokens, depths, attention)
        guided = guide(features[: self._batch], features[self._batch :], cfg_scale)
        return self._head(guided, places), features
