"""Is a lossless rule lossless for this model? G-tests of whole decodes against the exact law of their first tokens.

The law comes from teacher forcing over every sequence that the filters leave possible; the samples come from the decode
loop as it is. A test that cannot fail proves nothing, so the same test is run on a broken rule (`broken_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.certify.contexts import generators, plain
from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.relaxation import Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Judge, Judgement
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.loaded_model import LoadedModel

# ---- Rules broken on purpose, to show that a check would see a wrong one at the sample size it was run with


def judge_without_residual(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    _relaxation: Relaxation,
    _table: Tensor | None,
    _active: Sequence[int] | None = None,
) -> Judgement:
    """The strict rule with its residual left out: every child, and the one more token, on the node's own p.

    Arguments as of `judge_children`. Leaving the residual out is the mistake that looks right: each draft is accepted
    with the right probability, and only the law of the tokens is wrong.
    """
    accept = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for rank in range(tokens.shape[1]):
        x = tokens[:, rank, None]
        share = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = offered[:, rank, None] & (share > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / share).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Judgement(accept, torch.zeros_like(accept), p, torch.zeros(len(p), dtype=torch.bool, device=p.device))


# ---- Is greedy speculation greedy decoding, token for token? And where it is not: was it a near-tie?


NEAR_TIE = 1e-4
"""Top-1 minus top-2 guided logit below which float32 may choose either (algorithms.md, section 6)."""


class Agreement(NamedTuple):
    """One prompt under one decoding: where it first differs from greedy decoding, and the margin there (None: nowhere).

    The margin is that of greedy decoding's logits, given the same tokens before.
    """

    prompt: Prompt
    position: int | None
    margin: float | None

    @property
    def difference(self) -> tuple[int, float] | None:
        """Position and margin of the first difference."""
        return None if self.position is None or self.margin is None else (self.position, self.margin)

    @property
    def near_tie(self) -> bool:
        """Whether there is a difference and rounding explains it."""
        return self.margin is not None and self.margin < NEAR_TIE

    @property
    def holds(self) -> bool:
        """Whether the tokens are the same, or differ first at a near-tie."""
        return self.position is None or self.near_tie


def greedy_agreements(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Sequence[Decoding],
    *,
    batch: int = 8,
    on_progress: OnProgress = unheard,
) -> Iterator[tuple[Decoding, list[Agreement]]]:
    """Yield what every decoding (temperature 0, one guidance) makes of every batch of prompts."""
    for start in range(0, len(prompts), batch):
        chosen = prompts[start : start + batch]
        condition = model.condition([prompt.text for prompt in chosen])
        streams = generators(model, [0] * len(chosen))
        alone = decode(model, condition, plain(decodings[0]), streams, keep_logits=True, engine=model.engine)
        for number, decoding in enumerate(decodings):
            drafted = decode(model, condition, decoding, generators(model, [0] * len(chosen)), engine=model.engine)
            agreements = []
            for prompt, one, other in zip(chosen, alone, drafted, strict=True):
                assert one.logits is not None
                differs = (one.tokens != other.tokens).nonzero()
                if not len(differs):
                    agreements.append(Agreement(prompt, None, None))
                    continue
                place = int(differs[0])
                first, second = torch.topk(one.logits[place], 2).values.tolist()
                agreements.append(Agreement(prompt, place, first - second))
            yield decoding, agreements
            done = start + len(chosen) * (number + 1) / len(decodings)
            on_progress("greedy decoding", done / len(prompts))


# ----

# Cells of fewer expected samples are pooled: the statistic follows its chi-squared law only where cells are not small.
_LEAST_EXPECTED = 5.0


class Law(NamedTuple):
    """The sequences int64 [M, length] that can be, and the probability of each float64 [M]."""

    sequences: Tensor
    probabilities: Tensor


class GTest(NamedTuple):
    """A G-test, or several added up: the statistic, degrees of freedom, p-value, samples, and those that cannot be."""

    statistic: float
    freedom: int
    p_value: float
    samples: int
    impossible: int


@torch.inference_mode()
def law_of_first_tokens(model: LoadedModel, prompt: Prompt, decoding: Decoding, length: int) -> Law:
    """Return the exact law of the first `length` tokens under the sampling settings of `decoding`.

    Its size is the number of tokens that the filters keep to the power of `length`: `top_k` keeps it small.
    """
    device = model.target.device
    sequences = torch.zeros(1, 0, dtype=torch.int64, device=device)
    chances = torch.ones(1, dtype=torch.float64, device=device)
    for made in range(length):
        # Any token behind a prefix: what predicts it is wanted, not what follows.
        padded = torch.nn.functional.pad(sequences, (0, 1))
        condition = model.condition([prompt.text] * len(padded))
        scores = teacher_forced(model.target, condition, padded, decoding.cfg_scale != 1).scores
        uncond = None if scores.uncond is None else scores.uncond[:, made]
        p = decoding_probabilities(guide(scores.cond[:, made], uncond, decoding.cfg_scale), decoding)
        rows, tokens = (p > 0).nonzero(as_tuple=True)
        sequences = torch.cat([sequences[rows], tokens[:, None]], dim=1)
        chances = chances[rows] * p[rows, tokens].double()
    return Law(sequences, chances / chances.sum())


def g_test(laws: Sequence[Law], samples: Sequence[Tensor]) -> GTest:
    """Test samples int64 [n, length] against their laws, added up over independent lots.

    A sample that has no probability settles it: the p-value is then 0.
    """
    from scipy.stats import chi2

    statistic, freedom, impossible = 0.0, 0, 0
    for law, tokens in zip(laws, samples, strict=True):
        observed, expected, outside = _counts(law, tokens)
        impossible += outside
        observed, expected = _pooled(observed, expected)
        seen = observed > 0
        statistic += 2.0 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
        freedom += len(expected) - 1
    p_value = 0.0 if impossible else float(chi2.sf(statistic, freedom))
    return GTest(statistic, freedom, p_value, sum(map(len, samples)), impossible)


def _counts(law: Law, tokens: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Observed and expected counts of the law's sequences, and how many samples are none of them."""
    index = {tuple(sequence): place for place, sequence in enumerate(law.sequences.tolist())}
    observed = np.zeros(len(index))
    outside = 0
    for sequence in tokens.tolist():
        place = index.get(tuple(sequence))
        if place is None:
            outside += 1
        else:
            observed[place] += 1
    return observed, law.probabilities.cpu().numpy() * (len(tokens) - outside), outside


