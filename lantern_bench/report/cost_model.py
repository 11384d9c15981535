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

from lantern_bench.config.values import Location, Problems
from lantern_bench.config.yaml_source import problems_of, read_source
from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.methods.trees import STATIC_TREES

# ---- Devices

Program: TypeAlias = Literal["draft", "target", "verify"]

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a number above 0")]
_Share = Annotated[float, Field(gt=0, le=1, description="must be above 0 and at most 1")]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False, description="must be a number of at least 0")]


class Device(BaseModel):
    """A device: rates of its data sheet or measured ones, the shares of them that are reached, and overheads.

    kind: on a `cpu` reads and products follow each other, and attention reads the cache in use; on a `gpu` they
    overlap, and compiled programs read the whole cache. kernel_us: one kernel of a compiled program. eager_kernel_us:
    the host's time to launch one from Python; None where unknown. step_us: host work of a step outside its programs.
    code: what an own device was fitted to, and stands for. weight_bytes: of one number. factors: of draft and verify,
    measured over modelled seconds; of target forwards, by nodes, with lines between. sources: where each figure is
    from, and which are fitted or assumed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"\S", description="a name for tables")
    about: str = ""
    kind: Literal["gpu", "cpu"] = Field(description="must be gpu or cpu")
    read_gb_s: _Rate
    read_share: _Share = 1.0
    multiply_tflops: _Rate
    multiply_share: _Share = 1.0
    kernel_us: _Time
    eager_kernel_us: _Time | None = None
    step_us: _Time = 0.0
    code: Literal["compiled", "eager"] = "compiled"
    weight_bytes: Annotated[int, Field(ge=1, le=8, description="must be a whole number from 1 to 8")] = 2
    draft_factor: _Rate = 1.0
    verify_factor: _Rate = 1.0
    target_factors: dict[Annotated[int, Field(ge=1)], _Rate] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def target_factor(self, nodes: float) -> float:
        """What the modelled seconds of a target forward over `nodes` are multiplied by."""
        if not self.target_factors:
            return 1.0
        import numpy as np

        known = sorted(self.target_factors)
        return float(np.interp(nodes, known, [self.target_factors[at] for at in known]))


@cache
def devices() -> dict[str, Device]:
    """The devices that ship, by name."""
    text = resources.files("lantern_bench.report").joinpath("devices.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    made = [Device.model_validate({**data["all"], "name": name, **one}) for name, one in data["devices"].items()]
    return {device.name: device for device in made}


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
    """The kernels of a step under one kind of software.

    layer, forward: of a target forward, for each layer and besides. drafter: of a drafter forward, its layer included.
    level, node: of drawing a tree, for each drafter forward and each node. verify, rank, walk: of verification, and for
    each child rank and each token walked. keep: of the cache update, for each layer. fixed: shapes are fixed, and
    guidance comes before the head, which is float32 (docs/engine.md).
    """

    layer: float
    forward: float
    drafter: float
    level: float
    node: float
    verify: float
    rank: float
    walk: float
    keep: float
    fixed: bool


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
    """A draft: nodes scored (with the root), nodes of each drafter forward but the first, depth, most children.

    `levels` is None where no drafter is asked.
    """

    nodes: int
    levels: tuple[int, ...] | None
    depth: int
    fanout: int


class Setting(NamedTuple):
    """What is decoded where: sizes of the target (`TransformerConfig`), images at once, guidance, positions cached."""

    sizes: Any
    batch: int
    guided: bool
    context: float

    @property
    def rows(self) -> int:
        """Rows of a forward for each node."""
        return self.batch * (2 if self.guided else 1)


def forward_work(at: Setting, layers: int, nodes: float, weight_bytes: int, stack: Stack) -> Work:
    """A forward of `layers` layers and the head over `nodes` of each image, without kernels."""
    sizes, kv_heads = at.sizes, at.sizes.kv_heads or at.sizes.heads
    layer = sizes.dim * sizes.head_dim * (2 * sizes.heads + 2 * kv_heads) + 3 * sizes.dim * sizes.ffn_dim
    head = sizes.vocab_size * sizes.dim
    cache = 2 * layers * at.rows * at.context * kv_heads * sizes.head_dim * weight_bytes
    attention = 2 * layers * (at.context + nodes) * sizes.heads * sizes.head_dim
    head_bytes, head_rows = (4, at.batch) if stack.fixed else (weight_bytes, at.rows)
    operations = 2.0 * nodes * (at.rows * (layers * layer + attention) + head_rows * head)
    return Work(layers * layer * weight_bytes + head * head_bytes + cache, operations, 0.0)


def _logits(at: Setting, rows: float, passes: float) -> Work:
    """`passes` over float32 distributions of `rows` nodes of each image."""
    return Work(4.0 * passes * at.batch * rows * at.sizes.vocab_size, 0.0, 0.0)


def target_work(at: Setting, nodes: float, weight_bytes: int, stack: Stack) -> Work:
    """A target forward over `nodes`; drawing an autoregressive token is part of it."""
    layers = at.sizes.layers
    kernels = Work(0.0, 0.0, stack.layer * layers + stack.forward)
    return forward_work(at, layers, nodes, weight_bytes, stack) + _logits(at, nodes, 2) + kernels


def draft_work(at: Setting, draft: Draft, committed: float, weight_bytes: int, stack: Stack) -> list[Work]:
    """The drafter's forwards of a step: over the last step's tokens, then over the inner nodes of each level."""
    if draft.levels is None:
        return []
    first = draft.depth + 1 if stack.fixed else committed
    fuse, found = 2 * at.sizes.dim**2, []
    for number, nodes in enumerate((first, *draft.levels)):
        forward = forward_work(at, 1, nodes, weight_bytes, stack)
        # The drafter's head has the type of its weights (docs/engine.md).
        extra = fuse * weight_bytes - at.sizes.vocab_size * at.sizes.dim * (4 - weight_bytes) * stack.fixed
        kernels = stack.drafter + stack.level + stack.node * (draft.nodes - 1) / (1 + len(draft.levels))
        found.append(
            forward + Work(extra, 2.0 * at.rows * nodes * fuse, kernels) + _logits(at, nodes if number else 1, 4)
        )
    return found


def verify_work(at: Setting, draft: Draft, committed: float, stack: Stack) -> Work:
    """Acceptance of a tree, the bonus token, and the cache update."""
    walked = draft.depth + 1 if stack.fixed else committed
    kernels = stack.verify + stack.rank * draft.fanout + stack.walk * walked + stack.keep * at.sizes.layers
    return _logits(at, draft.nodes if stack.fixed else walked, 4 + 2 * draft.fanout) + Work(0.0, 0.0, kernels)


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
        return Seconds(*(factor * part for part in self))


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


def step_seconds(device: Device, stack: Stack, at: Setting, draft: Draft | None, committed: float) -> StepSeconds:
    """A step that commits `committed` tokens on average; `draft` None is an autoregressive step."""
    if stack.fixed and device.kind == "gpu":
        at = at._replace(context=at.sizes.prefix + at.sizes.image_tokens)
    size, nodes = device.weight_bytes, 1 if draft is None else draft.nodes
    target = seconds_of(target_work(at, nodes, size, stack), device, stack).times(device.target_factor(nodes))
    if draft is None:
        return StepSeconds(NOTHING, target, NOTHING, 0.0)
    forwards = draft_work(at, draft, committed, size, stack)
    drafted = sum((seconds_of(work, device, stack) for work in forwards), NOTHING).times(device.draft_factor)
    verify = seconds_of(verify_work(at, draft, committed, stack), device, stack).times(device.verify_factor)
    return StepSeconds(drafted, target, verify, 1e-6 * device.step_us if stack.fixed else 0.0)


def prefill_seconds(device: Device, stack: Stack, at: Setting) -> float:
    """The forward over the prefix, which this package does not compile.

    On a device that states no `eager_kernel_us` (a CPU, where launching is a small part) it counts as compiled.
    """
    how = stack if device.eager_kernel_us is None else STACKS["eager"]
    work = target_work(at._replace(context=0), at.sizes.prefix, device.weight_bytes, how)
    return seconds_of(work, device, how).total


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


def fit_device(samples: Sequence[Sample], **facts: Any) -> Device:
    """Fit rates, time of a kernel and factors to measured compiled programs; `facts` are the device's other fields.

    Least squares of relative errors without negative rates, as if nothing overlapped; then one factor a program
    (target: one a number of nodes), the median of measured over modelled.
    """
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.array([sample.seconds for sample in samples])
    parts = np.array([sample.work for sample in samples]) * (1e-9, 1e-12, 1e-6)
    per_gb, per_tflop, kernel_us = map(float, nnls(parts / seconds[:, None], np.ones(len(samples)))[0])
    rates = {"read_gb_s": 1 / max(per_gb, 1e-6), "multiply_tflops": 1 / max(per_tflop, 1e-6), "kernel_us": kernel_us}
    device = Device.model_validate(facts | {name: float(f"{rate:.4g}") for name, rate in rates.items()})
    over: dict[tuple[Program, int], list[float]] = {}
    for sample in samples:
        modelled = seconds_of(sample.work, device, STACKS["compiled"]).total
        place = (sample.program, sample.nodes if sample.program == "target" else 0)
        over.setdefault(place, []).append(sample.seconds / modelled)
    factors = {place: float(f"{median(ratios):.4g}") for place, ratios in over.items()}
    fitted = {f"{program}_factor": factor for (program, _), factor in factors.items() if program != "target"}
    targets = {nodes: factor for (program, nodes), factor in sorted(factors.items()) if program == "target"}
    return device.model_copy(update={**fitted, "target_factors": targets})


def step_samples(at: Setting, draft: Draft | None, weight_bytes: int, step: StepTimes) -> list[Sample]:
    """The programs of a measured compiled step as samples; `step` has the milliseconds of each."""
    stack = STACKS["compiled"]
    if draft is None:
        return [Sample("target", target_work(at, 1, weight_bytes, stack), 1e-3 * (step.target_ms + step.other_ms))]
    drafted = sum(draft_work(at, draft, 1, weight_bytes, stack), Work(0.0, 0.0, 0.0))
    return [
        Sample("draft", drafted, 1e-3 * step.draft_ms),
        Sample("target", target_work(at, draft.nodes, weight_bytes, stack), 1e-3 * step.target_ms, draft.nodes),
        Sample("verify", verify_work(at, draft, 1, stack), 1e-3 * step.verify_ms),
    ]


def tree_draft(paths: Sequence[Sequence[int]]) -> Draft:
    """The draft of a static tree, from its root-to-node paths of child ranks."""
    inner = {tuple(path[:-1]) for path in paths}
    depth = max(map(len, paths))
    levels = tuple(sum(len(node) == level for node in inner) for level in range(1, depth))
    return Draft(len(paths) + 1, levels, depth, 1 + max(path[-1] for path in paths))


def named_draft(label: str) -> Draft | None:
    """The draft that tables write as `chain-4` or, for a dynamic tree, `58n5d10b`; None for other labels."""
    if found := re.fullmatch(r"(\d+)n(\d+)d(\d+)b", label):
        nodes, depth, beam = map(int, found.groups())
        return Draft(nodes + 1, (beam,) * (depth - 1), depth, beam)
    return tree_draft(STATIC_TREES[label]) if label in STATIC_TREES else None
