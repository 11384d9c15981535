"""Is greedy speculation greedy decoding, token for token? And where it is not: was it a near-tie?

Two tokens whose logits differ by less than rounding may change places between a forward over one node and one over a
tree. Such a difference is counted and its margin told; any other is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lantern_bench.decode.loop import decode
from lantern_bench.measure.images import generators, plain
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.progress import OnProgress, unheard

__all__ = ["NEAR_TIE", "Agreement", "greedy_agreements"]

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
