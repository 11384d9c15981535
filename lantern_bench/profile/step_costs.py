"""What a decode step costs: a target forward by number of nodes, the parts of each kind of step, roofline, memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml
from torch import Tensor

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import greedy_probabilities, guide
from lantern_bench.decoding.step import tree_scorer
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.machine import (
    compute_block,
    machine_block,
    peak_memory_bytes,
    reset_peak_memory,
)
from lantern_bench.devices.names import device_in_words
from lantern_bench.methods.catalog import DRAFTINGS
from lantern_bench.methods.parameters import Values
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks.packed_linear import weight_bytes, weight_count
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.random_model import random_model, random_model_of_size, read_size
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import Setting, fit_device, named_draft, step_samples
from lantern_bench.report.draw import save_figure
from lantern_bench.storage.schema import Row, write_csv
from lantern_bench.utils.clock import collect_garbage, now, synchronize
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

if TYPE_CHECKING:
    import pandas as pd


_WARM_FORWARDS = 3
_NODES = (1, 8, 16, 32, 64)  # of the forwards that are measured
_PARTS = {
    "draft_ms": "#0072B2",
    "target_ms": "#009E73",
    "verify_ms": "#D55E00",
    "other_ms": "#999999",
}


class StepCost(NamedTuple):
    """Milliseconds per step without prefill."""

    total: float
    # draft_ms: drafter forwards, tree building; target_ms: target forward (`ar` samples in it); verify_ms: acceptance,
    # cache update, copy to the host; other_ms: noise and time outside the phases
    parts: dict[str, float]
    mean_accepted_length: float  # tokens per step, the last step of an image uncut
    traces: list[ImageTrace]  # of the measured images


@torch.inference_mode()
def forward_ms(
    model: LoadedModel, condition: Any, nodes: int, cfg_scale: float, repeats: int = 30
) -> float:
    """Return the median milliseconds of a guided forward over a chain of `nodes`, with half an image in the cache."""
    target = model.target
    device = target.device
    session, score = tree_scorer(
        target, batch=1, nodes=nodes, cfg_scale=cfg_scale, engine=model.engine
    )
    session.prefill(condition)
    path = torch.zeros(1, 1, dtype=torch.int64, device=device)
    session.commit(path, torch.full((1,), target.image_tokens // 2, device=device))
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()[None]
    tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    depths = torch.arange(nodes, device=device)[None]
    seconds = seconds_of(lambda: score(tokens, depths, chain), device, _WARM_FORWARDS + repeats)
    return 1e3 * median(seconds[_WARM_FORWARDS:])


def step_costs(
    model: LoadedModel,
    decodings: Sequence[Decoding],
    prompts: Sequence[str],
    seed: int = 0,
    tokens: int | None = None,
    emit: Emit = ignore_events,
) -> list[StepCost]:
    """Decode one image per prompt with each decoding, in turns, because the speed of a machine drifts."""
    device = model.target.device

    def trace_of(decoding: Decoding, number: int, most: int | None) -> ImageTrace:
        noise = torch.Generator(device).manual_seed(seed + number)
        condition = model.condition([prompts[number]])
        return decode(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=[noise],
            tokens=most,
            engine=model.engine,
        )[0].trace

    for decoding in decodings:
        trace_of(decoding, 0, min(24, tokens or 24))
    collect_garbage()
    traces: list[list[ImageTrace]] = [[] for _ in decodings]
    for number in range(len(prompts)):
        for index, decoding in enumerate(decodings):
            traces[index].append(trace_of(decoding, number, tokens))
            done = number * len(decodings) + index + 1
            total = len(prompts) * len(decodings)
            emit(ProgressEvent("measuring steps", done / total))
    return list(map(_step_cost, traces))


def _step_cost(traces: list[ImageTrace]) -> StepCost:
    steps = max(1, sum(len(trace.committed) for trace in traces))

    def ms_per_step(phase: str) -> float:
        return 1e3 * sum(trace.phases.get(phase, 0.0) for trace in traces) / steps

    parts = {f"{phase}_ms": ms_per_step(phase) for phase in ("draft", "target", "verify")}
    total = 1e3 * sum(trace.seconds for trace in traces) / steps - ms_per_step("prefill")
    parts["other_ms"] = max(ms_per_step("noise"), total - sum(parts.values()))
    length = sum(sum(trace.uncut) for trace in traces) / steps
    return StepCost(
        total=sum(parts.values()), parts=parts, mean_accepted_length=length, traces=traces
    )


@torch.inference_mode()
def dtype_error(
    name: str, rounded: LoadedModel, prompts: Sequence[str], cfg_scale: float
) -> Tensor:
    """Return the TV float32 [images * tokens] of `rounded` from `name` in float32, guided, along the same tokens."""
    exact = model_of(name).load(rounded.target.device, torch.float32)
    distances = []
    for number, prompt in enumerate(prompts):
        noise = torch.Generator(exact.target.device).manual_seed(number)
        condition = exact.condition([prompt])
        tokens = decode(
            model=exact,
            condition=condition,
            decoding=Decoding("ar", cfg_scale=cfg_scale),
            generators=[noise],
        )[0].tokens.long()[None]
        pair = []
        for target in (exact.target, rounded.target):
            logits = teacher_forced(
                target=target,
                condition=condition,
                tokens=tokens.to(target.device),
                guided=cfg_scale != 1,
            ).logits
            pair.append(greedy_probabilities(guide(logits.cond, logits.uncond, cfg_scale))[0].cpu())
        distances.append((pair[0] - pair[1]).abs().sum(dim=-1) / 2)
    return torch.cat(distances)


class Rates(NamedTuple):
    """How fast a device is."""

    bytes_per_s: float  # read
    operations_per_s: float  # a multiply-add counts as two


@torch.inference_mode()
def device_rates(target: TransformerTarget, guided: bool) -> Rates:
    """Measure reads of the bytes of one forward, and square matrix products; the best of 12 each."""
    device = target.device
    numbers = torch.ones(max(1, forward_need(target, 1, guided)[0] // 4), device=device)
    read = min(seconds_of(numbers.sum, device, 12))
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(side, side, dtype=target.dtype, device=device) for _ in range(2))
    multiply = min(seconds_of(lambda: a @ b, device, 12))
    return Rates(numbers.nbytes / read, 2.0 * side**3 / multiply)


def forward_need(target: TransformerTarget, nodes: int, guided: bool) -> tuple[int, float]:
    """Return the bytes and operations of a forward over `nodes` of one image, with half an image in the cache."""
    config = target.config
    rows = 2 if guided else 1
    network = target.transformer
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
    """Run `work` several times and return the seconds of each."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = now()
        work()
        synchronize(device)
        seconds.append(now() - began)
    return seconds


