"""The transformer with a condition before the image, as the target of the decode loop.

A condition is a class label, caption features, caption words or a prompt, as P prefix embeddings.
LlamaGen applies the padding mask of the prompt to the unconditional rows as well
(docs/algorithms.md, section 9, C3).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lantern_bench.decoding.protocol import Logits, Target, TargetSession
from lantern_bench.decoding.sampling import guide
from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.transformer import TokenEmbedding, Transformer
from lantern_bench.models.networks.transformer_config import TransformerConfig

# ---- Conditions: how prompts become prefix embeddings


class Prompts(NamedTuple):
    """The prompt functions of `LoadedModel`, and the hash of the text encoder."""

    condition: Callable[[Sequence[str]], Any]
    prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]] = lambda _prompts: iter(())
    sha256: str | None = None  # None without a text encoder
    # Random conditions, where the text encoder is missing: enough for `check-model`.
    stand_in: Callable[[Sequence[str]], Any] | None = None


class Condition(NamedTuple):
    """The prefix of B images before embedding."""

    # Labels [B], features [B, P, width], word numbers [B, P], or prompts [B, 2, P], whose second
    # entry is the unconditional prompt.
    values: Tensor
    valid: Tensor  # bool [B, P], or [B, 2, P] for prompts; False for padding


def prompt_condition(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Condition:
    """Return the condition of prompts with and without caption: int64 [B, 2, P], padded left."""
    rows = [
        torch.tensor(prompt, dtype=torch.int64) for prompt in itertools.chain.from_iterable(pairs)
    ]
    values = pad_sequence(
        rows, batch_first=True, padding_value=-1.0, padding_side="left"
    ).unflatten(0, (-1, 2))
    return Condition(values.masked_fill(values < 0, 1), values >= 0)


def prompt_rows(values: Tensor, groups: int) -> Tensor:
    """Return prompts [B, 2, P] as rows [groups * B, P], conditional ones first."""
    return values[:, :groups].transpose(0, 1).flatten(0, 1)


def visible_rows(valid: Tensor, groups: int) -> Tensor:
    """Return the visible prefix positions of each row.

    Args:
        valid: The mask of a `Condition`.
        groups: Rows of each image: 2 with guidance, otherwise 1.

    Returns:
        bool [groups * B, P].
    """
    if valid.dim() == 2:
        valid = valid[:, None].expand(-1, groups, -1)
    return prompt_rows(valid, groups)


class ClassLabel(nn.Module):
    """A class label as one position. The null class has the number `classes`."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, dim)
        self.classes = classes

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed labels int64 [B] to [rows, 1, dim], conditional rows first."""
        if guided:
            values = torch.cat([values, torch.full_like(values, self.classes)])
        return self.embedding_table(values)[:, None]


def _with_null(rows: Tensor, null: Tensor, *, guided: bool) -> Tensor:
    """Append the null condition [P, dim] once for each of the rows [B, P, dim], with guidance."""
    return torch.cat([rows, null.expand_as(rows)]) if guided else rows


class CaptionFeatures(nn.Module):
    """Text-encoder features (T5) through a projection. The null condition is learned features."""

    def __init__(self, positions: int, width: int, dim: int) -> None:
        super().__init__()
        self.cap_proj = nn.ModuleDict(
            {"fc1": nn.Linear(width, dim, bias=False), "fc2": nn.Linear(dim, dim, bias=False)}
        )
        self.uncond_embedding = nn.Parameter(torch.randn(positions, width) / width**0.5)

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed left-padded features [B, P, width] to [rows, P, dim], conditional rows first."""
        return _with_null(
            self._project(values), self._project(self.uncond_embedding), guided=guided
        )

    def _project(self, values: Tensor) -> Tensor:
        hidden = self.cap_proj["fc1"](values.to(self.uncond_embedding.dtype))
        return self.cap_proj["fc2"](functional.gelu(hidden, approximate="tanh"))


