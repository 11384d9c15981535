"""The training loop: optimiser, schedule, autocast, checkpoints, resume, several processes, progress events."""

from __future__ import annotations

import atexit
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lantern_bench.devices.compute import has_bfloat16
from lantern_bench.training.recipe import TrainSettings
from lantern_bench.utils.clock import now
from lantern_bench.utils.errors import RefusedError


@dataclass(frozen=True)
class Processes:
    """This process, number `rank` of the `count` that train together."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None  # None unless a launcher chose it

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the processes."""
        for tensor in tensors if self.count > 1 else ():
            distributed.all_reduce(tensor)
            tensor /= self.count

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block in the first process, then in the others, which find its files."""
        if not self.first:
            distributed.barrier()
        yield
        if self.first and self.count > 1:
            distributed.barrier()


SINGLE = Processes()


def is_distributed() -> bool:
    """Whether a launcher (`torchrun`) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes(cpu: bool = False) -> Processes:
    """Join the processes of this launch; each takes the GPU of its number, if there is one and not `cpu`."""
    if not is_distributed():
        return SINGLE
    rank, count, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    on_gpu = torch.cuda.is_available() and not cpu
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # The other processes wait while the first one samples, encodes and evaluates.
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(hours=24))
    atexit.register(distributed.destroy_process_group)
    return Processes(rank, count, device)


class Task(ABC):
    """What is trained: a module with its loss."""

    name: str  # for messages
    module: nn.Module

    @abstractmethod
    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of one batch and named figures to report (detached scalars)."""

    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: B027  # optional
        """Called after each optimiser step (to revive dead codes, for instance)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint has beside weights, optimiser and generator."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  # optional
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class TrainEvent:
    """Progress of a training."""

    step: int
    fraction: float  # from 0 to 1
    seconds: float  # so far
    loss: float  # mean since the last event, as the figures
    lr: float
    figures: Mapping[str, float]


OnEvent = Callable[[TrainEvent], None]


@dataclass(frozen=True)
class TrainReport:
    """What is written beside the weights."""

    steps: int
    seconds: float
    settings: dict[str, Any]
    losses: list[tuple[int, float]]  # by step


def train(
    task: Task,
    settings: TrainSettings,
    device: torch.device,
    on_event: OnEvent = lambda _event: None,
    processes: Processes = SINGLE,
) -> TrainReport:
    """Train `task.module` in place; raises `RefusedError` for a checkpoint of other settings and an infinite loss."""
    run = _Run(task=task, settings=settings, device=device, processes=processes)
    since = list[dict[str, float]]()
    while (done := run.fraction()) < 1.0:
        start = now()
        rate = run.learning_rate(done)
        since.append(run.step(rate))
        run.seconds += now() - start
        fraction = min(1.0, run.fraction())
        if run.steps % settings.log_every == 0 or fraction == 1.0:
            means = {
                name: sum(figures[name] for figures in since) / len(since) for name in since[0]
            }
            loss = means.pop("loss")
            run.losses.append((run.steps, loss))
            on_event(
                TrainEvent(
                    step=run.steps,
                    fraction=fraction,
                    seconds=run.seconds,
                    loss=loss,
                    lr=rate,
                    figures=means,
                )
            )
            since = []
        if (
            settings.checkpoint is not None
            and run.steps % settings.checkpoint_every == 0
            and processes.first
        ):
            run.save(settings.checkpoint)
    task.module.eval()
    return TrainReport(
        steps=run.steps, seconds=run.seconds, settings=settings.described(), losses=run.losses
    )


def read_checkpoint(settings: TrainSettings) -> dict[str, Any] | None:
    """Read the checkpoint that a training continues from; raises `RefusedError` for one of other settings."""
    path = settings.checkpoint
    if path is None or not settings.resume or not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    current = settings.described()
    recorded = content["settings"]
    for key in {**current, **recorded}:
        if current.get(key) != recorded.get(key):
            text = f"was made with {key} = {recorded.get(key)}, now it is {current.get(key)}"
            advice = "Train with the same settings, or start again with --no-resume."
            raise RefusedError(f"the checkpoint {path.name} {text}", advice)
    return content


class _Run:
    """The state of one training, from its checkpoint if there is one."""

    def __init__(
        self, task: Task, settings: TrainSettings, device: torch.device, processes: Processes
    ) -> None:
        self.task = task
        self.settings = settings
        self.device = device
        self.processes = processes
        module = task.module.to(device).train()
        self.trained = [p for p in module.parameters() if p.requires_grad]
        decayed = {
            "params": [p for p in self.trained if p.dim() >= 2],
            "weight_decay": settings.weight_decay,
        }
        others = {"params": [p for p in self.trained if p.dim() < 2], "weight_decay": 0.0}
        fused = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            [decayed, others], lr=settings.lr, betas=settings.betas, fused=fused
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.autocast = settings.autocast and has_bfloat16(device)
        self.steps = 0
        self.seconds = 0.0
        self.losses = list[tuple[int, float]]()
        content = read_checkpoint(settings)
        if content is not None:
            module.load_state_dict(content["module"])
            task.load_state_dict(content["task"])
            self.optimiser.load_state_dict(content["optimiser"])
            self.generator.set_state(content["generator"])
            self.steps = content["progress"]["step"]
            self.seconds = content["progress"]["seconds"]
            self.losses = [tuple(entry) for entry in content["progress"]["losses"]]

    def fraction(self) -> float:
        """Return the share of the training that is done; 1 or more at the end."""
        by_steps = self.steps / self.settings.steps if self.settings.steps else 0.0
        by_time = self.seconds / (60.0 * self.settings.minutes) if self.settings.minutes else 0.0
        return max(by_steps, by_time)

    def learning_rate(self, done: float) -> float:
        """Return the learning rate of the next step, when the share `done` of the training is done."""
        settings = self.settings
        decay = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
        warmup = min(1.0, (self.steps + 1) / max(1, settings.warmup or 0))
        return settings.lr * warmup * (settings.final_lr + (1 - settings.final_lr) * decay)

    def step(self, rate: float) -> dict[str, float]:
        """Make one step; return the loss and its figures, means over its batches and processes."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        share = 1 / self.settings.accumulate
        figures = dict[str, Tensor]()
        for _ in range(self.settings.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss, reported = self.task.loss(self.generator)
            (loss * share).backward()
            for name, figure in {"loss": loss.detach(), **reported}.items():
                figures[name] = figures.get(name, torch.zeros_like(figure)) + figure * share
        self.processes.average([p.grad for p in self.trained if p.grad is not None])
        by_norm = self.settings.clip_by == "norm"
        clip: Callable[..., Any] = (
            nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        )
        clip(self.trained, self.settings.clip)
        self.optimiser.step()
        self.steps += 1
        self.task.after_step(self.steps, self.generator)
        values = torch.stack([figure.float() for figure in figures.values()])
        self.processes.average([values])
        means = dict(zip(figures, values.tolist(), strict=True))
        if not math.isfinite(means["loss"]):
            advice = "Lower the learning rate, or run the same command again to continue from the last checkpoint."
            problem = f"training of {self.task.name} diverged at step {self.steps}: the loss is {means['loss']}"
            raise RefusedError(problem, advice)
        return means

    def save(self, path: Path) -> None:
        """Write a checkpoint; the file is replaced when the new one is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": self.settings.described(),
            "module": self.task.module.state_dict(),
            "task": self.task.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "progress": {"step": self.steps, "seconds": self.seconds, "losses": self.losses},
        }
        incomplete = path.with_suffix(".part")
        torch.save(content, incomplete)
        os.replace(incomplete, path)
