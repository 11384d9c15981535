"""The job of `train drafter`: flags and data, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.model import Model
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt_files import read_captioned
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.training.recipe import (
    DrafterFlags,
    DrafterRecipe,
    Optimisation,
    TrainSettings,
    flag_of,
    recipe_of,
)
from lantern_bench.training.token_data import Data
from lantern_bench.utils.errors import UserError


@dataclass(frozen=True)
class DrafterJob:
    """What to train and how."""

    flags: DrafterFlags
    data: Data
    recipe: DrafterRecipe
    # Mode `speculative` with tree, guidance and filters measures accepted lengths. Samples of the
    # target have the same guidance and filters.
    decoding: Decoding
    prompts: Sequence[str]  # of the evaluation; empty: the held-out captions
    out: Path
    work: Path

    @property
    def init_name(self) -> str:
        """Where the drafter starts from, without paths: `random`, `shipped` or `folder`."""
        return self.flags.init if self.flags.init in ("random", "shipped") else "folder"

    @property
    def held_out(self) -> int:
        """The number of sequences that are held out: at least one, never all."""
        count = len(self.data.captions)
        wanted = round(self.recipe.held_out * count)
        return min(count - 1, max(1, wanted))

    @property
    def sequences(self) -> int:
        """The number of training sequences."""
        return len(self.data.captions) - self.held_out

    def settings(self, model: LoadedModel) -> TrainSettings:
        """Return the settings of the training loop for the loaded target."""
        own = self.recipe.model_dump(mode="json", exclude=set(Optimisation.model_fields))
        depends_on = {
            "target weights": model.weights.get("target", ""),
            "data": self.data.sha256()[:16],
            "init": self.init_name,
            **own,
        }
        settings = self.flags.model_dump(include={"minutes", "seed", "resume"})
        if self.flags.minutes is not None and self.recipe.steps is None:
            settings["steps"] = None
        return self.recipe.train_settings(
            self.sequences,
            checkpoint=self.work / "drafter.ckpt",
            depends_on=depends_on,
            **settings,
        )


def make_job(flags: DrafterFlags, drafters: Path) -> DrafterJob:
    """Read and check what the flags name; the default of `--out` is a folder in `drafters`.

    Raises:
        UserError: A flag, the recipe or the data cannot be used.
    """
    recipe = recipe_of(flags)
    try:
        model = model_of(flags.target)
    except UserError as error:
        raise UserError(error.message.replace("--model", "--target"), error.advice) from error

    # Lossless speculative decoding with a static tree, and the model's guidance and filters.
    values = flags.model_dump(include={"cfg_scale", "temperature", "top_k", "tree"})
    guidance = model.defaults.get("cfg_scale", 1.0)
    try:
        decoding = Decoding(
            "speculative", cfg_default=guidance, model_defaults=model.defaults, **values
        )
    except ParameterError as error:
        key = error.key or "tree"
        raise UserError(f"{flag_of(key)} {values[key]}: {error.text}") from error

    prompts: list[str] = []
    if flags.eval_prompts is not None:
        prompts = _prompts(flags.eval_prompts, "--eval-prompts", model)
    data = _data(flags, model)
    out = flags.out or drafters / Path(model.name).stem
    job = DrafterJob(
        flags=flags,
        data=data,
        recipe=recipe,
        decoding=decoding,
        prompts=prompts,
        out=out,
        work=flags.work or out / "work",
    )
    if job.init_name == "folder" and not Path(flags.init).is_dir():
        raise UserError(
            f"--init {flags.init}: no such folder",
            "Use random or shipped, or give a drafter's folder.",
        )
    return job


def _data(flags: DrafterFlags, model: Model) -> Data:
    """Read `--data`: a folder holds pictures with captions, anything else names captions."""
    source = flags.data
    if Path(source).is_dir():
        data = _pictures(flags, model)
    elif flags.captions is not None or flags.mirror:
        flag = "--mirror" if flags.captions is None else "--captions"
        raise UserError(
            f"{flag}: needs pictures, and --data {source} is not a folder", "Leave it out."
        )
    else:
        texts = _prompts(source, "--data", model)
        count = flags.images or len(texts)
        data = Data([texts[number % len(texts)] for number in range(count)])
    if len(data.captions) < 2:
        raise UserError(
            f"--data {source}: one picture is too few", "Give at least two; some are held out."
        )
    return data


def _pictures(flags: DrafterFlags, model: Model) -> Data:
    """Read a folder of pictures with captions, followed by their mirror images with `--mirror`."""
    items = read_captioned(Path(flags.data), flags.captions, model)
    if flags.images is not None and flags.images > len(items):
        raise UserError(f"--images {flags.images}: --data {flags.data} holds {len(items)} pictures")
    captions: list[str] = []
    pictures: list[tuple[Path, bool]] = []
    for mirrored in (False, True) if flags.mirror else (False,):
        for item in items[: flags.images]:
            captions.append(item.caption)
            pictures.append((item.path, mirrored))
    return Data(captions, pictures)


def _prompts(source: str, flag: str, model: Model) -> list[str]:
    try:
        return [prompt.text for prompt in load_prompts(source, model)]
    except UserError as error:
        raise UserError(error.message.replace("--prompts", flag), error.advice) from error


def plan_rows(job: DrafterJob) -> list[tuple[str, str]]:
    """Return what the training would make, and how much of it."""
    flags = job.flags
    recipe = job.recipe
    model = model_of(flags.target)
    empty = model.with_random_weights() or model.load(torch.device("cpu"), torch.float32)
    image_tokens = transformer_of(empty).config.image_tokens

    total = len(job.data.captions)
    mirror = " with mirror images" if flags.mirror else ""
    source = "encoded" if job.data.pictures is not None else "sampled by the target"
    steps = recipe.total_steps(job.sequences)
    evaluations = steps // flags.eval_every if flags.eval_every else 0
    count = f"{steps:,}"
    epochs = f"{steps / recipe.steps_per_epoch(job.sequences):.3g}"
    if flags.minutes is not None:
        count = epochs = f"as many as {flags.minutes:g} minutes allow"
    return [
        (f"pictures {source}", f"{total:,}{mirror}"),
        ("tokens", f"{total * image_tokens:,} ({image_tokens:,} a picture)"),
        ("held out", f"{job.held_out:,} of {total:,}"),
        ("steps", f"{count} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", epochs),
        (
            "evaluations",
            f"{evaluations} of {flags.eval_images} images, one of {flags.final_images} at the end",
        ),
    ]
