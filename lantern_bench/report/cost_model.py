"""What a decode step costs on a device, from sizes alone (docs/prediction.md), and the speedups of a run there.

Acceptance is the run's: which tokens a step commits does not depend on the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_bench.config.yaml_source import Problems, problems_of, read_source
from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.methods.static_trees import STATIC_TREES, check_topology, topology_name
from lantern_bench.models.registry import model_of
from lantern_bench.report.records import CellRecords, Row, join_notes, run_cells
from lantern_bench.report.reproduction import device_in_words
from lantern_bench.report.tables import frame, tables_of
from lantern_bench.runs.records import rows_of
from lantern_bench.runs.store import RunData
from lantern_bench.schema import CELL_COLUMNS

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a number above 0")]
_Share = Annotated[float, Field(gt=0, le=1, description="must be above 0 and at most 1")]
_Time = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="must be a number of at least 0")
]


class Device(BaseModel):
    """A device: its rates, the shares of them that are reached, and overheads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"\S", description="a name for tables")
    about: str = ""
    # On a cpu reads and products follow each other, and attention reads the cache in use; on a gpu they overlap, and
    # compiled programs read the whole cache.
    kind: Literal["gpu", "cpu"] = Field(description="must be gpu or cpu")
    read_gb_s: _Rate
    read_share: _Share = 1.0
    multiply_tflops: _Rate
    multiply_share: _Share = 1.0
    kernel_us: _Time  # one kernel of a compiled program
    eager_kernel_us: _Time | None = None  # the host's time to launch one from Python; None: unknown
    step_us: _Time = 0.0  # host work of a step outside its programs
    code: Literal["compiled", "eager"] = "compiled"  # what a device of a user was fitted to
    weight_bytes: Annotated[
        int, Field(ge=1, le=8, description="must be a whole number from 1 to 8")
    ] = 2
    # Measured over modelled seconds; of target forwards by nodes, interpolated between.
    draft_factor: _Rate = 1.0
    verify_factor: _Rate = 1.0
    target_factors: dict[Annotated[int, Field(ge=1)], _Rate] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()  # where each figure is from, and which are fitted or assumed

    def target_factor(self, nodes: float) -> float:
        """What the modelled seconds of a target forward over `nodes` are multiplied by."""
        if not self.target_factors:
            return 1.0
        measured = sorted(self.target_factors)
        return float(np.interp(nodes, measured, [self.target_factors[count] for count in measured]))


@cache
def devices() -> dict[str, Device]:
    """The devices that ship, by name."""
    text = (
        resources.files("lantern_bench.report").joinpath("devices.yaml").read_text(encoding="utf-8")
    )
    data = yaml.safe_load(text)
    rows = data["devices"].items()
    return {
        name: Device.model_validate({**data["all"], "name": name, **fields})
        for name, fields in rows
    }


def find_device(name: str) -> Device:
    """A shipped device, or the one of a YAML file."""
    if not name.lower().endswith((".yaml", ".yml")):
        if name in devices():
            return devices()[name]
        advice = "or give a file that `lantern-bench profile --save-device FILE.yaml` wrote."
        raise UserError(
            f"--device {name}: unknown device{did_you_mean(name, devices())}",
            f"The devices are {', '.join(devices())}; {advice}",
        )
    source = read_source(Path(name), "Start with: name, kind, read_gb_s.")
    try:
        return Device.model_validate(source.data)
    except ValidationError as error:
        problems = Problems(name)
        for problem in problems_of(error, source, Device):
            problems.add(*problem)
        problems.raise_all()
        raise


class Stack(NamedTuple):
    """The kernels of a step under one kind of software."""

    layer: float  # of a target forward, for each layer
    forward: float  # of a target forward, besides its layers
    drafter: float  # of a drafter forward, its layer included
    level: float  # of drawing a tree, for each drafter forward
    node: float  # of drawing a tree, for each node
    verify: float  # of verification
    rank: float  # of verification, for each child rank
    walk: float  # of verification, for each token of the path
    keep: float  # of the cache update, for each layer
    # shapes are fixed, and guidance comes before the head, which is float32 (docs/engine.md)
    fixed: bool


