"""One training of a drafter from start to end: sequences, features, the one loop, examinations, the exported folder.

All of a job is data; what it makes on the way (tokens, features, checkpoint) lies in its work folder and is not made
again. Command line and tables are `cli.train_drafter`.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save

from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.eagle import EagleDrafter, drafter_key_map, fresh_drafter, load_drafter
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.io.state_dict import export
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.training.drafter.dataset import Examples, make_examples, split
from lantern_bench.training.drafter.features import (
    Features,
    FeatureShards,
    Lessons,
    LiveFeatures,
    Sequenced,
    bytes_a_row,
)
from lantern_bench.training.drafter.job import Accepted, DrafterJob, Examination, Examined, check_work, write_report
from lantern_bench.training.drafter.task import DrafterTask, drafter_like, loop_settings
from lantern_bench.training.loop import ALONE, TrainEvent, TrainReport, TrainSettings, Workers, train

# ---- Writing a trained drafter, in the layout the published ones have: `config.json` and `model.safetensors`


# The published code's name for each grid of LlamaGen; the number of condition positions tells t2i from c2i.
_INPUT_TYPES = {((16, 16), 120): "t2i", ((32, 32), 120): "t2i2", ((24, 24), 1): "c2i"}


def write_drafter(drafter: EagleDrafter, folder: Path, target: str, weights: Mapping[str, str]) -> None:
    """Write a drafter, and the model file for it; `target` is the model's name or its file's path.

    `weights` are the hashes of the model it was trained for. Each file is there as a whole or not at all.
    """
    state = {name: tensor.float() for name, tensor in export(drafter, drafter_key_map(drafter)).items()}
    write_atomically(folder / "model.safetensors", save(state, metadata={"format": "pt"}))
    config = json.dumps(_config(drafter) | {"trained_for": weights.get("target", "")}, indent=1)
    write_atomically(folder / "config.json", config.encode() + b"\n")
    name = os.path.relpath(target, folder) if target.lower().endswith((".yaml", ".yml")) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_atomically(folder / "model.yaml", model.encode())


def _config(drafter: EagleDrafter) -> dict[str, Any]:
    """The config.json: the keys that the published code and ours read, and how padding is treated."""
    config = drafter.config
    shared = {
        "num_hidden_layers": 1,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.words or config.vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if config.qk_norm:
        return {"model_type": "chameleon", **shared, "rope_theta": config.rope_base, "swin_norm": config.norm_after}
    kind = _INPUT_TYPES.get((config.grid, config.prefix))
    told = {} if kind is None else {"input_type": kind}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shared, **told} | {
        "mask_padding": drafter.mask_padding
    }


# ---- The course of a training as a CSV, a row every few steps; figures that were not measured there are empty


COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "feature_loss",
    "soft_loss",
    "train_one_minus_tv",
    "lr",
    "tokens_per_s",
    "one_minus_tv",
    "mal",
    "mal_images",
)


class TrainingLog:
    """The log in a file; with `resume` the rows that are there are kept."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        rows = self._read() if resume and path.is_file() else []
        self.last = _place(rows)
        """Step and seconds of the last row; zeros without one."""
        self._begun = bool(rows)

    def before(self, step: int) -> tuple[int, float]:
        """Step and seconds of the last row before `step`; zeros without one."""
        return self.last if self.last[0] < step else _place(self._rows_before(step))

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row; rows of its step and behind it are of a training that was cut off, and go."""
        step = int(row["step"] or 0)
        line = {name: _number(row.get(name)) for name in COLUMNS}
        if self._begun and self.last[0] < step:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(line)
        else:
            out = io.StringIO()
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*(self._rows_before(step) if self._begun else []), line])
            write_atomically(self._path, out.getvalue().encode())
            self._begun = True
        self.last = _place([line])

    def _rows_before(self, step: int) -> list[dict[str, str]]:
        return [row for row in self._read() if int(row["step"]) < step]

    def _read(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise RefusedError(
                    f"{self._path}: is no log of a training", "Move it away, or give another folder (--out)."
                )
            # A line that was cut off while it was written lacks its last fields.
            return [row for row in reader if None not in row.values() and row["step"].isdigit()]


def _place(rows: Sequence[Mapping[str, str]]) -> tuple[int, float]:
    return (int(rows[-1]["step"]), float(rows[-1]["seconds"])) if rows else (0, 0.0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


# ----

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
        drafters = {"trained": load_drafter(self.job.out, target, dtype=target.dtype, device=target.device)}
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
            return fresh_drafter(target).to(target.device)
    given = model.drafter
    if isinstance(job.init, Path):
        given = load_drafter(job.init, target, dtype=torch.float32, device=target.device)
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
