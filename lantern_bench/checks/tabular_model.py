"""A model without a network: next-token tables for target and drafter, behind the protocols of `decoding.protocol`.

The joint distribution of all tokens is known, and images are cheap: tens of thousands of them show what a few hundred
of a network's cannot (`g_tests`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, power_divergence
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.acceptance.bound_rule import BoundRule
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.loop import decode_altered
from lantern_bench.decoding.protocol import (
    DrafterLogits,
    DrafterSession,
    Logits,
    Target,
    TargetSession,
)
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.loaded_model import LoadedModel


class TabularModel(Target):
    """V tokens, `length` positions; guidance is real: cond and uncond tables differ.

    The distribution of a token depends on the `memory` tokens in front of it, by default on all.
    """

    def __init__(
        self,
        vocab: int,
        length: int,
        seed: int,
        drafter_noise: float = 0.7,
        memory: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.memory = memory or length
        states = (vocab + 1) ** self.memory
        self.vocab_size = vocab
        self.image_tokens = length
        self.device = torch.device("cpu")
        self.p = torch.randn(2, states, vocab, generator=generator) * 1.3
        self.q = self.p + torch.randn(2, states, vocab, generator=generator) * drafter_noise
        self.target = self
        self.drafter: Any = SimpleNamespace(session=self._drafter_session)

    def session(self, batch: int, *, guided: bool, nodes: int) -> _TargetSession:  # noqa: ARG002
        """A session; trees may have any number of nodes."""
        return _TargetSession(self, batch, guided)

    def _drafter_session(self, batch: int, *, guided: bool, nodes: int) -> _DrafterSession:  # noqa: ARG002
        return _DrafterSession(self, batch, guided)

    def state_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Append tokens to prefixes written in base V + 1, of which the last `memory` digits count."""
        return (state * (self.vocab_size + 1) + tokens + 1) % self.p.shape[1]

    def joint(self, probabilities: Any, count: int, skipped: int = 0) -> Tensor:
        """The joint distribution [V ** count] of the tokens behind the first `skipped` in AR sampling.

        `probabilities` turns (cond, uncond) logits into p.
        """
        states = torch.zeros(1, dtype=torch.int64)
        weights = torch.ones(1, dtype=torch.float64)
        for _ in range(skipped):
            after, every_weight = self._continued(states[:, None], weights[:, None], probabilities)
            states, index = after.flatten().unique(return_inverse=True)
            weights = torch.zeros(len(states), dtype=torch.float64).scatter_add_(
                0, index, every_weight.flatten()
            )
        ends = states[:, None]
        joint = weights[:, None]
        for _ in range(count):
            ends, joint = self._continued(ends, joint, probabilities)
        return joint.sum(dim=0)

    def _continued(
        self, states: Tensor, weights: Tensor, probabilities: Any
    ) -> tuple[Tensor, Tensor]:
        """The states [S, n V] and weights after one token more than in states [S, n]."""
        p = probabilities(self.p[0, states], self.p[1, states]).double()
        after = self.state_after(states[:, :, None], torch.arange(self.vocab_size))
        return after.flatten(1), (weights[:, :, None] * p).flatten(1)


class _TargetSession(TargetSession):
    def __init__(self, model: TabularModel, batch: int, guided: bool) -> None:
        self.model = model
        self.batch = batch
        self.guided = guided

    def prefill(self, condition: Any) -> Logits:  # noqa: ARG002
        self.state = torch.zeros(self.batch, dtype=torch.int64)
        return self._scores(self.state[:, None])

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        # The path of a node is read off the attention mask, as a transformer would; digits that have left the memory
        # are 0 again.
        base = self.model.vocab_size + 1
        most = self.model.memory
        apart = (depths[:, :, None] - depths[:, None, :]).clamp(0, most)
        path = torch.where(attention, (tokens[:, None, :] + 1) * base**apart, 0).sum(dim=-1)
        states = self.state[:, None] * base ** (depths + 1).clamp_max(most) + path
        self.nodes = states % self.model.p.shape[1]
        return self._scores(self.nodes)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        last = path.clamp_min(0).gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        states = self.nodes.gather(1, last[:, None]).squeeze(1)
        self.state = torch.where(counts > 0, states, self.state)

    def _scores(self, states: Tensor) -> Logits:
        features = states[..., None].float()
        return Logits(
            self.model.p[0, states], self.model.p[1, states] if self.guided else None, features
        )


class _DrafterSession(DrafterSession):
    def __init__(self, model: TabularModel, batch: int, guided: bool) -> None:
        self.model = model
        self.guided = guided
        self.state = torch.zeros(batch, dtype=torch.int64)

    def prefill(self, condition: Any, features: Tensor) -> None:  # noqa: ARG002
        self.state = torch.zeros_like(self.state)

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:  # noqa: ARG002
        for column in range(tokens.shape[1]):
            after = self.model.state_after(self.state, tokens[:, column])
            self.state = torch.where(column < counts, after, self.state)
        return self._drafts(self.state[:, None])

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:  # noqa: ARG002
        return self._drafts(self.model.state_after(self.last.gather(1, origin), tokens))

    def _drafts(self, states: Tensor) -> DrafterLogits:
        self.last = states
        return DrafterLogits(
            self.model.q[0, states], self.model.q[1, states] if self.guided else None
        )


# ---- whole images of the tables, tested against their joint distribution

