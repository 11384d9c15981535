"""Pictures: the PNG files of images, which also hold their tokens."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_TOKENS = "tokens"  # name of a text in a PNG file


def tokens_sha256(tokens: Tensor) -> str:
    """Return the SHA-256 of tokens [N] on the CPU, as little-endian int32."""
    return hashlib.sha256(tokens.numpy().astype("<i4").tobytes()).hexdigest()


def png_bytes(pixels: Tensor, tokens: Tensor | None = None) -> bytes:
    """Return pixels uint8 [H, W, 3] as a PNG file, with the tokens [N] as a text."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer = io.BytesIO()
    texts = PngInfo()
    if tokens is not None:
        texts.add_text(_TOKENS, " ".join(map(str, tokens.tolist())), zip=True)
    Image.fromarray(pixels.cpu().numpy()).save(buffer, format="PNG", pnginfo=texts)
    return buffer.getvalue()


def label(text: str, pixels: Tensor) -> Tensor:
    """Return text as pixels uint8 [14, W, 3], a title for `pixels` [H, W, 3]."""
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont

    strip = Image.new("RGB", (pixels.shape[1], 14), "white")
    ImageDraw.Draw(strip).text((1, 0), text, fill="black", font=ImageFont.load_default(10))
    return torch.from_numpy(np.array(strip)).to(pixels.device)


def read_tokens(path: Path) -> Tensor | None:
    """Return the tokens int32 [N] of a PNG file; None if it is missing, damaged or has none."""
    import torch
    from PIL import Image

    try:
        with Image.open(path) as picture:
            numbers = picture.info[_TOKENS].split()
        return torch.tensor([int(number) for number in numbers], dtype=torch.int32)
    except (OSError, KeyError, AttributeError, ValueError, RuntimeError):
        return None
