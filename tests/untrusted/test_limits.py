"""Files of strangers: what is too large, too deep or steers another program is refused or written
out.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import tokenizers

from lantern_bench.cli import main as cli
from lantern_bench.cli.console import Console
from lantern_bench.config.experiment import MOST_CELLS, load_experiment
from lantern_bench.config.plan import make_plan
from lantern_bench.config.settings import Overrides
from lantern_bench.devices.compute import choose_compute
from lantern_bench.models import registry
from lantern_bench.models.families.word_model import read_tokenizer
from lantern_bench.models.load import load_models
from lantern_bench.models.model_file import read_model_file
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.report.page import render
from lantern_bench.storage.run_directory import load_runs
from lantern_bench.storage.schema import write_csv
from lantern_bench.sweeps.request import prepare
from lantern_bench.training.drafter_job import read_captioned
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.yaml_file import DEEPEST, MOST_CHARACTERS, read_source
from tests.helpers import tiny_chameleon
from tests.helpers.made_up_run import AR, make_record, write_run
from tests.helpers.tiny_model import TinyModel

DEFAULTS = {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}}
ANY_PROMPT: Any = SimpleNamespace(check_prompt=lambda text: None, prompt_sets={})


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def deep(levels: int) -> str:
    return "key: " + "[" * levels + "]" * levels


LAUGHS = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (deep(DEEPEST), f"nested deeper than {DEEPEST} levels"),
        (deep(50_000), "not valid YAML"),
        ("{" * 50_000, "not valid YAML"),
        (LAUGHS, "the alias *a0 cannot be used here; write the value again"),
        ("a: &a {b: *a}", "the alias *a cannot be used here"),
        ("a: !!python/object/apply:os.mkdir [made]", "could not determine a constructor"),
        ("a: " + "9" * 5000, "not valid YAML"),
        (f"a: {'x' * MOST_CHARACTERS}", "more than 1000000 characters"),
    ],
)
def test_yaml_that_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mine") as raised:
        read_source(written(tmp_path, text))
    assert message in raised.value.message
    assert len(raised.value.message) < 400
    assert not Path("made").exists()


@pytest.mark.parametrize(
    "part", ["target: {checkpoint: NAME}", "drafter: {dir: NAME}", "neighbours: {table: NAME}"]
)
def test_a_path_that_is_too_long_is_named_by_line(part: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"family: llamagen\n{part.replace('NAME', '9x' * 2500)}\n")
    with pytest.raises(
        UserError, match=r"line 2: .*(cannot be a path: File name too long|no such file)"
    ):
        read_model_file(path)


def test_yaml_within_the_limits_is_read(tmp_path: Path) -> None:
    assert read_source(written(tmp_path, deep(DEEPEST - 1))).data


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        # a sparse file: it takes no room, and reading it would take minutes
        file.truncate(50 * 10**9)
    with pytest.raises(UserError, match="more than 1000000 characters"):
        read_source(path)


def values(count: int) -> list[float]:
    return [round((number + 1) / (count + 1), 6) for number in range(count)]


@pytest.mark.parametrize(
    "axes",
    [
        {"delta": values(MOST_CELLS + 1)},
        {key: values(300) for key in ("delta", "top_p", "temperature", "cfg_scale")},
    ],
)
def test_a_grid_of_too_many_cells_needs_yes(axes: dict[str, list[float]]) -> None:
    with pytest.raises(RefusedError, match="at most 1000") as raised:
        load_experiment("lanterns", DEFAULTS, Overrides(axes, ("lantern",)))
    assert "--yes" in str(raised.value.advice)


def test_yes_allows_a_large_grid() -> None:
    deltas = values(MOST_CELLS + 1)
    axes: dict[str, Any] = {"delta": deltas, "drafting": ["static"], "temperature": [1.0]}
    assert (
        len(load_experiment("lanterns", DEFAULTS, Overrides(axes, ("lantern",), many=True)).cells)
        > MOST_CELLS
    )


GENERATE = ["generate", "one round red lantern over a lake at dusk", "--mode"]
WIDE = [[rank] for rank in range(2049)]
DEEP = [[0] * depth for depth in range(1, 300)]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ([*GENERATE, "sjd", "--window", "100000"], 2, "--window 100000: must be at most 2,048"),
        (
            [*GENERATE, "sjd", "--window", "300"],
            2,
            "--window 300: the model lanterns has 256 tokens an image",
        ),
        (
            [*GENERATE, "scd", "--drafting", "hybrid", "--drafted", "1e9"],
            2,
            "--drafted 1e9: must be",
        ),
        (
            [*GENERATE, "sjd-pac", "--candidates", "50", "--branching", "6"],
            2,
            "the drafting pac needs 15,943,877,560 draft nodes with these values; the limit is",
        ),
        (
            [*GENERATE, "sjd-pac", "--candidates", "9", "--branching", "2000"],
            2,
            "draft nodes with these values; the limit is 2,048",
        ),
        (
            [*GENERATE, "speculative", "--tree", str(WIDE)],
            2,
            "the tree has 2049 paths, and at most 2048 are",
        ),
        (
            [*GENERATE, "speculative", "--tree", str(DEEP)],
            2,
            "--tree of depth 299: the model lanterns has 256 tokens",
        ),
        ([*GENERATE, "lantern", "--nodes", "5000"], 2, "--nodes 5000: must be at most 2,048"),
        (
            [*GENERATE, "lantern", "--beam", "2000", "--depth", "200"],
            2,
            "and at most 100,000 are possible",
        ),
        (
            [*GENERATE, "lantern", "--depth", "257", "--beam", "1"],
            2,
            "--depth 257: the model lanterns has 256 tokens",
        ),
        (
            [*GENERATE, "gsd", "--cluster", "5000"],
            2,
            "--cluster 5000: the model lanterns has 2048 codes",
        ),
        (
            [*GENERATE, "ar", "--cfg-scale", "1e39"],
            2,
            "--cfg-scale 1e39: must be at most 1,000,000,000,000",
        ),
        (
            [*GENERATE, "ar", "--images", "1000000000"],
            2,
            "--images 1000000000: must be less than or equal to 1000",
        ),
        (
            ["sweep", "--dry-run", "--images", "1000000000"],
            3,
            "14,000,000,000 images, and a run at most 1,000,000",
        ),
        (
            ["sweep", "--dry-run", "--repeats", str(10**12)],
            2,
            "--repeats 1000000000000: must be at most 1,000,000,000",
        ),
        (
            ["sweep", "--dry-run", "--processes", "1000000000"],
            2,
            "--processes 1000000000: must be at most 1,024",
        ),
        (
            ["sweep", "--dry-run", "--seed", str(10**39)],
            2,
            "must be below 9,223,372,036,854,775,808",
        ),
        (
            ["profile", "--size", "1000000000x64"],
            2,
            "--size 1000000000x64: is too large: at most 1,024 layers",
        ),
        (["profile", "--tree", "9999n1d9b"], 2, "nodes 9999: must be at most 2,048"),
        *(
            (words, 2, f"--device {words[-1]}: must be auto, cpu, mps, cuda or cuda:N")
            for words in (
                ["profile", "--device", "tpu"],
                ["profile", "--device", "cuda:x"],
                ["check-model", "lanterns", "--device", "tpu"],
                ["certify", "--device", "meta"],
                ["sweep", "--device", "tpu"],
                ["generate", "--device", "cpu:0"],
                [
                    "train",
                    "drafter",
                    "--target",
                    "lanterns",
                    "--data",
                    "held-out",
                    "--device",
                    "tpu",
                ],
            )
        ),
    ],
)
def test_a_size_beyond_its_limit_is_refused_in_one_line(
    command: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is loaded before."""
    monkeypatch.setattr("lantern_bench.models.families.lanterns.family.Lanterns.load", None)
    assert cli.main(command) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "internal" not in captured.err