class ProfiledModel(NamedTuple):
    """A model, and with what it is decoded."""

    model: LoadedModel
    is_trained: bool
    prompts: Sequence[str]  # one for each image
    cfg_scale: float
    seed: int
    tokens: int | None  # decoded of each image; None: all

    @property
    def is_guided(self) -> bool:
        """Whether a forward has unconditional rows."""
        return self.cfg_scale != 1

    def nodes(self, decoding: Decoding) -> int:
        """Return how many nodes the target scores in a step of `decoding`."""
        return drafting_of(decoding, self.model.target).nodes if decoding.drafts else 1


def load_profiled_model(
    name: str,
    size: str | None,
    random: bool,
    compute: Compute,
    images: int,
    seed: int,
    tokens: int | None,
) -> ProfiledModel:
    """Load the model, or make a random one, with prompts that it accepts."""
    noise = torch.Generator(compute.device).manual_seed(seed)
    if size is not None:
        loaded = random_model_of_size(read_size(size), *compute, noise)
        return ProfiledModel(
            model=loaded,
            is_trained=False,
            prompts=[""] * images,
            cfg_scale=2.0,
            seed=seed,
            tokens=tokens,
        )
    model = model_of(name)
    prompts = next((texts for texts in model.prompt_sets.values() if texts), ("anything",))
    loaded = random_model(name, *compute, noise) if random else model.load(*compute)
    cfg_scale = float(model.defaults.get("cfg_scale", 1.0))
    cycled = [prompts[number % len(prompts)] for number in range(images)]
    return ProfiledModel(
        model=loaded,
        is_trained=not random,
        prompts=cycled,
        cfg_scale=cfg_scale,
        seed=seed,
        tokens=tokens,
    )


