"""What a decode step costs: a target forward by number of nodes, and the parts of each kind of step.

Measurements use the programs and sessions of decoding, after a warm-up that compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.clock import settle_garbage
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.emitted_tv import total_variation
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import greedy_probabilities, guide
from lantern_bench.decoding.step import scoring
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import load_model
from lantern_bench.profile.roofline import seconds_of

_WARM_TOKENS = 24
_WARM_FORWARDS = 3


class StepCost(NamedTuple):
    """Milliseconds per step without prefill, tokens per step, and the `traces` of the measured images.

    draft: drafter forwards and tree building. target: the target's forward (autoregressive decoding samples in the same
    program). verify: acceptance, cache update, copy to the host. other: noise, and time outside the phases.
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
    """Median milliseconds of one target forward over a chain of `nodes`, with half an image in the cache.

    `condition` is that of one image; the forward includes guidance.
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
    seconds = seconds_of(lambda: run(tokens, depths, chain), device, _WARM_FORWARDS + repeats)
    return 1e3 * median(seconds[_WARM_FORWARDS:])


def step_cost(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int = 0, tokens: int | None = None
) -> StepCost:
    """Decode one image per prompt, one at a time, and divide the seconds by the number of steps."""
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


@torch.inference_mode()
def dtype_error(name: str, rounded: LoadedModel, prompts: Sequence[str], cfg_scale: float, seed: int = 0) -> Tensor:
    """TV float32 [images * tokens] of the distributions of `rounded` from those of the model `name` in float32.

    Both are guided, at temperature 1, without filters, along the same tokens.
    """
    exact = load_model(name, rounded.target.device, torch.float32)
    found = []
    decoding = Decoding.model_validate({"mode": "ar", "cfg_scale": cfg_scale})
    for number, prompt in enumerate(prompts):
        noise = torch.Generator(exact.target.device).manual_seed(seed + number)
        condition = exact.condition([prompt])
        tokens = decode(exact, condition, decoding, [noise])[0].tokens.long()[None]
        both = []
        for model in (exact, rounded):
            forced = teacher_forced(model.target, condition, tokens.to(model.target.device), cfg_scale != 1)
            both.append(greedy_probabilities(guide(forced.scores.cond, forced.scores.uncond, cfg_scale))[0].cpu())
        found.append(total_variation(*both))
    return torch.cat(found)