class WordCaption(nn.Module):
    """Words of a small vocabulary, left-padded to P positions. The null condition is learned."""

    def __init__(self, words: int, positions: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, dim) * 0.02)

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed word numbers int64 [B, P] to [rows, P, dim], conditional rows first."""
        return _with_null(self.words(values), self.uncond_embedding, guided=guided)


class PromptTokens(nn.Module):
    """Prompts in the model's own vocabulary (Chameleon), with and without caption."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the module does not own it

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed prompts int64 [B, 2, P] to [rows, P, dim], conditional rows first."""
        return self._embedding[0].of_text(prompt_rows(values, 2 if guided else 1))


# ---- Forced tokens: the end of a row (Lumina-mGPT) is certain at its position and impossible
# elsewhere


def force_line_ends(logits: Tensor, positions: Tensor, config: TransformerConfig) -> Tensor:
    """Force the tokens that end the rows of a picture, for models that have them.

    Both rows of guidance get the same values, so that no guidance scale changes them. The lowest
    finite number stands for impossible, because guidance makes NaN of two infinities.

    Args:
        logits: Logits [groups * B, n, V] of image tokens.
        positions: Positions int64 [B, n] of these tokens in their images.
        config: Sizes of the target.

    Returns:
        The logits, or a changed copy.
    """
    if not config.line_ends:
        return logits
    ends = (positions + 1) % config.line_length == 0
    ends = ends.repeat(len(logits) // len(positions), 1)[:, :, None]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    impossible = torch.finfo(logits.dtype).min
    return logits.masked_fill(ends, 0.0).masked_fill(ends != is_end, impossible)


def without_line_ends(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Remove the ends of rows: int [B, rows * (columns + 1)] to int [B, rows * columns]."""
    rows, columns = grid
    return tokens.reshape(len(tokens), rows, columns + 1)[:, :, :columns].flatten(1)


def with_line_ends(codes: Tensor, grid: tuple[int, int], end: int) -> Tensor:
    """Append the token `end` to each row.

    Args:
        codes: Codes int [B, rows * columns].
        grid: Rows and columns.
        end: The token.

    Returns:
        Tokens int [B, rows * (columns + 1)].
    """
    lines = codes.reshape(len(codes), *grid)
    return torch.cat([lines, torch.full_like(lines[:, :, :1], end)], dim=2).flatten(1)


# ---- Masks and positions


def causal_seen(n: int, device: torch.device) -> Tensor:
    """Return the causal mask of n positions: bool [1, n, n], lower triangular."""
    return torch.ones(1, n, n, dtype=torch.bool, device=device).tril_()


def prefix_seen(visible: Tensor, n: int) -> Tensor:
    """Return the causal mask of n prefix positions, in which padding sees only padding.

    Only drafters with `mask_padding` False read the rows of padding (docs/algorithms.md, section 9,
    B4).

    Args:
        visible: bool [rows, P], False for padding.
        n: Number of positions, at most P.

    Returns:
        bool [rows, n, n].
    """
    return causal_seen(n, visible.device) & (visible[:, None, :n] == visible[:, :n, None])


def prefix_mask(valid: Tensor, length: int) -> Tensor:
    """Return the additive mask of whole sequences: causal, and padding sees only padding.

    Args:
        valid: bool [B, P], False for padding.
        length: Number n of positions, at least P.

    Returns:
        Mask [B, 1, n, n].
    """
    visible = functional.pad(valid, (0, length - valid.shape[1]), value=True)
    allowed = prefix_seen(visible, length)
    mask = torch.zeros(allowed.shape, device=valid.device)
    return mask.masked_fill_(~allowed, -torch.inf)[:, None]


def uncounted_of(visible: Tensor, config: TransformerConfig) -> Tensor:
    """Return how many positions of a row its rotary positions do not count, int64 [rows, 1].

    A sequence does not count padding. The rotary table of three axes ends the prefix at
    `config.prefix`, so a shorter prefix starts late in it: it counts more positions than it has.
    """
    if config.positions == "sequence":
        return (~visible).sum(dim=1, keepdim=True)
    uncounted = torch.zeros(len(visible), 1, dtype=torch.int64, device=visible.device)
    return uncounted if config.positions == "grid" else uncounted + visible.shape[1] - config.prefix


def positions_of(valid: Tensor, length: int, config: TransformerConfig) -> Tensor:
    """Return the rotary positions of whole sequences.

    Args:
        valid: bool [B, P], False for padding.
        length: Number n of positions.
        config: Sizes of the target.

    Returns:
        Positions int64 [B, n], without those that `uncounted_of` takes away.
    """
    return (torch.arange(length, device=valid.device) - uncounted_of(valid, config)).clamp_min(0)


# ---- Sessions