# This package's compiled programs, and eager code as it is published.
STACKS: dict[str, Stack] = {
    "compiled": Stack(
        layer=17.5,
        forward=17,
        drafter=22,
        level=10,
        node=0,
        verify=16,
        rank=9,
        walk=0,
        keep=0.5,
        fixed=True,
    ),
    "eager": Stack(
        layer=49,
        forward=18,
        drafter=56,
        level=15,
        node=3,
        verify=0,
        rank=9,
        walk=8,
        keep=4,
        fixed=False,
    ),
}


class Work(NamedTuple):
    """Bytes read, operations (a multiply-add counts as two) and kernels."""

    bytes: float
    operations: float
    kernels: float

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        """The work of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Draft(NamedTuple):
    """The sizes of a draft tree."""

    nodes: int  # that the target scores, the root included
    levels: tuple[int, ...] | None  # nodes of each drafter forward but the first; None: no drafter
    depth: int
    fanout: int  # most children of a node


class Setting(NamedTuple):
    """The sizes of a decoding."""

    sizes: Any  # the target's `TransformerConfig`
    batch: int  # images at once
    guided: bool
    context: float  # positions in the cache

    @property
    def rows(self) -> int:
        """Rows of a forward for each node."""
        return self.batch * (2 if self.guided else 1)


def forward_work(
    setting: Setting, layers: int, nodes: float, weight_bytes: int, stack: Stack
) -> Work:
    """A forward of `layers` layers and the head over `nodes` of each image, without kernels."""
    sizes = setting.sizes
    kv_heads = setting.sizes.kv_heads or setting.sizes.heads
    layer = (
        sizes.dim * sizes.head_dim * (2 * sizes.heads + 2 * kv_heads)
        + 3 * sizes.dim * sizes.ffn_dim
    )
    head = sizes.vocab_size * sizes.dim
    cache = 2 * layers * setting.rows * setting.context * kv_heads * sizes.head_dim * weight_bytes
    attention = 2 * layers * (setting.context + nodes) * sizes.heads * sizes.head_dim
    head_bytes, head_rows = (4, setting.batch) if stack.fixed else (weight_bytes, setting.rows)
    operations = 2.0 * nodes * (setting.rows * (layers * layer + attention) + head_rows * head)
    return Work(layers * layer * weight_bytes + head * head_bytes + cache, operations, 0.0)


def _logits(setting: Setting, rows: float, passes: float, kernels: float) -> Work:
    """`passes` over float32 distributions of `rows` nodes of each image, and the kernels of the program."""
    return Work(4.0 * passes * setting.batch * rows * setting.sizes.vocab_size, 0.0, kernels)


def target_work(setting: Setting, nodes: float, weight_bytes: int, stack: Stack) -> Work:
    """A target forward over `nodes`; drawing an autoregressive token is part of it."""
    layers = setting.sizes.layers
    forward = forward_work(
        setting=setting, layers=layers, nodes=nodes, weight_bytes=weight_bytes, stack=stack
    )
    return forward + _logits(
        setting=setting, rows=nodes, passes=2, kernels=stack.layer * layers + stack.forward
    )


def draft_work(
    setting: Setting, draft: Draft, committed: float, weight_bytes: int, stack: Stack
) -> list[Work]:
    """The drafter's forwards of a step: over the last tokens, then over the inner nodes of each level."""
    if draft.levels is None:
        return []
    first = draft.depth + 1 if stack.fixed else committed
    fuse = 2 * setting.sizes.dim**2
    works = []
    for number, nodes in enumerate((first, *draft.levels)):
        forward = forward_work(
            setting=setting, layers=1, nodes=nodes, weight_bytes=weight_bytes, stack=stack
        )
        # The drafter's head has the type of its weights (docs/engine.md).
        extra = (
            fuse * weight_bytes
            - setting.sizes.vocab_size * setting.sizes.dim * (4 - weight_bytes) * stack.fixed
        )
        kernels = (
            stack.drafter + stack.level + stack.node * (draft.nodes - 1) / (1 + len(draft.levels))
        )
        fused = Work(extra, 2.0 * setting.rows * nodes * fuse, 0.0)
        works.append(
            forward
            + fused
            + _logits(setting=setting, rows=nodes if number else 1, passes=4, kernels=kernels)
        )
    return works


