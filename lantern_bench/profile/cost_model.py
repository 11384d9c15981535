"""Devices, and the cost of a decode step on a device, from sizes alone (docs/prediction.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Problems, problems_of, read_source

if TYPE_CHECKING:
    import pandas as pd

_SPECS = yaml.safe_load(Path(__file__).with_name("device_specs.yaml").read_bytes())

# ---- Devices: the ones that ship, and files of users

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a number above 0")]
_Share = Annotated[float, Field(gt=0, le=1, description="must be above 0 and at most 1")]
_Time = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="must be a number of at least 0")
]


class Device(BaseModel):
    """Rates of a device, the fractions of them that are reached, and overheads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"\S", description="a name for tables")
    about: str = ""
    # On a cpu, reads and products follow each other, and attention reads the cache in use. On a gpu
    # they overlap, and compiled programs read the whole cache.
    kind: Literal["gpu", "cpu"] = Field(description="must be gpu or cpu")
    read_gb_s: _Rate
    read_share: _Share = 1.0
    multiply_tflops: _Rate
    multiply_share: _Share = 1.0
    kernel_us: _Time  # one kernel of a compiled program
    # The host's time to launch a kernel from Python; None if unknown.
    eager_kernel_us: _Time | None = None
    step_us: _Time = 0.0  # host work of a step outside its programs
    code: Literal["compiled", "eager"] = "compiled"  # code that a user's device was fitted to
    weight_bytes: Annotated[
        int, Field(ge=1, le=8, description="must be a whole number from 1 to 8")
    ] = 2
    # Measured over modelled seconds. For target forwards by number of nodes, with interpolation.
    draft_factor: _Rate = 1.0
    verify_factor: _Rate = 1.0
    target_factors: dict[Annotated[int, Field(ge=1)], _Rate] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()  # where each figure is from, and which are fitted or assumed

    def target_factor(self, nodes: float) -> float:
        """Return measured over modelled seconds of a target forward over `nodes`."""
        factors = dict(sorted(self.target_factors.items())) or {1: 1.0}
        return float(np.interp(nodes, list(factors), list(factors.values())))


@cache
def devices() -> dict[str, Device]:
    """Return the devices that ship, by name."""
    return {
        name: Device.model_validate({**_SPECS["all"], "name": name, **fields})
        for name, fields in _SPECS["devices"].items()
    }


