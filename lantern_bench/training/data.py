"""The sequences a drafter learns from: images as tokens of the target's tokenizer, or the target's own samples.

Tokens are made once, in files of bounded size, so that an interrupted preparation continues. Each sequence has a
caption; the seed alone decides which sequences are held out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel, VQPixels
from lantern_bench.models.model import Model
from lantern_bench.models.registry import model_of
from lantern_bench.models.target import TransformerTarget
from lantern_bench.prompts import load_prompts, read_captioned
from lantern_bench.training.recipe import DrafterFlags, DrafterRecipe, Optimisation, TrainSettings, flag_of, recipe_of

_BATCH = 32


@dataclass(frozen=True)
class Data:
    """A caption per sequence, and the picture it belongs to; without pictures the target samples them."""

    captions: Sequence[str]
    pictures: Sequence[Path] | None = None
    mirrored: bool = False  # every picture's mirror image follows, with the same caption

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.captions) * (1 + (self.mirrored and self.pictures is not None))

    def caption(self, index: int) -> str:
        """Return the caption of a sequence."""
        return self.captions[index % len(self.captions)]

    def sha256(self) -> str:
        """Return a hash of captions and of the pictures' names and sizes; reading all pictures would take too long."""
        pictures = [[path.name, path.stat().st_size] for path in self.pictures or ()]
        return hashlib.sha256(json.dumps([list(self.captions), pictures]).encode()).hexdigest()


def make_tokens(
    data: Data, model: LoadedModel, decoding: Decoding, seed: int, work: Path, on_progress: OnProgress
) -> Tensor:
    """Encode the pictures, or sample from the target with `decoding` (a mode `ar`): tokens int32 [n, N].

    Rows in `work` are not made again. Raises `UserError` for a picture that cannot be read, and for a model without a
    tokenizer.
    """
    key: dict[str, Any] = {"data": data.sha256(), "grid": list(model.grid)}
    if data.pictures is None:
        key |= {"weights": dict(model.weights), "seed": seed}
        key |= {"decoding": decoding.settings(), "dtype": str(getattr(model.target, "dtype", ""))}
        folder, sample = _folder(work, "samples", key), _sampler(data, model, decoding, seed)
        return _in_files(folder, len(data), _BATCH, sample, "sampling from the target", on_progress)
    reader, pictures, tokens = model.pixels, data.pictures, []
    if not isinstance(reader, VQPixels):
        raise UserError(
            f"--data: pictures need the tokenizer of {model.name}, and it has none",
            "Name the tokenizer in the model's file; or give captions alone, and the target samples from them.",
        )
    for mirrored in (False, True)[: 1 + data.mirrored]:
        encoder_key = {"size": list(reader.size), "mirrored": mirrored, "tokenizer": model.weights.get("tokenizer")}
        folder, encode = _folder(work, "tokens", key | encoder_key), _encoder(pictures, reader, mirrored)
        label = "encoding mirror images" if mirrored else "encoding pictures"
        tokens.append(_in_files(folder, len(pictures), 256, encode, label, on_progress))
    return torch.cat(tokens)


def held_out_count(count: int, held_out: float) -> int:
    """Return how many of `count` sequences are held out for the share `held_out`: at least one, never all."""
    return min(count - 1, max(1, round(held_out * count)))


def split(count: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the training sequences and of those held out, in a seeded order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    first = held_out_count(count, held_out)
    return order[first:], order[:first]


def _folder(work: Path, name: str, key: Mapping[str, Any]) -> Path:
    """Make the folder for tokens of `key` (plain data), with a manifest that states it."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    folder = work / f"{name}-{digest[:12]}"
    write_atomically(folder / "manifest.json", json.dumps({"key": key}, indent=1, sort_keys=True).encode() + b"\n")
    return folder


def _in_files(
    folder: Path, total: int, rows: int, make: Callable[[int, int], Tensor], label: str, on_progress: OnProgress
) -> Tensor:
    """Return all tokens, `rows` of them a file; the files that are missing are written with `make(start, stop)`."""
    tokens = []
    for number, start in enumerate(range(0, total, rows)):
        path = folder / f"{number:05d}.safetensors"
        if not path.is_file():
            on_progress(label, start / total)
            write_atomically(path, save({"tokens": make(start, min(total, start + rows)).cpu().contiguous()}))
        try:
            tokens.append(load_file(path)["tokens"])
        except (OSError, KeyError, SafetensorError) as error:
            advice = f"Remove {folder}; the next training writes it again."
            raise RefusedError(f"{path}: damaged: {error}", advice) from error
    on_progress(label, 1.0)
    return torch.cat(tokens)


def _picture(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Read a picture as uint8 RGB [H, W, 3]: the short side scaled to `size`, the centre cropped."""
    height, width = size
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        advice = "Remove it, or save it again."
        raise UserError(f"--data: {path}: cannot be read as a picture: {error}", advice) from error
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        larger = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
        picture = picture.resize(larger, Image.Resampling.BICUBIC)
        x, y = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((x, y, x + width, y + height))
    return np.asarray(picture, dtype=np.uint8)


def _encoder(pictures: Sequence[Path], reader: VQPixels, mirrored: bool) -> Callable[[int, int], Tensor]:
    def encode(start: int, stop: int) -> Tensor:
        pixels = torch.from_numpy(np.stack([_picture(path, reader.size) for path in pictures[start:stop]]))
        batches = (pixels.flip(2) if mirrored else pixels).split(_BATCH)
        return torch.cat([reader.tokens(batch) for batch in batches]).int()

    return encode


def _sampler(data: Data, model: LoadedModel, decoding: Decoding, seed: int) -> Callable[[int, int], Tensor]:
    """Sample as a sweep does: the seed depends on the prompt and on its number of earlier occurrences."""
    repeats, counts = [], dict[str, int]()
    for caption in data.captions:
        repeats.append(counts.get(caption, 0))
        counts[caption] = repeats[-1] + 1

    def sample(start: int, stop: int) -> Tensor:
        captions = data.captions[start:stop]
        seeds = [record_seed(seed, Prompt(text).id, n) for text, n in zip(captions, repeats[start:stop], strict=True)]
        generators = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
        images = decode(model, model.condition(captions), decoding, generators, engine=model.engine)
        return torch.stack([image.tokens for image in images])

    return sample


# ---- A training as data: its inputs, read and checked before a model is loaded, and its plan in numbers


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
