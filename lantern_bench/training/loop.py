"""The training loop: optimiser, schedule, autocast, checkpoints, resume, several processes, progress events.

A task brings a module, a loss and an evaluation; the loop brings everything else. Progress goes to a callback.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lantern_bench.clock import now
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.packed_linear import has_bfloat16


@dataclass(frozen=True)
class Distributed:
    """Process `rank` of the `count` that train together; `device` is None unless a launcher chose it.

    `average` replaces tensors by their means over all processes; `wait` returns when every process has called it.
    """

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    average: Callable[[Sequence[Tensor]], None] = lambda _tensors: None
    wait: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0


SINGLE = Distributed()


def is_distributed() -> bool:
    """Whether a launcher (`accelerate launch`, `torchrun`) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes(cpu: bool = False) -> Distributed:
    """Join the processes of this launch; raises `RefusedError` for several without the package accelerate."""
    if not is_distributed():
        return SINGLE
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise RefusedError(
            "several processes need the package accelerate, which is not installed",
            "Run `pip install 'lantern-bench[train]'`, or start one process.",
        ) from error
    # The other processes wait while the first one samples, encodes and evaluates.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=24))
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[patience])

    def average(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(accelerator.reduce(tensor, reduction="mean"))

    place = (accelerator.process_index, accelerator.num_processes, accelerator.device)
    return Distributed(*place, average=average, wait=accelerator.wait_for_everyone)


class Task(ABC):
    """What the loop needs of a thing to train: its `name`, its `module` and the methods below."""

    name: str
    module: nn.Module

    @abstractmethod
    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One batch: the loss to minimise and named parts to report (detached scalars)."""

    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: B027  # optional
        """Called after each optimiser step (to revive dead codes, for instance)."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, for the training report."""

    def memory(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside weights, optimiser and generator."""
        return {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027  # optional
        """Restore what `memory` returned."""


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

    def described(self) -> dict[str, Any]:
        """Plain data for reports and checkpoints, without paths."""
        plain = asdict(self) | {"betas": list(self.betas)}
        # The last three were added after the first reports: left out at their defaults.
        added = [name for name in ("clip_by", "schedule", "accumulate") if plain[name] == getattr(TrainSettings, name)]
        return {name: value for name, value in plain.items() if name not in ("checkpoint", "resume", *added)}


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


OnEvent = Callable[[TrainEvent], None]


@dataclass(frozen=True)
class TrainReport:
    """What is written beside the weights: settings, losses by step and the figures at the end."""

    task: str
    steps: int
    seconds: float
    settings: dict[str, Any]
    losses: list[tuple[int, float]]
    figures: dict[str, float]


def train(
    task: Task,
    settings: TrainSettings,
    device: torch.device,
    on_event: OnEvent = lambda _event: None,
    distributed: Distributed = SINGLE,
) -> TrainReport:
    """Train `task.module` in place and return the report (with `task.evaluate()` figures).

    The first process of `distributed` writes checkpoints. `on_event` is called after every `log_every` steps and at
    the end; the time it takes is not counted as training.

    Raises `UserError` when neither steps nor minutes bound the training, and `RefusedError` for a checkpoint of
    other settings and for a loss that is not finite.
    """
    if settings.steps is None and settings.minutes is None:
        raise UserError("training needs an end", "Give a number of steps or --minutes.")
    run = _Run(task, settings, device, distributed)
    if settings.checkpoint is not None and settings.resume and settings.checkpoint.exists():
        run.load(settings.checkpoint)
    run.to_end(on_event)
    task.module.eval()
    # Few batches, of other shapes and precision than in training: not worth compiling.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        figures = task.evaluate()
    return TrainReport(task.name, run.done_steps, run.seconds, settings.described(), run.losses, figures)


class _Run:
    """The state of one training."""

    def __init__(self, task: Task, settings: TrainSettings, device: torch.device, distributed: Distributed) -> None:
        self.task, self.settings, self.device, self.distributed = task, settings, device, distributed
        module = task.module.to(device).train()
        self.trained = [p for p in module.parameters() if p.requires_grad]
        decayed = {"params": [p for p in self.trained if p.dim() >= 2], "weight_decay": settings.weight_decay}
        others = {"params": [p for p in self.trained if p.dim() < 2], "weight_decay": 0.0}
        fused = device.type == "cuda"
        self.optimiser = torch.optim.AdamW([decayed, others], lr=settings.lr, betas=settings.betas, fused=fused)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.autocast = settings.autocast and has_bfloat16(device)
        self.done_steps, self.seconds, self.losses = 0, 0.0, list[tuple[int, float]]()

    def to_end(self, on_event: OnEvent) -> None:
        """Step until the end, with events and checkpoints on the way."""
        settings = self.settings
        total, parts, count = 0.0, dict[str, float](), 0
        while (done := self.fraction()) < 1.0:
            began = now()
            left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
            warm = min(1.0, (self.done_steps + 1) / max(1, settings.warmup))
            rate = settings.lr * warm * (settings.final_lr + (1 - settings.final_lr) * left)
            value, named = self.step(rate)
            total, count = total + value, count + 1
            for key, part in named.items():
                parts[key] = parts.get(key, 0.0) + part
            self.seconds += now() - began
            step, fraction = self.done_steps, min(1.0, self.fraction())
            if step % settings.log_every == 0 or fraction == 1.0:
                self.losses.append((step, total / count))
                means = {key: part / count for key, part in parts.items()}
                on_event(TrainEvent(self.task.name, step, fraction, self.seconds, total / count, rate, means))
                total, parts, count = 0.0, {}, 0
            if settings.checkpoint is not None and step % settings.checkpoint_every == 0 and self.distributed.first:
                self.save(settings.checkpoint)

    def fraction(self) -> float:
        """The share of the training that is done; 1 or more at the end."""
        by_steps = self.done_steps / self.settings.steps if self.settings.steps else 0.0
        by_time = self.seconds / (60.0 * self.settings.minutes) if self.settings.minutes else 0.0
        return max(by_steps, by_time)

    def step(self, rate: float) -> tuple[float, dict[str, float]]:
        """One step at a learning rate: the loss and its parts, means over its batches and processes."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        share, figures = 1 / self.settings.accumulate, dict[str, Tensor]()
        for _ in range(self.settings.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss, named = self.task.loss(self.generator)
            (loss * share).backward()
            for key, part in {"": loss.detach(), **named}.items():
                figures[key] = figures.get(key, torch.zeros_like(part)) + part * share
        self.distributed.average([p.grad for p in self.trained if p.grad is not None])
        by_norm = self.settings.clip_by == "norm"
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        clip(self.trained, self.settings.clip)
        self.optimiser.step()
        self.done_steps += 1
        self.task.after_step(self.done_steps, self.generator)
        shared = torch.stack([figure.float() for figure in figures.values()])
        self.distributed.average([shared])
        value, *means = shared.tolist()
        if not math.isfinite(value):
            advice = "Lower the learning rate, or run the same command again to continue from the last checkpoint."
            problem = f"training of {self.task.name} diverged at step {self.done_steps}: the loss is {value}"
            raise RefusedError(problem, advice)
        return value, dict(zip(list(figures)[1:], means, strict=True))

    def save(self, path: Path) -> None:
        """Write a checkpoint; the file is replaced when the new one is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": self.settings.described(),
            "module": self.task.module.state_dict(),
            "memory": self.task.memory(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "progress": {"step": self.done_steps, "seconds": self.seconds, "losses": self.losses},
        }
        part = path.with_suffix(".part")
        torch.save(content, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; raises `RefusedError` when its settings differ."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        described, written = self.settings.described(), content["settings"]
        for key in {**described, **written}:
            now_is, was = (values.get(key, getattr(TrainSettings, key)) for values in (described, written))
            if was != now_is:
                problem = f"the checkpoint {path.name} was made with {key} = {was}, now it is {now_is}"
                raise RefusedError(problem, "Train with the same settings, or start again with --no-resume.")
        self.task.module.load_state_dict(content["module"])
        self.task.remember(content["memory"])
        self.optimiser.load_state_dict(content["optimiser"])
        self.generator.set_state(content["generator"])
        progress = content["progress"]
        self.done_steps, self.seconds = progress["step"], progress["seconds"]
        self.losses = [tuple(entry) for entry in progress["losses"]]