def find_device(name: str, flag: str = "--device") -> Device:
    """Return a shipped device by its name, or read a device from a YAML file.

    Raises:
        UserError: The name is unknown, or the file is not a device.
    """
    if not name.lower().endswith((".yaml", ".yml")):
        if name in devices():
            return devices()[name]
        raise UserError(
            f"{flag} {name}: unknown device{did_you_mean(name, devices())}",
            f"The devices are {', '.join(devices())}; "
            "or give a file that `lantern-bench profile --save-device FILE.yaml` wrote.",
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


# ---- The work of a step


class KernelCounts(NamedTuple):
    """Number of kernels that a step launches in one kind of code."""

    layer: float  # target forward, for each layer
    forward: float  # target forward, outside its layers
    drafter: float  # drafter forward, with its layer
    level: float  # drawing a tree, for each drafter forward
    node: float  # drawing a tree, for each node
    verify: float  # verification
    rank: float  # verification, for each child rank
    token: float  # verification, for each committed token
    keep: float  # cache update, for each layer
    # Shapes are fixed, and guidance comes before the head, which is float32 (docs/engine.md).
    fixed: bool


KERNEL_COUNTS = {name: KernelCounts(**counts) for name, counts in _SPECS["kernels"].items()}
"""By kind of code: `compiled` and `eager`."""


class Work(NamedTuple):
    """Bytes read, operations (a multiply-add counts as two) and kernels."""

    bytes: float
    operations: float
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        """Return the work of both."""
        return Work(*np.add(self, other))


class Draft(NamedTuple):
    """The sizes of a draft tree."""

    nodes: int  # scored by the target, root included
    # Nodes of each drafter forward after the first; None without a drafter.
    levels: tuple[int, ...] | None
    depth: int
    fanout: int  # most children of a node

    @property
    def drafter_forwards(self) -> int:
        """Drafter forwards of a step."""
        return 0 if self.levels is None else 1 + len(self.levels)


class Workload(NamedTuple):
    """The sizes of a decoding."""

    sizes: Any  # the target's `TransformerConfig`
    batch: int  # images decoded together
    guided: bool
    context: float  # positions in the cache

    @property
    def rows(self) -> int:
        """Rows of a forward at each node."""
        return self.batch * (2 if self.guided else 1)


def forward_work(
    setting: Workload, layers: int, nodes: float, *, weight_bytes: int, stack: KernelCounts
) -> Work:
    """Return the work of a forward, without its kernels.

    Args:
        setting: Sizes of the decoding.
        layers: Layers in front of the head.
        nodes: Nodes of each image.
        weight_bytes: Bytes of a weight.
        stack: Kind of code.
    """
    sizes = setting.sizes
    rows = setting.rows
    kv_heads = sizes.kv_heads or sizes.heads
    attention_weights = sizes.dim * sizes.head_dim * (2 * sizes.heads + 2 * kv_heads)
    layer_weights = layers * (attention_weights + 3 * sizes.dim * sizes.ffn_dim)
    head_weights = sizes.vocab_size * sizes.dim
    head_bytes = 4 if stack.fixed else weight_bytes
    head_rows = setting.batch if stack.fixed else rows
    cached = 2 * layers * rows * setting.context * kv_heads * sizes.head_dim
    attention = 2 * layers * (setting.context + nodes) * sizes.heads * sizes.head_dim
    products = rows * (layer_weights + attention) + head_rows * head_weights
    read = (layer_weights + cached) * weight_bytes + head_weights * head_bytes
    return Work(read, 2.0 * nodes * products)


def _logits_work(setting: Workload, rows: float, *, passes: float, kernels: float) -> Work:
    """Passes over float32 distributions of `rows` nodes of each image, and a program's kernels."""
    return Work(
        bytes=4.0 * passes * setting.batch * rows * setting.sizes.vocab_size,
        operations=0.0,
        kernels=kernels,
    )


def target_work(setting: Workload, nodes: float, *, weight_bytes: int, stack: KernelCounts) -> Work:
    """Return the work of a target forward, which includes drawing an autoregressive token.

    Args:
        setting: Sizes of the decoding.
        nodes: Nodes of each image.
        weight_bytes: Bytes of a weight.
        stack: Kind of code.
    """
    layers = setting.sizes.layers
    forward = forward_work(setting, layers, nodes, weight_bytes=weight_bytes, stack=stack)
    return forward + _logits_work(
        setting, nodes, passes=2, kernels=stack.layer * layers + stack.forward
    )


def draft_work(
    setting: Workload, draft: Draft, committed: float, *, weight_bytes: int, stack: KernelCounts
) -> list[Work]:
    """Return the work of the drafter's forwards in a step.

    The first forward is over the last committed tokens, the others over the inner nodes of each
    level. Without a drafter there is none.

    Args:
        setting: Sizes of the decoding.
        draft: Sizes of the draft tree.
        committed: Tokens that a step commits on average.
        weight_bytes: Bytes of a weight.
        stack: Kind of code.
    """
    if draft.levels is None:
        return []
    sizes = setting.sizes
    fuse_weights = 2 * sizes.dim**2
    fuse_bytes = fuse_weights * weight_bytes
    if stack.fixed:
        # The drafter's head has the dtype of its weights, not float32 (docs/engine.md).
        fuse_bytes -= sizes.vocab_size * sizes.dim * (4 - weight_bytes)
    nodes_of_forward = (draft.nodes - 1) / draft.drafter_forwards
    kernels = stack.drafter + stack.level + stack.node * nodes_of_forward
    first = draft.depth + 1 if stack.fixed else committed
    works = []
    for number, nodes in enumerate((first, *draft.levels)):
        forward = forward_work(setting, 1, nodes, weight_bytes=weight_bytes, stack=stack)
        fused = Work(fuse_bytes, 2.0 * setting.rows * nodes * fuse_weights)
        drawn = nodes if number else 1
        works.append(forward + fused + _logits_work(setting, drawn, passes=4, kernels=kernels))
    return works


def verify_work(setting: Workload, draft: Draft, committed: float, *, stack: KernelCounts) -> Work:
    """Return the work of accepting a tree, drawing the bonus token and updating the cache.

    Args:
        setting: Sizes of the decoding.
        draft: Sizes of the draft tree.
        committed: Tokens that a step commits on average.
        stack: Kind of code.
    """
    tokens = draft.depth + 1 if stack.fixed else committed
    kernels = stack.verify + stack.rank * draft.fanout + stack.token * tokens
    kernels += stack.keep * setting.sizes.layers
    return _logits_work(
        setting,
        draft.nodes if stack.fixed else tokens,
        passes=4 + 2 * draft.fanout,
        kernels=kernels,
    )


class Seconds(NamedTuple):
    """Seconds of a program: in all, and of reading, multiplying and launching alone."""

    total: float
    read: float
    multiply: float
    launch: float


def seconds_of(work: Work, device: Device, stack: KernelCounts, *, factor: float = 1.0) -> Seconds:
    """Return the seconds of a program.

    Args:
        work: Its work.
        device: The device.
        stack: Kind of code.
        factor: Measured over modelled seconds of such programs.

    Raises:
        RefusedError: The device does not say how long it takes to launch an eager kernel.
    """
    read = factor * work.bytes / (1e9 * device.read_gb_s * device.read_share)
    multiply = factor * work.operations / (1e12 * device.multiply_tflops * device.multiply_share)
    kernel_us = device.kernel_us if stack.fixed else device.eager_kernel_us
    if kernel_us is None:
        raise RefusedError(
            f"the device {device.name} states no eager_kernel_us",
            "Add it to its file, or predict --stack compiled.",
        )
    launch = factor * 1e-6 * kernel_us * work.kernels
    if device.kind == "cpu":
        total = launch + read + multiply
    elif stack.fixed:
        total = launch + max(read, multiply)
    else:
        total = max(launch, read, multiply)
    return Seconds(total=total, read=read, multiply=multiply, launch=launch)


def step_seconds(
    device: Device, stack: KernelCounts, setting: Workload, *, draft: Draft | None, committed: float
) -> pd.DataFrame:
    """Return the seconds of each part of a step: draft, target, verify and other.

    Other is the host's work outside the programs.

    Args:
        device: The device.
        stack: Kind of code.
        setting: Sizes of the decoding.
        draft: Sizes of the draft tree; None for an autoregressive step.
        committed: Tokens that a step commits on average.

    Returns:
        A table with the parts as rows and the fields of `Seconds` as columns.
    """
    import pandas as pd

    if stack.fixed and device.kind == "gpu":
        setting = setting._replace(context=setting.sizes.prefix + setting.sizes.image_tokens)
    weight_bytes = device.weight_bytes
    nodes = 1 if draft is None else draft.nodes
    target = target_work(setting, nodes, weight_bytes=weight_bytes, stack=stack)
    parts = pd.DataFrame(0.0, index=["draft", "target", "verify", "other"], columns=Seconds._fields)
    parts.loc["target"] = seconds_of(target, device, stack, factor=device.target_factor(nodes))
    if draft is not None:
        works = draft_work(setting, draft, committed, weight_bytes=weight_bytes, stack=stack)
        forwards = [seconds_of(work, device, stack, factor=device.draft_factor) for work in works]
        parts.loc["draft"] = np.sum(forwards, axis=0)
        verify = verify_work(setting, draft, committed, stack=stack)
        parts.loc["verify"] = seconds_of(verify, device, stack, factor=device.verify_factor)
        if stack.fixed:
            parts.loc["other", "total"] = 1e-6 * device.step_us
    return parts


def prefill_seconds(device: Device, stack: KernelCounts, setting: Workload) -> float:
    """Return the seconds of the forward over the prefix, which is never compiled.

    Args:
        device: The device.
        stack: Used if the device does not say how long it takes to launch an eager kernel.
        setting: Sizes of the decoding.
    """
    code = stack if device.eager_kernel_us is None else KERNEL_COUNTS["eager"]
    work = target_work(
        setting._replace(context=0),
        setting.sizes.prefix,
        weight_bytes=device.weight_bytes,
        stack=code,
    )
    return seconds_of(work, device, code).total


class Sample(NamedTuple):
    """A measured program."""

    program: str  # draft, target or verify
    work: Work
    seconds: float
    nodes: int = 1  # of the target forward


def fit_device(samples: Sequence[Sample], **fields: Any) -> Device:
    """Fit a device to measured compiled programs.

    First the rates and the time of a kernel: non-negative least squares of relative errors, as if
    nothing overlapped. Then the factors, each the median of measured over modelled seconds.

    Args:
        samples: The measured programs.
        **fields: The other fields of the device.
    """
    from scipy.optimize import nnls

    seconds = np.array([sample.seconds for sample in samples])
    work = np.array([sample.work for sample in samples]) * (1e-9, 1e-12, 1e-6)
    solution, _ = nnls(work / seconds[:, None], np.ones(len(samples)))
    per_gb, per_tflop, kernel_us = map(float, solution)
    device = Device(
        **fields,
        read_gb_s=_four_digits(1 / max(per_gb, 1e-6)),
        multiply_tflops=_four_digits(1 / max(per_tflop, 1e-6)),
        kernel_us=_four_digits(kernel_us),
    )
    ratios: dict[str | int, list[float]] = {}
    for sample in samples:
        modelled = seconds_of(sample.work, device, KERNEL_COUNTS["compiled"]).total
        name = sample.nodes if sample.program == "target" else f"{sample.program}_factor"
        ratios.setdefault(name, []).append(sample.seconds / modelled)
    factors: dict[Any, Any] = {
        name: _four_digits(median(values)) for name, values in ratios.items()
    }
    nodes = sorted(name for name in ratios if isinstance(name, int))
    factors["target_factors"] = {count: factors.pop(count) for count in nodes}
    return device.model_copy(update=factors)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def step_samples(
    setting: Workload, draft: Draft | None, *, weight_bytes: int, step: Row
) -> list[Sample]:
    """Return the programs of a measured compiled step.

    Args:
        setting: Sizes of the decoding.
        draft: Sizes of the draft tree; None for an autoregressive step.
        weight_bytes: Bytes of a weight.
        step: Milliseconds of the parts of the step: `target_ms` and so on.
    """
    stack = KERNEL_COUNTS["compiled"]
    if draft is None:
        target = target_work(setting, 1, weight_bytes=weight_bytes, stack=stack)
        return [Sample("target", target, seconds=1e-3 * (step["target_ms"] + step["other_ms"]))]
    works = {
        "target": target_work(setting, draft.nodes, weight_bytes=weight_bytes, stack=stack),
        "draft": sum(
            draft_work(setting, draft, 1, weight_bytes=weight_bytes, stack=stack),
            start=Work(0.0, 0.0),
        ),
        "verify": verify_work(setting, draft, 1, stack=stack),
    }
    return [
        Sample(program, work, seconds=1e-3 * step[f"{program}_ms"], nodes=draft.nodes)
        for program, work in works.items()
    ]


def tree_draft(paths: Sequence[Sequence[int]]) -> Draft:
    """Return the draft of a static tree, given its root-to-node paths of child ranks."""
    inner_depths = [len(node) for node in {tuple(path[:-1]) for path in paths}]
    depth = 1 + max(inner_depths)
    return Draft(
        nodes=len(paths) + 1,
        levels=tuple(inner_depths.count(level) for level in range(1, depth)),
        depth=depth,
        fanout=1 + max(path[-1] for path in paths),
    )


def named_draft(label: str) -> Draft | None:
    """Return the draft of a label such as `chain-4` or, for a dynamic tree, `58n5d10b`.

    None if the label does not say the sizes.
    """
    sizes = dynamic_sizes(label)
    if sizes:
        nodes, depth, beam = sizes.values()
        return Draft(nodes=nodes + 1, levels=(beam,) * (depth - 1), depth=depth, fanout=beam)
    return tree_draft(STATIC_TREES[label]) if label in STATIC_TREES else None


def dynamic_sizes(label: str) -> dict[str, int]:
    """Return nodes, depth and beam of a dynamic tree such as `58n5d10b`; none of other labels."""
    match = re.fullmatch(r"(?P<nodes>\d+)n(?P<depth>\d+)d(?P<beam>\d+)b", label)
    if match is None:
        return {}
    return {name: int(text) for name, text in match.groupdict().items()}
