"""NaN and infinite logits: found at the step, named, and in no image.

The model is a real transformer of two layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.image_state import ImageState
from lantern_bench.utils import signals
from lantern_bench.utils.errors import LogitsError
from tests.decoding.test_engine import CELLS, VOCABULARY, Small, decoded, same

AT = 3  # the step in which the fault happens; 0 is before the prefill
MODES = {
    "ar": CELLS["ar"],
    "static": CELLS["static"],
    "dynamic": CELLS["dynamic"],
    "greedy": CELLS["greedy"],
    "jacobi": {"mode": "sjd", "cfg_scale": 1.5},
}


class Spoiled(nn.Module):
    """A head of which one logit gets `wrong` added."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.wrong = torch.zeros(VOCABULARY)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features) + self.wrong


def spoiled(network: str) -> tuple[Small, Spoiled]:
    model = Small()
    head = Spoiled(model.target.transformer.output)
    if network == "target":
        model.target.transformer.output = head
    else:
        model.drafter.use_head(head)
    return model, head


def fail(
    model: Small,
    head: Spoiled,
    decoding: Decoding,
    engine: Engine,
    *,
    value: float,
    step: int = AT,
) -> str:
    """Decode two images, the second with wrong logits from `step` on; return the error and check
    its step.
    """
    steps = 0

    def spoil() -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            head.wrong[7] = value

    head.wrong[7] = value if step == 0 else 0.0
    with signals.on_check(spoil), pytest.raises(LogitsError) as raised:
        decoded(model=model, decoding=decoding, images=2, engine=engine)
    last = step if decoding.drafts else model.target.image_tokens - 1
    assert steps == last, "the loop went on"
    head.wrong.zero_()
    return str(raised.value)


@pytest.mark.parametrize("step", [0, AT])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("cell", MODES)
def test_broken_logits_of_the_target(
    cell: str, value: float, step: int, record_property: Callable[[str, object], None]
) -> None:
    """NaN or +inf in a target's logits"""
    decoding = Decoding(**MODES[cell])
    model, head = spoiled("target")
    engine = Engine()
    wanted = decoded(model=model, decoding=decoding, images=2, engine=engine)
    output = fail(model=model, head=head, decoding=decoding, engine=engine, value=value, step=step)
    assert output.startswith("the target gave NaN or infinite logits after ")
    position = int(output.split("after ")[1].split()[0])
    assert position == (0 if step == 0 else position)
    assert step == 0 or position >= step
    if cell == "ar":
        assert position == step
    # Nothing of it is left in caches: the same images come out as before.
    same(decoded(model=model, decoding=decoding, images=2, engine=engine), wanted)
    record_property("outcome", f"image failed: {output}")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("cell", ["static", "dynamic", "greedy"])
def test_broken_logits_of_the_drafter(
    cell: str, value: float, record_property: Callable[[str, object], None]
) -> None:
    """NaN or +inf in a drafter's logits"""
    decoding = Decoding(**MODES[cell])
    model, head = spoiled("drafter")
    engine = Engine()
    wanted = decoded(model=model, decoding=decoding, images=2, engine=engine)
    output = fail(model=model, head=head, decoding=decoding, engine=engine, value=value)
    assert output.startswith("the drafter gave NaN or infinite logits after ")
    same(decoded(model=model, decoding=decoding, images=2, engine=engine), wanted)
    record_property("outcome", f"image failed: {output}")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_steps_find_broken_logits(
    backend: str, record_property: Callable[[str, object], None]
) -> None:
    """NaN or +inf in a target's logits, steps compiled"""
    decoding = Decoding(**MODES["static"])
    model, head = spoiled("target")
    engine = Engine(compile=True, backend=backend)
    wanted = decoded(model=model, decoding=decoding, images=2, engine=engine)
    for value in (math.nan, math.inf):
        output = fail(model=model, head=head, decoding=decoding, engine=engine, value=value)
        same(decoded(model=model, decoding=decoding, images=2, engine=engine), wanted)
    record_property("outcome", f"image failed: {output}")


@pytest.mark.parametrize("cell", MODES)
def test_impossible_tokens_are_no_fault(
    cell: str, record_property: Callable[[str, object], None]
) -> None:
    """-inf in a target's logits, guided in both rows, before and in steps"""
    model, head = spoiled("target")
    head.wrong[7] = -math.inf
    for values, linear in (
        ({"cfg_scale": 1.0}, True),
        ({"cfg_scale": 1.5}, True),
        ({"cfg_scale": 1.5}, False),
    ):
        model.target.linear_head = linear  # True: a session guides features, False: logits
        decoding = Decoding(**MODES[cell] | values)
        images = decoded(model, decoding, 2)
        assert all(7 not in image.tokens for image in images)
    record_property("outcome", "no fault: such a token is impossible and never drawn")


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell == "static" else pytest.mark.long) for cell in MODES],
)
def test_compiled_steps_draw_no_impossible_tokens(
    cell: str, record_property: Callable[[str, object], None]
) -> None:
    """-inf in a target's logits, steps compiled"""
    model, head = spoiled("target")
    head.wrong[7] = -math.inf
    model.target.linear_head = False
    decoding = Decoding(**MODES[cell] | {"cfg_scale": 1.5})
    engine = Engine(compile=True, backend="aot_eager")
    images = decoded(model=model, decoding=decoding, images=2, engine=engine)
    assert all(7 not in image.tokens for image in images)
    wanted = decoded(model, decoding, 2)
    assert all(a.tokens.equal(b.tokens) for a, b in zip(images, wanted, strict=True))
    record_property("outcome", "no fault: such a token is impossible and never drawn")


def test_a_step_copies_once_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # What tells of broken logits comes with the positions, in the one copy there was.
    counts = dict.fromkeys(("tolist", "item", "steps"), 0)
    plain_commit = ImageState.commit

    def counted(name: str, plain: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        def count(tensor: Tensor) -> object:
            counts[name] += counts["steps"] > 0
            return plain(tensor)

        return count

    def step(*arguments: Any) -> None:
        counts["steps"] += 1
        plain_commit(*arguments)

    monkeypatch.setattr(Tensor, "tolist", counted("tolist", Tensor.tolist))
    monkeypatch.setattr(Tensor, "item", counted("item", Tensor.item))
    monkeypatch.setattr(ImageState, "commit", step)
    decoded(Small(), Decoding(**CELLS["greedy"]), 1)
    at_the_end = 10  # the seven columns of the trace, two that follow from them, and their lengths
    assert counts["steps"] > 3
    assert counts["tolist"] == counts["steps"] + at_the_end
    assert counts["item"] == 0