@pytest.mark.parametrize("mode", [{"mode": "ar"}, {"mode": "sjd", "window": 200}])
def test_cells_that_need_more_memory_than_is_free_are_refused(mode: dict[str, Any]) -> None:
    """Of a model whose sizes are known, before it is loaded."""
    content = {
        "name": "large",
        "model": "lanterns",
        "baseline": False,
        "batch": 10**6,
        "cells": [mode],
    }
    with pytest.raises(
        RefusedError, match=r"batch 1000000: needs [\d,.]+ GB, and [\d,.]+ GB are free"
    ) as raised:
        load_models(load_experiment(content, DEFAULTS), choose_compute("cpu"))
    assert "--batch" in str(raised.value.advice)


def test_sizes_are_checked_with_a_model_that_tells_its_own_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    content = {"name": "large", "model": "tiny", "cells": [{"mode": "sjd", "window": 13}]}
    assert model.tokens is None
    with pytest.raises(UserError, match="--window 13: the model tiny has 12 tokens an image"):
        load_models(load_experiment(content, {"tiny": {}}), choose_compute("cpu"))


@pytest.mark.parametrize("count", [2_000, pytest.param(30_000, marks=pytest.mark.long)])
def test_a_plan_of_many_captions_reads_the_tokenizer_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_chameleon.write_model_file(tmp_path / "files", "anole-7b", (4, 4))
    (tmp_path / "p.txt").write_text("".join(f"a red lantern {number}\n" for number in range(count)))
    opened: list[str] = []
    from_file = tokenizers.Tokenizer.from_file
    counted = SimpleNamespace(from_file=lambda name: opened.append(name) or from_file(name))
    monkeypatch.setattr(tokenizers, "Tokenizer", counted)
    parsed = read_tokenizer.cache_info().misses
    content = {
        "name": "many",
        "model": str(path),
        "prompts": str(tmp_path / "p.txt"),
        "cells": [{"mode": "ar"}],
    }
    assert len(prepare(content, Overrides(), out=tmp_path / "run").plan.tasks) == count
    assert (read_tokenizer.cache_info().misses - parsed, len(opened)) == (1, 1)


