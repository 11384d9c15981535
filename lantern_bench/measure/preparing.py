"""What is done to a picture before a network sees it: crop, resize, as a protocol says.

Resizing is Pillow's, which filters properly when it makes pictures smaller; the order of the steps is that of
`spec.protocols.Preparation`. What a network does to its input itself (CLIP's own preprocessing, an extractor's own
resizing) is not repeated here.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lantern_bench.spec.protocols import Preparation

__all__ = ["for_features", "prepare"]


def prepare(picture: Tensor, preparation: Preparation) -> Tensor:
    """A picture uint8 [3, h, w], cropped and resized as every judge of the protocol sees it: uint8 [3, h', w']."""
    if preparation.crop:
        height, width = picture.shape[1:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        picture = picture[:, top : top + side, left : left + side]
    return _resized(picture, preparation.size, Image.Resampling.LANCZOS)


def for_features(picture: Tensor, preparation: Preparation) -> Tensor:
    """A prepared picture as the fidelity features see it."""
    return _resized(picture, preparation.features_size, Image.Resampling.BICUBIC)


def _resized(picture: Tensor, side: int | None, filter: Image.Resampling) -> Tensor:
    """The picture with this many pixels a side, unless it has them already or None is asked for."""
    if side is None or tuple(picture.shape[1:]) == (side, side):
        return picture
    pixels = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    resized = np.asarray(Image.fromarray(pixels).resize((side, side), filter))
    return torch.from_numpy(resized.transpose(2, 0, 1).copy())
