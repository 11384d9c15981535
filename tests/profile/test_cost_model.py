"""The cost model: a step computed by hand, what more work must cost, fits, device files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lantern_bench.decoding.tree import StaticTree
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.models.registry import model_of, models
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Device,
    Draft,
    KernelCounts,
    Sample,
    Work,
    Workload,
    devices,
    draft_work,
    find_device,
    fit_device,
    named_draft,
    prefill_seconds,
    seconds_of,
    step_seconds,
    target_work,
    verify_work,
)
from lantern_bench.utils.errors import RefusedError, UserError

SIZES = TransformerConfig(
    vocab_size=100, dim=64, layers=2, heads=1, ffn_dim=128, prefix=4, grid=(4, 4)
)
AT = Workload(SIZES, batch=1, guided=True, context=10)
# Kernels: a layer 3, a forward 5, a drafter forward 7, a level 11, no node, verification 13, rank
# 17, token 19, keep 23.
STACK = KernelCounts(
    layer=3,
    forward=5,
    drafter=7,
    level=11,
    node=0,
    verify=13,
    rank=17,
    token=19,
    keep=23,
    fixed=True,
)
GPU = Device(
    name="gpu",
    kind="gpu",
    read_gb_s=1,
    multiply_tflops=1e-3,
    kernel_us=1,
    eager_kernel_us=2,
    step_us=10,
)
CPU = GPU.model_copy(update={"kind": "cpu"})


def test_target_work_is_as_computed_by_hand():
    # A layer: queries, keys, values and output 4 * 64^2, feed-forward 3 * 64 * 128; the head is
    # float32.
    layer = 4 * 64 * 64 + 3 * 64 * 128
    work = target_work(setting=AT, nodes=3, weight_bytes=2, stack=STACK)
    cache = 2 * 2 * 2 * 10 * 64 * 2  # keys and values, layers, rows, positions, width, bytes
    assert work.bytes == 2 * layer * 2 + 100 * 64 * 4 + cache + 2 * 4 * 3 * 100
    attention = 2 * 2 * (10 + 3) * 64  # layers, products with keys and values, positions
    assert work.operations == 2 * 3 * (2 * (2 * layer + attention) + 100 * 64)
    assert work.kernels == 3 * 2 + 5


def test_kernels_of_a_step_are_as_computed_by_hand():
    draft = Draft(nodes=4, levels=(1, 1), depth=3, fanout=2)
    assert [
        work.kernels
        for work in draft_work(setting=AT, draft=draft, committed=1.0, weight_bytes=2, stack=STACK)
    ] == [7 + 11] * 3
    assert (
        verify_work(setting=AT, draft=draft, committed=1.0, stack=STACK).kernels
        == 13 + 17 * 2 + 19 * 4 + 23 * 2
    )


def test_the_prefill_is_eager_where_the_device_says_what_that_costs():
    device = devices()["h100"]
    compiled = KERNEL_COUNTS["compiled"]
    seconds = prefill_seconds(device, compiled, AT)
    # This small forward waits for the host: 49 kernels per layer and 18 more, 13 us each.
    assert seconds == pytest.approx(13e-6 * (49 * SIZES.layers + 18))
    quiet = device.model_copy(update={"eager_kernel_us": None})
    assert prefill_seconds(quiet, compiled, AT) < seconds / 5


def test_programs_overlap_as_the_device_does():
    # 3 ms to read, 2 ms to multiply, 0.5 ms to launch
    work = Work(bytes=3e6, operations=2e6, kernels=500)
    eager = STACK._replace(fixed=False)
    assert seconds_of(work, GPU, STACK).total == pytest.approx(3.5e-3)
    assert seconds_of(work, GPU, eager).total == pytest.approx(3e-3)  # the host is ahead
    # the device waits
    assert seconds_of(work._replace(kernels=2000), GPU, eager).total == pytest.approx(4e-3)
    assert seconds_of(work, CPU, STACK).total == pytest.approx(5.5e-3)
    with pytest.raises(RefusedError, match="states no eager_kernel_us"):
        seconds_of(work, CPU.model_copy(update={"eager_kernel_us": None}), eager)


@pytest.mark.parametrize("stack", KERNEL_COUNTS.values(), ids=KERNEL_COUNTS)
@pytest.mark.parametrize("device", [*devices().values(), CPU], ids=lambda device: device.name)
def test_more_work_never_costs_less(device: Device, stack: KernelCounts):
    device = device.model_copy(update={"eager_kernel_us": device.eager_kernel_us or 20.0})
    at = Workload(sizes=model_of("llamagen-t2i-stage1").sizes, batch=1, guided=False, context=100)
    chains = [named_draft(f"chain-{length}") for length in range(3, 8)]
    steps = [
        step_seconds(device=device, stack=stack, setting=at, draft=draft, committed=2.0)[
            "total"
        ].sum()
        for draft in chains
    ]
    assert steps == sorted(steps)
    base = step_seconds(device=device, stack=stack, setting=at, draft=chains[0], committed=2.0)[
        "total"
    ].sum()
    for more in (at._replace(batch=4), at._replace(guided=True), at._replace(context=300)):
        assert (
            step_seconds(device=device, stack=stack, setting=more, draft=chains[0], committed=2.0)[
                "total"
            ].sum()
            >= base
        )
    for field in ("read_gb_s", "multiply_tflops"):
        faster = device.model_copy(update={field: 2 * getattr(device, field)})
        assert (
            step_seconds(device=faster, stack=stack, setting=at, draft=chains[0], committed=2.0)[
                "total"
            ].sum()
            <= base
        )


@pytest.mark.parametrize("name", STATIC_TREES)
def test_draft_has_the_forwards_of_the_drafting(name: str):
    tree = StaticTree.of(STATIC_TREES[name], torch.device("cpu"))
    draft = named_draft(name)
    assert draft is not None
    assert draft.levels is not None
    assert (draft.nodes, draft.depth, 1 + len(draft.levels)) == (
        len(tree.depths),
        int(tree.depths.max()),
        len(tree.levels),
    )
    assert draft.levels == tuple(len(level.nodes) for level in tree.levels[1:])
    assert draft.fanout == max(level.fanout for level in tree.levels)


def test_dynamic_draft_and_unknown_label():
    assert named_draft("58n5d10b") == Draft(nodes=59, levels=(10, 10, 10, 10), depth=5, fanout=10)
    assert named_draft("own-5-123456") is None


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_fit_recovers_a_device_from_its_own_times(kind: str):
    truth = CPU.model_copy(update={"kind": kind, "read_gb_s": 20.0, "multiply_tflops": 0.3})
    at = Workload(sizes=model_of("lanterns").sizes, batch=1, guided=True, context=138)
    stack = KERNEL_COUNTS["compiled"]
    samples = [
        Sample(
            program="target",
            work=target_work(setting=at, nodes=nodes, weight_bytes=2, stack=stack),
            seconds=seconds_of(
                target_work(setting=at, nodes=nodes, weight_bytes=2, stack=stack), truth, stack
            ).total,
            nodes=nodes,
        )
        for nodes in (1, 8, 16, 32, 64)
    ]
    for name in ("chain-3", "eagle1-25"):
        draft = named_draft(name)
        assert draft is not None
        whole = sum(
            draft_work(setting=at, draft=draft, committed=1, weight_bytes=2, stack=stack),
            Work(0, 0, 0),
        )
        samples.append(
            Sample(
                "draft",
                whole,
                sum(seconds_of(piece, truth, stack).total for piece in _works(at, draft)),
            )
        )
        verify = verify_work(setting=at, draft=draft, committed=1, stack=stack)
        samples.append(Sample("verify", verify, seconds_of(verify, truth, stack).total))
    fitted = fit_device(samples, name="fitted", kind=kind, step_us=truth.step_us)
    for name in ("chain-5", "24n4d6b"):  # held out
        steps = [
            step_seconds(
                device=device, stack=stack, setting=at, draft=named_draft(name), committed=2.0
            )
            for device in (fitted, truth)
        ]
        ours, theirs = (step["total"].sum() for step in steps)
        assert ours == pytest.approx(theirs, rel=0.01 if kind == "cpu" else 0.1)


def _works(at: Workload, draft: Draft) -> list[Work]:
    return draft_work(
        setting=at, draft=draft, committed=1, weight_bytes=2, stack=KERNEL_COUNTS["compiled"]
    )


def test_device_file_is_read_back(tmp_path: Path):
    device = CPU.model_copy(update={"target_factors": {1: 1.1, 8: 0.9}, "sources": ("measured",)})
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(device.model_dump(mode="json")))
    loaded = find_device(str(path))
    assert loaded == device
    assert loaded.target_factor(4.5) == pytest.approx(1.0)
    assert loaded.target_factor(64) == 0.9


def test_unusable_devices_are_refused(tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: mine\nkind: tpu\nread_gb_s: -1\nmultiply_tflops: 1\nkernal_us: 2\n")
    with pytest.raises(UserError) as error:
        find_device(str(path))
    for part in (
        "line 2",
        "gpu or cpu",
        "line 3",
        "read_gb_s",
        "must be a number above 0",
        "line 5",
        "kernel_us",
    ):
        assert part in str(error.value.message)
    path.write_text("name: mine\n")
    with pytest.raises(UserError) as error:
        find_device(str(path))
    for key in ("kind", "read_gb_s", "multiply_tflops", "kernel_us"):
        assert f"{key}: missing" in str(error.value.message)
    with pytest.raises(
        UserError, match=r"--device h10: unknown device; did you mean h100\?"
    ) as error:
        find_device("h10")
    assert "rtx-3090, a40, a100, a100-40gb, rtx-4090, l40s, b200, h100, h200" in str(
        error.value.advice
    )


def test_shipped_devices_state_their_source():
    assert {"rtx-3090", "a100", "h100", "h200"} <= devices().keys()
    assert all(device.sources and device.about for device in devices().values())
    for name in ("a100-40gb", "rtx-4090", "l40s", "b200"):
        sources = find_device(name).sources
        assert any(
            text.startswith("data sheet") and "not measured with this package" in text
            for text in sources
        )


def test_named_models_state_their_sizes():
    for name, model in models().items():
        assert model.sizes is not None, name
        assert model.sizes.image_tokens == model.tokens, name
