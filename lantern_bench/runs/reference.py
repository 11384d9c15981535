"""What fidelity is measured against: freshly painted scenes, or the pictures of a folder.

A reference is part of the figure: its label holds its size, its seed and a hash of its pixels. How the distance to it
is measured is in `measure.fidelity`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lantern_bench.errors import UserError
from lantern_bench.lanterns.captions import HELD_OUT
from lantern_bench.lanterns.scenes import render

__all__ = ["Reference", "folder_reference", "held_out_reference", "read_picture", "reference_name"]

# Fewest reference scenes; a cell with more than half as many images gets twice its own number.
_LEAST = 500
_SEED = 730_113
_SUFFIXES = (".png", ".jpg", ".jpeg")


class Reference(NamedTuple):
    """The pictures fidelity is measured against: uint8 [m, 3, h, w], and how results name them."""

    pictures: Tensor
    label: str


def held_out_reference(largest_cell: int, seed: int = _SEED) -> Reference:
    """Freshly painted scenes of the held-out captions, each caption as often as any other (one more at most).

    There are twice as many as the largest cell has images, and 500 at least, the same for all cells of a run. The
    seed is used nowhere in training.
    """
    n = _size(largest_cell)
    attributes = [HELD_OUT[number % len(HELD_OUT)] for number in range(n)]
    pictures = torch.from_numpy(np.ascontiguousarray(render(attributes, seed).transpose(0, 3, 1, 2)))
    return Reference(pictures, f"{reference_name(largest_cell, seed)}, sha256={_digest(pictures)}")


def reference_name(largest_cell: int, seed: int = _SEED) -> str:
    """How the label of `held_out_reference` begins: all of it but the hash, which takes the painting to know."""
    return f"lanterns held-out scenes, n={_size(largest_cell)}, seed={seed}"


def _size(largest_cell: int) -> int:
    return max(_LEAST, 2 * largest_cell)


def folder_reference(folder: Path) -> Reference:
    """All pictures of a folder, by name; `UserError` when there are none or they differ in size."""
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise UserError(f"no pictures in the reference folder {folder}", f"it takes {', '.join(_SUFFIXES)}")
    pictures = [read_picture(path) for path in files]
    sizes = {tuple(picture.shape[1:]) for picture in pictures}
    if len(sizes) > 1:
        raise UserError(f"the pictures of the reference folder {folder} differ in size: {sorted(sizes)[:3]}")
    stacked = torch.stack(pictures)
    return Reference(stacked, f"{folder.name}, n={len(files)}, sha256={_digest(stacked)}")


def read_picture(path: Path) -> Tensor:
    """A picture file as uint8 [3, h, w]."""
    with Image.open(path) as picture:
        return torch.from_numpy(np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1)))


def _digest(pictures: Tensor) -> str:
    return hashlib.sha256(pictures.numpy().tobytes()).hexdigest()[:8]
