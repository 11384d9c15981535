"""The job of `train drafter`: flags and data, checked before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.model import Model
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import PromptedModel
from lantern_bench.prompts.sets import (
    BLANKS,
    SUFFIXES,
    check_texts,
    lacks_keys,
    load_prompts,
    read_rows,
    text_under,
)
from lantern_bench.storage.pictures import PICTURE_SUFFIXES, pictures_below
from lantern_bench.training.recipe import (
    DrafterFlags,
    DrafterRecipe,
    TrainSettings,
    flag_of,
    recipe_of,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_text
from lantern_bench.utils.text import listed

# ---- Pictures with captions in a folder

# The names of a caption file of a folder; in .txt a tab separates the name and the caption.
_CAPTION_FILES = ("captions", "metadata")
_NAME_KEYS = ("file_name", "file", "image", "path")
_CAPTION_KEYS = ("caption", "prompt", "text")


class Captioned(NamedTuple):
    """A picture and its caption."""

    path: Path
    caption: str
    location: str  # where the caption is written, for messages


def read_captioned(folder: Path, captions: Path | None, model: PromptedModel) -> list[Captioned]:
    """Return the captioned pictures of a folder.

    Args:
        folder: The folder of `--data`.
        captions: A file of names and captions. With None, the caption file of the folder is used,
            such as metadata.jsonl, or a .txt file beside each picture.
        model: The model that is given the captions.

    Returns:
        The pictures in the order of the caption file, or by name.

    Raises:
        UserError: A picture or a caption is missing, captions stand in two places, or the model
            cannot take a caption.
    """
    flag = f"--data {folder}"
    try:
        if captions is None:
            pictures = _captioned_in(folder)
        else:
            pictures = list(_captioned_in_file(captions, folder))
    except OSError as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not pictures:
        raise UserError(
            f"{flag}: contains no picture ({', '.join(PICTURE_SUFFIXES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; "
            "or a file of captions alone.",
        )
    check_texts(
        ((picture.location, picture.caption) for picture in pictures),
        model,
        flag=flag,
        noun="captions",
    )
    return pictures


def _captioned_in(folder: Path) -> list[Captioned]:
    """Return the pictures of a folder that has one caption file, or a .txt beside each picture."""
    files = sorted(file for file in folder.glob("*.*") if file.stem in _CAPTION_FILES)
    files = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not files:
        return list(_captioned_beside(folder))
    if len(files) > 1:
        names = listed([file.name for file in files])
        raise UserError(
            f"--data {folder}: has several files of captions: {names}",
            f"Give the one that is meant: --captions {files[0]}",
        )
    pictures = list(_captioned_in_file(files[0], folder))
    for picture in pictures:
        beside = picture.path.with_suffix(".txt")
        if beside.is_file() and beside != files[0] and _text_of(beside) != picture.caption:
            raise UserError(
                f"--data {folder}: {picture.path.name} has two captions, in {picture.location} and "
                f"in {beside.name}",
                f"Remove one, or give --captions {files[0]}",
            )
    return pictures


def _text_of(path: Path) -> str:
    return read_text(path, f"--data: {path}").strip(BLANKS)


def _captioned_beside(folder: Path) -> Iterator[Captioned]:
    """Yield the pictures of a folder and below it, each with the .txt file of its name."""
    pictures = pictures_below(folder)
    missing = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if missing:
        raise UserError(
            f"--data {folder}: {len(missing)} of {len(pictures)} pictures have no caption, "
            f"the first {missing[0]}",
            "Put NAME.txt beside NAME.png, or give --captions FILE with file names and captions.",
        )
    for path in pictures:
        text = path.with_suffix(".txt")
        yield Captioned(path, _text_of(text), text.name)


def _captioned_in_file(path: Path, folder: Path) -> Iterator[Captioned]:
    flag = f"--captions {path}"
    if not path.is_file():
        raise UserError(f"{flag}: no such file")
    for number, row in read_rows(path, flag):
        place = f"{flag} line {number}"
        named = row
        if isinstance(row, str):
            # A line of .txt as a row of the other file types.
            named = dict(zip(("file", "caption"), row.split("\t", maxsplit=1), strict=False))
        name = text_under(named, _NAME_KEYS, place)
        caption = text_under(named, _CAPTION_KEYS, place)
        if name is None or caption is None:
            raise lacks_keys(
                row,
                f"{place}: has no picture and caption",
                f"Name the picture under {', '.join(_NAME_KEYS)} "
                f"and the caption under {', '.join(_CAPTION_KEYS)}.",
            )
        picture = folder / name.strip()
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{place}: {name} is outside {folder}", "Name pictures inside it.")
        if not picture.is_file():
            raise UserError(f"{place}: no such picture {picture.name}")
        yield Captioned(picture, caption.strip(BLANKS), f"{path.name} line {number}")


# ---- The data


@dataclass(frozen=True)
class Data:
    """A caption for each sequence, and its picture; without pictures the target samples them."""

    captions: Sequence[str]
    # Files, and whether the mirror image is meant.
    pictures: Sequence[tuple[Path, bool]] | None = None
    # Captions, or pictures in the folder, and how many of them are used.
    found: int = 0
    used: int = 0

    def sha256(self) -> str:
        """Return a hash of captions and of the pictures' names and sizes.

        Reading all pictures would take too long.
        """
        sizes = [
            [path.name, path.stat().st_size, mirrored] for path, mirrored in self.pictures or ()
        ]
        described = json.dumps([list(self.captions), sizes])
        return hashlib.sha256(described.encode()).hexdigest()


def _read_data(flags: DrafterFlags, model: Model) -> Data:
    """Read `--data`: a folder holds pictures with captions, anything else names captions."""
    source = flags.data
    if Path(source).is_dir():
        items = read_captioned(Path(source), flags.captions, model)
        if (flags.images or 0) > len(items):
            raise UserError(f"--images {flags.images}: --data {source} holds {len(items)} pictures")
        items = items[: flags.images]
        captions = [item.caption for item in items]
        pictures = [(item.path, False) for item in items]
        if flags.mirror:
            captions += captions
            pictures += [(item.path, True) for item in items]
        data = Data(
            captions,
            pictures,
            found=len(pictures_below(Path(source))),
            used=len({item.path for item in items}),
        )
    elif flags.captions is not None or flags.mirror:
        flag = "--mirror" if flags.captions is None else "--captions"
        raise UserError(
            f"{flag}: needs pictures, and --data {source} is not a folder", "Leave it out."
        )
    else:
        prompts = load_prompts(source, model, flag="--data")
        count = flags.images or len(prompts)
        data = Data(
            [prompts[number % len(prompts)].text for number in range(count)],
            found=len(prompts),
            used=min(count, len(prompts)),
        )
    if len(data.captions) < 2:
        raise UserError(
            f"--data {source}: one picture is too few", "Give at least two; some are held out."
        )
    return data


# ---- The job


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
        return min(count - 1, max(1, round(self.recipe.held_out * count)))

    @property
    def sequences(self) -> int:
        """The number of training sequences."""
        return len(self.data.captions) - self.held_out

    def settings(self, model: LoadedModel) -> TrainSettings:
        """Return the settings of the training loop for the loaded target."""
        recipe = self.recipe
        settings = self.flags.model_dump(include={"minutes", "seed", "resume"})
        if self.flags.minutes is None:
            settings["steps"] = recipe.total_steps(self.sequences)
        if recipe.warmup is None:
            settings["warmup"] = round(recipe.warmup_share * recipe.steps_per_epoch(self.sequences))
        return recipe.train_settings(
            checkpoint=self.work / "drafter.ckpt",
            depends_on={
                "target weights": model.weights.get("target", ""),
                "data": self.data.sha256()[:16],
                "init": self.init_name,
                **recipe.model_dump(mode="json"),
            },
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
    if flags.init not in ("random", "shipped") and not Path(flags.init).is_dir():
        raise UserError(
            f"--init {flags.init}: no such folder",
            "Use random or shipped, or give a drafter's folder.",
        )

    # Lossless speculative decoding with a static tree, and the model's guidance and filters.
    values = flags.model_dump(include={"cfg_scale", "temperature", "top_k", "tree"})
    try:
        decoding = Decoding("speculative", model_defaults=model.defaults, **values)
    except ParameterError as error:
        key = error.key or "tree"
        raise UserError(f"{flag_of(key)} {values[key]}: {error.text}") from error

    prompts: list[str] = []
    if flags.eval_prompts is not None:
        prompts = [
            prompt.text for prompt in load_prompts(flags.eval_prompts, model, flag="--eval-prompts")
        ]
    out = flags.out or drafters / Path(model.name).stem
    return DrafterJob(
        flags=flags,
        data=_read_data(flags, model),
        recipe=recipe,
        decoding=decoding,
        prompts=prompts,
        out=out,
        work=flags.work or out / "work",
    )


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
    noun = "captions" if job.data.pictures is None else "pictures"
    return [
        (f"{noun} from {flags.data}", f"{job.data.found:,}, {job.data.used:,} of them used"),
        (f"pictures {source}", f"{total:,}{mirror}"),
        ("tokens", f"{total * image_tokens:,} ({image_tokens:,} a picture)"),
        ("held out", f"{job.held_out:,} of {total:,}"),
        ("steps", f"{count} of {recipe.step_sequences} sequences"),
        ("epochs", epochs),
        (
            "evaluations",
            f"{evaluations} of {flags.eval_images} images, one of {flags.final_images} at the end",
        ),
    ]
