"""A model of next-token tables, and tests of its tokens against their known joint distribution.

Images of the tables are cheap. Tens of thousands of them show mistakes that a few hundred images of
a network do not show (`g_tests`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtrc, chdtrc, xlogy
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.loop import decode, image_generators
from lantern_bench.decoding.protocol import (
    DrafterLogits,
    DrafterSession,
    Logits,
    Target,
    TargetSession,
)
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.loaded_model import LoadedModel

# Standard deviation of the drafter's logits around the target's.
_DRAFTER_NOISE = 0.7


class TabularModel(Target):
    """Target and drafter whose logits come from tables; rows with and without the prompt differ.

    Args:
        vocab: Number of tokens, V.
        length: Tokens of an image.
        seed: Seed of the random tables.
        memory: Number of earlier tokens on which a token depends. Default: all.
    """

    def __init__(
        self,
        vocab: int,
        length: int,
        seed: int,
        *,
        memory: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.memory = memory or length
        states = (vocab + 1) ** self.memory
        self.vocab_size = vocab
        self.image_tokens = length
        self.device = torch.device("cpu")
        self.p = torch.randn(2, states, vocab, generator=generator) * 1.3
        self.q = self.p + torch.randn(2, states, vocab, generator=generator) * _DRAFTER_NOISE
        self.target = self
        self.drafter: Any = SimpleNamespace(session=partial(_DrafterSession, self))

    def session(
        self,
        batch: int,
        *,
        guided: bool,
        nodes: int,  # noqa: ARG002
    ) -> _TargetSession:
        """Return a session.

        Args:
            batch: Number of images.
            guided: Whether the logits have rows without the prompt.
            nodes: Not used; trees may have any size.
        """
        return _TargetSession(self, batch, guided=guided)

    def sources(self, positions: Tensor) -> Tensor:
        """Return the positions of the first row that later rows copy, else -1."""
        is_later = positions >= self.coarse_tokens
        return torch.where(is_later, positions % self.coarse_tokens, -1)

    def state_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Append tokens to states, which write the last `memory` tokens in base V + 1."""
        return (state * (self.vocab_size + 1) + tokens + 1) % self.p.shape[1]

    def joint(self, probabilities: Any, count: int, skipped: int = 0) -> Tensor:
        """Return the joint distribution [V ** count] of successive tokens in AR sampling.

        Args:
            probabilities: Function from logits (cond, uncond) to p.
            count: Number of tokens.
            skipped: Tokens in front of them, which are summed over.
        """
        states = torch.zeros(1, dtype=torch.int64)
        weights = torch.ones(1, dtype=torch.float64)
        for _ in range(skipped):
            after, every_weight = self._continued(states[:, None], weights[:, None], probabilities)
            states, index = after.flatten().unique(return_inverse=True)
            weights = torch.bincount(index, every_weight.flatten())
        ends = states[:, None]
        joint = weights[:, None]
        for _ in range(count):
            ends, joint = self._continued(ends, joint, probabilities)
        return joint.sum(dim=0)

    def _continued(
        self, states: Tensor, weights: Tensor, probabilities: Any
    ) -> tuple[Tensor, Tensor]:
        """The states and weights [S, n V] after one more token than in states [S, n]."""
        p = probabilities(self.p[0, states], self.p[1, states]).double()
        after = self.state_after(states[:, :, None], torch.arange(self.vocab_size))
        return after.flatten(1), (weights[:, :, None] * p).flatten(1)


@dataclass
class _TargetSession(TargetSession):
    model: TabularModel
    batch: int
    guided: bool

    def prefill(self, condition: Any) -> Logits:  # noqa: ARG002
        self.state = torch.zeros(self.batch, dtype=torch.int64)
        return self._scores(self.state[:, None])

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        # The attention mask gives the path of a node, as in a transformer. Digits that have left
        # the memory are 0 again.
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
        uncond = self.model.p[1, states] if self.guided else None
        return Logits(self.model.p[0, states], uncond, features=states[..., None].float())


@dataclass
class _DrafterSession(DrafterSession):
    model: TabularModel
    batch: int
    guided: bool
    nodes: int  # not used; trees may have any size

    def prefill(self, condition: Any, features: Tensor) -> None:  # noqa: ARG002
        self.state = torch.zeros(self.batch, dtype=torch.int64)

    def observe(
        self,
        tokens: Tensor,
        features: Tensor,  # noqa: ARG002
        counts: Tensor,
    ) -> DrafterLogits:
        for column in range(tokens.shape[1]):
            after = self.model.state_after(self.state, tokens[:, column])
            self.state = torch.where(column < counts, after, self.state)
        return self._drafts(self.state[:, None])

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:  # noqa: ARG002
        return self._drafts(self.model.state_after(self.last.gather(1, origin), tokens))

    def _drafts(self, states: Tensor) -> DrafterLogits:
        self.last = states
        uncond = self.model.q[1, states] if self.guided else None
        return DrafterLogits(self.model.q[0, states], uncond)


# ---- Whole images of the tables, tested against their joint distribution

VOCABULARY = 4
TOKENS = 7  # of an image
TESTS = 4  # p-values of `g_tests`
_LONG = 24  # tokens of an image for wide windows
_MEMORY = 3  # earlier tokens on which a token of a long image depends
_LINE = 4  # tokens of a row
_WINDOW = 3  # successive tokens that are tested together
_BATCH = 5000  # images decoded together
_FEWEST = 5.0  # expected images of a cell of a G-test


