"""What a stranger may have written is read or refused in words: 500 inputs of each kind, 10,000 in
the long tests.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.core import TyperOption
from typer.main import get_command

from lantern_bench.cli.main import app
from lantern_bench.config.experiment import load_experiment, shipped_experiments
from lantern_bench.config.settings import Settings
from lantern_bench.methods.catalog import MODES, PARAMETERS, RULES, has_parameter
from lantern_bench.models.model_file import read_model_file
from lantern_bench.prompts.sets import BLANKS, load_prompts
from lantern_bench.storage.run_directory import done_images, read_records, read_scores
from lantern_bench.storage.schema import columns
from lantern_bench.utils.errors import LanternError
from tests.helpers.made_up_run import make_records, make_scores, with_checksum, write_run

COUNTS = [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
ANY_PROMPT: Any = SimpleNamespace(check_prompt=lambda text: None, prompt_sets={})
# What has meaning in YAML, JSON or CSV, and what breaks programs.
SIGNS = [
    b"\0",
    b"\n",
    b"\t",
    b"\r",
    b'"',
    b"'",
    b"[",
    b"]",
    b"{",
    b"}",
    b":",
    b",",
    b"&a ",
    b"*a",
    b"- ",
    b"!!",
    b"#",
]
SIGNS += [
    b"\xff",
    b"\x85",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b'"\\ud800"',
    b"..",
    b"=1+1",
    b"<b>",
]
SIGNS += [b"null", b"true", b"NaN", b"1e999", b"-1", b"0.5", b"{}", b"[]", b"9" * 5000, b"[" * 3000]
PIECES = st.sampled_from(SIGNS) | st.binary(max_size=4)


@st.composite
def changed(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """A file with up to four places overwritten, removed, doubled or filled with a sign; or no such
    file at all.
    """
    content = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(0, 12)))
        part = draw(st.one_of(PIECES, st.just(b""), st.just(content[at:end] * 2)))
        content = content[:at] + part + content[end:]
    return draw(
        st.one_of(
            st.just(content),
            st.just(content),
            st.binary(max_size=60),
            st.text(max_size=60).map(str.encode),
        )
    )


def fuzz(count: int, originals: list[bytes], read: Callable[[bytes], object]) -> None:
    """Let `read` read so many files; it may raise nothing but errors that a user sees."""
    outcomes = {"read": 0, "refused": 0}

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(changed(originals))
    def each(content: bytes) -> None:
        try:
            read(content)
        except LanternError as error:
            assert error.message
            assert "\0" not in error.message
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1

    each()
    assert min(outcomes.values()) > count / 200, outcomes  # few changed files stay JSON


@pytest.mark.parametrize("count", COUNTS)
def test_experiments(count: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    defaults = {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}
    small = b"model: lanterns\nimages: 2\ncells:\n  - {mode: ar}\n"
    small += b"  - {mode: lantern, delta: [0.1, 0.2], nodes: 5}\n"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_experiment(path, defaults).run_name  # noqa: B018  # what is read lazily

    fuzz(count, [small, small, shipped_experiments()["frontier"].read_bytes()], read)


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
COCO = b"""{"annotations": [
{"image_id": 3, "caption": "a lantern"}, {"image_id": 3, "caption": "two lanterns"}
]}"""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("suffix", [*PROMPTS, "coco"])
def test_prompt_files(suffix: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / ("annotations.json" if suffix == "coco" else f"prompts{suffix}")
    source = f"coco:{path}" if suffix == "coco" else str(path)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for prompt in load_prompts(source, ANY_PROMPT):
            assert prompt.id
            assert prompt.text == prompt.text.strip()

    fuzz(count, [COCO if suffix == "coco" else PROMPTS[suffix]], read)


# Any text, most of it with characters that mean something in one of the formats.
_SIGNS = "\"',;|\\ \x00\x0b\x0c\x1c\x1e\x85\xa0\u2028\u2029\ufeff"
_CHARACTERS = st.one_of(st.sampled_from(_SIGNS), st.characters(codec="utf-8"))


def _rows_of(suffix: str, texts: list[str], quotes: list[bool]) -> list[str]:
    """Return a row of a file for each text, with and without quotes."""
    rows = []
    for text, quoted in zip(texts, quotes, strict=True):
        if suffix == ".jsonl":
            rows.append(json.dumps({"prompt": text}, ensure_ascii=quoted))
        elif suffix == ".csv":
            quoting = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
            row = io.StringIO()
            csv.writer(row, quoting=quoting, lineterminator="").writerow([text, "x"])
            rows.append(row.getvalue())
        else:
            row_text = f'"{text}"' if quoted else text
            rows.append(row_text if suffix == ".txt" else f"{row_text}\tx")
    return rows


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".jsonl"])
def test_each_row_is_one_prompt_or_an_error_with_its_line(
    suffix: str, end: str, count: int, tmp_path: Path
) -> None:
    path = tmp_path / f"prompts{suffix}"
    one_line = st.text(_CHARACTERS, max_size=6).map(lambda text: re.sub(r"[\n\r\t]", "", text))
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(one_line, st.booleans()), min_size=1, max_size=4))
    def each(written: list[tuple[str, bool]]) -> None:
        texts = [text for text, _ in written]
        quotes = [quoted for _, quoted in written]
        rows = _rows_of(suffix, texts, quotes)
        header = {".csv": ["prompt,n"], ".tsv": ["prompt\tn"]}.get(suffix, [])
        path.write_bytes(end.join([*header, *rows]).encode())
        wanted = texts
        if suffix in (".txt", ".tsv"):
            wanted = [row.removesuffix("\tx") for row in rows]
        if suffix == ".txt":  # empty lines separate paragraphs of prompts
            wanted = [text for text in wanted if text.strip(BLANKS)]
        try:
            prompts = load_prompts(str(path), ANY_PROMPT)
        except LanternError as error:
            assert not wanted or re.search(r"\bline \d+: ", str(error)), error
            outcomes["refused"] += 1
        else:
            assert [prompt.text for prompt in prompts] == [text.strip(BLANKS) for text in wanted]
            outcomes["read"] += 1

    each()
    assert min(outcomes.values()) > count / 50, outcomes


@pytest.mark.parametrize("count", COUNTS)
def test_records_and_scores(count: int, tmp_path: Path) -> None:
    empty: dict[str, dict[str, Any]] = {
        table: dict.fromkeys(column.name for column in columns(table))
        for table in ("records", "scores")
    }
    records = make_records()[:3]
    lines = {"records": records, "scores": make_scores(records)[:3]}
    whole = {
        table: "".join(json.dumps(empty[table] | row) + "\n" for row in rows).encode()
        for table, rows in lines.items()
    }

    def read(content: bytes) -> None:
        # With right checksums, so that the parser sees the changes too.
        lines = b"".join(map(with_checksum, content.splitlines()))
        for table in whole:
            (tmp_path / f"{table}.jsonl").write_bytes(lines)
        rows = [*read_records(tmp_path), *read_scores(tmp_path)]
        assert all(isinstance(row, dict) for row in rows)
        done_images(tmp_path)

    fuzz(count, [whole["records"]], read)


# ---- Numbers of flags

NUMBERS = [
    "0",
    "-1",
    "1e9",
    "1000000000",
    "1e39",
    "1" + 39 * "0",
    "nan",
    ",".join(map(str, range(1, 3001))),
]
CAPTION = "one round red lantern over a lake at dusk"
# decoding takes .9, and some more in a process of many commands
GIGABYTES = {"plans": 1.0, "images": 2.5}
SMALL = ["--threads", "1", "--set", "compile=false"]
# What makes a command short; sweeps are planned, and every command with a model loads it in the
# long test alone.
WORDS = {
    "sweep": ["FILE", "--dry-run"],
    "reproduce": ["FILE", "--dry-run"],
    "explore": ["FILE", "--images", "1", "--device", "a100", "--verify", "0", "--out", "FOLDER/e"],
    "generate": [CAPTION, "--out", "FOLDER/p.png", "--force", *SMALL],
    "certify": ["lanterns", "--modes", "ar", "--samples", "8", "--out", "FOLDER/c", *SMALL],
    "profile": [
        "--images",
        "1",
        "--tokens",
        "8",
        "--no-compile",
        "--threads",
        "1",
        "--tree",
        "chain-3",
    ],
    "check-model": ["lanterns", "--tokens", "4"],
    "predict": ["FOLDER/run", "--device", "a100"],
    "compare": ["FOLDER/run", "FOLDER/other"],
    "recommend": ["FOLDER/run"],
    "train drafter": ["--target", "lanterns", "--data", "held-out", "--dry-run"],
}


def numeric_flags() -> list[tuple[str, str, str | None]]:
    """The flags that take numbers: command, flag, and the parameter of cells that it sets, found in
    the program.
    """
    flags = []
    settings = {
        key for key, field in Settings.model_fields.items() if "int" in str(field.annotation)
    }

    def walk(name: str, command: Any) -> None:
        for inside, subcommand in getattr(command, "commands", {}).items():
            walk(f"{name} {inside}".strip(), subcommand)
        for option in command.params:
            if not isinstance(option, TyperOption):
                continue
            key = (option.name or "").removeprefix("flag_")
            is_parameter = key in PARAMETERS and PARAMETERS[key].kind.dtype in ("int", "float")
            is_number = bool(
                {int, float}
                & {option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation)}
            )
            if is_number or is_parameter or key in settings:
                flags.append((name, option.opts[0], key if is_parameter else None))

    walk("", get_command(app))
    return flags


def command_line(
    folder: Path, command: str, flag: str, parameter: str | None, number: str
) -> list[str]:
    """A command with a number for one of its flags, in a mode that has the parameter."""
    owners = (
        mode
        for mode in MODES.values()
        if parameter
        and has_parameter(parameter, mode.drafting, mode.rule)
        and not (command == "explore" and mode.name == "ar")
    )
    mode = next(owners, MODES["speculative"])
    rule = RULES[mode.rule]
    file = folder / f"{mode.name}.yaml"
    bound = "" if rule.lossless else f", {rule.bound}: {rule.example}"
    file.write_text(
        f"model: lanterns\nimages: 2\nbaseline: false\ncells: [{{mode: {mode.name}{bound}}}]\n"
    )
    words = [
        word.replace("FILE", str(file)).replace("FOLDER", str(folder)) for word in WORDS[command]
    ]
    words += ["--mode", mode.name] if command in ("generate", "profile") else []
    if flag in words:
        del words[words.index(flag) : words.index(flag) + 2]
    return [*command.split(), *words, f"{flag}={number}"]


CHILD = r"""
import gc, json, os, re, sys
from lantern_bench.cli.main import main
from lantern_bench.utils.errors import RefusedError
from lantern_bench.models.families.lanterns.family import Lanterns

