"""A training of a drafter as data: its inputs, read and checked before a model is loaded, and its plan in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.errors import UserError
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.model import Model
from lantern_bench.models.registry import model_of
from lantern_bench.models.target import TransformerTarget
from lantern_bench.prompts import load_prompts, read_captioned
from lantern_bench.training.drafter.data import Data, held_out_count
from lantern_bench.training.drafter.recipe import DrafterFlags, DrafterRecipe, recipe_of
from lantern_bench.training.settings import Optimisation, TrainSettings, flag_of


@dataclass(frozen=True)
class DrafterJob:
    """What to train and how."""

    flags: DrafterFlags
    data: Data
    recipe: DrafterRecipe
    # Mode `speculative` with its tree, guidance and filters measures accepted lengths; where the target samples the
    # images, it uses the same guidance and filters.
    decoding: Decoding
    prompts: Sequence[str]  # of the measurement; empty: the held-out captions
    out: Path
    work: Path
    init: str | Path  # `random`, `shipped` (the model's own drafter) or a folder

    @property
    def init_name(self) -> str:
        """`init` for reports, without paths."""
        return self.init if isinstance(self.init, str) else "folder"

    @property
    def sequences(self) -> int:
        """The number of training sequences."""
        return len(self.data) - held_out_count(len(self.data), self.recipe.held_out)

    def settings(self, model: LoadedModel) -> TrainSettings:
        """Return the settings of the loop."""
        flags, recipe = self.flags, self.recipe
        settings: dict[str, Any] = flags.model_dump(
            include={"minutes", "seed", "log_every", "checkpoint_every", "resume"}
        )
        if flags.minutes is not None and recipe.steps is None:
            settings["steps"] = None
        settings["checkpoint"] = self.work / "drafter.ckpt"
        weights = {"target weights": model.weights.get("target", ""), "data": self.data.sha256()[:16]}
        losses = recipe.model_dump(mode="json", exclude=set(Optimisation.model_fields))
        settings["depends_on"] = {**weights, "init": self.init_name, **losses}
        return recipe.train_settings(self.sequences, **settings)


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
    values = flags.model_dump(include={"cfg_scale", "temperature", "top_k", "tree"})
    guidance = model.defaults.get("cfg_scale", 1.0)
    try:
        decoding = Decoding("speculative", cfg_default=guidance, model_defaults=model.defaults, **values)
    except ParameterError as error:
        raise UserError(f"{flag_of(error.key or 'tree')} {values[error.key or 'tree']}: {error.text}") from error
    prompts = [] if flags.eval_prompts is None else _prompts(flags.eval_prompts, "--eval-prompts", model)
    out = flags.out or drafters / Path(model.name).stem
    init = flags.init if flags.init in ("random", "shipped") else Path(flags.init)
    if isinstance(init, Path) and not init.is_dir():
        raise UserError(f"--init {init}: no such folder", "Use random or shipped, or give a drafter's folder.")
    return DrafterJob(flags, data, recipe, decoding, prompts, out, flags.work or out / "work", init)


def _data(flags: DrafterFlags, model: Model) -> Data:
    """Read `--data`: a folder holds pictures with captions, anything else names captions."""
    source, images = flags.data, flags.images
    if Path(source).is_dir():
        pictures = read_captioned(Path(source), flags.captions, model)
        if images is not None and images > len(pictures):
            raise UserError(f"--images {images}: --data {source} holds {len(pictures)} pictures")
        pictures = pictures[:images]
        data = Data([item.caption for item in pictures], [item.path for item in pictures], flags.mirror)
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
    """Return the prompts of a set or a file; errors name `flag`."""
    try:
        return [prompt.text for prompt in load_prompts(source, model)]
    except UserError as error:
        advice = error.advice
        if flag == "--data" and "no such file" in error.message:
            advice = f"{advice or ''} Or a folder of pictures with captions.".strip()
        raise UserError(error.message.replace("--prompts", flag), advice) from error


def plan_rows(job: DrafterJob) -> list[tuple[str, str]]:
    """Return what the training would make, and how much of it; a published target's files are not needed.

    Raises `UserError` for a target that is not a transformer, and as `Model.load` where its own files are missing.
    """
    flags, recipe, total = job.flags, job.recipe, len(job.data)
    model = model_of(flags.target)
    target = (model.with_random_weights() or model.load(torch.device("cpu"), torch.float32)).target
    if not isinstance(target, TransformerTarget):
        raise UserError(f"--target {flags.target}: has no features to learn from", "Use a model that is a transformer.")
    steps, image_tokens = recipe.total_steps(job.sequences), target.config.image_tokens
    label = "pictures encoded" if job.data.pictures is not None else "pictures sampled by the target"
    evaluations = steps // flags.eval_every if flags.eval_every else 0
    timed = flags.minutes is not None
    count = f"as many as {flags.minutes:g} minutes allow" if timed else f"{steps:,}"
    epochs = "as many as the minutes allow" if timed else f"{steps / recipe.steps_per_epoch(job.sequences):.3g}"
    return [
        (label, f"{total:,}" + (" with mirror images" if job.data.mirrored else "")),
        ("tokens", f"{total * image_tokens:,} ({image_tokens:,} a picture)"),
        ("held out", f"{total - job.sequences:,} of {total:,}"),
        ("steps", f"{count} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", epochs),
        ("evaluations", f"{evaluations} of {flags.eval_images} images, one of {flags.final_images} at the end"),
    ]
