"""The one training loop, on a module small enough to count by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern_bench.training import trainer
from lantern_bench.training.recipe import TrainSettings
from lantern_bench.training.trainer import Task, TrainEvent, TrainReport, train
from lantern_bench.utils.errors import RefusedError

CPU = torch.device("cpu")
PLAIN = TrainSettings(
    steps=40,
    lr=0.05,
    warmup=10,
    autocast=False,
    log_every=5,
    checkpoint_every=10,
    weight_decay=0.05,
    clip=1.0,
    clip_by="norm",
    schedule="cosine",
    final_lr=0.02,
)


def replace(settings: TrainSettings, **values: Any) -> TrainSettings:
    return settings.model_copy(update=values)


class Line(Task):
    """Fit y = 3 x - 1 from noisy batches drawn by the loop's generator."""

    name = "line"

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1)
        with torch.no_grad():
            self.module.weight.zero_()  # type: ignore[union-attr, operator]
            self.module.bias.zero_()  # type: ignore[union-attr, operator]
        self.steps: list[int] = []
        self.explode_at: int | None = None

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = torch.randn(16, 1, generator=generator)
        y = 3 * x - 1 + 0.1 * torch.randn(16, 1, generator=generator)
        error = (self.module(x) - y).pow(2).mean()
        if self.explode_at is not None and len(self.steps) + 1 == self.explode_at:
            error = error * math.inf
        return error, {"rmse": error.detach().sqrt()}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        self.steps.append(step)
        torch.rand(1, generator=generator)


def run(settings: TrainSettings) -> tuple[Line, TrainReport, list[TrainEvent]]:
    task = Line()
    events = list[TrainEvent]()
    report = train(task=task, settings=settings, device=CPU, on_event=events.append)
    return task, report, events


def test_training_learns_and_reports() -> None:
    task, report, events = run(replace(PLAIN, steps=200, lr=0.2))
    assert not task.module.training
    weight = task.module.weight.item()  # type: ignore[union-attr, operator]
    assert weight == pytest.approx(3, abs=0.2)
    assert report.steps == 200
    assert task.steps == list(range(1, 201))
    assert report.losses[-1][1] < 0.05 * report.losses[0][1]
    assert report.settings["steps"] == 200
    assert "checkpoint" not in report.settings
    assert (
        [event.step for event in events]
        == [step for step, _ in report.losses]
        == list(range(5, 201, 5))
    )
    assert events[-1].fraction == 1.0
    assert set(events[-1].figures) == {"rmse"}


def test_learning_rate_follows_a_half_cosine() -> None:
    _, _, events = run(replace(PLAIN, log_every=1, weight_decay=0.0))
    rates = [event.lr for event in events]
    # Event n reports the step that started with n - 1 of 40 done.
    for done, rate in enumerate(rates):
        warm = min(1.0, (done + 1) / 10)
        assert rate == pytest.approx(
            0.05 * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done / 40)))
        )
    assert max(rates) == rates[9]
    assert rates[-1] < 0.03 * 0.05


def test_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = replace(PLAIN, checkpoint=tmp_path / "work" / "line.ckpt")
    whole, whole_report, _ = run(PLAIN)

    broken = Line()
    broken.explode_at = 27
    with pytest.raises(RefusedError, match="line diverged at step 27: the loss is inf"):
        train(broken, settings, CPU)
    resumed, report, _ = run(settings)
    assert resumed.steps[0] == 21
    assert report.losses == whole_report.losses
    assert report.steps == 40
    for parameter, expected in zip(
        resumed.module.parameters(), whole.module.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected)
    assert run(settings)[0].steps == []
    with pytest.raises(
        RefusedError, match=r"line.ckpt was made with lr = 0.05, now it is 0.1"
    ) as caught:
        run(replace(settings, lr=0.1))
    assert caught.value.exit_code == 3
    assert "--no-resume" in (caught.value.advice or "")
    assert str(tmp_path) not in caught.value.message
    assert run(replace(settings, resume=False))[0].steps == list(range(1, 41))


def test_minutes_end_a_training() -> None:
    _, report, _ = run(replace(PLAIN, steps=10_000_000, minutes=0.2 / 60))
    assert 0.2 <= report.seconds < 2
    assert 0 < report.steps < 10_000_000


def test_training_does_not_touch_the_global_generator() -> None:
    task = Line()
    state = torch.get_rng_state()
    train(task, replace(PLAIN, steps=3), CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_linear_schedule_and_clipping_by_value() -> None:
    settings = replace(
        PLAIN, log_every=1, schedule="linear", final_lr=0.0, warmup=4, clip_by="value", clip=1e-3
    )
    task, _, events = run(replace(settings, steps=8))
    wanted = [0.05 * min(1.0, (done + 1) / 4) * (1 - done / 8) for done in range(8)]
    assert [event.lr for event in events] == pytest.approx(wanted)
    assert task.module.weight.grad.abs().max() <= 1e-3  # type: ignore[union-attr, operator]


def test_accumulated_batches_are_one_step() -> None:
    task, report, events = run(replace(PLAIN, steps=5, log_every=1, accumulate=3))
    assert report.steps == 5
    assert len(task.steps) == 5
    assert report.settings["accumulate"] == 3
    assert len(events) == 5


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_products_are_in_bfloat16_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, *, asked: bool, fast: bool
) -> None:
    monkeypatch.setattr(trainer, "has_bfloat16", lambda _device: fast)
    types = set[torch.dtype]()

    class Seen(Line):
        def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
            types.add(self.module(torch.ones(1, 1)).dtype)
            return super().loss(generator)

    train(Seen(), replace(PLAIN, steps=1, autocast=asked), CPU)
    assert types == {torch.bfloat16 if asked and fast else torch.float32}
