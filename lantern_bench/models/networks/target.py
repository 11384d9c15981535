"""The transformer with a condition before the image, as the target of the decode loop, in reading order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.decoding.protocol import Logits, Target, TargetSession
from lantern_bench.decoding.sampling import guide
from lantern_bench.models.networks.conditions import (
    CaptionFeatures,
    ClassLabel,
    Condition,
    PromptTokens,
    WordCaption,
    visible_rows,
)
from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.transformer import Transformer
from lantern_bench.models.networks.transformer_config import TransformerConfig

# ---- Forced tokens: the end of a row (Lumina-mGPT) is certain in its position and impossible elsewhere


def force_line_ends(logits: Tensor, positions: Tensor, config: TransformerConfig) -> Tensor:
    """Force the ends of rows in logits [groups * B, n, V] of the tokens at `positions` int64 [B, n] of their images."""
    if not config.line_ends:
        return logits
    # Both rows of guidance get the same values, so that no scale moves them. The lowest finite number stands for
    # impossible, because guidance makes NaN of two infinities.
    ends = ((positions + 1) % config.line_length == 0).repeat(len(logits) // len(positions), 1)[
        :, :, None
    ]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(ends, 0.0).masked_fill(ends != is_end, torch.finfo(logits.dtype).min)


def without_line_ends(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens int [B, rows * (columns + 1)] -> codes int [B, rows * columns], without the ends of rows."""
    rows, columns = grid
    return tokens.reshape(len(tokens), rows, columns + 1)[:, :, :columns].flatten(1)


def with_line_ends(codes: Tensor, grid: tuple[int, int], end: int) -> Tensor:
    """Append the token `end` to each row."""
    lines = codes.reshape(len(codes), *grid)
    return torch.cat([lines, torch.full_like(lines[:, :, :1], end)], dim=2).flatten(1)


# ---- Masks and positions


