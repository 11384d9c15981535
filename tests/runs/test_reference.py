"""Reference sets: the same scenes every time, and folders that are refused when they are not one set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from lantern_bench.errors import UserError
from lantern_bench.runs import reference


def test_reference_scenes_are_the_held_out_captions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_LEAST", 12)
    small, again, large = (reference.held_out_reference(largest) for largest in (3, 3, 10))
    assert small.pictures.shape == (12, 3, 64, 64) and len(large.pictures) == 20
    assert small.label == again.label != large.label
    assert torch.equal(small.pictures, again.pictures)
    assert small.label.startswith(reference.reference_name(3))
    assert "n=12" in small.label and "seed=" in small.label and "sha256=" in small.label


def test_reference_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pictures"):
        reference.folder_reference(tmp_path)
    for name, size in (("b.png", 16), ("a.png", 16)):
        Image.new("RGB", (size, size), (200 if name == "a.png" else 10, 0, 0)).save(tmp_path / name)
    found = reference.folder_reference(tmp_path)
    assert found.pictures[:, 0, 0, 0].tolist() == [200, 10]
    Image.new("RGB", (20, 16)).save(tmp_path / "c.png")
    with pytest.raises(UserError, match="differ in size"):
        reference.folder_reference(tmp_path)