@pytest.mark.parametrize("character", ["\0", "\x1b[2J", "\x07", "\x9b", "\x7f"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.csv", "prompts.json"])
def test_prompts_with_control_characters_are_refused_by_line(
    name: str, character: str, tmp_path: Path
) -> None:
    texts = {
        ".txt": f"a lantern\nred {character} lantern\n",
        ".csv": f"prompt\na lantern\nred {character} lantern\n",
        ".json": f'["a lantern", "red \\u{ord(character[0]):04x} lantern"]',
    }
    path = tmp_path / name
    path.write_text(texts[path.suffix], encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_prompts(str(path), ANY_PROMPT)
    assert "control character" in raised.value.message or "cannot be read" in raised.value.message
    assert not any(ord(sign) < 32 and sign != "\n" for sign in raised.value.message)


def test_a_prompt_names_no_file(tmp_path: Path) -> None:
    """Pictures are named by cell and number."""
    (tmp_path / "p.txt").write_text("../../etc/passwd\n/tmp/x\nC:\\x\n")
    experiment = load_experiment("lanterns", DEFAULTS, Overrides({"images": [3]}))
    plan = make_plan(experiment, load_prompts(str(tmp_path / "p.txt"), ANY_PROMPT))
    assert {prompt.text for prompt in {task.prompt for task in plan.tasks}} >= {"../../etc/passwd"}
    for task in plan.tasks:
        assert (tmp_path / task.image).resolve().is_relative_to(tmp_path / "images")


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd.png", "a/../../secret.png"])
def test_captions_name_no_picture_outside_their_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (folder / "captions.txt").write_text(f"{name}\ta lantern\n")
    with pytest.raises(UserError, match=r"line 1: .* is outside"):
        read_captioned(folder, None, ANY_PROMPT)


def test_messages_and_tables_do_not_steer_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    err = io.StringIO()
    console = Console(stdout=out, stderr=err)
    console.error(UserError("prompt \x1b[2J\x9b5n", "\x1b]0;title\x07"))
    console.table(pd.DataFrame({"prompt": ["\x1b[2J gone"], "n": [1]}))
    console.data("\x1b[2J gone")
    assert err.getvalue() == "error: prompt \\x1b[2J\\x9b5n\n  \\x1b]0;title\\x07\n"
    assert "\\x1b[2J gone" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_a_pipe_gets_data_unchanged() -> None:
    out = io.StringIO()
    Console(stdout=out).data("\x1b[2J")
    assert out.getvalue() == "\x1b[2J\n"


def test_a_spreadsheet_runs_no_text_of_a_table(tmp_path: Path) -> None:
    texts = ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "\t=1", "a=b", "", None]
    table = pd.DataFrame(
        {"model": pd.Series(texts, dtype="string"), "plain": texts, "value": [-1.5] * 8}
    )
    write_csv(table, tmp_path / "t.csv")
    read = pd.read_csv(tmp_path / "t.csv")
    for name in ("model", "plain"):
        assert read[name].tolist()[:6] == [*(f"'{text}" for text in texts[:5]), "a=b"]
        assert read[name].isna().tolist()[6:] == [True, True]
    assert read["value"].tolist() == [-1.5] * 8
    out = io.StringIO()
    Console(stdout=out).table(table)
    assert out.getvalue() == (tmp_path / "t.csv").read_text()


def test_html_anywhere_in_a_run_is_escaped(tmp_path: Path) -> None:
    bad = '<img src=x onerror="alert(1)">'
    texts = {"prompt": bad, "model": bad, "prompt_source": bad}
    records = [
        make_record(cell=AR, prompt=number, walks=[[]] * 3, seconds=1.0) | texts
        for number in range(2)
    ]
    folder = write_run(
        folder=tmp_path / "run",
        records=records,
        scores=[],
        experiment={"name": bad, "description": bad, "model": [bad]},
    )
    assert "<img src=x" not in render(load_runs([folder]), folder)


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_long_prompt_files_are_read(count: int, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("".join(f"lantern {number}\n" for number in range(count)))
    assert len(load_prompts(str(path), ANY_PROMPT)) == count
    assert load_prompts(f"{path}#0-2", ANY_PROMPT) == [
        Prompt("lantern 0", "p.txt:1"),
        Prompt("lantern 1", "p.txt:2"),
    ]
