"""What a decode step costs: a forward of the target by number of nodes, and the parts of a step of each kind.

Measured through the same programs and sessions that decoding uses, after they have run (and compiled) once. What the
device could do at best is `rates`; what follows for a choice of trees is `tree_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from lantern_bench.clock import now, settle_garbage, synchronize
from lantern_bench.decode.loop import decode
from lantern_bench.decode.speculation import scoring
from lantern_bench.decode.trace import ImageTrace
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding

__all__ = ["StepCost", "forward_ms", "step_cost"]

_WARM_TOKENS = 24
_WARM_FORWARDS = 3


class StepCost(NamedTuple):
    """Milliseconds a step, prefill excluded, and tokens a step; `traces` are the images it was measured on.

    draft: the drafter's forwards and the making of the tree. target: the target's forward (autoregressive decoding
    draws its token in the same program). verify: acceptance, the move of the cache, the copy to the host. other: noise
    and what no phase covers.
    """

    draft: float
    target: float
    verify: float
    other: float
    mean_accepted_length: float
    traces: list[ImageTrace]

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.draft + self.target + self.verify + self.other


@torch.inference_mode()
def forward_ms(model: LoadedModel, condition: Any, nodes: int, cfg_scale: float, repeats: int = 30) -> float:
    """Median milliseconds of one forward of the target over a chain of `nodes`, with half an image in the cache.

    `condition` is that of one image; guidance is part of the forward.
    """
    target = model.target
    device = target.device
    session, run = scoring(target, 1, nodes, cfg_scale, model.engine)
    session.prefill(condition)
    whole = torch.zeros(1, 1, dtype=torch.int64, device=device)
    session.commit(whole, torch.full((1,), target.image_tokens // 2, device=device))
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()[None]
    tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    depths = torch.arange(nodes, device=device)[None]
    seconds = []
    for repeat in range(repeats + _WARM_FORWARDS):
        synchronize(device)
        began = now()
        run(tokens, depths, chain)
        synchronize(device)
        if repeat >= _WARM_FORWARDS:
            seconds.append(now() - began)
    return 1e3 * median(seconds)


def step_cost(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int = 0, tokens: int | None = None
) -> StepCost:
    """Decode an image for each prompt, one at a time, and share the seconds out over the steps."""
    device = model.target.device

    def made(prompt: str, number: int, most: int | None) -> ImageTrace:
        noise = torch.Generator(device).manual_seed(seed + number)
        condition = model.condition([prompt])
        return decode(model, condition, decoding, [noise], tokens=most, engine=model.engine)[0].trace

    made(prompts[0], 0, min(_WARM_TOKENS, tokens or _WARM_TOKENS))
    settle_garbage()
    traces = [made(prompt, number, tokens) for number, prompt in enumerate(prompts)]
    steps = max(1, sum(len(trace.committed) for trace in traces))

    def each(phase: str) -> float:
        return 1e3 * sum(trace.phases.get(phase, 0.0) for trace in traces) / steps

    whole = 1e3 * sum(trace.seconds for trace in traces) / steps - each("prefill")
    draft, target, verify, noise = each("draft"), each("target"), each("verify"), each("noise")
    other = noise + max(0.0, whole - draft - target - verify - noise)
    uncut = sum(sum(trace.uncut) for trace in traces) / steps
    return StepCost(draft, target, verify, other, uncut, traces)