@functools.cache
def table_model(tokens: int = TOKENS) -> LoadedModel:
    """Return the model of tables: 4 codes, `tokens` tokens, and a codebook for neighbour rules."""
    model = TabularModel(VOCABULARY, tokens, seed=1, memory=None if tokens == TOKENS else _MEMORY)
    model.line_length = _LINE
    # With `initial: copy`, later rows copy the first one, as a fine grid copies a coarse one.
    model.coarse_tokens = _LINE
    # Consecutive distributions differ more, which makes mistakes with kept drafts larger.
    model.p *= 1.6
    model.q *= 1.6
    generator = torch.Generator().manual_seed(2)
    return LoadedModel(
        name="tables",
        target=model,
        drafter=model.drafter,
        pixels=None,
        why_no_pixels="its tokens mean nothing",
        codebook=0.3 * torch.randn(VOCABULARY, 2, generator=generator),
        condition=lambda _: None,
        weights={},
        grid=(1, tokens),
    )


def table_tokens(decoding: Decoding) -> int:
    """Return the tokens of an image on which a decoding is tested: more for wide windows."""
    return _LONG if decoding.settings().get("window", 0) > TOKENS else TOKENS


def table_images(
    decoding: Decoding,
    images: range,
    *,
    rule: ConfiguredRule | None = None,
    seed: int = 0,
) -> Tensor:
    """Decode images of the `table_model`.

    The images of a batch are at different positions as soon as they have accepted different numbers
    of drafts.

    Args:
        decoding: The decoding.
        images: Numbers of the images, from which their seeds follow.
        rule: Replaces the rule of the decoding.
        seed: Seed of the run.

    Returns:
        Tokens int64 [images, N].
    """
    model = table_model(table_tokens(decoding))
    engine = Engine()
    tokens = []
    for start in range(0, len(images), _BATCH):
        batch = images[start : start + _BATCH]
        decoded = decode(
            model=model,
            condition=None,
            decoding=decoding,
            generators=image_generators(
                model, [record_seed(seed, "tables", image) for image in batch]
            ),
            engine=engine,
            rule=rule,
        )
        tokens.append(torch.stack([image.tokens for image in decoded]).long())
    return torch.cat(tokens)


class _Window(NamedTuple):
    """Successive tokens of images, counted."""

    expected: NDArray[Any]  # [cells] probability of each combination of tokens
    combinations: NDArray[Any]  # [images]
    halves: NDArray[Any]  # [2, cells] counts of even and odd images
    p_value: float  # of the G-test


def g_tests(decoding: Decoding, tokens: Tensor) -> tuple[dict[str, float], tuple[float, float]]:
    """Test images of the `table_model`, whose tokens are int64 [images, N].

    There are four tests. Two are G-tests of the first two and of the first three tokens. One takes
    the smallest p-value over all later windows of three tokens, whose drafts come from rows that
    earlier steps verified. The last counts how often two successive images, which are decoded in
    one batch, have the same first three tokens.

    Returns:
        The p-values by test, and two estimates of the TV of the window with the smallest p-value:
        one is biased downward, one upward.
    """
    target: Any = table_model(table_tokens(decoding)).target

    def probabilities(cond: Tensor, uncond: Tensor) -> Tensor:
        return decoding_probabilities(guide(cond, uncond, decoding.cfg_scale), decoding)

    def window(first: int, count: int) -> _Window:
        joint = target.joint(probabilities, count, first).numpy()
        expected = joint / joint.sum()
        columns = tuple(tokens[:, first : first + count].T.numpy())
        combinations = np.ravel_multi_index(columns, [VOCABULARY] * count)
        even = np.bincount(combinations[::2], minlength=len(expected))
        odd = np.bincount(combinations[1::2], minlength=len(expected))
        return _Window(
            expected=expected,
            combinations=combinations,
            halves=np.stack([even, odd]),
            p_value=_g_test(even + odd, expected),
        )

    pair = window(0, _WINDOW - 1)
    start, *later = [window(first, _WINDOW) for first in range(tokens.shape[1] - _WINDOW + 1)]
    smallest = min(window.p_value for window in later)
    alike = (start.combinations[:-1:2] == start.combinations[1::2]).sum()
    tests = {
        "first tokens": pair.p_value,
        "joint of the first tokens": start.p_value,
        "later windows": min(1.0, smallest * len(later)),
        "images of a batch": float(
            bdtrc(alike - 1, len(tokens) // 2, (start.expected**2).sum()) if alike else 1.0
        ),
    }
    worst = min([start, *later], key=lambda window: window.p_value)
    return tests, _distances(worst)


def _distances(window: _Window) -> tuple[float, float]:
    """Estimate the TV of a window: one estimate is biased downward, one upward.

    The lower one takes the signs from one half of the images and the differences from the other
    half. The upper one uses all images for both, so it counts noise as a difference.
    """
    counts = np.vstack([window.halves, window.halves.sum(axis=0)])
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    first, second, both = shares - window.expected
    low = float((np.sign(first) * second + np.sign(second) * first).sum()) / 4.0
    return max(0.0, low), 0.5 * float(np.abs(both).sum())


def _g_test(counts: NDArray[Any], expected: NDArray[Any]) -> float:
    """The p-value of a G-test of counts against probabilities.

    Cells with fewer than five expected images are merged into one cell of at least five.
    """
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    wanted = expected[order] * counts.sum()
    seen = counts[order]
    too_few = np.searchsorted(wanted, _FEWEST)
    enough_together = np.searchsorted(wanted.cumsum(), _FEWEST) + 1
    rare = max(too_few, enough_together)
    merged_seen = np.append(seen[:rare].sum(), seen[rare:])
    merged_wanted = np.append(wanted[:rare].sum(), wanted[rare:])
    statistic = 2.0 * xlogy(merged_seen, merged_seen / merged_wanted).sum()
    return float(chdtrc(len(merged_seen) - 1, statistic))
