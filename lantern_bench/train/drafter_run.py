"""One training of a drafter from start to end: sequences, features, the one loop, examinations, the exported folder.

All of a job is data; what it makes on the way (tokens, features, checkpoint) lies in its work folder and is not made
again. Command line and tables are `cli.train_drafter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.own_drafter import read_drafter, transformer_of
from lantern_bench.models.target import TransformerTarget
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.progress import OnProgress, unheard
from lantern_bench.train.drafter_evaluation import Accepted, Examination
from lantern_bench.train.drafter_files import write_drafter
from lantern_bench.train.drafter_job import DrafterJob, Examined, check_work, write_report
from lantern_bench.train.drafter_task import DrafterTask, build_drafter, drafter_like, loop_settings
from lantern_bench.train.examples import Examples, make_examples, split
from lantern_bench.train.lessons import Features, FeatureShards, Lessons, LiveFeatures, Sequenced, bytes_a_row
from lantern_bench.train.loop import TrainEvent, TrainReport, TrainSettings, train
from lantern_bench.train.training_log import TrainingLog
from lantern_bench.train.workers import ALONE, Workers

__all__ = ["train_drafter"]

_TEACHER_FORCED = 32


def train_drafter(
    job: DrafterJob,
    model: LoadedModel,
    on_event: Callable[[TrainEvent], None] = lambda _event: None,
    on_progress: OnProgress = unheard,
    workers: Workers = ALONE,
) -> tuple[TrainReport, list[Examined]]:
    """Train, write `job.out` and examine what was written beside the model's own drafter, where it has one.

    Raises `UserError` for a target without features or data that do not fit, `RefusedError` for a work folder of
    another training and a loss that diverges.
    """
    target = transformer_of(model)
    if job.recipe.batch % workers.count:
        raise UserError(f"--batch {job.recipe.batch}: must be a multiple of the {workers.count} processes")
    run = _Run(job, model, target, workers, on_progress)
    report = run.train(on_event)
    if not workers.first:
        return report, []
    write_drafter(run.drafter, job.out, job.target, model.weights)
    examined = run.final()
    write_report(job, report, examined)
    return report, examined


class _Run:
    """A job with all that is made for it."""

    def __init__(
        self,
        job: DrafterJob,
        model: LoadedModel,
        target: TransformerTarget,
        workers: Workers,
        on_progress: OnProgress,
    ) -> None:
        self.job, self.model, self.target, self.workers, self.on_progress = job, model, target, workers, on_progress
        self.drafter = _initial(job, model, target)
        check_work(job, model, workers)
        self.examples = self._examples()
        learnt, held_out = split(len(self.examples.tokens), job.recipe.held_out, job.seed)
        self.held_out = held_out.tolist()
        self.live = LiveFeatures(target, Sequenced(self.examples.tokens, self._condition))
        examined = self.held_out[:_TEACHER_FORCED]
        lessons = Lessons(
            self._features(),
            learnt.tolist(),
            job.recipe.batch,
            job.recipe.dropped,
            job.seed,
            lambda: self.live.examined(examined),
            workers,
            job.recipe.guided,
        )
        self.task = DrafterTask(self.drafter, lessons, job.recipe, job.decoding)
        self.settings = _settings(job, len(learnt))
        captions = list(dict.fromkeys(self.examples.caption(row) for row in self.held_out))
        prompts = list(job.prompts) or captions
        self.examination = Examination(model, prompts, job.decoding, job.seed)

    def train(self, on_event: Callable[[TrainEvent], None]) -> TrainReport:
        """The loop, with a row of the log for each event."""
        if self.job.compiled:
            self.target.transformer.compile()
            self.drafter.compile()
        log = TrainingLog(self.job.out / "log.csv", self.job.resume)

        def hear(event: TrainEvent) -> None:
            if not self.workers.first:
                return
            before = log.before(event.step)
            figures = self._examine(event.step, before[0])
            log.add(self._row(event, before) | figures)
            mal = figures.get("mal")
            on_event(replace(event, parts={**event.parts, **({} if mal is None else {"mal": mal})}))

        return train(self.task, self.settings, self.target.device, hear, self.workers)

    def final(self) -> list[Examined]:
        """The drafter as it was written, read again, and the model's own."""
        target = self.target
        drafters = {"trained": read_drafter(self.job.out, target, target.dtype, target.device)}
        if isinstance(self.model.drafter, EagleDrafter):
            drafters["the model's own"] = self.model.drafter
        with torch.compiler.set_stance("force_eager"):
            return [
                Examined(name, self.task.overlap(drafter), self._accepted(drafter, name))
                for name, drafter in drafters.items()
            ]

    def _examples(self) -> Examples:
        """Sequences, and the captions' features where a text encoder makes them; the first worker makes them all."""
        job, data = self.job, self.job.data
        captions = list(dict.fromkeys([*data.captions, *job.prompts]))
        sampling = {name: getattr(job.decoding, name) for name in _SAMPLING}
        made = None
        for first in (True, False):
            if self.workers.first == first:
                heard = self.on_progress if first else unheard
                for done, total in self.model.prepare(captions):
                    heard("encoding captions", done / total)
                made = make_examples(data, self.model, Decoding(mode="ar", **sampling), job.seed, job.work, heard)
            self.workers.wait()
        if made is None:
            raise RuntimeError("a worker made no examples")
        if int(made.tokens.shape[1]) != self.target.image_tokens:
            raise UserError(
                f"--data: the pictures have {made.tokens.shape[1]} tokens, and the target {self.target.image_tokens}"
            )
        return made

    def _condition(self, rows: Sequence[int]) -> Any:
        return self.model.condition([self.examples.caption(row) for row in rows])

    def _features(self) -> Features:
        job, target = self.job, self.target
        if job.features == "live":
            return self.live
        config, dtype = target.config, torch.bfloat16 if job.recipe.autocast else target.dtype
        key: dict[str, Any] = {"weights": dict(self.model.weights), "sequences": self.examples.sha256}
        key |= {"dropped": job.recipe.dropped, "seed": job.seed}
        draws = torch.Generator().manual_seed(job.seed)
        dropped = torch.rand(len(self.examples.tokens), generator=draws) < job.recipe.dropped
        if job.recipe.guided:
            key |= {"dropped": "both"}
            dropped = torch.arange(2 * len(dropped)) >= len(dropped)
        shards = FeatureShards(job.work, key, dtype, target.device)
        row = bytes_a_row(config.prefix, config.image_tokens, config.dim, dtype)
        if self.workers.first:
            shards.make(self.live, row, max(8, job.recipe.batch), dropped, job.recipe.autocast, self.on_progress)
        self.workers.wait()
        return FeatureShards(job.work, key, dtype, target.device)

    def _examine(self, step: int, before: int) -> dict[str, float | None]:
        """Held-out figures, where this event is the first behind a multiple of `examine_every`."""
        every = self.job.examine_every
        if not every or step // every == before // every:
            return {}
        with torch.compiler.set_stance("force_eager"):
            overlap = self.task.overlap(self.drafter)
            decoding = drafter_like(self.drafter, self.target.dtype, self.target.device).eval()
            images = self.job.examine_images
            mal = self.examination.accepted(decoding, images).mal if images else None
        return {"one_minus_tv": overlap, "mal": mal, "mal_images": images}

    def _accepted(self, drafter: EagleDrafter, name: str) -> Accepted | None:
        images = self.job.final_images
        what = f"decoding, drafter: {name}"
        return self.examination.accepted(drafter, images, what, self.on_progress) if images else None

    def _row(self, event: TrainEvent, before: tuple[int, float]) -> dict[str, float | None]:
        recipe, parts = self.job.recipe, event.parts
        sequences = recipe.batch * recipe.accumulate
        tokens = (event.step - before[0]) * sequences * self.target.image_tokens
        took = event.seconds - before[1]
        return {
            "step": event.step,
            "epoch": event.step * sequences / (len(self.examples.tokens) - len(self.held_out)),
            "seconds": event.seconds,
            "loss": event.loss,
            "feature_loss": parts["feature"],
            "soft_loss": parts["soft"],
            "train_one_minus_tv": parts["one_minus_tv"],
            "lr": event.lr,
            "tokens_per_s": tokens / took if took > 0 else None,
        }


_SAMPLING = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "cfg_default")


def _initial(job: DrafterJob, model: LoadedModel, target: TransformerTarget) -> EagleDrafter:
    """The drafter to begin with, float32, where the target is."""
    target.requires_grad_(False).eval()
    if job.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)  # noqa: TID251  # layers draw from the global stream; this fork of it is ours
            return build_drafter(target).to(target.device)
    given = model.drafter
    if isinstance(job.init, Path):
        given = read_drafter(job.init, target, torch.float32, target.device)
    if not isinstance(given, EagleDrafter):
        raise UserError(f"--init shipped: {model.name} has no drafter", "Type --init random, or give a folder.")
    return drafter_like(given, torch.float32, target.device)


def _settings(job: DrafterJob, learnt: int) -> TrainSettings:
    loop = loop_settings(job.recipe, learnt)
    return replace(
        loop,
        steps=loop.steps if job.minutes is None or job.recipe.steps is not None else None,
        minutes=job.minutes,
        seed=job.seed,
        log_every=job.log_every,
        checkpoint_every=job.checkpoint_every,
        checkpoint=job.work / "drafter.ckpt",
        resume=job.resume,
    )