def step_of(tree: str, decoding: Decoding) -> Decoding:
    """Return `decoding` with a tree by name; `58n5d10b` is dynamic. Raises `UserError` for one that cannot be."""
    if dynamic := re.fullmatch(r"(\d+)n(\d+)d(\d+)b", tree):
        sizes = map(int, dynamic.groups())
        values = {
            "drafting": "dynamic",
            **dict(zip(("nodes", "depth", "beam"), sizes, strict=True)),
        }
    else:
        values = {"drafting": "static", "tree": tree}
    try:
        return with_drafting(decoding, values)
    except ParameterError as error:
        size = f"{error.key} {values[error.key]}: " if dynamic and error.key in values else ""
        raise UserError(f"--tree {tree}: {size}{error.text}") from error


def with_drafting(decoding: Decoding, values: Values) -> Decoding:
    """Return a configuration with other parameters of its drafting, or with another drafting."""
    of_draftings = {key for row in DRAFTINGS.values() for key in row.parameter_names}
    others = {key: value for key, value in decoding.settings().items() if key not in of_draftings}
    return Decoding(**others | {"cfg_default": decoding.cfg_default} | dict(values))


def measure(
    profiled: ProfiledModel, steps: Mapping[str, Decoding], rates: Rates, emit: Emit
) -> list[Row]:
    """Measure target forwards by number of nodes, then each kind of step by name, in turns; one step is `ar`."""
    model = profiled.model
    prompts = profiled.prompts
    # First of all: what other trees allocate stays allocated.
    memory = []
    for number, decoding in enumerate(steps.values(), start=1):
        memory.append(_memory(profiled, decoding))  # its programs are compiled here
        emit(ProgressEvent("measuring memory", number / len(steps)))
    rows: list[Row] = []
    for number, nodes in enumerate(_NODES, start=1):
        milliseconds = forward_ms(
            model=model,
            condition=model.condition(prompts[:1]),
            nodes=nodes,
            cfg_scale=profiled.cfg_scale,
        )
        label = {"what": "forward", "name": f"{nodes} nodes"}
        rows.append(
            label | _bounded(profiled=profiled, nodes=nodes, milliseconds=milliseconds, rates=rates)
        )
        emit(ProgressEvent("measuring forwards", number / len(_NODES)))
    costs = step_costs(
        model=model,
        decodings=list(steps.values()),
        prompts=prompts,
        seed=profiled.seed,
        tokens=profiled.tokens,
        emit=emit,
    )
    ar_ms = costs[list(steps).index("ar")].total
    one_node_ms = rows[0]["milliseconds"]
    for (name, decoding), cost, memory_row in zip(steps.items(), costs, memory, strict=True):
        row: Row = {"what": "step", "name": name} | _bounded(
            profiled=profiled, nodes=profiled.nodes(decoding), milliseconds=cost.total, rates=rates
        )
        # An autoregressive step samples inside the target's program.
        drafted_outside = cost.parts["verify_ms"] + cost.parts["other_ms"]
        outside = drafted_outside if decoding.drafts else cost.total - one_node_ms
        # Drafts of random weights are accepted by chance, so their accepted length means nothing.
        length = cost.mean_accepted_length if profiled.is_trained else float("nan")
        row |= cost.parts | {
            "outside_share": outside / cost.total,
            "break_even_mal": cost.total / ar_ms,
        }
        row |= {"mean_accepted_length": length, "speedup": length * ar_ms / cost.total}
        rows.append(row | memory_row)
    return rows


def _bounded(profiled: ProfiledModel, nodes: int, milliseconds: float, rates: Rates) -> Row:
    """The columns of measured milliseconds beside the least that the device allows."""
    needed, operations = forward_need(profiled.model.target, nodes, profiled.is_guided)  # type: ignore[arg-type]
    bound = 1e3 * max(needed / rates.bytes_per_s, operations / rates.operations_per_s)
    return {
        "nodes": nodes,
        "milliseconds": milliseconds,
        "bound_ms": bound,
        "over_bound": milliseconds / bound,
    }


