"""Caption features that somebody else has made, from an .npz file with `embeddings` and `mask`.

They may be as a text encoder gives them (words first) or as the model is fed (padding first): the mask tells which, and
both become the same condition.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from lantern_bench.errors import UserError
from lantern_bench.models.conditioning import CaptionFeatures, Condition
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.text_encoder import left_padded

__all__ = ["read_condition"]

_ADVICE = "It needs embeddings [n, positions, width] and mask [n, positions], 1 for words and 0 for padding."


def read_condition(path: Path, model: LoadedModel) -> list[Condition]:
    """The conditions in a file, one an image, as this model is fed; raises `UserError` for what does not fit it."""
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
    return [Condition(values[row : row + 1], valid[row : row + 1]) for row in range(len(values))]


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = set(getattr(arrays, "files", ()))
            missing = sorted({"embeddings", "mask"} - names)
            if missing:
                raise UserError(f"--condition {path}: has no {' and no '.join(missing)}", _ADVICE)
            embeddings, mask = np.asarray(arrays["embeddings"], np.float32), np.asarray(arrays["mask"])
    except FileNotFoundError as error:
        raise UserError(f"--condition {path}: no such file") from error
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"--condition {path}: cannot be read as .npz", _ADVICE) from error
    if embeddings.ndim == 2:
        embeddings, mask = embeddings[None], np.atleast_2d(mask)
    if not np.isfinite(embeddings).all():
        raise UserError(f"--condition {path}: embeddings holds numbers that are not finite")
    return embeddings, mask.astype(bool)
