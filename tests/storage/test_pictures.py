"""Picture files from elsewhere: read as they look, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_bench.storage.pictures import read_rgb
from lantern_bench.utils.errors import UserError

RAMP = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(4, axis=0)


def pixels_of(path: Path) -> Any:
    return np.asarray(read_rgb(path))


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_16_bits_of_grey_become_8(tmp_path: Path, name: str) -> None:
    Image.fromarray(RAMP).save(tmp_path / name)
    assert pixels_of(tmp_path / name).shape == (4, 256, 3)
    assert pixels_of(tmp_path / name)[0, :, 1].tolist() == list(range(256))


def test_a_picture_is_upright_as_its_exif_data_says(tmp_path: Path) -> None:
    stored = np.zeros((2, 3, 3), dtype=np.uint8)
    stored[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees to the right
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert pixels_of(tmp_path / "a.png").shape == (3, 2, 3)
    assert pixels_of(tmp_path / "a.png")[0, 1].tolist() == [255, 255, 255]
    Image.fromarray(stored).save(tmp_path / "b.png", exif=b"Exif\0\0no TIFF data")
    assert pixels_of(tmp_path / "b.png").shape == (2, 3, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "CMYK"])
def test_opaque_pictures_of_all_kinds(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new("RGB", (4, 4), "white").convert(mode).save(path)
    assert pixels_of(path).min() == 255


def test_transparent_pictures_are_refused(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "rgba.png")
    Image.new("LA", (4, 4), (255, 254)).save(tmp_path / "la.png")
    Image.new("RGB", (4, 4), "red").save(tmp_path / "rgb.png", transparency=(255, 0, 0))
    Image.new("L", (4, 4), 9).save(tmp_path / "l.png", transparency=9)
    Image.fromarray(RAMP.astype(np.uint8), "L").convert("P").save(
        tmp_path / "p.gif", transparency=9
    )
    Image.new("RGBA", (4, 4), (255, 0, 0, 9)).save(tmp_path / "a.webp")
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="is transparent in places") as caught:
            read_rgb(path)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_without_a_known_range_are_refused(tmp_path: Path, kind: Any) -> None:
    Image.fromarray(np.ones((4, 4), dtype=kind)).save(tmp_path / "a.tiff")
    with pytest.raises(UserError, match="which of them is white is not known"):
        read_rgb(tmp_path / "a.tiff")


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tiff"])
def test_several_frames_are_refused(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    with pytest.raises(UserError, match="has 3 frames"):
        read_rgb(tmp_path / name)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[:80])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="cannot be read as a picture"):
            read_rgb(path)
