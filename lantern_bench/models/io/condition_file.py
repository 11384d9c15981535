"""Conditions that somebody else has made, from an .npz file: caption features with their mask, or prompts as numbers.

Features may be as a text encoder gives them (words first) or as the model is fed (padding first): the mask tells which,
and both become the same condition. What a model with prompts makes of numbers is its own to say.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from lantern_bench.errors import UserError
from lantern_bench.models.llamagen.text_encoder import left_padded
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.transformer.conditioning import CaptionFeatures, Condition

_ADVICE = "It needs embeddings [n, positions, width] and mask [n, positions], 1 for words and 0 for padding."


_NUMBERS = "It needs input_ids [P] or [n, P], whole numbers, and a mask where some of them are padding."


def read_condition(path: Path, model: LoadedModel) -> list[Condition]:
    """The conditions in a file, one an image, as this model is fed; raises `UserError` for what does not fit it."""
    if model.condition_of_arrays is not None:
        try:
            made = model.condition_of_arrays(_arrays(path, _NUMBERS))
        except ValueError as error:
            raise UserError(f"--condition {path}: {error}", _NUMBERS) from error
        return _rows(made)
    module = getattr(model.target, "cls_embedding", None)
    if not isinstance(module, CaptionFeatures):
        raise UserError(f"--condition {path}: {model.name} takes no caption features", "Give --class, or a caption.")
    positions, width = module.uncond_embedding.shape
    embeddings, mask = _read(path)
    if embeddings.ndim != 3 or embeddings.shape[2] != width or embeddings.shape[1] > positions:
        shape = "x".join(map(str, embeddings.shape))
        raise UserError(
            f"--condition {path}: embeddings is {shape}, and {model.name} takes n x {positions} x {width}", _ADVICE
        )
    if mask.shape != embeddings.shape[:2]:
        raise UserError(f"--condition {path}: mask is {'x'.join(map(str, mask.shape))}, not one for each row", _ADVICE)
    if not mask.any(axis=1).all():
        raise UserError(f"--condition {path}: row {int(mask.any(axis=1).argmin())} of mask has no words", _ADVICE)
    try:
        values, valid = left_padded(torch.from_numpy(embeddings), torch.from_numpy(mask))
    except ValueError as error:
        raise UserError(f"--condition {path}: {error}", _ADVICE) from error
    # Fewer positions than the model has: the rest is padding, in front.
    short = positions - valid.shape[1]
    values, valid = functional.pad(values, (0, 0, short, 0)), functional.pad(valid, (short, 0))
    return _rows(Condition(values, valid))


def _rows(made: Condition) -> list[Condition]:
    return [Condition(made.values[row : row + 1], made.valid[row : row + 1]) for row in range(len(made.values))]


def _arrays(path: Path, advice: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}
    except FileNotFoundError as error:
        raise UserError(f"--condition {path}: no such file") from error
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"--condition {path}: cannot be read as .npz", advice) from error


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = _arrays(path, _ADVICE)
    missing = sorted({"embeddings", "mask"} - set(arrays))
    if missing:
        raise UserError(f"--condition {path}: has no {' and no '.join(missing)}", _ADVICE)
    embeddings, mask = arrays["embeddings"], arrays["mask"]
    if embeddings.dtype.kind not in "fiu":
        raise UserError(f"--condition {path}: embeddings must hold numbers", _ADVICE)
    embeddings = embeddings.astype(np.float32)
    if embeddings.ndim == 2:
        embeddings, mask = embeddings[None], np.atleast_2d(mask)
    if not np.isfinite(embeddings).all():
        raise UserError(f"--condition {path}: embeddings holds numbers that are not finite")
    return embeddings, mask.astype(bool)
