"""Runs of tokens that another engine decoded: they are drawn and scored, and nothing is decoded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import make_plan
from lantern_bench.config.settings import OF_RESULTS, Settings
from lantern_bench.metrics.token_sums import score_tokens
from lantern_bench.models.load import load_to_decode
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.prompts.sets import check_texts, prompt_facts, read_rows
from lantern_bench.storage.pictures import png_bytes, tokens_sha256
from lantern_bench.storage.run_directory import run_folder
from lantern_bench.storage.run_store import RunStore
from lantern_bench.sweeps.decode_missing import key_fields, maps_entry
from lantern_bench.utils.clock import stamp
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.progress import Emit, ProgressEvent

_FORM = "It holds prompts, tokens [images, tokens] and, if measured, seconds: docs/quality.md."
_OF_FILE = ("prompts", "prompt_column", "images", "repeats", "batch")  # what the file states


def score_token_file(
    path: Path, experiment: ResolvedExperiment, out: Path | None, emit: Emit, *, command: str
) -> Path:
    """Make a run of the tokens in a file, and score their distance from the target.

    Args:
        path: The file: .npz, .safetensors or .jsonl.
        experiment: One cell of one model, as whose tokens these are scored.
        out: The run directory, by default a new one in the folder of runs.
        emit: Receives progress.
        command: The command line, which the manifest keeps.

    Returns:
        The run directory.

    Raises:
        UserError: The file does not fit the model, or a setting chooses among its images.
        RefusedError: Weights are missing.
    """
    # 1. The file and its prompts.
    flag = f"--tokens {path}"
    captions, grids, seconds = _read(path, flag)
    prompts = [Prompt(text, f"{path.name}:{place}") for place, text in enumerate(captions)]
    settings = experiment.settings
    for name in (*_OF_FILE, *OF_RESULTS):
        if getattr(settings, name) != Settings.model_fields[name].default:
            raise UserError(
                f"--set {name}: a file of tokens is scored whole",
                "Leave it out.",
            )
    texts = ((prompt.source, prompt.text) for prompt in prompts)
    check_texts(texts, model_of(settings.model[0]), flag=flag, noun="prompts")
    metrics = ("distance",) if seconds is None else ("speed", "distance")
    settings = settings.model_copy(update={"prompts": str(path), "metrics": metrics})
    experiment = replace(experiment, settings=settings)
    plan = make_plan(experiment, prompts)
    folder = run_folder(experiment, out, resume=False)
    check_writable(folder)

    # 2. The run: a picture and a record for each image.
    compute, models = load_to_decode(experiment, emit)
    model = models[settings.model[0]]
    tokens = _fitting(grids, model, flag)
    key = key_fields(models, settings, compute, cells=plan.cells)
    with RunStore.open(folder, experiment, key) as store:
        store.update_manifest(
            started=stamp(),
            commands=[command],
            prompts=prompt_facts(str(path), path, prompts),
            engine="other",
            **maps_entry(settings.model),
        )
        for number, task in enumerate(plan.tasks):
            of_image = tokens[number]
            with torch.inference_mode():
                (pixels,) = model.draw(of_image[None].to(compute.device))
            png = png_bytes(pixels, of_image)
            columns: dict[str, Any] = {
                "tokens": len(of_image),
                "tokens_sha256": tokens_sha256(of_image),
                "image_sha256": hashlib.sha256(png).hexdigest(),
            }
            if seconds is not None:
                columns["seconds"] = float(seconds[number])
            store.append(task, columns, png)
            emit(ProgressEvent("drawing", number + 1, len(prompts)))

        # 3. Their distance from the target.
        score_tokens(store, settings.device, emit)
    return folder


def _read(path: Path, flag: str) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Return prompts, tokens [n, N] and seconds [n] of a file."""
    try:
        content = _content(path, flag)
        prompts = [str(prompt) for prompt in content["prompts"]]
        tokens = np.asarray(content["tokens"])
        seconds = content.get("seconds")
        if seconds is not None:
            seconds = np.asarray(seconds, dtype=float)
    except (OSError, ValueError, TypeError, KeyError, BadZipFile, SafetensorError) as error:
        raise UserError(f"{flag}: cannot be read: {error!r}", _FORM) from error
    shapes = f"{len(prompts)} prompts, tokens {tokens.dtype} {list(tokens.shape)}"
    is_whole = tokens.dtype.kind in "iu" and tokens.ndim > 1 and len(tokens) == len(prompts) > 0
    is_timed = seconds is None or (len(seconds) == len(prompts) and 0 < min(seconds) < np.inf)
    if not is_whole or not is_timed:
        raise UserError(
            f"{flag}: {shapes}, seconds {seconds}",
            f"Give whole numbers as tokens, and seconds above 0 of each image or none. {_FORM}",
        )
    return prompts, tokens.reshape(len(tokens), -1), seconds


def _content(path: Path, flag: str) -> dict[str, Any]:
    """Return prompts, tokens and seconds as they are in a file."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    if suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            prompts = json.loads(file.metadata()["prompts"])
            names = {"tokens", "seconds"}.intersection(file.keys())
            return {"prompts": prompts} | {name: file.get_tensor(name) for name in names}
    if suffix == ".jsonl":
        rows = [row for _, row in read_rows(path, flag)]
        keys = {"prompts": "prompt", "tokens": "tokens"}
        if any("seconds" in row for row in rows):
            keys["seconds"] = "seconds"
        return {name: [row[key] for row in rows] for name, key in keys.items()}
    raise UserError(f"{flag}: unknown file type", "Give a .npz, .safetensors or .jsonl file.")


def _fitting(tokens: np.ndarray, model: LoadedModel, flag: str) -> Tensor:
    """Return tokens int32 [n, N]; raises `UserError` where they are not tokens of the model."""
    count = model.target.image_tokens
    codes = model.target.vocab_size
    if tokens.shape[1] != count or tokens.min() < 0 or tokens.max() >= codes:
        raise UserError(
            f"{flag}: has {tokens.shape[1]} tokens an image, from {tokens.min()} to "
            f"{tokens.max()}; {model.name} has {count}, from 0 to {codes - 1}",
            "Give the image tokens alone, in their order, less the first one of the vocabulary.",
        )
    return torch.from_numpy(tokens.astype(np.int32))
