"""Pictures: the PNG files of images, which also hold their tokens; and files from elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""File types of pictures."""

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


# ---- Pictures from elsewhere


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it, also behind links to folders.

    Hidden files and folders are left out, such as `._a.png`, which holds no picture but what macOS
    knows of `a.png`.
    """
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__MACOSX"]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def pictures_below(folder: Path) -> list[Path]:
    """Return the picture files in a folder and below it, by path."""
    return sorted(path for path in files_below(folder) if path.suffix.lower() in PICTURE_SUFFIXES)


def other_files(folder: Path) -> str:
    """Count the files in a folder and below it that are no pictures: `3 .pgm, 1 .txt`."""
    counts = Counter(path.suffix.lower() or path.name for path in files_below(folder))
    for suffix in PICTURE_SUFFIXES:
        del counts[suffix]
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(5))


def read_rgb(path: Path) -> Image.Image:
    """Read a picture file as 8-bit RGB, upright as its EXIF data says.

    Raises:
        UserError: It is no picture, or its colours are not known: it is transparent somewhere, has
            several frames, or values without a known range.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            frames = getattr(opened, "n_frames", 1)
            # The second frame of a photograph in the format MPO is its preview.
            if frames > 1 and opened.format != "MPO":
                raise UserError(f"{path}: has {frames} frames", "Save one of them as a picture.")
            picture: Image.Image = opened
            # Damaged EXIF data says nothing, and viewers show the picture as it is stored.
            with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError, struct.error):
                picture = ImageOps.exif_transpose(opened)
            if picture.has_transparency_data:
                picture = _opaque(picture, path)
            return _in_8_bits(picture, path, is_png=opened.format == "PNG").convert("RGB")
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read as a picture: {error}", "Remove it, or save it again."
        ) from error


def _opaque(picture: Image.Image, path: Path) -> Image.Image:
    """Return a picture with an alpha channel as RGBA; refuse it if it is transparent somewhere."""
    picture = picture.convert("RGBA")
    if min(picture.getchannel("A").tobytes()) < 255:
        raise UserError(
            f"{path}: is transparent in places, so that its colours depend on what is behind it",
            "Put it on a background, for example with ImageMagick: "
            f"mogrify -background white -alpha remove -alpha off {path.name}",
        )
    return picture


def _in_8_bits(picture: Image.Image, path: Path, *, is_png: bool) -> Image.Image:
    """Return a picture with 16 bits a pixel in 8; refuse 32 bits, whose range is not known."""
    import numpy as np
    from PIL import Image

    # Older versions of Pillow read 16-bit PNG files in the mode I.
    if picture.mode.startswith("I;16") or (is_png and picture.mode == "I"):
        return Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
    if picture.mode in ("I", "F"):
        kind = "whole numbers" if picture.mode == "I" else "floating-point numbers"
        raise UserError(
            f"{path}: its pixels are {kind} of 32 bits, and which of them is white is not known",
            "Save it with 8 bits a channel.",
        )
    return picture
