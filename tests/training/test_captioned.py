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


def test_two_files_of_captions_are_refused(folder: Path) -> None:
    rows = "file_name,text\n00.png,red lantern\n01.png,blue round lantern\n"
    (folder / "metadata.CSV").write_text(rows)
    assert len(read_captioned(folder, None, MODEL)) == 2
    (folder / "captions.txt").write_text("00.png\tblue lantern\n")
    with pytest.raises(UserError, match=r"captions: captions\.txt and metadata\.CSV") as caught:
        read_captioned(folder, None, MODEL)
    assert f"--captions {folder / 'captions.txt'}" in str(caught.value.advice)
    assert len(read_captioned(folder, folder / "metadata.CSV", MODEL)) == 2


def test_a_caption_beside_a_picture_that_differs_from_the_file(folder: Path) -> None:
    (folder / "captions.txt").write_text("00.png\tred lantern\n01.png\tblue lantern\n")
    (folder / "00.txt").write_text("red lantern\n")
    assert len(read_captioned(folder, None, MODEL)) == 2
    (folder / "01.txt").write_text("green lantern\n")
    with pytest.raises(
        UserError, match=r"01\.png has two captions, in captions\.txt line 2 and in"
    ):
        read_captioned(folder, None, MODEL)
    assert len(read_captioned(folder, folder / "captions.txt", MODEL)) == 2


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "captions.jsonl",
            '{"file_name": "00.png", "image": "01.png", "text": "red lantern"}',
            "different texts under file_name and image",
        ),
        (
            "captions.jsonl",
            '{"file_name": "00.png", "caption": "red", "text": "blue"}',
            "different texts under caption and text",
        ),
        ("captions.csv", "file_name;text\n00.png;red", "columns separated by ';'"),
        ("captions.csv", "file_name,title\n00.png,red", "it has 'file_name', 'title'"),
        ("captions.txt", "00.png\t", "captions.txt line 1: is empty"),
        ("captions.txt", "00.png\tred\u2028lantern\nno caption\n", "captions.txt line 2: has no"),
    ],
)
def test_captions_that_can_be_read_in_two_ways(
    folder: Path, name: str, content: str, problem: str
) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_captioned(folder, None, MODEL)
    assert problem in caught.value.message


def test_captions_in_another_encoding(folder: Path) -> None:
    (folder / "captions.csv").write_bytes("file_name,text\n".encode("utf-16"))
    with pytest.raises(UserError, match="line 1: the file is in UTF-16"):
        read_captioned(folder, None, MODEL)
    (folder / "captions.csv").unlink()
    for name in ("00.txt", "01.txt"):
        (folder / name).write_bytes(b"red lanterns \x96 two")
    with pytest.raises(UserError, match=r"00\.txt line 1: byte 0x96 is not UTF-8"):
        read_captioned(folder, None, MODEL)
