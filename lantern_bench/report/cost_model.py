"""What a decode step costs on a device, from sizes alone: bytes read, operations and kernels of each of its programs.

A program takes `launch` + max(`read`, `multiply`) on a GPU that replays graphs, the larger of `launch` and of what the
device does where the host launches every kernel (eager code), and the sum of all three on a CPU. docs/prediction.md has
the formulas, the constants and how far published speedups are from them. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_bench.config.yaml_source import Location, Problems, problems_of, read_source
from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.methods.trees import STATIC_TREES

# ---- Devices

Program: TypeAlias = Literal["draft", "target", "verify"]

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a number above 0")]
_Share = Annotated[float, Field(gt=0, le=1, description="must be above 0 and at most 1")]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False, description="must be a number of at least 0")]


class Device(BaseModel):
    """A device: rates of its data sheet or measured ones, the shares of them that are reached, and overheads."""

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
    weight_bytes: Annotated[int, Field(ge=1, le=8, description="must be a whole number from 1 to 8")] = 2
    # Measured over modelled seconds; of target forwards by nodes, interpolated between.
    draft_factor: _Rate = 1.0
    verify_factor: _Rate = 1.0
    target_factors: dict[Annotated[int, Field(ge=1)], _Rate] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()  # where each figure is from, and which are fitted or assumed

    def target_factor(self, nodes: float) -> float:
        """What the modelled seconds of a target forward over `nodes` are multiplied by."""
        if not self.target_factors:
            return 1.0
        import numpy as np

        measured = sorted(self.target_factors)
        return float(np.interp(nodes, measured, [self.target_factors[count] for count in measured]))


@cache
def devices() -> dict[str, Device]:
    """The devices that ship, by name."""
    text = resources.files("lantern_bench.report").joinpath("devices.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    rows = data["devices"].items()
    return {name: Device.model_validate({**data["all"], "name": name, **fields}) for name, fields in rows}


def find_device(name: str) -> Device:
    """A shipped device, or the one of a YAML file; raises `UserError` with the names there are, or for a bad file."""
    if not name.lower().endswith((".yaml", ".yml")):
        if name in devices():
            return devices()[name]
        advice = "or give a file that `lantern-bench profile --save-device FILE.yaml` wrote."
        raise UserError(
            f"--device {name}: unknown device{did_you_mean(name, devices())}",
            f"The devices are {', '.join(devices())}; {advice}",
        )
    source, problems = read_source(Path(name), "Start with: name, kind, read_gb_s."), Problems(name)
    try:
        return Device.model_validate(source.data)
    except ValidationError as error:
        for line, key, text, value in problems_of(error, source, Device):
            problems.add(Location(key, line), text, value)
    problems.raise_all()
    raise AssertionError("a validation error has a problem")


# ---- Software: how many kernels a program has


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
    fixed: bool  # shapes are fixed, and guidance comes before the head, which is float32 (docs/engine.md)


STACKS: dict[str, Stack] = {
    "compiled": Stack(17.5, 17, 22, 10, 0, 16, 9, 0, 0.5, fixed=True),
    "eager": Stack(49, 18, 56, 15, 3, 0, 9, 8, 4, fixed=False),
}
"""This package's compiled programs (CUDA graphs on a GPU), and eager code as it is published. docs/prediction.md."""

# ---- Work of the programs of a step


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


def forward_work(setting: Setting, layers: int, nodes: float, weight_bytes: int, stack: Stack) -> Work:
    """A forward of `layers` layers and the head over `nodes` of each image, without kernels."""
    sizes, kv_heads = setting.sizes, setting.sizes.kv_heads or setting.sizes.heads
    layer = sizes.dim * sizes.head_dim * (2 * sizes.heads + 2 * kv_heads) + 3 * sizes.dim * sizes.ffn_dim
    head = sizes.vocab_size * sizes.dim
    cache = 2 * layers * setting.rows * setting.context * kv_heads * sizes.head_dim * weight_bytes
    attention = 2 * layers * (setting.context + nodes) * sizes.heads * sizes.head_dim
    head_bytes, head_rows = (4, setting.batch) if stack.fixed else (weight_bytes, setting.rows)
    operations = 2.0 * nodes * (setting.rows * (layers * layer + attention) + head_rows * head)
    return Work(layers * layer * weight_bytes + head * head_bytes + cache, operations, 0.0)


