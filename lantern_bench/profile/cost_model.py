"""What a decode step costs on a device, from sizes alone (docs/prediction.md), and the speedups of a run there.

Acceptance is the run's: which tokens a step commits does not depend on the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.profile.device_specs import Device
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError


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
