"""The command line: streams, exit codes, and the commands that read runs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from lantern_bench import __version__
from lantern_bench.cli import main as cli
from lantern_bench.errors import CheckFailedError, RecordsFailedError, RefusedError, UserError
from lantern_bench.report.tables import NAMES
from lantern_bench.runs.store import RESULTS_VARIABLE, results_root
from tests.made_up_run import make_records, make_scores, write_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run called made-up-1234 in the results folder."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "results"))
    records = make_records()
    return write_run(tmp_path / "results" / "made-up-1234", records, make_scores(records))


@pytest.fixture
def failing(monkeypatch):
    """Make `show` raise a given error."""

    def arrange(error: BaseException) -> None:
        def find(_run: str, _root: Path) -> None:
            raise error

        monkeypatch.setattr("lantern_bench.cli.options.find_run", find)

    return arrange


@pytest.mark.parametrize("name", ["made-up-1234", "made-up"])
def test_show_finds_run_by_name_and_rebuilds_tables(run, capsys, name):
    assert cli.main(["show", name]) == 0
    written = capsys.readouterr()
    assert pd.read_csv(io.StringIO(written.out))["method"].tolist() == ["ar", "speculative", "lantern++"]
    assert written.err == ""
    assert all((run / f"{table}.csv").is_file() for table in NAMES)


@pytest.mark.parametrize("table", NAMES)
def test_show_prints_the_csv_it_writes(run, capsys, table):
    assert cli.main(["show", str(run), "--table", table]) == 0
    assert capsys.readouterr().out == (run / f"{table}.csv").read_text()


def test_show_formats(run, capsys):
    assert cli.main(["show", "made-up", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert cli.main(["show", "made-up", "--table", "speed", "--format", "table"]) == 0
    assert "2.09x [1.93, 2.27]" in capsys.readouterr().out


def test_show_prints_from_read_only_run(run, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lantern_bench.report.tables.write_atomically", refuse)
    assert cli.main(["show", "made-up"]) == 0
    written = capsys.readouterr()
    assert len(written.out.splitlines()) == 4
    assert "warning:" in written.err and "Permission denied" in written.err


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["show", "nope"], "no such run"),
        (["show", "made-up", "--table", "sped"], "--table sped"),
        (["show", "made-up", "--format", "yaml"], "--format yaml"),
        (["show"], "Missing argument"),
        (["show", "made-up", "--tabel", "speed"], "--tabel"),
        (["shwo"], "Did you mean 'show'"),
        (["curves", "made-up", "made-up", "nope"], "nope"),
        (["experiments", "--format", "yaml"], "--format yaml"),
    ],
)
def test_usage_errors_exit_2_with_one_message(run, capsys, typed, wrong):
    assert cli.main(typed) == 2
    written = capsys.readouterr()
    assert wrong in written.err
    assert written.out == "" and "Traceback" not in written.err
    assert not (run / "summary.csv").exists()


@pytest.mark.parametrize(
    "typed",
    [
        ["show", "9" * 5000],
        ["sweep", "9" * 5000 + ".yaml"],
        ["sweep", "--out", "9" * 5000],
        ["sweep", "--model", "9" * 5000 + ".yaml"],
        ["sweep", "--prompts", "coco:" + "9" * 5000 + ".json"],
        ["verify", "9" * 5000],
        ["merge", "9" * 5000],
    ],
)
def test_a_path_that_is_too_long_is_a_usage_error(capsys, typed):
    assert cli.main(typed) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ") and "999" in written and "internal" not in written


@pytest.mark.parametrize("error", [UserError, RefusedError, RecordsFailedError, CheckFailedError])
def test_errors_set_their_exit_codes(failing, capsys, error):
    failing(error("it is so", "do that"))
    assert cli.main(["show", "x"]) == error.exit_code
    assert capsys.readouterr().err == "error: it is so\n  do that\n"


def test_internal_error_is_one_line_and_exits_1(failing, capsys):
    failing(ZeroDivisionError("by zero"))
    assert cli.main(["show", "x"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: internal: ZeroDivisionError: by zero",
        "  This is a bug in lantern-bench; --debug shows where it happened.",
    ]
    assert cli.main(["show", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interruption_exits_130(failing):
    failing(KeyboardInterrupt())
    assert cli.main(["show", "x"]) == 130


def test_interruption_outside_a_command_exits_130(monkeypatch):
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_program", lambda **_: interrupt)
    assert cli.main(["--version"]) == 130


def test_global_flags_work_in_any_position(run, capsys, monkeypatch):
    monkeypatch.setattr("lantern_bench.report.tables.write_atomically", lambda *_: (_ for _ in ()).throw(OSError("no")))
    assert cli.main(["show", "made-up", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["-q", "show", "made-up"]) == 0
    assert cli.main(["show", "--", "-q"]) == 2  # a run of that name
    assert "-q: no such run" in capsys.readouterr().err


def test_curves_write_png_svg_and_csv(run, capsys):
    assert cli.main(["curves", "made-up"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.is_file() for path in paths)
    names = {path.stem for path in paths}
    assert {(path.stem, path.suffix) for path in paths} == {
        (name, suffix) for name in names for suffix in (".csv", ".png", ".svg")
    }
    assert names >= {"acceptance-by-depth", "acceptance-by-position", "accepted-lengths"}


def test_curves_of_several_runs_share_the_axes(run, tmp_path, monkeypatch):
    records = make_records()
    write_run(run.parent / "other", records, make_scores(records))
    drawn = []
    monkeypatch.setattr("lantern_bench.report.curves.draw_curves", lambda *arguments: drawn.append(arguments) or [])
    assert cli.main(["curves", "made-up", "other", "--out", str(tmp_path / "both")]) == 0
    ((tables, folder, by),) = drawn
    assert list(tables) == ["made-up-1234", "other"] and folder == tmp_path / "both" and by == "mode"


def test_experiments_lists_shipped_experiments(capsys):
    assert cli.main(["experiments"]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert "lanterns" in set(listed["experiment"])
    assert listed["about"].notna().all()


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lantern-bench {__version__}\n"
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "Exit codes" in shown and "show" in shown and "\x1b" not in shown


def flags_shown(capsys, *typed: str) -> set[str]:
    assert cli.main([*typed]) == 0
    return set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE))


def test_rarely_used_flags_are_accepted_and_shown_by_help_all(run, capsys):
    often, every = flags_shown(capsys, "sweep", "--help"), flags_shown(capsys, "sweep", "--help-all")
    assert often < every and {"--neighbour-metric", "--worker-timeout", "--pool-devices"} <= every - often
    assert {"--delta", "--images", "--seed"} <= often
    assert cli.main(["sweep", "--neighbour-space", "cosine", "--dry-run"]) == 2
    assert "--neighbour-space cosine: must be raw or normalised" in capsys.readouterr().err
    assert flags_shown(capsys, "show", "--help") == flags_shown(capsys, "show", "--help-all")


def test_results_variable_sets_the_directory(monkeypatch):
    monkeypatch.delenv(RESULTS_VARIABLE, raising=False)
    assert str(results_root()) == "results"
    monkeypatch.setenv(RESULTS_VARIABLE, "elsewhere")
    assert str(results_root()) == "elsewhere"


def test_help_imports_nothing_heavy():
    """Heavy packages are imported only inside commands."""
    code = (
        "import sys; from lantern_bench.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'pandas', 'scipy', 'matplotlib', 'numpy', 'rich'} & set(sys.modules);"
        "assert code == 0 and not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    module = subprocess.run([sys.executable, "-m", "lantern_bench", "--version"], check=True, capture_output=True)
    assert module.stdout.decode().startswith("lantern-bench ")
