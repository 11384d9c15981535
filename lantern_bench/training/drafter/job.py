"""What a training of a drafter would make, in numbers, before anything is made: sequences, bytes, steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.loop import decode
from lantern_bench.errors import RefusedError
from lantern_bench.models.eagle import EagleDrafter
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.random_model import blueprint
from lantern_bench.models.registry import Buildable, family_of, load_model
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.training.drafter.dataset import Data
from lantern_bench.training.drafter.features import SHARD_BYTES, bytes_a_row
from lantern_bench.training.drafter.recipe import DrafterRecipe, described
from lantern_bench.training.loop import TrainReport, Workers

# ---- How far a drafter carries while it is being trained: accepted lengths through the project's own decode loop


_AT_ONCE = 16


class Accepted(NamedTuple):
    """Of each image: tokens committed by steps, steps, and its prompt."""

    committed: list[float]
    steps: list[float]
    prompts: list[str]

    @property
    def mal(self) -> float:
        """Mean accepted length: sum over sum."""
        return sum(self.committed) / sum(self.steps)


@dataclass(frozen=True)
class Examination:
    """`prompts` in order and then again, decoded as `decoding` says (a mode `speculative`)."""

    model: LoadedModel
    prompts: Sequence[str]
    decoding: Decoding
    seed: int

    def accepted(
        self, drafter: EagleDrafter, images: int, what: str = "", on_progress: OnProgress = unheard
    ) -> Accepted:
        """Measure a drafter, which has the target's type, over so many images; `what` is said of the progress."""
        # An engine of its own: programs of another drafter must not be met.
        model = replace(self.model, drafter=drafter, engine=Engine())
        slots = [(self.prompts[n % len(self.prompts)], n // len(self.prompts)) for n in range(images)]
        found = Accepted([], [], [])
        for start in range(0, images, _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            seeds = [record_seed(self.seed, Prompt(text).id, repeat) for text, repeat in part]
            draws = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
            texts = [text for text, _ in part]
            for text, image in zip(texts, decode(model, model.condition(texts), self.decoding, draws), strict=True):
                found.committed.append(float(sum(image.trace.committed)))
                found.steps.append(float(len(image.trace.committed)))
                found.prompts.append(text)
            on_progress(what, (start + len(part)) / images)
        return found


# ---- A training of a drafter as data: what is asked for, what a work folder was begun with, what is reported at th

_ABOUT = "run.json"


@dataclass(frozen=True)
class DrafterJob:
    """What to train and how.

    `prompts` are for accepted lengths; without any the captions held out of the data are taken. `decoding` is how they
    are decoded: mode `speculative`, its tree, guidance and filters; self-distilled pictures are sampled with the same
    guidance and filters. `init`: random, shipped (the model's own drafter) or a folder. `examine_every` steps,
    `examine_images` are decoded, `final_images` at the end.
    """

    target: str
    data: Data
    recipe: DrafterRecipe
    decoding: Decoding
    out: Path
    work: Path
    prompts: Sequence[str] = ()
    init: Path | Literal["random", "shipped"] = "random"
    features: Literal["live", "shards"] = "live"
    seed: int = 0
    minutes: float | None = None
    examine_every: int = 500
    examine_images: int = 8
    final_images: int = 32
    log_every: int = 10
    checkpoint_every: int = 100
    resume: bool = True
    compiled: bool = False


@dataclass(frozen=True)
class Examined:
    """A drafter at the end: 1 - TV on held-out sequences, and accepted lengths; None where no image was decoded."""

    name: str
    one_minus_tv: float
    accepted: Accepted | None


def check_work(job: DrafterJob, model: LoadedModel, workers: Workers) -> None:
    """Refuse (`RefusedError`) to continue what was begun with other data, weights or settings; note what this is."""
    init = job.init if isinstance(job.init, str) else "folder"
    about = {
        "target weights": model.weights.get("target", ""),
        "data": job.data.sha256()[:16],
        "seed": job.seed,
        "init": init,
        "features": job.features,
    } | described(job.recipe)
    path = job.work / _ABOUT
    if job.resume and path.is_file() and (job.work / "drafter.ckpt").is_file():
        was = json.loads(path.read_text(encoding="utf-8"))
        for key, now_is in about.items():
            if was.get(key) != now_is:
                raise RefusedError(
                    f"{job.out}: was begun with {key} = {was.get(key)}, now it is {now_is}",
                    "Continue with the same, give another --out, or start anew with --no-resume.",
                )
    if workers.first:
        write_atomically(path, json.dumps(about, indent=1).encode() + b"\n")


def write_report(job: DrafterJob, report: TrainReport, examined: Sequence[Examined]) -> None:
    """Write `training_report.json`: recipe, decoding, course and the figures at the end."""
    found = {
        one.name: {
            "one_minus_tv": one.one_minus_tv,
            "mal": one.accepted.mal if one.accepted else None,
            "images": len(one.accepted.steps) if one.accepted else 0,
        }
        for one in examined
    }
    about = {
        "target": job.target if not job.target.endswith((".yaml", ".yml")) else Path(job.target).name,
        "init": job.init if isinstance(job.init, str) else "folder",
        "sequences": len(job.data),
        "recipe": described(job.recipe),
        "decoding": job.decoding.model_dump(mode="json"),
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "settings": report.settings,
        "drafters": found,
    }
    write_atomically(job.out / "training_report.json", json.dumps(about, indent=1).encode() + b"\n")


# ----


def shape_of(model: str) -> TransformerConfig | None:
    """The target's sizes: of a published model without its files, else from them; None for no transformer.

    Raises as `load_model` where a model's own files are needed and missing.
    """
    if isinstance(family_of(model), Buildable):
        target = blueprint(model)[2].target
    else:
        target = load_model(model, torch.device("cpu"), torch.float32).target  # type: ignore[assignment]
    return target.config if isinstance(target, TransformerTarget) else None


def plan_rows(job: DrafterJob, config: TransformerConfig, dtype: torch.dtype) -> list[tuple[str, str]]:
    """What would be made, and how much of it."""
    recipe, total = job.recipe, len(job.data)
    held_out = min(total - 1, max(1, round(recipe.held_out * total)))
    learnt = total - held_out
    steps = recipe.total_steps(learnt)
    stored = torch.bfloat16 if recipe.autocast else dtype
    row = bytes_a_row(config.prefix, config.image_tokens, config.dim, stored)
    rows = total * (1 + recipe.guided)
    shards = math.ceil(rows / max(1, SHARD_BYTES // row))
    kind = "pictures encoded" if job.data.pictures is not None else "pictures sampled by the target"
    where = "written" if job.features == "shards" else "not written: features are made as they are needed"
    weights = 4 * _parameters(config)
    examined = steps // job.examine_every if job.examine_every else 0
    until = f"{steps:,}" if job.minutes is None else f"as many as {job.minutes:g} minutes allow"
    return [
        (kind, f"{total:,}" + (" with mirror images" if job.data.mirrored else "")),
        ("tokens", f"{total * config.image_tokens:,} ({config.image_tokens:,} a picture)"),
        ("held out", f"{held_out:,} of {total:,}"),
        ("token files", _bytes(4 * total * config.image_tokens)),
        ("feature shards", f"{_bytes(rows * row)} in {shards} files of {str(stored)[6:]}, {where}"),
        ("steps", f"{until} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", f"{steps / recipe.steps_an_epoch(learnt):.3g}" if job.minutes is None else "as many"),
        ("examinations", f"{examined} of {job.examine_images} images, one of {job.final_images} at the end"),
        ("checkpoint", _bytes(3 * weights)),
        ("exported drafter", _bytes(weights)),
    ]


def _parameters(config: TransformerConfig) -> int:
    """Numbers of a drafter: embedding, fusion, one layer."""
    kv = (config.kv_heads or config.heads) * config.head_dim
    layer = 2 * config.dim * config.dim + 2 * config.dim * kv + 3 * config.dim * config.ffn_dim + config.dim
    return (config.words or config.vocab_size) * config.dim + 2 * config.dim * config.dim + config.dim + layer


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
