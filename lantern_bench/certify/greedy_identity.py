"""Greedy identity: speculative greedy decoding gives the tokens of greedy decoding, or differs at a near-tie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lantern_bench.certify.relaxation import generators
from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.models.loaded_model import LoadedModel

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""By dtype: top-1 minus top-2 guided logit below which rounding may choose either (docs/algorithms.md, section 6)."""


def greedy_differences(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Sequence[Decoding],
    *,
    batch: int = 8,
    on_progress: OnProgress = no_progress,
) -> dict[Decoding, list[tuple[int, float] | None]]:
    """Compare every decoding (temperature 0, one guidance scale) with greedy decoding, of every prompt.

    Returns position and margin of the first token that differs, or None. The margin is top-1 minus top-2 of the logits
    of greedy decoding there.
    """
    differences: dict[Decoding, list[tuple[int, float] | None]] = {decoding: [] for decoding in decodings}
    for start in range(0, len(prompts), batch):
        chosen = prompts[start : start + batch]
        condition, seeds = model.condition([prompt.text for prompt in chosen]), [0] * len(chosen)
        decode_all = partial(decode, model, condition, engine=model.engine)
        greedy = decode_all(decodings[0].autoregressive(), generators(model, seeds), keep_logits=True)
        for number, decoding in enumerate(decodings):
            drafted = decode_all(decoding, generators(model, seeds))
            differences[decoding] += map(_difference, greedy, drafted)
            done = start + len(chosen) * (number + 1) / len(decodings)
            on_progress("greedy decoding", done / len(prompts))
    return differences


def _difference(greedy: Decoded, drafted: Decoded) -> tuple[int, float] | None:
    positions = (greedy.tokens != drafted.tokens).nonzero()
    if not len(positions):
        return None
    assert greedy.logits is not None
    first, second = torch.topk(greedy.logits[int(positions[0])], 2).values.tolist()
    return int(positions[0]), first - second