def _logits(setting: Setting, rows: float, passes: float) -> Work:
    """`passes` over float32 distributions of `rows` nodes of each image."""
    return Work(4.0 * passes * setting.batch * rows * setting.sizes.vocab_size, 0.0, 0.0)


def target_work(setting: Setting, nodes: float, weight_bytes: int, stack: Stack) -> Work:
    """A target forward over `nodes`; drawing an autoregressive token is part of it."""
    layers = setting.sizes.layers
    kernels = Work(0.0, 0.0, stack.layer * layers + stack.forward)
    return forward_work(setting, layers, nodes, weight_bytes, stack) + _logits(setting, nodes, 2) + kernels


def draft_work(setting: Setting, draft: Draft, committed: float, weight_bytes: int, stack: Stack) -> list[Work]:
    """The drafter's forwards of a step: over the last step's tokens, then over the inner nodes of each level."""
    if draft.levels is None:
        return []
    first = draft.depth + 1 if stack.fixed else committed
    fuse, works = 2 * setting.sizes.dim**2, []
    for number, nodes in enumerate((first, *draft.levels)):
        forward = forward_work(setting, 1, nodes, weight_bytes, stack)
        # The drafter's head has the type of its weights (docs/engine.md).
        extra = fuse * weight_bytes - setting.sizes.vocab_size * setting.sizes.dim * (4 - weight_bytes) * stack.fixed
        kernels = stack.drafter + stack.level + stack.node * (draft.nodes - 1) / (1 + len(draft.levels))
        works.append(
            forward
            + Work(extra, 2.0 * setting.rows * nodes * fuse, kernels)
            + _logits(setting, nodes if number else 1, 4)
        )
    return works


def verify_work(setting: Setting, draft: Draft, committed: float, stack: Stack) -> Work:
    """Acceptance of a tree, the bonus token, and the cache update."""
    walked = draft.depth + 1 if stack.fixed else committed
    kernels = stack.verify + stack.rank * draft.fanout + stack.walk * walked + stack.keep * setting.sizes.layers
    return _logits(setting, draft.nodes if stack.fixed else walked, 4 + 2 * draft.fanout) + Work(0.0, 0.0, kernels)


# ---- Seconds


class Seconds(NamedTuple):
    """Seconds of a program: in all, and what reading, multiplying and launching would take alone."""

    total: float
    read: float
    multiply: float
    launch: float

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        """The seconds of both, one after the other."""
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Seconds:
        """Each part multiplied by a factor."""
        return Seconds(*(factor * seconds for seconds in self))


def seconds_of(work: Work, device: Device, stack: Stack) -> Seconds:
    """The seconds of a program; raises `RefusedError` for eager code on a device without `eager_kernel_us`."""
    read = work.bytes / (1e9 * device.read_gb_s * device.read_share)
    multiply = work.operations / (1e12 * device.multiply_tflops * device.multiply_share)
    each = device.kernel_us if stack.fixed else device.eager_kernel_us
    if each is None:
        raise RefusedError(
            f"the device {device.name} states no eager_kernel_us", "Add it to its file, or predict --stack compiled."
        )
    launch = 1e-6 * each * work.kernels
    if device.kind == "cpu":
        return Seconds(launch + read + multiply, read, multiply, launch)
    busy = max(read, multiply)
    return Seconds(launch + busy if stack.fixed else max(launch, busy), read, multiply, launch)


class StepSeconds(NamedTuple):
    """The programs of a step, and the host's work outside them."""

    draft: Seconds
    target: Seconds
    verify: Seconds
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.draft.total + self.target.total + self.verify.total + self.host


NOTHING = Seconds(0.0, 0.0, 0.0, 0.0)


def step_seconds(device: Device, stack: Stack, setting: Setting, draft: Draft | None, committed: float) -> StepSeconds:
    """A step that commits `committed` tokens on average; `draft` None is an autoregressive step."""
    if stack.fixed and device.kind == "gpu":
        setting = setting._replace(context=setting.sizes.prefix + setting.sizes.image_tokens)
    size, nodes = device.weight_bytes, 1 if draft is None else draft.nodes
    target = seconds_of(target_work(setting, nodes, size, stack), device, stack).times(device.target_factor(nodes))
    if draft is None:
        return StepSeconds(NOTHING, target, NOTHING, 0.0)
    forwards = draft_work(setting, draft, committed, size, stack)
    drafted = sum((seconds_of(work, device, stack) for work in forwards), NOTHING).times(device.draft_factor)
    verify = seconds_of(verify_work(setting, draft, committed, stack), device, stack).times(device.verify_factor)
    return StepSeconds(drafted, target, verify, 1e-6 * device.step_us if stack.fixed else 0.0)


