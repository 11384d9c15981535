"""Is a lossless rule lossless for this model? G-tests of whole decodes against the exact law of their first tokens.

The law comes from teacher forcing over every sequence that the filters leave possible; the samples come from the decode
loop as it is. A test that cannot fail proves nothing, so the same test is run on a broken rule (`broken_rules.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.decode.forcing import teacher_forced
from lantern_bench.decode.judge import Judge
from lantern_bench.decode.loop import decode
from lantern_bench.decode.sampling import decoding_probabilities, guide
from lantern_bench.measure.images import generators
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.progress import OnProgress, unheard
from lantern_bench.spec.seeds import record_seed

__all__ = ["GTest", "Law", "first_tokens_test", "g_test", "law_of_first_tokens"]

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
