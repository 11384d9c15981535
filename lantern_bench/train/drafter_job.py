"""A training of a drafter as data: what is asked for, what a work folder was begun with, what is reported at the end.

How it is done is `drafter_run`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lantern_bench.errors import RefusedError
from lantern_bench.models.files import write_atomically
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.train.drafter_evaluation import Accepted
from lantern_bench.train.drafter_recipe import DrafterRecipe, described
from lantern_bench.train.examples import Data
from lantern_bench.train.loop import TrainReport
from lantern_bench.train.workers import Workers

__all__ = ["DrafterJob", "Examined", "check_work", "write_report"]

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
