"""Is a lossless rule lossless for this model? G-tests of whole decodes, and greedy identity token for token.

The exact distribution of the first tokens comes from teacher forcing over every sequence that the filters allow; the
samples come from the unchanged decode loop. The same test of a rule that is broken on purpose shows its power.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.certify.relaxation import autoregressive, generators
from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.tree_acceptance import Accept, Acceptance
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.loaded_model import LoadedModel

NEAR_TIE = 1e-4
"""Top-1 minus top-2 guided logit below which float32 may choose either (docs/algorithms.md, section 6)."""


def strict_without_residual(
    p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *_unused: object
) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Arguments as of `accept_children`. Each draft is accepted with the right probability and only the distribution of
    the tokens is wrong, which makes it the mistake that a weak test misses.
    """
    accept = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for rank in range(tokens.shape[1]):
        x = tokens[:, rank, None]
        share = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = offered[:, rank, None] & (share > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / share).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros(len(p), dtype=torch.bool, device=p.device))


class Agreement(NamedTuple):
    """One prompt under one decoding: position and margin of the first token that differs from greedy decoding, or None.

    The margin is top-1 minus top-2 of the logits of greedy decoding there.
    """

    prompt: Prompt
    difference: tuple[int, float] | None

    @property
    def near_tie(self) -> bool:
        """Whether the tokens differ, and rounding explains it."""
        return self.difference is not None and self.difference[1] < NEAR_TIE


def greedy_agreements(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Sequence[Decoding],
    *,
    batch: int = 8,
    on_progress: OnProgress = no_progress,
) -> Iterator[tuple[Decoding, list[Agreement]]]:
    """Compare every decoding (temperature 0, one guidance scale) with greedy decoding, batch by batch of prompts."""
    for start in range(0, len(prompts), batch):
        chosen = prompts[start : start + batch]
        condition, seeds = model.condition([prompt.text for prompt in chosen]), [0] * len(chosen)
        common = partial(decode, model, condition, engine=model.engine)
        plain = common(autoregressive(decodings[0]), generators(model, seeds), keep_logits=True)
        for number, decoding in enumerate(decodings):
            drafted = common(decoding, generators(model, seeds))
            agreements = []
            for prompt, one, other in zip(chosen, plain, drafted, strict=True):
                differs, difference = (one.tokens != other.tokens).nonzero(), None
                if len(differs):
                    assert one.logits is not None
                    first, second = torch.topk(one.logits[int(differs[0])], 2).values.tolist()
                    difference = (int(differs[0]), first - second)
                agreements.append(Agreement(prompt, difference))
            yield decoding, agreements
            done = start + len(chosen) * (number + 1) / len(decodings)
            on_progress("greedy decoding", done / len(prompts))


class Distribution(NamedTuple):
    """The possible sequences int64 [M, length], and the probability of each float64 [M]."""

    sequences: Tensor
    probabilities: Tensor


class GTest(NamedTuple):
    """The p-value of a G-test, how many samples it saw, and how many of them have probability 0."""

    p_value: float
    samples: int
    impossible: int


@torch.inference_mode()
def first_token_distribution(model: LoadedModel, prompt: Prompt, decoding: Decoding, length: int) -> Distribution:
    """Return the exact distribution of the first `length` tokens under the sampling settings of `decoding`.

    It has (tokens kept by the filters) ** `length` sequences: use a small `top_k`.
    """
    device = model.target.device
    sequences = torch.zeros(1, 0, dtype=torch.int64, device=device)
    chances = torch.ones(1, dtype=torch.float64, device=device)
    for position in range(length):
        # Teacher forcing returns the scores that predict each token, so any token may stand at the end.
        padded = torch.nn.functional.pad(sequences, (0, 1))
        condition = model.condition([prompt.text] * len(padded))
        scores = teacher_forced(model.target, condition, padded, decoding.cfg_scale != 1).scores
        uncond = None if scores.uncond is None else scores.uncond[:, position]
        p = decoding_probabilities(guide(scores.cond[:, position], uncond, decoding.cfg_scale), decoding)
        rows, tokens = (p > 0).nonzero(as_tuple=True)
        sequences = torch.cat([sequences[rows], tokens[:, None]], dim=1)
        chances = chances[rows] * p[rows, tokens].double()
    return Distribution(sequences, chances / chances.sum())


def g_test(distributions: Sequence[Distribution], samples: Sequence[Tensor]) -> GTest:
    """Test samples int64 [n, length] against their distributions; the statistics of independent lots are summed.

    The p-value is 0 if any sample has probability 0.
    """
    from scipy.stats import chi2

    statistic, freedom, impossible = 0.0, 0, 0
    for (sequences, probabilities), tokens in zip(distributions, samples, strict=True):
        counts = Counter(map(tuple, tokens.tolist()))
        observed = np.array([counts[tuple(sequence)] for sequence in sequences.tolist()], dtype=np.float64)
        possible = int(observed.sum())
        impossible += len(tokens) - possible
        observed, expected = _pooled(observed, probabilities.cpu().numpy() * possible)
        seen = observed > 0
        statistic += 2.0 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
        freedom += len(expected) - 1
    p_value = 0.0 if impossible else float(chi2.sf(statistic, freedom))
    return GTest(p_value, sum(map(len, samples)), impossible)


def _pooled(
    observed: NDArray[np.float64], expected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pool the rarest cells until each has 5 expected samples; the choice does not depend on `observed`.

    G follows the chi-squared distribution only if no cell is small.
    """
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    rare = int((expected < 5.0).sum())
    if rare and expected[:rare].sum() < 5.0:
        rare = min(rare + 1, len(expected))
    if rare < 2:
        return observed, expected
    return np.append(observed[:rare].sum(), observed[rare:]), np.append(expected[:rare].sum(), expected[rare:])


def first_tokens_test(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    distributions: Sequence[Distribution],
    decoding: Decoding,
    samples: int,
    *,
    accept: Accept | None = None,
    seed: int = 0,
    batch: int = 64,
    on_progress: OnProgress = no_progress,
    about: str = "first tokens",
) -> GTest:
    """Decode the first tokens of `samples` images per prompt and test them against the exact distributions.

    `accept` replaces the acceptance rule, to show the power of the test; `about` names the test in the progress.
    """
    lots = []
    for number, (prompt, (sequences, _)) in enumerate(zip(prompts, distributions, strict=True)):
        made: list[Tensor] = []
        length = sequences.shape[1]
        for start in range(0, samples, batch):
            count = min(batch, samples - start)
            streams = generators(model, [record_seed(seed, prompt.id, start + image) for image in range(count)])
            condition = model.condition([prompt.text] * count)
            decoded = decode(model, condition, decoding, streams, tokens=length, engine=model.engine, accept=accept)
            made += [image.tokens.long() for image in decoded]
            on_progress(about, (number * samples + start + count) / (len(prompts) * samples))
        lots.append(torch.stack(made))
    return g_test(distributions, lots)
