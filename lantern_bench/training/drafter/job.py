"""A training of a drafter as data: its inputs, read and checked before a model is loaded, and its plan in numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.values import Place, Problems, read_parameter
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.eagle import untrained_drafter
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.model import Model
from lantern_bench.models.registry import model_of
from lantern_bench.models.target import TransformerTarget
from lantern_bench.prompts import load_prompts, read_captioned
from lantern_bench.training.drafter.dataset import Data, held_out_count
from lantern_bench.training.drafter.features import SHARD_BYTES, bytes_per_row
from lantern_bench.training.drafter.recipe import DrafterFlags, DrafterRecipe, flag_of, recipe_of
from lantern_bench.training.loop import Distributed


@dataclass(frozen=True)
class DrafterJob:
    """What to train and how.

    `decoding` (mode `speculative`, with its tree, guidance and filters) measures accepted lengths on `prompts`, or
    without any on the held-out captions; where the target samples the images, it uses the same guidance and filters.
    `init`: `random`, `shipped` (the model's own drafter) or a folder.
    """

    flags: DrafterFlags
    data: Data
    recipe: DrafterRecipe
    decoding: Decoding
    prompts: Sequence[str]
    out: Path
    work: Path
    init: str | Path

    @property
    def init_name(self) -> str:
        """`init` for reports, without paths."""
        return self.init if isinstance(self.init, str) else "folder"


def make_job(flags: DrafterFlags, drafters: Path) -> DrafterJob:
    """Read and check what the flags name; the default of `--out` is a folder in `drafters`.

    Raises `UserError` that names the flag, its value and what is allowed.
    """
    recipe = recipe_of(flags)
    try:
        model = model_of(flags.target)
    except UserError as error:
        raise UserError(error.message.replace("--model", "--target"), error.advice) from error
    data = _data(flags, model)
    # Lossless speculative decoding with a static tree; guidance and filters default to the model's.
    problems, read, defaults = Problems("train drafter"), dict[str, Any](), dict(model.defaults)
    for key in ("cfg_scale", "temperature", "top_k", "tree"):
        value = getattr(flags, key) if getattr(flags, key) is not None else defaults.get(key)
        if value is not None:
            for given in read_parameter(key, value, Place(flag_of(key)), problems):
                read["topology" if isinstance(given.value, tuple) else key] = given.value
    problems.raise_all()
    guidance = defaults.get("cfg_scale", 1.0)
    decoding = Decoding(mode="speculative", drafting="static", rule="strict", cfg_default=guidance, **read)
    prompts = [] if flags.eval_prompts is None else _prompts(flags.eval_prompts, "--eval-prompts", model)
    out = flags.out or drafters / Path(model.name).stem
    init = flags.init if flags.init in ("random", "shipped") else Path(flags.init)
    if isinstance(init, Path) and not init.is_dir():
        raise UserError(f"--init {init}: no such folder", "Use random or shipped, or give a drafter's folder.")
    return DrafterJob(flags, data, recipe, decoding, prompts, out, flags.work or out / "work", init)


def _data(flags: DrafterFlags, model: Model) -> Data:
    """A folder holds pictures with captions; any other `--data` names captions."""
    source, images = flags.data, flags.images
    if Path(source).is_dir():
        found = read_captioned(Path(source), flags.captions, model)
        if images is not None and images > len(found):
            raise UserError(f"--images {images}: --data {source} holds {len(found)} pictures")
        found = found[:images]
        data = Data([item.caption for item in found], [item.path for item in found], flags.mirror)
    else:
        if flags.captions is not None or flags.mirror:
            flag = "--mirror" if flags.captions is None else "--captions"
            raise UserError(f"{flag}: needs pictures, and --data {source} is not a folder", "Leave it out.")
        texts = _prompts(source, "--data", model)
        data = Data([texts[number % len(texts)] for number in range(images or len(texts))])
    if len(data) < 2:
        raise UserError(f"--data {source}: one picture is too few", "Give at least two; some are held out.")
    return data


def _prompts(source: str, flag: str, model: Model) -> list[str]:
    """The prompts of a set or a file; errors name `flag`."""
    try:
        return [prompt.text for prompt in load_prompts(source, model)]
    except UserError as error:
        advice = error.advice
        if flag == "--data" and "no such file" in error.message:
            advice = f"{advice or ''} Or a folder of pictures with captions.".strip()
        raise UserError(error.message.replace("--prompts", flag), advice) from error


def check_work(job: DrafterJob, model: LoadedModel, distributed: Distributed) -> None:
    """Write what a work folder is for; raises `RefusedError` where it was started with other data or settings."""
    about = {
        "target weights": model.weights.get("target", ""),
        "data": job.data.sha256()[:16],
        "seed": job.flags.seed,
        "init": job.init_name,
        "features": job.flags.features,
    } | job.recipe.model_dump(mode="json")
    path = job.work / "run.json"
    if job.flags.resume and path.is_file() and (job.work / "drafter.ckpt").is_file():
        was = json.loads(path.read_text(encoding="utf-8"))
        for key, value in about.items():
            if was.get(key) != value:
                advice = "Continue with the same, give another --out, or start again with --no-resume."
                raise RefusedError(f"{job.out}: was started with {key} = {was.get(key)}, now it is {value}", advice)
    if distributed.first:
        write_atomically(path, json.dumps(about, indent=1).encode() + b"\n")


def plan_rows(job: DrafterJob, dtype: torch.dtype) -> list[tuple[str, str]]:
    """What the training would make, and how much of it; a published target's files are not needed.

    Raises `UserError` for a target that is not a transformer, and as `Model.load` where its own files are missing.
    """
    flags, recipe, total = job.flags, job.recipe, len(job.data)
    model = model_of(flags.target)
    target = (model.with_random_weights() or model.load(torch.device("cpu"), torch.float32)).target
    if not isinstance(target, TransformerTarget):
        raise UserError(f"--target {flags.target}: has no features to learn from", "Use a model that is a transformer.")
    config, held_out = target.config, held_out_count(total, recipe.held_out)
    steps = recipe.total_steps(total - held_out)
    stored = torch.bfloat16 if recipe.autocast else dtype
    row, rows = bytes_per_row(config, stored), total * (1 + recipe.guided)
    shards = math.ceil(rows / max(1, SHARD_BYTES // row))
    kind = "pictures encoded" if job.data.pictures is not None else "pictures sampled by the target"
    where = "written" if flags.features == "shards" else "not written: features are computed at each step"
    with torch.device("meta"):
        weights = sum(parameter.numel() * 4 for parameter in untrained_drafter(target).parameters())
    evaluations = steps // flags.eval_every if flags.eval_every else 0
    timed = flags.minutes is not None
    count = f"as many as {flags.minutes:g} minutes allow" if timed else f"{steps:,}"
    epochs = "as many as the minutes allow" if timed else f"{steps / recipe.steps_per_epoch(total - held_out):.3g}"
    return [
        (kind, f"{total:,}" + (" with mirror images" if job.data.mirrored else "")),
        ("tokens", f"{total * config.image_tokens:,} ({config.image_tokens:,} a picture)"),
        ("held out", f"{held_out:,} of {total:,}"),
        ("token files", _bytes(4 * total * config.image_tokens)),
        ("feature shards", f"{_bytes(rows * row)} in {shards} files of {str(stored)[6:]}, {where}"),
        ("steps", f"{count} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", epochs),
        ("evaluations", f"{evaluations} of {flags.eval_images} images, one of {flags.final_images} at the end"),
        ("checkpoint", _bytes(3 * weights)),
        ("exported drafter", _bytes(weights)),
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
