"""Conditions from an .npz file: caption features with their mask, or prompts as token ids.

Caption features may be padded behind the words, as a text encoder returns them, or in front, as the model takes them:
the mask tells which.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lantern_bench.errors import UserError
from lantern_bench.models.llamagen.text_encoder import left_padded
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.transformer.conditioning import CaptionFeatures, Condition


def read_condition(path: Path, model: LoadedModel) -> list[Condition]:
    """The conditions in a file for a model, one per image; raises `UserError` for arrays that do not fit the model."""
    module: Any = getattr(model.target, "cls_embedding", None)
    if model.condition_of_arrays is None and not isinstance(module, CaptionFeatures):
        raise UserError(f"--condition {path}: {model.name} takes no caption features", "Give --class, or a caption.")
    advice = "It needs embeddings [n, positions, width] and mask [n, positions], 1 for words and 0 for padding."
    if model.condition_of_arrays is not None:
        advice = "It needs input_ids [P] or [n, P], whole numbers, and a mask where some of them are padding."
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError as error:
        raise UserError(f"--condition {path}: no such file") from error
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"--condition {path}: cannot be read as .npz", advice) from error
    try:
        if model.condition_of_arrays is not None:
            made = model.condition_of_arrays(arrays)
        else:
            made = _caption_features(arrays, *module.uncond_embedding.shape)
    except ValueError as error:
        raise UserError(f"--condition {path}: {error}", advice) from error
    return [Condition(made.values[row : row + 1], made.valid[row : row + 1]) for row in range(len(made.values))]


def _caption_features(arrays: Mapping[str, np.ndarray], positions: int, width: int) -> Condition:
    """The condition of embeddings and mask, padded in front to `positions`; raises ValueError for unfit arrays."""
    missing = sorted({"embeddings", "mask"} - set(arrays))
    if missing:
        raise ValueError(f"has no {' and no '.join(missing)}")
    if arrays["embeddings"].dtype.kind not in "fiu":
        raise ValueError("embeddings must hold numbers")
    embeddings, mask = arrays["embeddings"].astype(np.float32), arrays["mask"].astype(bool)
    if embeddings.ndim == 2:
        embeddings, mask = embeddings[None], np.atleast_2d(mask)
    if not np.isfinite(embeddings).all():
        raise ValueError("embeddings holds numbers that are not finite")
    if embeddings.ndim != 3 or embeddings.shape[2] != width or embeddings.shape[1] > positions:
        shape = "x".join(map(str, embeddings.shape))
        raise ValueError(f"embeddings is {shape}, and the model takes n x {positions} x {width}")
    if mask.shape != embeddings.shape[:2]:
        raise ValueError(f"mask is {'x'.join(map(str, mask.shape))}; it must have one row for each of embeddings")
    if not mask.any(axis=1).all():
        raise ValueError(f"row {int(mask.any(axis=1).argmin())} of mask has no words")
    values, valid = left_padded(torch.from_numpy(embeddings), torch.from_numpy(mask))
    short = positions - valid.shape[1]
    return Condition(functional.pad(values, (0, 0, short, 0)), functional.pad(valid, (short, 0)))