def _memory(profiled: ProfiledModel, decoding: Decoding) -> Row:
    """The columns of the peak of decoding an image (on a GPU), and of the sum of weights, caches and logits."""
    model = profiled.model
    nodes = profiled.nodes(decoding)
    networks: list[Any] = (
        [model.target, model.drafter] if nodes > 1 and model.drafter is not None else [model.target]
    )
    standing = sum(
        network.session(1, guided=profiled.is_guided, nodes=nodes).cache.nbytes
        for network in networks
    )
    standing += sum(weight_bytes(network) for network in networks)
    reset_peak_memory(model.target.device)
    step_costs(model, [decoding], profiled.prompts[:1], tokens=24)
    peak = peak_memory_bytes(model.target.device)
    accounted = standing + nodes * model.target.vocab_size * 4
    return {
        "peak_memory_mb": float("nan") if peak is None else peak / 1e6,
        "accounted_memory_mb": accounted / 1e6,
    }


def save_device(profiled: ProfiledModel, rows: Sequence[Row], compute: Compute, path: Path) -> None:
    """Fit a device to the rows of `measure` and write its file, for `lantern-bench predict --device`."""
    model, config = profiled.model, profiled.model.target.config  # type: ignore[attr-defined]
    is_gpu = compute.device.type == "cuda"
    weight_bytes = compute.dtype.itemsize
    context = config.prefix + config.image_tokens // (1 if is_gpu else 2)
    setting = Setting(sizes=config, batch=1, guided=profiled.is_guided, context=context)
    # Forwards by themselves find weights and cache where the forward before left them: a step's own take longer.
    samples = []
    steps = [row for row in rows if row["what"] == "step"]
    for row in steps:
        samples += step_samples(
            setting=setting, draft=named_draft(row["name"]), weight_bytes=weight_bytes, step=row
        )
    host_ms = [row["other_ms"] for row in steps if row["name"] != "ar"]
    device = fit_device(
        samples,
        name=path.stem,
        about=device_in_words(
            {"machine": machine_block()} | compute_block(compute, compiled=model.engine.compile)
        ),
        kind="gpu" if is_gpu else "cpu",
        weight_bytes=weight_bytes,
        code="compiled" if model.engine.compile else "eager",
        step_us=round(1e3 * median(host_ms), 2) if host_ms else 0.0,
        sources=(
            f"fitted to {len(samples)} times of `lantern-bench profile`: {model.name}, {compute.dtype_name}",
        ),
    )
    text = yaml.safe_dump(device.model_dump(mode="json"), sort_keys=False)
    write_file(path, text.encode(), flag="--save-device")


def save_profile(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`; raises `UserError` if it cannot be written."""
    csv_file = folder / "profile.csv"
    figure_file = folder / "profile.png"
    write_csv(table, csv_file)
    figure = _drawn(table[table["what"] == "step"])
    save_figure(figure, figure_file, dpi=160, metadata={"Software": None})
    return [csv_file, figure_file]


def _drawn(steps: pd.DataFrame) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    costs, lengths = figure.subplots(1, 2)
    parts = steps.set_index("name")[list(_PARTS)].rename(
        columns=lambda part: part.removesuffix("_ms")
    )
    parts.plot.barh(stacked=True, width=0.8, color=list(_PARTS.values()), ax=costs, ylabel="")
    costs.invert_yaxis()
    costs.set_xlabel("milliseconds per step")
    costs.legend(frameon=False)
    columns = {"break_even_mal": "as fast as ar", "mean_accepted_length": "measured"}
    drafted = steps[steps["name"] != "ar"].set_index("name").rename(columns=columns)
    if len(drafted):
        drafted[list(columns.values())].plot.barh(width=0.8, ax=lengths, ylabel="")
        lengths.invert_yaxis()
        lengths.legend(frameon=False)
    lengths.set_xlabel("mean accepted length")
    figure.tight_layout()
    return figure