def refuse(*_):
    raise RefusedError("nothing is loaded in this test")

if sys.argv[1] == "plans":
    Lanterns.load = refuse
for line in sys.stdin:
    began = sum(os.times()[:2])
    code = main(json.loads(line))
    gc.unfreeze()  # a run freezes what it has when it starts to time; here many run in one process
    gc.collect()
    # Of this program alone: getrusage also counts the process that it was started from.
    peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1e6
    print(json.dumps(["done", code, sum(os.times()[:2]) - began, peak]), flush=True)
"""


def outcomes(kind: str, commands: list[list[str]]) -> list[tuple[list[str], int, float, float]]:
    """Run commands in a process; return each with its exit code, seconds of processor time and the
    peak of memory, GB.

    The process is killed where it takes half as much again as `GIGABYTES`, or ten minutes for one
    command.
    """
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", CHILD, kind], **pipes, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    lines: queue.Queue[str] = queue.Queue()
    errors: list[str] = []
    threading.Thread(
        target=lambda: [lines.put(line) for line in child.stdout or ()], daemon=True
    ).start()
    threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True).start()
    process = psutil.Process(child.pid)
    rows = []
    try:
        for words in commands:
            child.stdin.write(json.dumps(words) + "\n")
            child.stdin.flush()
            for _ in range(6000):
                assert child.poll() is None, (words, errors[-5:])
                assert process.memory_info().rss < 1.5e9 * GIGABYTES[kind], words
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=0.1)
                    if line.startswith('["done"'):
                        rows.append((words, *json.loads(line)[1:]))
                        break
            else:
                pytest.fail(f"takes longer than ten minutes: {words}")
    finally:
        child.kill()
        child.wait()
    return rows


def test_numbers_of_flags_are_found() -> None:
    flags = {(command, flag) for command, flag, _ in numeric_flags()}
    assert {command for command, _ in flags} == set(WORDS)
    assert flags >= {("sweep", flag) for flag in ("--images", "--window", "--worker-timeout")}
    assert flags >= {("train drafter", "--lr"), ("generate", "--class"), ("predict", "--prompts")}


@pytest.mark.parametrize(
    "kind", ["plans", pytest.param("images", marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_any_number_of_any_flag_is_refused_or_works(kind: str, tmp_path: Path) -> None:
    """Exit code 2 or 3 within ten seconds of processor time, or the command works; in less than
    `GIGABYTES`.

    Every run takes one of the numbers for each flag, and loads nothing; the long tests take all,
    and load the model.
    """
    for name in ("run", "other"):
        write_run(tmp_path / name, make_records(), [])
    commands = []
    for place, (command, flag, parameter) in enumerate(numeric_flags()):
        chosen = NUMBERS if kind == "images" else [NUMBERS[place % len(NUMBERS)]]
        commands += [
            command_line(
                folder=tmp_path, command=command, flag=flag, parameter=parameter, number=number
            )
            for number in chosen
        ]
    rows = outcomes(kind, commands)
    assert len(rows) == len(commands)
    wrong = [
        row
        for row in rows
        if row[1] not in (0, 2, 3, 5)
        or row[3] > GIGABYTES[kind]
        or (row[1] in (2, 3) and row[2] > 10)
    ]
    assert not wrong, "\n".join(f"{' '.join(words)[:300]}: {figures}" for words, *figures in wrong)
    assert {2, 3 if kind == "plans" else 0} <= {code for _, code, *_ in rows}