VOCABULARY = 4
TOKENS = 7
# tokens of the images of wide windows, what they depend on; tokens of a row
_LONG = 24
_MEMORY = 3
_LINE = 4
_WINDOW = 3
_BATCH = 5000
_FEWEST = 5.0


@functools.cache
def table_model(tokens: int = TOKENS) -> LoadedModel:
    """Return the model of tables: 4 codes, `tokens` tokens, and a codebook for rules that merge neighbours."""
    model = TabularModel(VOCABULARY, tokens, seed=1, memory=None if tokens == TOKENS else _MEMORY)
    model.line_length = _LINE
    # Uneven enough that consecutive answers differ much: mistakes with drafts that are kept are larger then.
    model.p *= 1.6
    model.q *= 1.6
    codebook = 0.3 * torch.randn(VOCABULARY, 2, generator=torch.Generator().manual_seed(2))
    return LoadedModel(
        name="tables",
        target=model,
        drafter=model.drafter,
        pixels=None,
        why_no_pixels="its tokens mean nothing",
        codebook=codebook,
        condition=lambda _: None,
        weights={},
        grid=(1, tokens),
    )


def generators(model: LoadedModel, seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one seeded generator per image, on the model's device."""
    return [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]


def table_tokens(decoding: Decoding) -> int:
    """Return how many tokens the images have on which a decoding is tested: more for windows that are wider."""
    return _LONG if decoding.settings().get("window", 0) > TOKENS else TOKENS


def table_images(
    decoding: Decoding,
    images: range,
    rule: BoundRule | None = None,
    drafting: Callable[[Decoding, Target, int], DraftMethod] | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the tokens int64 [images, N] of the `table_model`, decoded with `rule` and `drafting` for the decoding's.

    The images of a batch are at different positions as soon as they have accepted different numbers of drafts.
    """
    model = table_model(table_tokens(decoding))
    engine = Engine()
    tokens = []
    for start in range(images.start, images.stop, _BATCH):
        seeds = [
            record_seed(seed, "tables", image)
            for image in range(start, min(start + _BATCH, images.stop))
        ]
        broken = None if drafting is None else drafting(decoding, model.target, len(seeds))
        streams = generators(model, seeds)
        decoded = decode_altered(
            model=model,
            condition=None,
            decoding=decoding,
            generators=streams,
            engine=engine,
            rule=rule,
            drafting=broken,
        )
        tokens.append(torch.stack([image.tokens for image in decoded]).long())
    return torch.cat(tokens)


def g_tests(decoding: Decoding, tokens: Tensor) -> tuple[dict[str, float], tuple[float, float]]:
    """Test images of the `table_model`, whose tokens are int64 [images, N].

    The tests: the first two tokens, of which a step decides the second; the first three; every later three, where
    drafts come from rows that earlier steps verified; and how often two successive images begin alike, which are
    decoded in one batch. Returns the p-values by test, and two estimates of the TV of three successive tokens, where
    the tests see most: one that errs downwards and one that errs upwards.
    """
    target: Any = table_model(table_tokens(decoding)).target

    def probabilities(cond: Tensor, uncond: Tensor) -> Tensor:
        return decoding_probabilities(guide(cond, uncond, decoding.cfg_scale), decoding)

    windows = [
        (0, _WINDOW - 1),
        *((first, first + _WINDOW) for first in range(tokens.shape[1] - _WINDOW + 1)),
    ]
    compared = []
    p_values = []
    for first, end in windows:
        expected = target.joint(probabilities, end - first, first).numpy()
        expected = expected / expected.sum()
        cells = np.ravel_multi_index(
            tuple(tokens[:, first:end].T.numpy()), [VOCABULARY] * (end - first)
        )
        halves = np.stack(
            [np.bincount(half, minlength=len(expected)) for half in (cells[::2], cells[1::2])]
        )
        compared.append((halves, expected, cells))
        p_values.append(_g_test(halves.sum(axis=0), expected))
    tests = {"first tokens": p_values[0], "joint of the first tokens": p_values[1]}
    tests["later windows"] = min(1.0, min(p_values[2:]) * len(p_values[2:]))
    _, expected, cells = compared[1]
    alike = int((cells[:-1:2] == cells[1::2]).sum())
    pairs = len(cells) // 2
    tests["images of a batch"] = float(binom.sf(alike - 1, pairs, (expected**2).sum()))
    halves, expected, _ = compared[1 + int(np.argmin(p_values[1:]))]
    first, second, both = (
        counts / max(1, counts.sum()) - expected for counts in (*halves, halves.sum(axis=0))
    )
    # Signs of one half of the images on the differences of the other; both together take noise for a difference.
    low = float((np.sign(first) * second + np.sign(second) * first).sum()) / 4.0
    return tests, (max(0.0, low), 0.5 * float(np.abs(both).sum()))


def _g_test(counts: NDArray[Any], expected: NDArray[Any]) -> float:
    """The p-value of a G-test; cells in which fewer than five images are expected are one cell of at least five."""
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    wanted = expected[order] * counts.sum()
    seen = counts[order]
    rare = max(
        int(np.searchsorted(wanted, _FEWEST)), int(np.searchsorted(wanted.cumsum(), _FEWEST)) + 1
    )
    observed, pooled = (np.append(values[:rare].sum(), values[rare:]) for values in (seen, wanted))
    return float(power_divergence(observed, pooled, lambda_="log-likelihood").pvalue)
