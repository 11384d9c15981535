"""Measure decode steps on this machine: their parts, the roofline of the device, and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml
from torch import Tensor, nn

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.loop import decode, image_generators
from lantern_bench.decoding.sampling import greedy_probabilities, guide
from lantern_bench.decoding.step import tree_scorer
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.environment import device_in_words
from lantern_bench.devices.machine import (
    compute_block,
    machine_block,
    peak_memory_bytes,
    reset_peak_memory,
)
from lantern_bench.models.load import load_model
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks.packed_linear import weights_of
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.random_weights import random_model, random_model_of_size, read_size
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    Work,
    Workload,
    dynamic_sizes,
    fit_device,
    named_draft,
    step_samples,
)
from lantern_bench.report.draw import save_figure
from lantern_bench.storage.schema import Row, write_csv
from lantern_bench.utils.clock import collect_garbage, now, synchronize
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

_WARM_FORWARDS = 3
_WARM_TOKENS = 24
_NODES = (1, 8, 16, 32, 64)  # of the measured forwards
_REPEATS = 12  # of the work that gives a rate
_COLOURS = {
    "draft_ms": "#0072B2",
    "target_ms": "#009E73",
    "verify_ms": "#D55E00",
    "other_ms": "#999999",
}


class StepCost(NamedTuple):
    """The cost of a step, without prefill."""

    total: float  # milliseconds
    # draft_ms: drafter forwards, tree building
    # target_ms: target forward, in which `ar` also draws its token
    # verify_ms: acceptance, cache update, copy to the host
    # other_ms: noise, and time outside the phases
    parts: dict[str, float]
    mean_accepted_length: float  # tokens per step; the last step of an image counts in full
    traces: list[ImageTrace]  # of the measured images


@torch.inference_mode()
def forward_ms(
    model: LoadedModel, condition: Any, nodes: int, *, cfg_scale: float, repeats: int = 30
) -> float:
    """Return the median milliseconds of a guided forward with half an image in the cache.

    Args:
        model: Its target is measured, with its engine.
        condition: Condition of one image.
        nodes: Length of the chain that is scored.
        cfg_scale: Guidance scale.
        repeats: Measured forwards.
    """
    target = model.target
    device = target.device
    session, score = tree_scorer(
        target, batch=1, nodes=nodes, cfg_scale=cfg_scale, engine=model.engine
    )
    session.prefill(condition)
    path = torch.zeros(1, 1, dtype=torch.int64, device=device)
    session.commit(path, torch.full((1,), target.image_tokens // 2, device=device))
    tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    depths = torch.arange(nodes, device=device)[None]
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()[None]
    seconds = seconds_of(
        lambda: score(tokens, depths, chain), device, repeats=_WARM_FORWARDS + repeats
    )
    return 1e3 * median(seconds[_WARM_FORWARDS:])


def step_costs(
    model: LoadedModel,
    decodings: Sequence[Decoding],
    prompts: Sequence[str],
    *,
    seed: int = 0,
    tokens: int | None = None,
    emit: Emit = ignore_events,
) -> list[StepCost]:
    """Decode one image per prompt with each decoding.

    The decodings take turns, because the speed of a machine drifts.

    Args:
        model: Decodes the images.
        decodings: The decodings to measure.
        prompts: One prompt for each image.
        seed: Seed of the first image.
        tokens: Tokens of an image that are decoded. Default: all.
        emit: Receives progress.
    """

    def trace_of(decoding: Decoding, number: int, most: int | None) -> ImageTrace:
        (image,) = decode(
            model=model,
            condition=model.condition([prompts[number]]),
            decoding=decoding,
            generators=image_generators(model, [seed + number]),
            tokens=most,
            engine=model.engine,
        )
        return image.trace

    for decoding in decodings:
        trace_of(decoding, 0, min(_WARM_TOKENS, tokens or _WARM_TOKENS))
    collect_garbage()
    total = len(prompts) * len(decodings)
    traces = []
    for number, decoding in itertools.product(range(len(prompts)), decodings):
        traces.append(trace_of(decoding, number, tokens))
        emit(ProgressEvent("measuring steps", len(traces) / total))
    return [_step_cost(traces[index :: len(decodings)]) for index in range(len(decodings))]


def _step_cost(traces: list[ImageTrace]) -> StepCost:
    steps = max(1, sum(len(trace.committed) for trace in traces))
    seconds = pd.DataFrame([{"image": trace.seconds, **trace.phases} for trace in traces])
    ms = 1e3 * seconds.sum() / steps
    parts = {f"{phase}_ms": ms.get(phase, 0.0) for phase in ("draft", "target", "verify")}
    outside = ms["image"] - ms.get("prefill", 0.0) - sum(parts.values())
    parts["other_ms"] = max(ms.get("noise", 0.0), outside)
    return StepCost(
        total=sum(parts.values()),
        parts=parts,
        mean_accepted_length=sum(sum(trace.uncut) for trace in traces) / steps,
        traces=traces,
    )


@torch.inference_mode()
def dtype_error(
    name: str, rounded: LoadedModel, prompts: Sequence[str], *, cfg_scale: float
) -> Tensor:
    """Return the TV between a model and itself in float32, at every token of some images.

    Args:
        name: Name of the model.
        rounded: The model in another dtype.
        prompts: One image is decoded in float32 for each.
        cfg_scale: Guidance scale.

    Returns:
        TV float32 [images * tokens].
    """
    exact = model_of(name).load(rounded.target.device, torch.float32)
    distances = []
    for number, prompt in enumerate(prompts):
        condition = exact.condition([prompt])
        (image,) = decode(
            model=exact,
            condition=condition,
            decoding=Decoding("ar", cfg_scale=cfg_scale),
            generators=image_generators(exact, [number]),
            keep_logits=True,
        )
        assert image.logits is not None
        forced = teacher_forced(
            target=rounded.target,
            condition=condition,
            tokens=image.tokens.long()[None].to(rounded.target.device),
            guided=cfg_scale != 1,
        )
        logits = guide(forced.logits.cond, forced.logits.uncond, cfg_scale)[0]
        difference = greedy_probabilities(image.logits) - greedy_probabilities(logits.cpu())
        distances.append(difference.abs().sum(dim=-1) / 2)
    return torch.cat(distances)


class Rates(NamedTuple):
    """Speed of a device."""

    bytes_per_s: float  # read
    operations_per_s: float  # a multiply-add counts as two


@torch.inference_mode()
def device_rates(target: TransformerTarget, *, guided: bool) -> Rates:
    """Measure reads of the bytes of one forward, and products of square matrices.

    Each rate is the best of 12.
    """
    device = target.device
    read_bytes = forward_need(target, 1, guided=guided).bytes
    numbers = torch.ones(math.ceil(read_bytes / 4), device=device)
    side = 8192 if device.type == "cuda" else 1024
    a = torch.ones(side, side, dtype=target.dtype, device=device)
    b = torch.ones(side, side, dtype=target.dtype, device=device)
    read = min(seconds_of(numbers.sum, device, repeats=_REPEATS))
    multiply = min(seconds_of(lambda: a @ b, device, repeats=_REPEATS))
    return Rates(numbers.nbytes / read, 2.0 * side**3 / multiply)


def forward_need(target: TransformerTarget, nodes: int, *, guided: bool) -> Work:
    """Return the bytes and operations of a forward with half an image in the cache.

    Weights count with their bytes in memory, which may be packed in 16 bits.

    Args:
        target: The network.
        nodes: Nodes of one image.
        guided: Whether there are rows without the prompt.
    """
    config = target.config
    network = target.transformer
    modules = nn.ModuleList([*network.layers, network.norm, network.output])
    if network.head_layer is not None:
        modules.append(network.head_layer)
    rows = 2 if guided else 1
    length = config.prefix + config.image_tokens // 2
    kv_heads = config.kv_heads or config.heads
    cached = 2 * config.layers * rows * length * kv_heads * config.head_dim
    attention = 2 * config.layers * (length + nodes) * config.heads * config.head_dim
    weights = weights_of(modules)
    products = sum(weight.numel() for weight in weights)
    read = sum(weight.nbytes for weight in weights) + cached * target.dtype.itemsize
    return Work(read, 2.0 * rows * nodes * (products + attention))


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int) -> list[float]:
    """Return the seconds of each of several runs.

    Args:
        work: What is run.
        device: Synchronized before and after each run.
        repeats: Number of runs.
    """
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = now()
        work()
        synchronize(device)
        seconds.append(now() - began)
    return seconds


class ProfiledModel(NamedTuple):
    """A model, and what is decoded with it."""

    model: LoadedModel
    is_trained: bool
    prompts: Sequence[str]  # one for each image
    cfg_scale: float
    seed: int
    tokens: int | None  # decoded of each image; None: all

    @property
    def is_guided(self) -> bool:
        """Whether a forward has rows without the prompt."""
        return self.cfg_scale != 1

    def nodes(self, decoding: Decoding) -> int:
        """Return the nodes that the target scores in a step of `decoding`."""
        if not decoding.drafts:
            return 1
        return drafting_of(decoding, self.model.target).tree.tokens.shape[1]


def load_profiled_model(
    name: str,
    *,
    size: str | None,
    random: bool,
    compute: Compute,
    cfg_scale: float,
    images: int,
    seed: int,
    tokens: int | None,
) -> ProfiledModel:
    """Load a model, or make a random one, with prompts that it accepts.

    Args:
        name: Name of the model.
        size: Shape of a random model, in place of the named one.
        random: Whether the named model gets random weights.
        compute: Device and dtype.
        cfg_scale: Guidance scale.
        images: Number of prompts.
        seed: Seed of random weights and of the first image.
        tokens: Tokens of an image that are decoded; None: all.
    """
    device, dtype = compute
    noise = torch.Generator(device).manual_seed(seed)
    prompts: Sequence[str] = [""]
    if size is not None:
        loaded = random_model_of_size(read_size(size), device, dtype, generator=noise)
    else:
        model = model_of(name)
        prompts = next((texts for texts in model.prompt_sets.values() if texts), ("anything",))
        if random:
            loaded = random_model(name, device, dtype, generator=noise)
        else:
            loaded = load_model(model, compute, captions=True)
    return ProfiledModel(
        model=loaded,
        is_trained=size is None and not random,
        prompts=[prompts[number % len(prompts)] for number in range(images)],
        cfg_scale=cfg_scale,
        seed=seed,
        tokens=tokens,
    )


def step_of(tree: str, decoding: Decoding) -> Decoding:
    """Return `decoding` with a named static tree, or a dynamic tree such as `58n5d10b`.

    Raises:
        UserError: The tree does not exist, or the rule cannot decide on it.
    """
    sizes = dynamic_sizes(tree)
    values: dict[str, Any] = {"drafting": "static", "tree": tree}
    if sizes:
        values = {"drafting": "dynamic", **sizes}
    kept = decoding.settings()
    for key in decoding.drafting_row.parameter_names:
        kept.pop(key, None)
    try:
        return Decoding(**kept | values, cfg_default=decoding.cfg_default)
    except ParameterError as error:
        size = f"{error.key} {sizes[error.key]}: " if error.key in sizes else ""
        raise UserError(f"--tree {tree}: {size}{error.text}") from error


def measure(
    profiled: ProfiledModel, steps: Mapping[str, Decoding], rates: Rates, emit: Emit
) -> list[Row]:
    """Measure target forwards by number of nodes, then the kinds of steps in turns.

    Args:
        profiled: The model, its prompts and seed.
        steps: The decodings by name; one is `ar`.
        rates: Rates of the device.
        emit: Receives progress.

    Returns:
        The rows of the table: forwards, then steps.
    """
    model = profiled.model
    condition = model.condition(profiled.prompts[:1])
    # Memory comes first, because what other trees allocate stays allocated.
    memory = {}
    for name, decoding in steps.items():
        memory[name] = _memory(profiled, decoding)  # its programs are compiled here
        emit(ProgressEvent("measuring memory", len(memory), len(steps)))
    rows: list[Row] = []
    for nodes in _NODES:
        milliseconds = forward_ms(model, condition, nodes, cfg_scale=profiled.cfg_scale)
        rows.append(
            {
                "what": "forward",
                "name": f"{nodes} nodes",
                **_bounded(profiled, nodes, milliseconds, rates=rates),
            }
        )
        emit(ProgressEvent("measuring forwards", len(rows), len(_NODES)))
    one_node_ms = rows[0]["milliseconds"]

    measured = step_costs(
        model=model,
        decodings=list(steps.values()),
        prompts=profiled.prompts,
        seed=profiled.seed,
        tokens=profiled.tokens,
        emit=emit,
    )
    costs = dict(zip(steps, measured, strict=True))
    ar_ms = costs["ar"].total
    for name, cost in costs.items():
        # An autoregressive step draws its token in the target's program.
        outside = cost.total - one_node_ms
        if name != "ar":
            outside = cost.parts["verify_ms"] + cost.parts["other_ms"]
        # Drafts of random weights are accepted by chance, so their accepted length means nothing.
        length = cost.mean_accepted_length if profiled.is_trained else float("nan")
        rows.append(
            {
                "what": "step",
                "name": name,
                **_bounded(profiled, profiled.nodes(steps[name]), cost.total, rates=rates),
                **cost.parts,
                "outside_share": outside / cost.total,
                "break_even_mal": cost.total / ar_ms,
                "mean_accepted_length": length,
                "speedup": length * ar_ms / cost.total,
                **memory[name],
            }
        )
    return rows


def _bounded(profiled: ProfiledModel, nodes: int, milliseconds: float, *, rates: Rates) -> Row:
    """The columns of measured milliseconds and of the lower bound of the device."""
    target: Any = profiled.model.target
    need = forward_need(target, nodes, guided=profiled.is_guided)
    bound = 1e3 * max(need.bytes / rates.bytes_per_s, need.operations / rates.operations_per_s)
    return {
        "nodes": nodes,
        "milliseconds": milliseconds,
        "bound_ms": bound,
        "over_bound": milliseconds / bound,
    }


def _memory(profiled: ProfiledModel, decoding: Decoding) -> Row:
    """The columns of peak memory (on a GPU), and of the sum of weights, caches and logits."""
    model = profiled.model
    nodes = profiled.nodes(decoding)
    networks: list[Any] = [model.target]
    if nodes > 1 and model.drafter is not None:
        networks.append(model.drafter)
    accounted = nodes * model.target.vocab_size * 4
    for network in networks:
        session = network.session(batch=1, guided=profiled.is_guided, nodes=nodes)
        accounted += session.cache.nbytes + sum(weight.nbytes for weight in weights_of(network))
    reset_peak_memory(model.target.device)
    step_costs(model, [decoding], profiled.prompts[:1], tokens=_WARM_TOKENS)
    peak = peak_memory_bytes(model.target.device)
    return {
        "peak_memory_mb": float("nan") if peak is None else peak / 1e6,
        "accounted_memory_mb": accounted / 1e6,
    }


def save_device(profiled: ProfiledModel, rows: Sequence[Row], compute: Compute, path: Path) -> None:
    """Fit a device and write its file, for `lantern-bench predict --device`.

    Args:
        profiled: The measured model.
        rows: Rows of `measure`.
        compute: Device and dtype.
        path: The YAML file.
    """
    model = profiled.model
    target: Any = model.target
    config = target.config
    is_gpu = compute.device.type == "cuda"
    context = config.prefix + config.image_tokens // (1 if is_gpu else 2)
    setting = Workload(sizes=config, batch=1, guided=profiled.is_guided, context=context)
    itemsize = compute.dtype.itemsize
    # Only steps are fitted. A forward that is repeated alone finds weights and cache still in fast
    # memory, so it is faster than a forward inside a step.
    samples = []
    host_ms = []
    for row in rows:
        if row["what"] == "step":
            draft = named_draft(row["name"])
            samples += step_samples(setting, draft, weight_bytes=itemsize, step=row)
            if draft is not None:
                host_ms.append(row["other_ms"])
    facts = {"machine": machine_block()} | compute_block(compute, compiled=model.engine.compile)
    device = fit_device(
        samples,
        name=path.stem,
        about=device_in_words(facts),
        kind="gpu" if is_gpu else "cpu",
        weight_bytes=itemsize,
        code="compiled" if model.engine.compile else "eager",
        step_us=round(1e3 * median(host_ms), 2) if host_ms else 0.0,
        sources=(
            f"fitted to {len(samples)} times of `lantern-bench profile`: {model.name}, "
            f"{compute.dtype_name}",
        ),
    )
    write_file(
        path,
        yaml.safe_dump(device.model_dump(mode="json"), sort_keys=False).encode(),
        flag="--save-device",
    )


def save_profile(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`.

    Raises:
        UserError: A file cannot be written.
    """
    csv_file = folder / "profile.csv"
    figure_file = folder / "profile.png"
    write_csv(table, csv_file)
    save_figure(
        _drawn(table[table["what"] == "step"]), figure_file, dpi=160, metadata={"Software": None}
    )
    return [csv_file, figure_file]


def _drawn(steps: pd.DataFrame) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="tight")
    left, right = figure.subplots(1, 2)
    by_name = steps.set_index("name")
    parts = by_name[list(_COLOURS)].rename(columns=lambda part: part.removesuffix("_ms"))
    columns = {"break_even_mal": "as fast as ar", "mean_accepted_length": "measured"}
    lengths = by_name.drop("ar")[list(columns)].rename(columns=columns)
    parts.plot.barh(stacked=True, width=0.8, color=list(_COLOURS.values()), ax=left)
    left.set(xlabel="milliseconds per step", ylabel="")
    if len(lengths):
        lengths.plot.barh(width=0.8, ax=right)
    right.set(xlabel="mean accepted length", ylabel="")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.legend(frameon=False)
    return figure