def causal_seen(batch: int, n: int, device: torch.device) -> Tensor:
    """Return the causal mask of n positions: bool [B, n, n], lower triangular."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril_().expand(batch, -1, -1)


def prefix_seen(visible: Tensor, n: int) -> Tensor:
    """Return the causal mask of n prefix positions, in which padding sees only padding: bool [B or rows, n, n].

    Only drafters with `mask_padding` False read the rows of padding (docs/algorithms.md, section 9, B4).
    """
    alike = visible[:, None, :n] == visible[:, :n, None]
    return causal_seen(len(visible), n, visible.device) & alike


def prefix_mask(valid: Tensor, length: int) -> Tensor:
    """Return the additive mask [B, 1, n, n] of whole sequences: causal; padding (`valid` bool [B, P]) sees padding."""
    allowed = prefix_seen(functional.pad(valid, (0, length - valid.shape[1]), value=True), length)
    return torch.zeros(allowed.shape, device=valid.device).masked_fill_(~allowed, -torch.inf)[
        :, None
    ]


def padding_of(visible: Tensor, rows: int, config: TransformerConfig) -> Tensor:
    """Return by how many positions padding moves each row's tokens back, [rows, 1]."""
    if config.positions == "grid":
        return torch.zeros(rows, 1, dtype=torch.int64, device=visible.device)
    return (~visible).sum(dim=1).repeat(rows // len(visible))[:, None]


def positions_of(valid: Tensor, length: int, config: TransformerConfig) -> Tensor | None:
    """Return positions int64 [B, length] behind the padding, for models that count them; None for those on a grid."""
    positions = torch.arange(length, device=valid.device)
    return (
        None
        if config.positions == "grid"
        else (positions - padding_of(valid, len(valid), config)).clamp_min(0)
    )


# ---- Sessions


class CachedSession:
    """What decode sessions of targets and drafters share: cache, padding and positions."""

    def __init__(self, model: Any, spare: int, batch: int, guided: bool, nodes: int) -> None:
        """There is room for `spare` trees of `nodes` behind the image."""
        config: TransformerConfig = model.config
        self._config = config
        self._batch = batch
        self._guided = guided
        self._groups = 1 + guided
        capacity = config.prefix + config.image_tokens + spare * nodes
        self.cache = KVCache(
            config=config,
            groups=self._groups,
            batch=batch,
            capacity=capacity,
            dtype=model.dtype,
            device=model.device,
        )
        self._prefix = torch.zeros((), dtype=torch.int64, device=model.device)
        self._padding = torch.zeros(self._groups * batch, 1, dtype=torch.int64, device=model.device)

    def clear(self) -> None:
        """Fill the cache with zeros."""
        self.cache.clear()

    def _start(self, condition: Condition, prefix: int, device: torch.device) -> Tensor:
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
        """Return the rows of the rotary table for positions [B, n] in the cache."""
        if self._config.positions == "sequence":
            return (self.cache.per_row(positions) - self._padding).clamp_min(0)
        return positions if self._batch == 1 else self.cache.per_row(positions)

    def _split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return conditional and unconditional logits [B, n, V]."""
        return (logits[: self._batch], logits[self._batch :]) if self._guided else (logits, None)


class _TransformerSession(CachedSession, TargetSession):
    def __init__(self, target: CachedTarget, *shape: Any) -> None:
        # A completed image of a batch stays behind its end until the others are complete: room for a second tree.
        super().__init__(target, 2, *shape)
        self._target = target

    def prefill(self, condition: Condition) -> Logits:
        x = self._target.prefix(condition, self._guided)
        n = x.shape[1]
        visible = self._start(condition, n, x.device)
        features = self._forward(
            x, torch.arange(n, device=x.device).expand(self._batch, -1), prefix_seen(visible, n)
        )
        self._commit_prefix(visible, n)
        head = self._head(features[:, -1:], torch.zeros_like(self.cache.lengths)[:, None])
        return Logits(*self._split(head), features)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        features, positions = self._features(tokens, depths, attention)
        return Logits(*self._split(self._head(features, positions)), features)

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        if not self._target.linear_head:
            return super().score_guided(
                tokens=tokens, depths=depths, attention=attention, cfg_scale=cfg_scale
            )
        features, positions = self._features(tokens, depths, attention)
        guided = guide(features[: self._batch], features[self._batch :], cfg_scale)
        return self._head(guided, positions), features

    def commit(self, path: Tensor, counts: Tensor) -> None:
        if path.shape[1] == 1:
            self.cache.advance(counts)
        else:
            self.cache.keep(path, counts)

    def _features(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of the nodes of a tree, and which tokens of the image they predict [B, n]."""
        x = self.cache.per_row(self._target.transformer.tok_embeddings(tokens))
        positions = self.cache.lengths[:, None] + depths
        return self._forward(x, positions, attention), positions - self._prefix + 1

    def _forward(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        mask = self.cache.mask(seen, x.dtype)
        slots = self.cache.slots(0, x.shape[1])
        positions = self._rotary_positions(positions)
        return self._target.transformer.step(x, positions, self.cache, slots, mask)

    def _head(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of `features` [rows, n, dim], which predict the image tokens at `positions` [B, n]."""
        return force_line_ends(
            self._target.transformer.output(features), positions, self._target.config
        )


# ---- Targets


class CachedModel(nn.Module):
    """A target or a drafter whose sessions use this package's cache; they are made once for each shape."""

    session_type: ClassVar[Callable[..., CachedSession]]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self._sessions: dict[tuple[int, bool, int], Any] = {}

    def session(self, batch: int, *, guided: bool, nodes: int) -> Any:
        """Return the session of this shape."""
        shape = (batch, guided, nodes)
        if shape not in self._sessions:
            self._sessions[shape] = self.session_type(self, *shape)
        return self._sessions[shape]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, except that of the bundled model's head, which is float32."""
        return next(self.parameters()).dtype


class CachedTarget(CachedModel, Target):  # type: ignore[override]  # others assign `device`
    """A target whose sessions use this package's cache; `transformer` may be another library's."""

    session_type = _TransformerSession
    linear_head = True  # logits are linear in features, so that a session may guide features

    def __init__(self, config: TransformerConfig, transformer: Any, condition: Any) -> None:
        super().__init__(config)
        self.transformer = transformer
        self.cls_embedding = condition
        self.vocab_size = config.vocab_size
        self.image_tokens = config.image_tokens
        self.n_codes = config.n_codes
        self.line_length = config.line_length
        self.drafter_config = config  # the sizes that a drafter takes from this target

    def forced(self, positions: Tensor) -> Tensor:
        """Return the tokens that are forced at `positions` int64 [...] of an image, -1 where none is."""
        if not self.config.line_ends:
            return torch.full_like(positions, -1)
        return torch.where((positions + 1) % self.line_length == 0, self.vocab_size - 1, -1)

    def prefix(self, condition: Condition, guided: bool) -> Tensor:
        """Return prefix embeddings [rows, P, dim], conditional rows first."""
        return self.cls_embedding.rows(condition.values.to(self.device), guided)


class TransformerTarget(CachedTarget):
    """This package's transformer; prompts in its own vocabulary where `condition` is None."""

    transformer: Transformer

    def __init__(
        self,
        config: TransformerConfig,
        condition: ClassLabel | CaptionFeatures | WordCaption | None = None,
    ) -> None:
        transformer = Transformer(config)
        super().__init__(config, transformer, condition or PromptTokens(transformer.tok_embeddings))

    @torch.inference_mode()
    def logits_without_cache(
        self, condition: Condition, tokens: Tensor, guided: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, N, V] that predict tokens int64 [B, N], with and without the prompt."""
        batch = len(tokens)
        x = self.prefix(condition, guided)
        rows = len(x)
        first = x.shape[1] - 1
        visible = visible_rows(condition.valid.to(x.device), 1 + guided)
        visible = visible.repeat(rows // len(visible), 1)
        embedded = self.transformer.tok_embeddings(tokens[:, :-1].to(x.device)).repeat(
            1 + guided, 1, 1
        )
        x = torch.cat([x, embedded], dim=1)
        mask = prefix_mask(visible, x.shape[1]).to(x.dtype)
        features = self.transformer(x, mask, positions_of(visible, x.shape[1], self.config))
        positions = torch.arange(tokens.shape[1], device=x.device).expand(batch, -1)
        logits = force_line_ends(
            self.transformer.output(features[:, first:]), positions, self.config
        )
        return logits[:batch], logits[batch:] if guided else None
