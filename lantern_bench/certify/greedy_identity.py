"""Greedy identity: speculative greedy decoding gives the tokens of greedy decoding, or differs at a near-tie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lantern_bench.certify.relaxation import autoregressive, generators
from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.decoding.loop import decode
from lantern_bench.models.loaded_model import LoadedModel

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""By dtype: top-1 minus top-2 guided logit below which rounding may choose either (docs/algorithms.md, section 6)."""


class Agreement(NamedTuple):
    """One prompt under one decoding: position and margin of the first token that differs from greedy decoding, or None.

    The margin is top-1 minus top-2 of the logits of greedy decoding there; below `tolerance` rounding explains it.
    """

    prompt: Prompt
    difference: tuple[int, float] | None
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether the tokens differ, and rounding explains it."""
        return self.difference is not None and self.difference[1] < self.tolerance


def greedy_agreements(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Sequence[Decoding],
    *,
    batch: int = 8,
    tolerance: float = NEAR_TIE["float32"],
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
                agreements.append(Agreement(prompt, difference, tolerance))
            yield decoding, agreements
            done = start + len(chosen) * (number + 1) / len(decodings)
            on_progress("greedy decoding", done / len(prompts))
