"""The training loop.

Optimiser, schedule, autocast, checkpoints, resuming, several processes, and progress events.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lantern_bench.devices.compute import has_bfloat16
from lantern_bench.training.recipe import TrainSettings
from lantern_bench.utils.clock import now
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.progress import Emit, ignore_events


@dataclass(frozen=True)
class Processes:
    """The processes that train together, seen from this one."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None  # None unless a launcher chose it

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the processes."""
        if self.count == 1:
            return
        for tensor in tensors:
            distributed.all_reduce(tensor)
            tensor.div_(self.count)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block in the first process, then in the others, which find the files it wrote."""
        if not self.first:
            distributed.barrier()
        yield
        if self.first and self.count > 1:
            distributed.barrier()


SINGLE = Processes()


def is_distributed() -> bool:
    """Return whether a launcher such as `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes(*, cpu: bool) -> Processes:
    """Join the processes of this launch; each takes its GPU, unless `cpu` or there is none."""
    if not is_distributed():
        return SINGLE
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available() and not cpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
        torch.cuda.set_device(device)
    # This module keeps the group that is joined when it is first imported, and the optimiser
    # imports it. The threads of a group that is kept outlive its destruction, and can end the
    # process with SIGABRT while the interpreter closes.
    importlib.import_module("torch.distributed.nn.functional")
    # The other processes wait while the first one samples, encodes and evaluates.
    distributed.init_process_group(backend, timeout=timedelta(hours=24))
    atexit.register(distributed.destroy_process_group)
    return Processes(distributed.get_rank(), distributed.get_world_size(), device)


class Task(ABC):
    """A module with its loss."""

    name: str  # for messages
    module: nn.Module

    @abstractmethod
    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of one batch and named figures to report, all scalars."""

    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: B027  # optional
        """Called after each optimiser step (to revive dead codes, for instance)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds beside weights, optimiser and generator."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  # optional
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class TrainEvent:
    """Progress of a training."""

    step: int
    fraction: float  # from 0 to 1
    seconds: float  # so far
    loss: float  # mean since the last event
    lr: float
    figures: Mapping[str, float]  # means since the last event


@dataclass
class TrainReport:
    """The course of a training, kept in its checkpoint and written beside the weights."""

    steps: int
    seconds: float
    settings: dict[str, Any]
    losses: list[tuple[int, float]]  # by step


def train(
    task: Task,
    settings: TrainSettings,
    device: torch.device,
    on_event: Emit = ignore_events,
    processes: Processes = SINGLE,
) -> TrainReport:
    """Train `task.module` in place.

    Args:
        task: The module and its loss.
        settings: Optimiser, schedule, end, and checkpoint to continue from.
        device: Where to train.
        on_event: Receives a `TrainEvent` every `log_every` steps.
        processes: The processes that train together.

    Raises:
        RefusedError: The checkpoint has other settings, or the loss is not finite.
    """
    run = _Run(task=task, settings=settings, device=device, processes=processes)
    report = run.report
    since = list[dict[str, float]]()
    done = run.fraction()
    while done < 1.0:
        start = now()
        rate = run.learning_rate(done)
        since.append(run.step(rate))
        report.seconds += now() - start
        done = run.fraction()
        if report.steps % settings.log_every == 0 or done >= 1.0:
            means = {name: fmean(figures[name] for figures in since) for name in since[0]}
            loss = means.pop("loss")
            report.losses.append((report.steps, loss))
            on_event(
                TrainEvent(
                    step=report.steps,
                    fraction=min(1.0, done),
                    seconds=report.seconds,
                    loss=loss,
                    lr=rate,
                    figures=means,
                )
            )
            since = []
        if report.steps % settings.checkpoint_every == 0:
            run.save()
    task.module.eval()
    return report


def read_checkpoint(settings: TrainSettings) -> dict[str, Any] | None:
    """Read the checkpoint that a training continues from, if there is one.

    Raises:
        RefusedError: The checkpoint was made with other settings.
    """
    path = settings.checkpoint
    if path is None or not settings.resume or not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    current = settings.described()
    # Checkpoints of earlier versions have no report, and are refused.
    recorded = content.get("report", {"settings": {}})["settings"]
    for key in {**current, **recorded}:
        if current.get(key) != recorded.get(key):
            raise RefusedError(
                f"the checkpoint {path.name} was made with {key} = {recorded.get(key)}, "
                f"now it is {current.get(key)}",
                "Train with the same settings, or start again with --no-resume.",
            )
    return content


@dataclass
class _Run:
    """The state of one training, from its checkpoint if there is one."""

    task: Task
    settings: TrainSettings
    device: torch.device
    processes: Processes

    def __post_init__(self) -> None:
        settings = self.settings
        module = self.task.module.to(self.device).train()
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self.trained if p.dim() >= 2],
                    "weight_decay": settings.weight_decay,
                },
                {"params": [p for p in self.trained if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            fused=self.device.type == "cuda",
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.report = TrainReport(steps=0, seconds=0.0, settings=settings.described(), losses=[])
        content = read_checkpoint(settings)
        if content is not None:
            module.load_state_dict(content["module"])
            self.task.load_state_dict(content["task"])
            self.optimiser.load_state_dict(content["optimiser"])
            self.generator.set_state(content["generator"])
            self.report = TrainReport(**content["report"])

    def fraction(self) -> float:
        """Return the fraction of the training that is done; 1 or more at the end."""
        by_steps = self.report.steps / (self.settings.steps or math.inf)
        by_time = self.report.seconds / (60.0 * (self.settings.minutes or math.inf))
        return max(by_steps, by_time)

    def learning_rate(self, done: float) -> float:
        """Return the learning rate of the next step, when a fraction `done` is done."""
        settings = self.settings
        decay = 1 - done
        if settings.schedule == "cosine":
            decay = 0.5 * (1 + math.cos(math.pi * done))
        warmup = min(1.0, (self.report.steps + 1) / max(1, settings.warmup or 0))
        return settings.lr * warmup * (settings.final_lr + (1 - settings.final_lr) * decay)

    def step(self, rate: float) -> dict[str, float]:
        """Make one step; return means of the loss and its figures over batches and processes."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        settings = self.settings
        autocast = settings.autocast and has_bfloat16(self.device)
        batches = []
        for _ in range(settings.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                loss, reported = self.task.loss(self.generator)
            (loss * (1 / settings.accumulate)).backward()
            figures = {"loss": loss, **reported}
            batches.append(torch.stack([figure.detach().float() for figure in figures.values()]))
        self.processes.average([p.grad for p in self.trained if p.grad is not None])
        if settings.clip_by == "norm":
            nn.utils.clip_grad_norm_(self.trained, settings.clip)
        else:
            nn.utils.clip_grad_value_(self.trained, settings.clip)
        self.optimiser.step()
        self.report.steps += 1
        self.task.after_step(self.report.steps, self.generator)
        values = torch.stack(batches).mean(dim=0)
        self.processes.average([values])
        means = dict(zip(figures, values.tolist(), strict=True))
        if not math.isfinite(means["loss"]):
            raise RefusedError(
                f"training of {self.task.name} diverged at step {self.report.steps}: "
                f"the loss is {means['loss']}",
                "Lower the learning rate, or run the same command again to continue from the last "
                "checkpoint.",
            )
        return means

    def save(self) -> None:
        """Write the checkpoint, if there is one to write by this process."""
        path = self.settings.checkpoint
        if path is None or not self.processes.first:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        incomplete = path.with_suffix(".part")
        torch.save(
            {
                "report": vars(self.report),
                "module": self.task.module.state_dict(),
                "task": self.task.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "generator": self.generator.get_state(),
            },
            incomplete,
        )
        os.replace(incomplete, path)
