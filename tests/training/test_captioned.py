"""Captions of pictures in a folder, in every file format."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_bench.training.drafter_job import read_captioned
from lantern_bench.utils.errors import UserError
from tests.helpers.tiny_target import TinyModel, write_pictures

MODEL = TinyModel()
FOUND = [("00.png", "red lantern"), ("01.png", "blue round lantern")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "pictures", 2)
    for text in (tmp_path / "pictures").glob("*.txt"):
        text.unlink()
    return tmp_path / "pictures"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "captions.jsonl",
            '{"file_name": "00.png", "text": "red lantern"}\n\n'
            '{"image": "01.png", "caption": "%s"}\n',
        ),
        ("captions.csv", 'File,Caption\n00.png,red lantern\n01.png,"%s"\n'),
        ("metadata.csv", "file_name,text\n00.png,red lantern\n01.png,%s\n"),
        ("captions.tsv", "path\tprompt\n00.png\tred lantern\n01.png\t%s\n"),
        ("captions.txt", "00.png\tred lantern\n01.png\t%s\n"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_file_names_pictures_and_captions(
    name: str, content: str, *, named: bool, folder: Path
) -> None:
    where = folder.parent / name if named else folder / name
    where.write_text(content % FOUND[1][1])
    pictures = read_captioned(folder, where if named else None, MODEL)
    assert [(item.path.name, item.caption) for item in pictures] == FOUND
    assert all(item.path.is_file() and item.location.startswith(name) for item in pictures)


def test_captions_beside_pictures_in_subfolders(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "01.png").rename(folder / "below" / "01.JPEG")
    (folder / "00.txt").write_text("red lantern\n")
    (folder / "below" / "01.txt").write_text("  blue round lantern ")
    pictures = read_captioned(folder, None, MODEL)
    assert [item.caption for item in pictures] == [caption for _, caption in FOUND]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("00.png red lantern\n", "captions.txt line 1: has no picture and caption"),
        (
            "00.png\tred lantern\n02.png\tred lantern\n",
            "captions.txt line 2: no such picture 02.png",
        ),
        ("00.png\tred fish\n01.png\tgreen lantern\n", "2 captions cannot be used"),
        ("", "contains no picture"),
    ],
)
def test_caption_errors_name_the_line(content: str, message: str, folder: Path) -> None:
    (folder / "captions.txt").write_text(content)
    with pytest.raises(UserError) as caught:
        read_captioned(folder, None, MODEL)
    assert message in caught.value.message