class CachedSession:
    """Cache, padding and positions of the decode sessions of targets and drafters.

    Args:
        model: The target or the drafter.
        batch: Number of images B.
        guided: Whether each image has an unconditional row too.
        nodes: Largest number of nodes in a draft tree.
    """

    # Number of draft trees for which the cache has room after the image.
    spare_trees: ClassVar[int]

    def __init__(self, model: Any, *, batch: int, guided: bool, nodes: int) -> None:
        config: TransformerConfig = model.config
        self._model = model
        self._config = config
        self._guided = guided
        self.cache = KVCache(
            config,
            groups=2 if guided else 1,
            batch=batch,
            capacity=config.prefix + config.image_tokens + self.spare_trees * nodes,
            dtype=model.dtype,
            device=model.device,
        )
        self._prefix = torch.zeros((), dtype=torch.int64, device=model.device)
        self._uncounted = torch.zeros_like(self.cache.rows)

    def clear(self) -> None:
        """Fill the cache with zeros."""
        self.cache.clear()

    def _start(self, condition: Condition, prefix: int) -> Tensor:
        """Reset the session for a new image. Return the visible positions, bool [rows, P]."""
        visible = visible_rows(condition.valid.to(self.cache.rows.device), self.cache.groups)
        self.cache.lengths.zero_()
        self._prefix.fill_(prefix)
        self._uncounted.copy_(uncounted_of(visible, self._config))
        return visible

    def _rotary_positions(self, positions: Tensor) -> Tensor:
        """Return the rows of the rotary table for positions [B, n] in the cache."""
        if self._config.positions != "grid":
            counted = (self.cache.per_row(positions) - self._uncounted).clamp_min(0)
            return self._model.position_ids(counted, self._prefix - self._uncounted)
        return positions if self.cache.batch == 1 else self.cache.per_row(positions)

    def _split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return conditional and unconditional logits [B, n, V]."""
        batch = self.cache.batch
        return (logits[:batch], logits[batch:]) if self._guided else (logits, None)


class _TransformerSession(CachedSession, TargetSession):
    # A completed image keeps its last tree until the other images of the batch are completed.
    spare_trees = 2

    def prefill(self, condition: Condition) -> Logits:
        x = self._model.prefix(condition, guided=self._guided)
        n = x.shape[1]
        visible = self._start(condition, n)
        features = self._forward(x, self.cache.slots(0, n), prefix_seen(visible, n))
        self.cache.commit_prefix(visible, n)
        first = torch.zeros_like(self.cache.lengths)[:, None]
        return Logits(*self._split(self._head(features[:, -1:], first)), features)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        features, positions = self._features(tokens, depths, attention)
        return Logits(*self._split(self._head(features, positions)), features)

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        if cfg_scale == 1 or not self._model.linear_head:
            return super().score_guided(
                tokens=tokens, depths=depths, attention=attention, cfg_scale=cfg_scale
            )
        features, positions = self._features(tokens, depths, attention)
        return self._head(guide(*self._split(features), cfg_scale), positions), features

    def commit(self, path: Tensor, counts: Tensor) -> None:
        if path.shape[1] == 1:
            self.cache.advance(counts)
        else:
            self.cache.keep(path, counts)

    def _features(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of tree nodes, and the positions [B, n] of the tokens they predict."""
        x = self.cache.per_row(self._model.transformer.tok_embeddings(tokens))
        positions = self.cache.lengths[:, None] + depths
        return self._forward(x, positions, attention), positions - self._prefix + 1

    def _forward(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        return self._model.transformer.step(
            x,
            mask=self.cache.mask(seen, x.dtype, hidden=self._hidden(positions)),
            slots=self.cache.slots(0, x.shape[1]),
            positions=self._rotary_positions(positions),
            cache=self.cache,
        )

    def _hidden(self, positions: Tensor) -> Tensor | None:  # noqa: ARG002  # for subclasses
        """Return the committed columns that nodes at `positions` [B, n] do not see, or None."""
        return None

    def _head(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return logits of features [rows, n, dim], which predict the tokens at `positions`."""
        return force_line_ends(self._model.transformer.output(features), positions, self._config)


class _OrderedSession(_TransformerSession):
    """A session that commits the tokens of an image in a given order.

    Args:
        model: As in `CachedSession`.
        order: As in `Target.ordered_session`.
        **sizes: As in `CachedSession`.
    """

    def __init__(self, model: Any, *, order: Sequence[int], **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self._order = torch.tensor(order, device=model.device)
        # the position of each column, prefix included
        self._column_positions = torch.zeros(
            self.cache.capacity, dtype=torch.int64, device=model.device
        )

    def _start(self, condition: Condition, prefix: int) -> Tensor:
        columns = self._column_positions
        columns.copy_(torch.arange(len(columns), device=columns.device))
        columns[prefix : prefix + len(self._order)] = prefix + self._order
        return super()._start(condition, prefix)

    def _hidden(self, positions: Tensor) -> Tensor:
        return self._column_positions > positions[:, :, None]


# ---- Targets


class CachedModel(nn.Module):
    """A target or a drafter whose sessions use this package's cache."""

    session_type: ClassVar[Callable[..., CachedSession]]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self._sessions: dict[tuple[Any, ...], Any] = {}

    def session(self, batch: int, *, guided: bool, nodes: int) -> Any:
        """Return a session, the same one for the same arguments.

        Args:
            batch: Number of images.
            guided: Whether each image has an unconditional row too.
            nodes: Largest number of nodes in a draft tree.
        """
        shape = (batch, guided, nodes)
        if shape not in self._sessions:
            self._sessions[shape] = self.session_type(self, batch=batch, guided=guided, nodes=nodes)
        return self._sessions[shape]

    def position_ids(self, counted: Tensor, words: Tensor) -> Tensor:  # noqa: ARG002  # for subclasses
        """Return what the network takes as positions.

        Args:
            counted: Positions from the end of the padding, int64 [rows, n].
            words: Number of words of the prompt of each row, int64 [rows, 1].
        """
        return counted

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights. The head of the bundled model is always float32."""
        return next(self.parameters()).dtype


class CachedTarget(CachedModel, Target):  # type: ignore[override]  # others assign `device`
    """A target whose sessions use this package's cache.

    `transformer` may be a module of another library.
    """

    session_type = _TransformerSession
    linear_head = True  # logits are linear in features, so that a session may guide features

    def __init__(self, config: TransformerConfig, transformer: Any, condition: Any) -> None:
        super().__init__(config)
        self.transformer = transformer
        self.cls_embedding = condition
        self.vocab_size = config.vocab_size
        self.image_tokens = config.image_tokens
        self.n_codes = config.n_codes
        # Rows of two grids are not equally long.
        self.line_length = 0 if config.coarse_grid else config.line_length
        self.coarse_tokens = config.coarse_tokens
        self.drafter_config = config  # the sizes that a drafter takes from this target

    def ordered_session(
        self, batch: int, *, guided: bool, nodes: int, order: Sequence[int]
    ) -> TargetSession:
        """Return a session for another order, the same one for the same arguments.

        Args:
            batch: Number of images.
            guided: Whether each image has an unconditional row too.
            nodes: Largest number of nodes in a step.
            order: Positions in the image, in the order in which they are committed.
        """
        shape = (batch, guided, nodes, tuple(order))
        if shape not in self._sessions:
            self._sessions[shape] = _OrderedSession(
                self, batch=batch, guided=guided, nodes=nodes, order=order
            )
        session: TargetSession = self._sessions[shape]
        return session

    def forced_tokens(self, positions: Tensor) -> Tensor:
        """Return the forced tokens at `positions` int64 [...] of an image, -1 at free positions."""
        if not self.config.line_ends:
            return torch.full_like(positions, -1)
        return torch.where((positions + 1) % self.line_length == 0, self.vocab_size - 1, -1)

    def sources(self, positions: Tensor) -> Tensor:
        """Return the positions of the coarse tokens that cover `positions` int64 [...], else -1."""
        if self.config.coarse_grid is None:
            return super().sources(positions)
        rows, columns = self.config.grid
        coarse_rows, coarse_columns = self.config.coarse_grid
        cell = positions - self.coarse_tokens
        row = (cell // columns).clamp_max(rows - 1) * coarse_rows // rows
        column = cell % columns * coarse_columns // columns
        return torch.where(cell >= 0, row * coarse_columns + column, -1)

    def prefix(self, condition: Condition, *, guided: bool) -> Tensor:
        """Return prefix embeddings [rows, P, dim], conditional rows first."""
        return self.cls_embedding.rows(condition.values.to(self.device), guided=guided)

    @abstractmethod
    def features_without_cache(self, condition: Condition, tokens: Tensor) -> Tensor:
        """Return the features [2B, N, dim] that predict int64 [B, N], conditional rows first."""

    @torch.inference_mode()
    def logits_without_cache(self, condition: Condition, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, N, V] that predict int64 [B, N], with and without the prompt."""
        tokens = tokens.to(self.device)
        batch, count = tokens.shape
        logits = self.transformer.output(self.features_without_cache(condition, tokens))
        positions = torch.arange(count, device=self.device).expand(batch, -1)
        return force_line_ends(logits, positions, self.config).split(batch)


class TransformerTarget(CachedTarget):
    """This package's transformer. Without `condition` it takes prompts in its own vocabulary."""

    transformer: Transformer

    def __init__(
        self,
        config: TransformerConfig,
        condition: ClassLabel | CaptionFeatures | WordCaption | None = None,
    ) -> None:
        transformer = Transformer(config)
        super().__init__(config, transformer, condition or PromptTokens(transformer.tok_embeddings))

    def features_without_cache(self, condition: Condition, tokens: Tensor) -> Tensor:
        """Return the features [2B, N, dim] that predict int64 [B, N], conditional rows first."""
        x = self.prefix(condition, guided=True)
        embedded = self.transformer.tok_embeddings(tokens[:, :-1])
        x = torch.cat([x, embedded.repeat(2, 1, 1)], dim=1)

        length = x.shape[1]
        visible = visible_rows(condition.valid.to(x.device), 2)
        mask = prefix_mask(visible, length).to(x.dtype)
        features = self.transformer(x, mask, positions_of(visible, length, self.config))
        return features[:, -tokens.shape[1] :]