def _pooled(
    observed: NDArray[np.float64], expected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pool the rarest cells until every cell has enough expected samples; what is pooled does not depend on counts."""
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    rare = int((expected < _LEAST_EXPECTED).sum())
    if rare and expected[:rare].sum() < _LEAST_EXPECTED:
        rare = min(rare + 1, len(expected))
    if rare < 2:
        return observed, expected
    return (
        np.concatenate([[observed[:rare].sum()], observed[rare:]]),
        np.concatenate([[expected[:rare].sum()], expected[rare:]]),
    )


def first_tokens_test(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    laws: Sequence[Law],
    decoding: Decoding,
    samples: int,
    *,
    judge: Judge | None = None,
    seed: int = 0,
    batch: int = 64,
    on_progress: OnProgress = unheard,
) -> GTest:
    """Decode the first tokens of `samples` images of each prompt and test them against the laws, added up.

    `judge` is a broken rule where the power of the test is to be seen.
    """
    lots = []
    for number, (prompt, law) in enumerate(zip(prompts, laws, strict=True)):
        made: list[Tensor] = []
        for start in range(0, samples, batch):
            count = min(batch, samples - start)
            streams = generators(model, [record_seed(seed, prompt.id, start + image) for image in range(count)])
            condition = model.condition([prompt.text] * count)
            decoded = decode(
                model, condition, decoding, streams, tokens=law.sequences.shape[1], engine=model.engine, judge=judge
            )
            made += [image.tokens.long() for image in decoded]
            on_progress("first tokens", (number * samples + start + count) / (len(prompts) * samples))
        lots.append(torch.stack(made))
    return g_test(laws, lots)
