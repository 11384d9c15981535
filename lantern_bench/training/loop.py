"""The one training loop: optimiser, schedule, autocast, checkpoints, resume, progress events.

A task brings a module, a loss and an evaluation; the loop brings everything else, so that tokenizer, target, drafter
and metric models are trained by the same lines. It draws nothing on the screen: events go to a callback.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lantern_bench.clock import now
from lantern_bench.errors import RefusedError, UserError

# ---- Processes that train together, one a GPU: who is the first, and how gradients are averaged


_PATIENCE = timedelta(hours=24)  # the others wait while the first one samples, encodes and evaluates


def _nothing_to_average(_tensors: Sequence[Tensor]) -> None:
    """One process has the mean already."""


def _nobody_to_wait_for() -> None:
    """One process is always together."""


@dataclass(frozen=True)
class Workers:
    """`count` processes, of which this is number `rank`, on `device` (None: wherever it was told).

    `average` replaces tensors by their means over all; `wait` returns when all have called it.
    """

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    average: Callable[[Sequence[Tensor]], None] = _nothing_to_average
    wait: Callable[[], None] = _nobody_to_wait_for

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0


ALONE = Workers()


def is_one_of_several() -> bool:
    """Whether a launcher (`accelerate launch`, `torchrun`) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(cpu: bool = False) -> Workers:
    """The workers this process was started with; raises `RefusedError` for several without the package accelerate."""
    if not is_one_of_several():
        return ALONE
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise RefusedError(
            "several processes need the package accelerate, which is not installed",
            "Type `pip install 'lantern-bench[train]'`, or start one process.",
        ) from error
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])

    def average(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(accelerator.reduce(tensor, reduction="mean"))

    workers = (accelerator.process_index, accelerator.num_processes, accelerator.device)
    return Workers(*workers, average=average, wait=accelerator.wait_for_everyone)


# ----


class Task(Protocol):
    """What the loop needs of a thing to train."""

    name: str
    module: nn.Module

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One batch: the loss to minimise and named parts worth showing (detached scalars)."""
        ...

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Called after each optimiser step (reviving dead codes, for instance)."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, for the training report."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A task whose steps depend on more than weights, optimiser and generator: a checkpoint keeps that as well."""

    def memory(self) -> dict[str, Tensor]:
        """What to keep."""
        ...

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Take up what was kept."""
        ...


@dataclass(frozen=True)
class TrainSettings:
    """How to train. Either `steps` or `minutes` ends it; with both, whichever comes first.

    The learning rate rises linearly over `warmup` steps and falls to `final_lr` of itself along a half cosine or a
    line (`schedule`), over the steps when `steps` is given (reproducible), else over the minutes. A step is made of
    `accumulate` batches. Gradients are clipped by their norm or each by its value (`clip_by`).
    """

    steps: int | None = None
    minutes: float | None = None
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: int = 50
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    clip_by: Literal["norm", "value"] = "norm"
    schedule: Literal["cosine", "linear"] = "cosine"
    accumulate: int = 1
    seed: int = 0
    autocast: bool = True
    log_every: int = 10
    checkpoint_every: int = 100
    checkpoint: Path | None = None
    resume: bool = True


@dataclass(frozen=True)
class TrainEvent:
    """Progress of a training: `fraction` in [0, 1], seconds so far, mean loss and parts since the last event."""

    task: str
    step: int
    fraction: float
    seconds: float
    loss: float
    lr: float
    parts: Mapping[str, float]


@dataclass
class TrainReport:
    """What is written beside the weights: settings, the course of the loss and the figures at the end."""

    task: str
    steps: int
    seconds: float
    settings: dict[str, Any]
    losses: list[tuple[int, float]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def train(
    task: Task,
    settings: TrainSettings,
    device: torch.device,
    on_event: Callable[[TrainEvent], None] = lambda _event: None,
    workers: Workers = ALONE,
) -> TrainReport:
    """Train `task.module` in place and return the report (with `task.evaluate()` figures).

    `workers` are the processes that train together; the first of them writes checkpoints. `on_event` is called after
    every `log_every` steps and at the end; what it takes is not counted as training.

    Raises `UserError` when neither steps nor minutes bound the training, and `RefusedError` when a checkpoint is there
    that belongs to other settings.
    """
    if settings.steps is None and settings.minutes is None:
        raise UserError("training needs an end", "give a number of steps or --minutes")
    module = task.module.to(device).train()
    optimiser = _optimiser(module, settings, device)
    generator = torch.Generator().manual_seed(settings.seed)
    state = _Progress()
    if settings.checkpoint is not None and settings.resume and settings.checkpoint.exists():
        state = _load(settings.checkpoint, task, optimiser, generator, settings)
    _Run(task, settings, device, optimiser, generator, state, workers).to_the_end(on_event)
    module.eval()
    report = TrainReport(task.name, state.step, state.seconds, _described(settings), state.losses)
    # Figures come from few batches of other shapes and precision: not worth compiling anew.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        report.figures = task.evaluate()
    return report


@dataclass
class _Progress:
    step: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)


class _Run:
    """A training on its way."""

    def __init__(
        self,
        task: Task,
        settings: TrainSettings,
        device: torch.device,
        optimiser: torch.optim.Optimizer,
        generator: torch.Generator,
        state: _Progress,
        workers: Workers,
    ) -> None:
        self.task, self.settings, self.device = task, settings, device
        self.optimiser, self.generator, self.state, self.workers = optimiser, generator, state, workers
        self.trained = [p for p in task.module.parameters() if p.requires_grad]

    def to_the_end(self, on_event: Callable[[TrainEvent], None]) -> None:
        """Step until it is over, telling of it and keeping checkpoints."""
        task, settings, state = self.task, self.settings, self.state
        total, parts, count = 0.0, dict[str, float](), 0
        while (done := _fraction(state, settings)) < 1.0:
            began = now()
            rate = _learning_rate(state.step, done, settings)
            value, named = self.step(rate)
            total, count = total + value, count + 1
            for key, part in named.items():
                parts[key] = parts.get(key, 0.0) + part
            state.seconds += now() - began
            fraction = min(1.0, _fraction(state, settings))
            if state.step % settings.log_every == 0 or fraction == 1.0:
                state.losses.append((state.step, total / count))
                means = {key: part / count for key, part in parts.items()}
                on_event(TrainEvent(task.name, state.step, fraction, state.seconds, total / count, rate, means))
                total, parts, count = 0.0, {}, 0
            if settings.checkpoint is not None and state.step % settings.checkpoint_every == 0 and self.workers.first:
                _save(settings.checkpoint, task, self.optimiser, self.generator, state, settings)

    def step(self, rate: float) -> tuple[float, dict[str, float]]:
        """One step at a learning rate: the loss and its parts, means over its batches and workers."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        share, figures = 1 / self.settings.accumulate, dict[str, Tensor]()
        for _ in range(self.settings.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.autocast):
                loss, named = self.task.loss(self.generator)
            (loss * share).backward()
            for key, part in {"": loss.detach(), **named}.items():
                figures[key] = figures.get(key, torch.zeros_like(part)) + part * share
        self.workers.average([p.grad for p in self.trained if p.grad is not None])
        by_norm = self.settings.clip_by == "norm"
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        clip(self.trained, self.settings.clip)
        self.optimiser.step()
        self.state.step += 1
        self.task.after_step(self.state.step, self.generator)
        shared = torch.stack([figure.float() for figure in figures.values()])
        self.workers.average([shared])
        value, *means = shared.tolist()
        if not math.isfinite(value):
            raise RefusedError(
                f"training of {self.task.name} diverged at step {self.state.step}: the loss is {value}",
                "lower the learning rate or start from the last checkpoint",
            )
        return value, dict(zip(list(figures)[1:], means, strict=True))


def _fraction(state: _Progress, settings: TrainSettings) -> float:
    by_steps = state.step / settings.steps if settings.steps else 0.0
    by_time = state.seconds / (60.0 * settings.minutes) if settings.minutes else 0.0
    return max(by_steps, by_time)


def _learning_rate(step: int, done: float, settings: TrainSettings) -> float:
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    done = min(done, 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.lr * warm * (settings.final_lr + (1 - settings.final_lr) * left)


def _optimiser(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=device.type == "cuda")


def _described(settings: TrainSettings) -> dict[str, Any]:
    """Settings as plain data, without what is a matter of place."""
    plain = asdict(settings)
    plain.pop("checkpoint")
    plain.pop("resume")
    for name in ("clip_by", "schedule", "accumulate"):  # younger than the first reports: left out at their defaults
        if plain[name] == getattr(TrainSettings, name):
            plain.pop(name)
    plain["betas"] = list(settings.betas)
    return plain


def _save(
    path: Path,
    task: Task,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    state: _Progress,
    settings: TrainSettings,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "settings": _described(settings),
        "module": task.module.state_dict(),
        "memory": task.memory() if isinstance(task, Remembers) else {},
        "optimiser": optimiser.state_dict(),
        "generator": generator.get_state(),
        "progress": asdict(state),
    }
    part = path.with_suffix(".part")
    torch.save(whole, part)
    os.replace(part, path)


def _load(
    path: Path,
    task: Task,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    settings: TrainSettings,
) -> _Progress:
    whole = torch.load(path, map_location="cpu", weights_only=True)
    described = _described(settings)
    for key in {**described, **whole["settings"]}:
        now_is, was = (values.get(key, getattr(TrainSettings, key)) for values in (described, whole["settings"]))
        if was != now_is:
            raise RefusedError(
                f"the checkpoint {path.name} was made with {key} = {was}, now it is {now_is}",
                "train with the same settings, or start anew with --no-resume",
            )
    task.module.load_state_dict(whole["module"])
    if isinstance(task, Remembers):
        task.remember(whole["memory"])
    optimiser.load_state_dict(whole["optimiser"])
    generator.set_state(whole["generator"])
    progress = whole["progress"]
    return _Progress(progress["step"], progress["seconds"], [tuple(entry) for entry in progress["losses"]])