def prefill_seconds(device: Device, stack: Stack, setting: Setting) -> float:
    """The forward over the prefix, which this package does not compile.

    On a device that states no `eager_kernel_us` (a CPU, where launching is a small part) it counts as compiled.
    """
    eager = stack if device.eager_kernel_us is None else STACKS["eager"]
    work = target_work(setting._replace(context=0), setting.sizes.prefix, device.weight_bytes, eager)
    return seconds_of(work, device, eager).total


class StepTimes(NamedTuple):
    """Measured milliseconds of the parts of a step."""

    draft_ms: float
    target_ms: float
    verify_ms: float
    other_ms: float


class Sample(NamedTuple):
    """A measured program: its work, its seconds, and the nodes of a target forward."""

    program: Program
    work: Work
    seconds: float
    nodes: int = 1


def fit_device(samples: Sequence[Sample], **fields: Any) -> Device:
    """Fit rates, time of a kernel and factors to measured compiled programs; `fields` are the device's other fields.

    Least squares of relative errors without negative rates, as if nothing overlapped; then one factor a program
    (target: one a number of nodes), the median of measured over modelled.
    """
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.array([sample.seconds for sample in samples])
    work = np.array([sample.work for sample in samples]) * (1e-9, 1e-12, 1e-6)
    per_gb, per_tflop, kernel_us = map(float, nnls(work / seconds[:, None], np.ones(len(samples)))[0])
    rates = {"read_gb_s": 1 / max(per_gb, 1e-6), "multiply_tflops": 1 / max(per_tflop, 1e-6), "kernel_us": kernel_us}
    device = Device.model_validate(fields | {name: float(f"{rate:.4g}") for name, rate in rates.items()})
    ratios: dict[tuple[Program, int], list[float]] = {}
    for sample in samples:
        modelled = seconds_of(sample.work, device, STACKS["compiled"]).total
        key = (sample.program, sample.nodes if sample.program == "target" else 0)
        ratios.setdefault(key, []).append(sample.seconds / modelled)
    factors = {key: float(f"{median(values):.4g}") for key, values in ratios.items()}
    fitted = {f"{program}_factor": factor for (program, _), factor in factors.items() if program != "target"}
    targets = {nodes: factor for (program, nodes), factor in sorted(factors.items()) if program == "target"}
    return device.model_copy(update={**fitted, "target_factors": targets})


def step_samples(setting: Setting, draft: Draft | None, weight_bytes: int, step: StepTimes) -> list[Sample]:
    """The programs of a measured compiled step as samples; `step` has the milliseconds of each."""
    stack = STACKS["compiled"]
    if draft is None:
        return [Sample("target", target_work(setting, 1, weight_bytes, stack), 1e-3 * (step.target_ms + step.other_ms))]
    drafted = sum(draft_work(setting, draft, 1, weight_bytes, stack), Work(0.0, 0.0, 0.0))
    return [
        Sample("draft", drafted, 1e-3 * step.draft_ms),
        Sample("target", target_work(setting, draft.nodes, weight_bytes, stack), 1e-3 * step.target_ms, draft.nodes),
        Sample("verify", verify_work(setting, draft, 1, stack), 1e-3 * step.verify_ms),
    ]


def tree_draft(paths: Sequence[Sequence[int]]) -> Draft:
    """The draft of a static tree, from its root-to-node paths of child ranks."""
    inner = {tuple(path[:-1]) for path in paths}
    depth = max(map(len, paths))
    levels = tuple(sum(len(node) == level for node in inner) for level in range(1, depth))
    return Draft(len(paths) + 1, levels, depth, 1 + max(path[-1] for path in paths))


def named_draft(label: str) -> Draft | None:
    """The draft that tables write as `chain-4` or, for a dynamic tree, `58n5d10b`; None for other labels."""
    if match := re.fullmatch(r"(\d+)n(\d+)d(\d+)b", label):
        nodes, depth, beam = map(int, match.groups())
        return Draft(nodes + 1, (beam,) * (depth - 1), depth, beam)
    return tree_draft(STATIC_TREES[label]) if label in STATIC_TREES else None
