"""What a stranger may have written is read or refused in words: 500 inputs of each kind, 10,000 in the long tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import load_experiment, shipped_experiments
from lantern_bench.errors import LanternError
from lantern_bench.models.io.model_file import read_model_file
from lantern_bench.prompts import SUFFIXES, load_prompts
from lantern_bench.runs.store import done_images, read_records, read_scores
from lantern_bench.schema import columns
from tests.made_up_run import make_records, make_scores

COUNTS = [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
ANY_PROMPT: Any = SimpleNamespace(check_prompt=lambda text: None, prompt_sets={})
# What has meaning in YAML, JSON or CSV, and what breaks programs.
SIGNS = [b"\0", b"\n", b"\t", b"\r", b'"', b"'", b"[", b"]", b"{", b"}", b":", b",", b"&a ", b"*a", b"- ", b"!!", b"#"]
SIGNS += [b"\xff", b"\x85", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", b'"\\ud800"', b"..", b"=1+1", b"<b>"]
SIGNS += [b"null", b"true", b"NaN", b"1e999", b"-1", b"0.5", b"{}", b"[]", b"9" * 5000, b"[" * 3000]
PIECES = st.sampled_from(SIGNS) | st.binary(max_size=4)


@st.composite
def changed(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """A file with up to four places overwritten, removed, doubled or filled with a sign; or no such file at all."""
    content = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(0, 12)))
        part = draw(st.one_of(PIECES, st.just(b""), st.just(content[at:end] * 2)))
        content = content[:at] + part + content[end:]
    return draw(
        st.one_of(st.just(content), st.just(content), st.binary(max_size=60), st.text(max_size=60).map(str.encode))
    )


def fuzz(count: int, originals: list[bytes], read: Callable[[bytes], object]) -> None:
    """Let `read` read so many files; it may raise nothing but errors that a user sees."""
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(changed(originals))
    def each(content: bytes) -> None:
        try:
            read(content)
        except LanternError as error:
            assert error.message and "\0" not in error.message
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1

    each()
    assert min(outcomes.values()) > count / 200, outcomes  # few changed files stay JSON


@pytest.mark.parametrize("count", COUNTS)
def test_experiments(count: int, tmp_path: Path) -> None:
    path, defaults = tmp_path / "mine.yaml", {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}
    small = b"model: lanterns\nimages: 2\ncells:\n  - {mode: ar}\n  - {mode: lantern, delta: [0.1, 0.2], nodes: 5}\n"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_experiment(path, defaults).run_name  # noqa: B018  # what is read lazily

    fuzz(count, [small, small, shipped_experiments()["certify"].read_bytes()], read)


MODEL = b"""family: llamagen
name: mine
grid: [4, 4]
target: {checkpoint: target.pt, config: {dim: 64, n_layer: 2}}
tokenizer: {checkpoint: target.pt, config: sizes.json}
drafter: {dir: .}
defaults: {cfg_scale: 2.0, tree: small-7}
"""


@pytest.mark.parametrize("count", COUNTS)
def test_model_files(count: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    (tmp_path / "target.pt").write_bytes(b"x")
    (tmp_path / "sizes.json").write_text('{"codes": 16}')

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_model_file(path)

    fuzz(count, [MODEL, b"model: lanterns\ndrafter: {dir: .}\n"], read)


PROMPTS = {
    ".txt": b"a red lantern\ntwo \xe2\x80\x9cround\xe2\x80\x9d lanterns\n",
    ".csv": b'id,prompt\n1,"a red, round lantern"\n2,two lanterns\n',
    ".tsv": b"prompt\tid\na red lantern\t1\n",
    ".json": b'["a red lantern", {"caption": "two lanterns"}]',
    ".jsonl": b'{"prompt": "a red lantern"}\n{"caption": "two lanterns"}\n',
}
COCO = b'{"annotations": [{"image_id": 3, "caption": "a lantern"}, {"image_id": 3, "caption": "two lanterns"}]}'


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("suffix", [*SUFFIXES, "coco"])
def test_prompt_files(suffix: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / ("annotations.json" if suffix == "coco" else f"prompts{suffix}")
    source = f"coco:{path}" if suffix == "coco" else str(path)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for prompt in load_prompts(source, ANY_PROMPT):
            assert prompt.id and prompt.text == prompt.text.strip()

    fuzz(count, [COCO if suffix == "coco" else PROMPTS[suffix]], read)


@pytest.mark.parametrize("count", COUNTS)
def test_records_and_scores(count: int, tmp_path: Path) -> None:
    empty: dict[str, dict[str, Any]] = {
        table: dict.fromkeys(column.name for column in columns(table)) for table in ("records", "scores")
    }
    records = make_records()[:3]
    lines = {"records": records, "scores": make_scores(records)[:3]}
    whole = {
        table: "".join(json.dumps(empty[table] | row) + "\n" for row in rows).encode() for table, rows in lines.items()
    }

    def read(content: bytes) -> None:
        for table in whole:
            (tmp_path / f"{table}.jsonl").write_bytes(content)
        rows = [*read_records(tmp_path), *read_scores(tmp_path)]
        assert all(isinstance(row, dict) for row in rows)
        done_images(tmp_path)

    fuzz(count, [whole["records"]], read)
