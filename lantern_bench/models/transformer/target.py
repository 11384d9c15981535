"""A transformer with a condition before it, as the target that `decoding.interface` asks for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_bench.decoding.interface import Scores
from lantern_bench.decoding.sampling import guide
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.attention import KVCache, Sessions
from lantern_bench.models.transformer.conditioning import (
    CaptionFeatures,
    ClassLabel,
    Condition,
    PromptTokens,
    WordCaption,
    visible_rows,
)
from lantern_bench.models.transformer.layers import Transformer

# ---- Tokens that nobody chooses: the ends of an image's lines (Lumina-mGPT), certain in place and impossible elsew


def force_line_ends(logits: Tensor, places: Tensor, config: TransformerConfig) -> Tensor:
    """Logits [rows, n, V] of the tokens at `places` int64 [B, n] of their images, rows being groups of the B images.

    Both rows of guidance get the same values where nothing is left to choose, so that no scale moves them. The lowest
    finite number stands for impossible: of two infinities guidance would make no number.
    """
    if not config.line_ends:
        return logits
    ends = ((places + 1) % config.line_length == 0).repeat(len(logits) // len(places), 1)[:, :, None]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(ends, 0.0).masked_fill(ends != is_end, torch.finfo(logits.dtype).min)


def without_line_ends(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The codes int [B, rows * columns] of images int [B, rows * (columns + 1)] whose lines have ends."""
    rows, columns = grid
    return tokens.reshape(len(tokens), rows, columns + 1)[:, :, :columns].flatten(1)


def with_line_ends(codes: Tensor, grid: tuple[int, int], end: int) -> Tensor:
    """The inverse of `without_line_ends`: codes int [B, rows * columns] with token `end` behind each line."""
    lines = codes.reshape(len(codes), *grid)
    return torch.cat([lines, torch.full_like(lines[:, :, :1], end)], dim=2).flatten(1)


# ----


def causal_seen(batch: int, n: int, device: torch.device) -> Tensor:
    """Who sees whom in a plain run of n positions: bool [B, n, n], lower triangular."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril_().expand(batch, -1, -1)


def padding_of(visible: Tensor, rows: int, config: TransformerConfig) -> Tensor:
    """How far the positions of each row are moved back, [rows, 1]: by its padding, where they are a sequence.

    `visible` bool [B or rows, P] as in `KVCache.hide`; a grid's positions are never moved.
    """
    if config.positions == "grid":
        return torch.zeros(rows, 1, dtype=torch.int64, device=visible.device)
    return (~visible).sum(dim=1).repeat(rows // len(visible))[:, None]


class TransformerTarget(nn.Module):
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
        self._sessions = Sessions(lambda *shape: _Session(self, *shape))

    @property
    def choices(self) -> int:
        """How many tokens are ever chosen: all but the ends of lines."""
        return self.vocab_size - self.config.line_ends

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.transformer.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are, those of the head apart: logits are float32."""
        return self.transformer.norm.weight.dtype

    def session(self, batch: int, guided: bool, nodes: int) -> _Session:
        """The session of this shape; its caches are made at the first call and reused."""
        return self._sessions.of(batch, guided, nodes)

    def prefix(self, condition: Condition, guided: bool) -> Tensor:
        """Prefix embeddings [rows, P, dim], conditional rows first."""
        return self.cls_embedding.rows(condition.values.to(self.device), guided)


class _Session:
    def __init__(self, target: TransformerTarget, batch: int, guided: bool, nodes: int) -> None:
        config = target.config
        self._target, self._batch, self._guided = target, batch, guided
        self._groups = 2 if guided else 1
        self.cache = KVCache(
            config.layers,
            self._groups,
            batch,
            # An image of a batch that is complete idles behind its end until the others are.
            config.prefix + config.image_tokens + 2 * nodes,
            config.kv_heads or config.heads,
            config.head_dim,
            target.dtype,
            target.device,
        )
        self._prefix = torch.zeros((), dtype=torch.int64, device=target.device)
        self._padding = torch.zeros(self._groups * batch, 1, dtype=torch.int64, device=target.device)

    def prefill(self, condition: Condition) -> Scores:
        x = self._target.prefix(condition, self._guided)
        n = x.shape[1]
        visible = visible_rows(condition.valid.to(x.device), self._groups)
        self.cache.reset()
        self._prefix.fill_(n)
        self._padding.copy_(padding_of(visible, len(x), self._target.config))
        # Padded columns are hidden from everybody but themselves.
        seen = causal_seen(len(visible), n, x.device) & visible[:, None]
        seen = seen | torch.eye(n, dtype=torch.bool, device=x.device)
        features = self._forward(x, torch.arange(n, device=x.device).expand(self._batch, -1), seen)
        self.cache.hide(visible)
        self.cache.advance(torch.full_like(self.cache.lengths, n))
        cond, uncond = self._logits(features[:, -1:], torch.zeros_like(self.cache.lengths)[:, None])
        return Scores(cond, uncond, features)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Scores:
        features, places = self._features(tokens, depths, attention)
        return Scores(*self._logits(features, places), features)

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        features, places = self._features(tokens, depths, attention)
        guided = guide(features[: self._batch], features[self._batch :], cfg_scale)
        return self._head(guided, places), features

    def commit(self, path: Tensor, counts: Tensor) -> None:
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
        if self._target.config.positions == "sequence":
            at = (self.cache.per_row(positions) - self._padding).clamp_min(0)
        else:
            at = positions if self._batch == 1 else self.cache.per_row(positions)
        return self._target.transformer.step(x, at, self.cache, slots, mask)

    def _logits(self, features: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits of `features` [rows, n, dim], which are for the image tokens at `places` [B, n]."""
        logits = self._head(features, places)
        if not self._guided:
            return logits, None
        return logits[: self._batch], logits[self._batch :]

    def _head(self, features: Tensor, places: Tensor) -> Tensor:
        return force_line_ends(self._target.transformer.output(features), places, self._target.config)
