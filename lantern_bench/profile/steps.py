"""What a decode step costs: a target forward by number of nodes, the parts of each kind of step, roofline, memory.

Measurements use the programs and sessions of decoding, after a warm-up that compiles them. A forward takes at least its
bytes over the read rate, and its operations over the multiply rate. Peak memory comes from the allocator on CUDA, and
from the profiler's allocation record on a CPU, where the process holds other things too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.chatter import silence_profiler
from lantern_bench.clock import now, peak_memory_bytes, reset_peak_memory, settle_garbage, synchronize
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.emitted_tv import total_variation
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import greedy_probabilities, guide
from lantern_bench.decoding.step import scoring
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.packed_linear import weight_bytes, weight_count
from lantern_bench.models.registry import model_of
from lantern_bench.models.target import TransformerTarget

_WARM_FORWARDS = 3


class StepCost(NamedTuple):
    """Milliseconds per step without prefill.

    Parts: `draft_ms` has drafter forwards and tree building; `target_ms` the target's forward (autoregressive decoding
    samples in the same program); `verify_ms` acceptance, cache update and the copy to the host; `other_ms` noise and
    time outside the phases.
    """

    total: float
    parts: dict[str, float]
    mean_accepted_length: float  # tokens per step
    traces: list[ImageTrace]  # of the measured images


@torch.inference_mode()
def forward_ms(model: LoadedModel, condition: Any, nodes: int, cfg_scale: float, repeats: int = 30) -> float:
    """Return the median milliseconds of one target forward over a chain of `nodes`, with half an image in the cache.

    `condition` is that of one image; the forward includes guidance.
    """
    target = model.target
    device = target.device
    session, run = scoring(target, 1, nodes, cfg_scale, model.engine)
    session.prefill(condition)
    path = torch.zeros(1, 1, dtype=torch.int64, device=device)
    session.commit(path, torch.full((1,), target.image_tokens // 2, device=device))
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()[None]
    tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    depths = torch.arange(nodes, device=device)[None]
    seconds = seconds_of(lambda: run(tokens, depths, chain), device, _WARM_FORWARDS + repeats)
    return 1e3 * median(seconds[_WARM_FORWARDS:])


def step_costs(
    model: LoadedModel,
    decodings: Sequence[Decoding],
    prompts: Sequence[str],
    seed: int = 0,
    tokens: int | None = None,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> list[StepCost]:
    """Decode one image per prompt with each decoding, one at a time, and divide the seconds by the number of steps.

    The decodings take turns, because the speed of a machine drifts: a step that reads memory may take twice as long a
    moment later, and one that computes does not. `on_progress` receives the share that is done.
    """
    device = model.target.device

    def trace_of(decoding: Decoding, number: int, most: int | None) -> ImageTrace:
        noise = torch.Generator(device).manual_seed(seed + number)
        condition = model.condition([prompts[number]])
        return decode(model, condition, decoding, [noise], tokens=most, engine=model.engine)[0].trace

    for decoding in decodings:
        trace_of(decoding, 0, min(24, tokens or 24))
    settle_garbage()
    traces: list[list[ImageTrace]] = [[] for _ in decodings]
    for number in range(len(prompts)):
        for index, decoding in enumerate(decodings):
            traces[index].append(trace_of(decoding, number, tokens))
            on_progress((number * len(decodings) + index + 1) / (len(prompts) * len(decodings)))
    return list(map(_step_cost, traces))


def _step_cost(traces: list[ImageTrace]) -> StepCost:
    steps = max(1, sum(len(trace.committed) for trace in traces))

    def ms_per_step(phase: str) -> float:
        return 1e3 * sum(trace.phases.get(phase, 0.0) for trace in traces) / steps

    parts = {f"{phase}_ms": ms_per_step(phase) for phase in ("draft", "target", "verify")}
    total = 1e3 * sum(trace.seconds for trace in traces) / steps - ms_per_step("prefill")
    parts["other_ms"] = max(ms_per_step("noise"), total - sum(parts.values()))
    length = sum(sum(trace.uncut) for trace in traces) / steps
    return StepCost(sum(parts.values()), parts, length, traces)


@torch.inference_mode()
def dtype_error(name: str, rounded: LoadedModel, prompts: Sequence[str], cfg_scale: float, seed: int = 0) -> Tensor:
    """Return the TV float32 [images * tokens] of the distributions of `rounded` from those of `name` in float32.

    Both are guided, at temperature 1, without filters, along the same tokens.
    """
    exact = model_of(name).load(rounded.target.device, torch.float32)
    distances = []
    decoding = Decoding("ar", cfg_scale=cfg_scale)
    for number, prompt in enumerate(prompts):
        noise = torch.Generator(exact.target.device).manual_seed(seed + number)
        condition = exact.condition([prompt])
        tokens = decode(exact, condition, decoding, [noise])[0].tokens.long()[None]
        pair = []
        for model in (exact, rounded):
            forced = teacher_forced(model.target, condition, tokens.to(model.target.device), cfg_scale != 1)
            pair.append(greedy_probabilities(guide(forced.logits.cond, forced.logits.uncond, cfg_scale))[0].cpu())
        distances.append(total_variation(*pair))
    return torch.cat(distances)


# ---- What the device can do at best, what a forward needs at least, how much memory a decode holds


class Rates(NamedTuple):
    """How fast a device is."""

    bytes_per_s: float  # read
    operations_per_s: float  # a multiply-add counts as two


@torch.inference_mode()
def device_rates(target: TransformerTarget, guided: bool) -> Rates:
    """Measure reads of the bytes of one forward, and square matrix products in its dtype; the best of 12 each."""
    device = target.device
    numbers = torch.ones(max(1, forward_need(target, 1, guided)[0] // 4), device=device)
    read = min(seconds_of(numbers.sum, device, 12))
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(side, side, dtype=target.dtype, device=device) for _ in range(2))
    multiply = min(seconds_of(lambda: a @ b, device, 12))
    return Rates(numbers.nbytes / read, 2.0 * side**3 / multiply)


def forward_need(target: TransformerTarget, nodes: int, guided: bool) -> tuple[int, float]:
    """Return the bytes and operations of a forward over `nodes` of one image, with half an image in the cache."""
    config, rows, network = target.config, 2 if guided else 1, target.transformer
    layers = [*network.layers, network.norm, network.output]
    layers += [] if network.head_layer is None else [network.head_layer]
    length = config.prefix + config.image_tokens // 2
    kv_width = (config.kv_heads or config.heads) * config.head_dim
    size = torch.finfo(target.dtype).bits // 8
    cache = 2 * config.layers * rows * length * kv_width * size
    weights = sum(weight_bytes(module) for module in layers)
    products = sum(weight_count(module) for module in layers)
    attention = 2 * config.layers * (length + nodes) * config.heads * config.head_dim
    return weights + cache, 2.0 * rows * nodes * (products + attention)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Run `work` several times and return the seconds of each, with the device idle before and after."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = now()
        work()
        synchronize(device)
        seconds.append(now() - began)
    return seconds


def decode_memory(model: LoadedModel, nodes: int, guided: bool, run: Callable[[], Any]) -> tuple[int, int]:
    """Measure the bytes of `run`, a decode of one image with trees of `nodes`, after a warm-up.

    Returns the peak, and the sum of weights, caches and logits of one tree. For transformer targets only.
    """
    target, drafter = model.target, model.drafter
    networks: list[Any] = [target, drafter] if nodes > 1 and drafter is not None else [target]
    standing = sum(network.session(1, guided, nodes).cache.nbytes for network in networks)
    standing += sum(weight_bytes(network) for network in networks)
    logits = nodes * target.vocab_size * 4
    device = target.device
    if device.type == "cuda":
        reset_peak_memory(device)
        run()
        return peak_memory_bytes(device) or 0, standing + logits
    # The most bytes that `run` holds at once beyond those held before it.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with silence_profiler(), torch.profiler.profile(activities=activities, profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return standing + most, standing + logits
