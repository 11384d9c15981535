"""Prompt files and sets, and every error in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lantern_bench.errors import UserError
from lantern_bench.prompts import load_prompts
from tests.tiny_model import PROMPTS, TinyModel

MODEL = TinyModel()


def texts(source: str | Path) -> list[str]:
    return [prompt.text for prompt in load_prompts(str(source), MODEL)]


def test_a_set_by_name() -> None:
    assert texts("held-out") == list(PROMPTS)


@pytest.mark.parametrize("column", ["prompt", "caption"])
def test_files_of_all_kinds(tmp_path: Path, column: str) -> None:
    wanted = ["one red lantern", "two blue lanterns"]
    (tmp_path / "a.txt").write_text("\ufeffone red lantern\r\n\n  two blue lanterns  ", encoding="utf-8")
    (tmp_path / "a.csv").write_text(f"id,{column}\n1,one red lantern\n2,\n3,two blue lanterns\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({column: text}) + "\n\n" for text in wanted))
    assert [texts(tmp_path / name) for name in ("a.txt", "a.csv", "a.jsonl")] == [wanted] * 3


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.txt", b"\n \n", "contains no prompt"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.csv", b"id,text\n1,one\n", "line 2: has no text under prompt or caption"),
        ("a.jsonl", b'{"prompt": "one"}\n{oops\n', "line 2: not JSON"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1: has no text"),
        ("a.jsonl", b"[1]\n", "line 1: has no text"),
        ("a.parquet", b"", "unknown file type"),
        ("a.txt", b"one red lantern\none rad lantern\n", "line 2: caption 'one rad lantern'"),
        ("a.txt", b"rad\n" * 7, "7 prompts cannot be used"),
    ],
)
def test_prompt_errors_name_flag_and_line(tmp_path: Path, name: str, content: bytes, wrong: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        texts(tmp_path / name)
    assert caught.value.message.startswith(f"--prompts {tmp_path / name}") and wrong in caught.value.message


def test_no_such_set() -> None:
    with pytest.raises(UserError, match="no such file and no prompt set; did you mean held-out") as caught:
        texts("held_out")
    assert "The sets are held-out" in str(caught.value.advice)