def verify_work(setting: Setting, draft: Draft, committed: float, stack: Stack) -> Work:
    """Acceptance of a tree, the bonus token, and the cache update."""
    walked = draft.depth + 1 if stack.fixed else committed
    kernels = (
        stack.verify
        + stack.rank * draft.fanout
        + stack.walk * walked
        + stack.keep * setting.sizes.layers
    )
    return _logits(
        setting=setting,
        rows=draft.nodes if stack.fixed else walked,
        passes=4 + 2 * draft.fanout,
        kernels=kernels,
    )


class Seconds(NamedTuple):
    """Seconds of a program: in all, and what reading, multiplying and launching would take alone."""

    total: float
    read: float
    multiply: float
    launch: float


def seconds_of(work: Work, device: Device, stack: Stack, factor: float = 1.0) -> Seconds:
    """Seconds of a program, times a factor; raises `RefusedError` without a time of eager kernels."""
    read = work.bytes / (1e9 * device.read_gb_s * device.read_share)
    multiply = work.operations / (1e12 * device.multiply_tflops * device.multiply_share)
    each = device.kernel_us if stack.fixed else device.eager_kernel_us
    if each is None:
        raise RefusedError(
            f"the device {device.name} states no eager_kernel_us",
            "Add it to its file, or predict --stack compiled.",
        )
    launch = 1e-6 * each * work.kernels
    busy = max(read, multiply)
    total = launch + busy if stack.fixed else max(launch, busy)
    if device.kind == "cpu":
        total = launch + read + multiply
    return Seconds(
        total=factor * total, read=factor * read, multiply=factor * multiply, launch=factor * launch
    )


def step_seconds(
    device: Device, stack: Stack, setting: Setting, draft: Draft | None, committed: float
) -> pd.DataFrame:
    """`Seconds` of the programs of a step (draft, target, verify) and of the host's work outside them (other).

    The step commits `committed` tokens on average; `draft` None is an autoregressive step.
    """
    if stack.fixed and device.kind == "gpu":
        setting = setting._replace(context=setting.sizes.prefix + setting.sizes.image_tokens)
    size = device.weight_bytes
    nodes = 1 if draft is None else draft.nodes
    target = seconds_of(
        work=target_work(setting=setting, nodes=nodes, weight_bytes=size, stack=stack),
        device=device,
        stack=stack,
        factor=device.target_factor(nodes),
    )
    programs = {
        "draft": np.zeros(4),
        "target": np.array(target),
        "verify": np.zeros(4),
        "other": np.zeros(4),
    }
    if draft is not None:
        for work in draft_work(
            setting=setting, draft=draft, committed=committed, weight_bytes=size, stack=stack
        ):
            programs["draft"] += seconds_of(
                work=work, device=device, stack=stack, factor=device.draft_factor
            )
        verify = verify_work(setting=setting, draft=draft, committed=committed, stack=stack)
        programs["verify"] += seconds_of(
            work=verify, device=device, stack=stack, factor=device.verify_factor
        )
        programs["other"][0] = 1e-6 * device.step_us if stack.fixed else 0.0
    return pd.DataFrame.from_dict(programs, orient="index", columns=Seconds._fields)


def prefill_seconds(device: Device, stack: Stack, setting: Setting) -> float:
    """The forward over the prefix, which is not compiled; without `eager_kernel_us` it counts as such."""
    eager = stack if device.eager_kernel_us is None else STACKS["eager"]
    work = target_work(
        setting=setting._replace(context=0),
        nodes=setting.sizes.prefix,
        weight_bytes=device.weight_bytes,
        stack=eager,
    )
    return seconds_of(work, device, eager).total


class Sample(NamedTuple):
    """A measured program: its work, its seconds, and the nodes of a target forward."""

    program: Literal["draft", "target", "verify"]
    work: Work
    seconds: float
    nodes: int = 1


def fit_device(samples: Sequence[Sample], **fields: Any) -> Device:
    """Fit rates, time of a kernel and factors to compiled programs; `fields` are the device's other fields.

    Least squares of relative errors without negative rates, as if nothing overlapped; then factors, each the median of
    measured over modelled.
    """
    from scipy.optimize import nnls

    seconds = np.array([sample.seconds for sample in samples])
    work = np.array([sample.work for sample in samples]) * (1e-9, 1e-12, 1e-6)
    per_gb, per_tflop, kernel_us = map(
        float, nnls(work / seconds[:, None], np.ones(len(samples)))[0]
    )
    rates = {
        "read_gb_s": 1 / max(per_gb, 1e-6),
        "multiply_tflops": 1 / max(per_tflop, 1e-6),
        "kernel_us": kernel_us,
    }
    device = Device.model_validate(
        fields | {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    )
    ratios: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        modelled = seconds_of(sample.work, device, STACKS["compiled"]).total
        key = (sample.program, sample.nodes if sample.program == "target" else 0)
        ratios.setdefault(key, []).append(sample.seconds / modelled)
    factors = {key: float(f"{median(values):.4g}") for key, values in ratios.items()}
    fitted = {
        f"{program}_factor": factor
        for (program, _), factor in factors.items()
        if program != "target"
    }
    targets = {
        nodes: factor for (program, nodes), factor in sorted(factors.items()) if program == "target"
    }
    return device.model_copy(update={**fitted, "target_factors": targets})


def step_samples(
    setting: Setting, draft: Draft | None, weight_bytes: int, step: Row
) -> list[Sample]:
    """The programs of a measured compiled step as samples; `step` has `target_ms` and so on."""
    stack = STACKS["compiled"]
    nodes, target_ms = (
        (1, step["target_ms"] + step["other_ms"])
        if draft is None
        else (draft.nodes, step["target_ms"])
    )
    samples = [
        Sample(
            program="target",
            work=target_work(setting=setting, nodes=nodes, weight_bytes=weight_bytes, stack=stack),
            seconds=1e-3 * target_ms,
            nodes=nodes,
        )
    ]
    if draft is not None:
        drafted = sum(
            draft_work(
                setting=setting, draft=draft, committed=1, weight_bytes=weight_bytes, stack=stack
            ),
            Work(0.0, 0.0, 0.0),
        )
        samples.append(Sample("draft", drafted, 1e-3 * step["draft_ms"]))
        samples.append(
            Sample(
                "verify",
                verify_work(setting=setting, draft=draft, committed=1, stack=stack),
                1e-3 * step["verify_ms"],
            )
        )
    return samples


def tree_draft(paths: Sequence[Sequence[int]]) -> Draft:
    """The draft of a static tree, from its root-to-node paths of child ranks."""
    inner = {tuple(path[:-1]) for path in paths}
    depth = max(map(len, paths))
    levels = tuple(sum(len(node) == level for node in inner) for level in range(1, depth))
    return Draft(
        nodes=len(paths) + 1, levels=levels, depth=depth, fanout=1 + max(path[-1] for path in paths)
    )


def named_draft(label: str) -> Draft | None:
    """The draft that tables write as `chain-4` or, for a dynamic tree, `58n5d10b`; None for other labels."""
    if match := re.fullmatch(r"(\d+)n(\d+)d(\d+)b", label):
        nodes, depth, beam = map(int, match.groups())
        return Draft(nodes=nodes + 1, levels=(beam,) * (depth - 1), depth=depth, fanout=beam)
    return tree_draft(STATIC_TREES[label]) if label in STATIC_TREES else None


# ---- The predictions of a run

_READ = [
    "committed_per_step",
    "start_per_step",
    "offered_depth_per_step",
    "tokens",
    "drafter_forwards",
]


def predict_run(run: RunData, device: Device, stack: str, model: str | None = None) -> pd.DataFrame:
    """Return the table `prediction` of a run; `model` replaces the run's sizes, not its acceptance.

    Raises `RefusedError` for a run without recorded steps and for a model of unknown sizes.
    """
    table = frame("prediction", prediction_rows(run=run, device=device, stack=stack, model=model))
    table["speedup_measured"] = table["cell_id"].map(
        tables_of(run)["speed"].set_index("cell_id")["speedup"]
    )
    if measured_elsewhere(run=run, device=device, stack=stack, model=model) is None:
        table["speedup_error"] = table["speedup"] / table["speedup_measured"] - 1
    return table


def prediction_rows(
    run: RunData, device: Device, stack: str, model: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `predict_run` without what the run measured."""
    cells = run_cells(run)
    kernels = STACKS[stack]
    if not any(any(cell.completed["committed_per_step"]) for cell in cells):
        raise RefusedError(
            f"{run.folder}: no image has recorded steps", "Give a run with completed images."
        )
    for cell in cells:
        completed = [row for row in rows_of(cell.completed[_READ]) if row["committed_per_step"]]
        if not completed:
            continue
        run_model = str(cell.columns["model"])
        name = model or run_model
        notes = []
        sizes = model_of(name).sizes
        if sizes is None:
            advice = "Give a published model with --model, such as llamagen-t2i-stage1."
            raise RefusedError(f"the sizes of {name} are not known", advice)
        counts = [count for row in completed for count in row["committed_per_step"]]
        length = sum(counts) / len(counts)
        tokens = sum(row["tokens"] for row in completed) / len(completed)
        progress = (
            sum(start for row in completed for start in row["start_per_step"])
            / len(counts)
            / tokens
        )
        if name != run_model:
            tokens = sizes.image_tokens
            notes.append(f"sizes of {name} at the acceptance of {run_model}: its own may differ")
        batch = int(cell.columns["batch"] or 1)
        guided = cell.columns["cfg_scale"] != 1
        setting = Setting(
            sizes=sizes, batch=batch, guided=guided, context=sizes.prefix + progress * tokens
        )
        draft, assumed = _draft(cell, completed, run.manifest)
        if batch > 1 and draft is not None:
            notes.append("images of a batch that end early are not counted as idle")
        middle = setting._replace(context=sizes.prefix + tokens / 2)
        plain = step_seconds(
            device=device, stack=kernels, setting=middle, draft=None, committed=1.0
        )["total"].sum()
        programs = step_seconds(
            device=device, stack=kernels, setting=setting, draft=draft, committed=length
        )
        step = programs.sum()
        prefill = prefill_seconds(device, kernels, setting)
        seconds = prefill + (tokens - 1) / length * step["total"]
        yield {
            **cell.columns,
            "model": name,
            "device": device.name,
            "stack": stack,
            "images": len(completed),
            "mean_accepted_length": length,
            "nodes": 1 if draft is None else draft.nodes,
            "drafter_forwards_per_step": 0
            if draft is None or draft.levels is None
            else 1 + len(draft.levels),
            "speedup": (prefill + (tokens - 1) * plain) / seconds,
            "latency_s": seconds / batch,
            "ar_ms": 1e3 * plain,
            "step_ms": 1e3 * step["total"],
            **(1e3 * programs["total"]).add_suffix("_ms"),
            **(1e3 * step.drop("total")).add_suffix("_ms"),
            "note": join_notes([*notes, assumed]),
        }


def _draft(
    cell: CellRecords, completed: Sequence[Row], manifest: Mapping[str, Any]
) -> tuple[Draft | None, str | None]:
    """The draft of a cell, None for autoregressive decoding, and what is assumed about it."""
    drafting = cell.columns["drafting"]
    label = str(cell.columns["tree"])
    if drafting == "none":
        return None, None
    if (named := named_draft(label)) is not None:
        return named, None
    for settings in (manifest.get("experiment") or {}).get("cells") or ():
        if isinstance(settings.get("tree"), list):
            paths = check_topology(settings["tree"])
            if topology_name(paths) == label:
                return tree_draft(paths), None
    depth = max(offered for row in completed for offered in row["offered_depth_per_step"])
    forwards = round(
        sum(row["drafter_forwards"] for row in completed)
        / sum(len(row["start_per_step"]) for row in completed)
    )
    levels = (1,) * (forwards - 1) if forwards else None
    note = f"the nodes of {drafting} are not recorded: a chain of {depth} is assumed"
    return Draft(nodes=depth + 1, levels=levels, depth=depth, fanout=1), note


def measured_elsewhere(
    run: RunData, device: Device, stack: str, model: str | None = None
) -> str | None:
    """Say with what the run was measured; None where that is what is predicted."""
    measured = device_in_words(run.manifest), "compiled" if run.manifest.get("compile") else "eager"
    # A device of a user stands for the code that it was fitted to.
    predicted = device.about or device.name, device.code if stack == "compiled" else stack
    others = set(run.records["model"]) - {model} if model is not None else set()
    if not others and measured == predicted:
        return None
    run_of = f"{', '.join(sorted(others))} on " if others else ""
    return f"The run was measured on {run_of}{', '.join(measured)}; predicted is {', '.join(predicted)}."


def terms_of(device: Device, stack: str) -> list[str]:
    """Return the constants of a prediction as sentences, each with its source."""
    shares = (
        f"{device.read_gb_s:g} GB/s x {device.read_share:g}, {device.multiply_tflops:g} Tflop/s x "
    )
    kernel, code = (
        (device.kernel_us, device.code) if stack == "compiled" else (device.eager_kernel_us, stack)
    )
    return [
        f"Predicted for {device.about or device.name}, not measured: read {shares}{device.multiply_share:g}; "
        f"{kernel:g} us a kernel ({code}), {device.step_us:g} us of host work a step.",
        *device.sources,
        "Acceptance is that of the run. Formulas, kernel counts, errors against published figures: docs/prediction.md.",
    ]


def measured_times(run: RunData) -> pd.DataFrame:
    """Return the table `prediction` with what a run measured; raises `RefusedError` without seconds."""
    speed = tables_of(run)["speed"]
    timed = speed[speed["latency_s"].notna()]
    if not len(timed):
        raise RefusedError(
            "the run has no seconds", "Give one that measured speed, or a --device to predict for."
        )
    names = [column.name for column in CELL_COLUMNS] + [
        "images",
        "mean_accepted_length",
        "latency_s",
    ]
    rows = timed[names].assign(
        device=device_in_words(run.manifest), speedup_measured=timed["speedup"]
    )
    return frame("prediction", rows_of(rows))


def with_hours(table: pd.DataFrame, prompts: int, devices: int) -> pd.DataFrame:
    """Return the table with hours; a prompt stays on one device with all its cells."""
    hours = math.ceil(prompts / devices) * table["latency_s"] / 3600
    return table.assign(hours=hours, device_hours=hours * devices)


def hours_in_words(table: pd.DataFrame, prompts: int, devices: int) -> str:
    """Return a sentence on the hours of all cells together."""
    hours = float(table["hours"].sum())
    images = prompts * len(table)
    return (
        f"{prompts:,} prompts in all {len(table)} cells, {images:,} images: {hours:.3g} hours on {devices} "
        f"device{'s' if devices > 1 else ''}, {devices * hours:.3g} device-hours. Loading, compiling, text encoding, "
        "pixels and scoring are not counted."
    )
