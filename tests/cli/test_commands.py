"""The command line: streams, exit codes, and the commands that read runs (show, curves, compare,
report).
"""

from __future__ import annotations

import functools
import io
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import lantern_bench
from lantern_bench import __version__
from lantern_bench.analysis.tables import NAMES
from lantern_bench.cli import main as cli
from lantern_bench.cli.console import FORMATS
from lantern_bench.models import registry
from lantern_bench.storage.run_directory import RESULTS_VARIABLE
from lantern_bench.utils.errors import CheckFailedError, RecordsFailedError, RefusedError, UserError
from tests.helpers.made_up_run import make_records, make_scores, write_run


@pytest.fixture
def results(folder, monkeypatch):
    """The folder of two runs, first-1234 and second, which takes half the time."""
    root = folder / "elsewhere"
    monkeypatch.setenv(RESULTS_VARIABLE, str(root))
    records = make_records()
    write_run(root / "first-1234", records, make_scores(records))
    faster = [row | {"seconds": row["seconds"] and row["seconds"] / 2} for row in records]
    write_run(root / "second", faster, make_scores(records))
    return root


@pytest.fixture
def failing(monkeypatch):
    """Make `show` raise a given error."""

    def arrange(error: BaseException) -> None:
        def names() -> None:
            raise error

        monkeypatch.setattr("lantern_bench.storage.run_directory.known_runs", names)

    return arrange


@pytest.mark.parametrize("table", NAMES)
def test_show_makes_the_tables_and_prints_the_csv(results, capsys, table):
    assert cli.main(["show", "first", "--table", table, "--save"]) == 0
    written = capsys.readouterr()
    assert written.out == (results / "first-1234" / f"{table}.csv").read_text()
    assert written.err == ""
    assert all((results / "first-1234" / f"{name}.csv").is_file() for name in NAMES)


@pytest.mark.parametrize(
    "words",
    [["show"], ["show", "--format", "json"], ["recommend"], ["predict", "--device", "a100"]],
)
def test_commands_that_read_a_run_write_nothing(results, capsys, words):
    """Also not where a file is older than the records, as after an update."""
    run = results / "first-1234"
    (run / "speed.csv").write_text("cell_id\n")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    cli.main([words[0], "first", *words[1:]])
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before


def test_groups_of_prompts_are_shown_and_not_saved(folder, monkeypatch, capsys):
    monkeypatch.setenv(RESULTS_VARIABLE, str(folder))
    records = [row | {"prompt_metadata": {"tag": row["prompt_id"]}} for row in make_records()]
    run = write_run(folder / "run", records, make_scores(records))
    assert cli.main(["show", "run", "--by", "tag", "--table", "speed", "--save"]) == 0
    shown = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert shown["category"].tolist() == sorted([f"p00{prompt}" for prompt in range(4)] * 3)
    assert shown["prompts"].sum() == 11
    assert len(pd.read_csv(run / "speed.csv")) == 3


def test_show_joins_runs_by_cell(results, capsys):
    manifest = json.loads((results / "second" / "manifest.json").read_text())
    manifest["key"] = {"dtype": "bfloat16"}
    (results / "second" / "manifest.json").write_text(json.dumps(manifest))
    unlike = "second differs from first-1234 in setting: dtype (bfloat16 instead of not recorded)"

    assert cli.main(["show", "first", "second", "--table", "speed"]) == 0
    written = capsys.readouterr()
    assert written.err == f"warning: {unlike}\n"
    rows = pd.read_csv(io.StringIO(written.out))
    assert rows.columns[0] == "run"
    for run in ("first-1234", "second"):
        assert cli.main(["show", run, "--table", "speed"]) == 0
        alone = pd.read_csv(io.StringIO(capsys.readouterr().out))
        assert rows[rows["run"] == run].drop(columns="run").reset_index(drop=True).equals(alone)

    assert cli.main(["show", "first", "second", "--format", "md"]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    head, _, table = written.out.partition("\n\n")
    assert head == f"**first-1234 (11 images, 1 failed)   second (11 images, 1 failed)\n{unlike}**"
    names, _, *cells = [line for line in table.splitlines() if line.startswith("|")]
    assert names == (
        "| cell | first-1234: speedup | first-1234: MAL | second: speedup | second: MAL |"
    )
    assert len(cells) == 3


INCOMPLETE = "first-1234: 5 of 12 images; the last line of records.jsonl is cut off and left out"


@pytest.fixture
def incomplete(results):
    """The first run with the records of five of its images, and a half of the sixth."""
    run = results / "first-1234"
    lines = (run / "records.jsonl").read_bytes().splitlines(keepends=True)
    (run / "records.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:50])
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["experiment"] = {"images": 4, "repeats": 1, "batch": 1, "cells": [{}, {}, {}]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["show", "--save"],
        ["curves", "--out", "curves"],
        ["report", "--out", "page.html"],
        ["compare", "second"],
        ["recommend", "second", "--within", "clip_score=0.01"],
        ["predict", "--device", "a100"],
    ],
)
def test_commands_say_that_a_run_is_incomplete(incomplete, capsys, words):
    assert cli.main([words[0], "first", *words[1:]]) == 0
    written = capsys.readouterr().err
    assert written.count(f"{INCOMPLETE}. The command that started the run continues it.") == 1
    assert "Warning:" not in written
    if words[0] == "report":
        assert INCOMPLETE in Path("page.html").read_text(encoding="utf-8")


def test_quiet_commands_and_complete_runs_say_nothing_of_it(incomplete, results, capsys):
    assert cli.main(["show", "first", "-q"]) == 0
    assert cli.main(["show", "second"]) == 0
    assert capsys.readouterr().err == ""


def test_the_api_says_that_a_run_is_incomplete(incomplete):
    with pytest.warns(UserWarning, match="5 of 12 images"):
        run = lantern_bench.load_run("first")
    assert repr(run).endswith("first-1234': 3 cells, 5 of 12 images)")


def test_a_run_without_records_still_has_its_tables(results, tmp_path, capsys):
    run = results / "first-1234"
    assert cli.main(["show", "first", "--save"]) == 0
    capsys.readouterr()
    for table in NAMES:
        assert cli.main(["show", "first", "--table", table]) == 0
        shown = capsys.readouterr().out
        (run / "records.jsonl").rename(tmp_path / "records.jsonl")
        assert cli.main(["show", "first", "--table", table]) == 0
        assert capsys.readouterr().out == shown == (run / f"{table}.csv").read_text()
        (tmp_path / "records.jsonl").rename(run / "records.jsonl")
    (run / "records.jsonl").unlink()
    assert cli.main(["curves", "first", "--out", str(tmp_path / "curves")]) == 0
    assert (tmp_path / "curves" / "acceptance-by-depth.png").is_file()
    capsys.readouterr()
    for words in (
        ["check-run"],
        ["report"],
        ["predict", "--device", "a100"],
        ["compare", "second"],
    ):
        assert cli.main([words[0], "first", *words[1:]]) == 3
        assert "first-1234 holds tables only, no records" in capsys.readouterr().err


def test_check_run_accepts_a_run_whose_pictures_were_left_out(results, capsys):
    manifest = results / "second" / "manifest.json"
    assert cli.main(["check-run", "second"]) == 5
    assert "000000.png" in capsys.readouterr().out
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"pictures_left_out": True}))
    cli.main(["check-run", "second"])
    assert ".png" not in capsys.readouterr().out


def test_show_formats(results, capsys):
    assert cli.main(["show", "first", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert cli.main(["show", "first", "--table", "speed", "--format", "table"]) == 0
    assert "2.09x [1.98, 2.21]" in capsys.readouterr().out


def test_show_needs_a_writable_run_only_to_save(results, refuse, capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lantern_bench.utils.files.write_atomically", fail)
    assert cli.main(["show", "first"]) == 0
    written = capsys.readouterr()
    assert len(written.out.splitlines()) == 4
    assert written.err == ""
    refuse(["show", "first", "--save"], 2, "speed.csv: cannot be written: Permission denied")


def test_tables_without_records_are_not_saved(results, refuse):
    assert cli.main(["show", "first", "--save"]) == 0
    (results / "first-1234" / "records.jsonl").unlink()
    refuse(["show", "first", "--save"], 3, "holds tables only, no records")


def test_a_file_that_may_not_be_read_is_named(failing, capsys):
    failing(PermissionError(13, "Permission denied", "runs/x/manifest.json"))
    assert cli.main(["show", "x"]) == 2
    assert "error: runs/x/manifest.json: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        (["show", "nope"], "no such run"),
        (["show", "--", "-q"], "-q: no such run"),
        (["show", "first", "--table", "sped"], "--table sped"),
        (["show", "first", "--format", "yaml"], "--format yaml"),
        (["show", "first", "--by", "category"], "--by category: the prompts of"),
        (["show", "first", "nope"], "nope"),
        (["show", "first", "second", "first-1234"], "a run is given twice"),
        (["curves", "first", "first", "--out", "both"], "a run is given twice"),
        (["show"], "Missing argument"),
        (["show", "first", "--tabel", "speed"], "--tabel"),
        (["shwo"], "Did you mean 'show'"),
        (["experiments", "--format", "yaml"], "--format yaml"),
        (["compare", "first", "nope"], "nope"),
        (["compare", "first", "first"], "same run"),
        (["compare", "first", "second", "--across", "all"], "--across all"),
        (["compare", "first", "second", "--format", "yaml"], "--format yaml"),
        (
            ["compare", "first", "second", "--margin", "clip_score"],
            "clip_score: is no name with a positive number",
        ),
        (["recommend", "first", "--within", "fid=1"], "--within fid"),
        (["recommend", "first", "nope"], "nope"),
        (["curves", "first", "nope"], "nope"),
        (["curves", "first", "--by", "colour"], "--by colour"),
        (["curves", "first", "second"], "--out is missing"),
        (["report", "first", "second"], "--out is missing"),
        (["report", "first", "--out", "."], "is a directory"),
    ],
)
def test_usage_errors(results, refuse, typed, word):
    refuse(typed, 2, word)


@pytest.mark.parametrize(
    "typed",
    [
        ["show", "9" * 5000],
        ["sweep", "9" * 5000 + ".yaml"],
        ["sweep", "--out", "9" * 5000],
        ["sweep", "--model", "9" * 5000 + ".yaml"],
        ["sweep", "--prompts", "coco:" + "9" * 5000 + ".json"],
        ["check-run", "9" * 5000],
        ["merge", "9" * 5000],
    ],
)
def test_a_path_that_is_too_long_is_a_usage_error(folder, refuse, typed):
    refuse(typed, 2, "error: ", "999")


@pytest.mark.parametrize("error", [UserError, RefusedError, RecordsFailedError, CheckFailedError])
def test_errors_set_their_exit_codes(failing, capsys, error):
    failing(error("it is so", "do that"))
    assert cli.main(["show", "x"]) == error.exit_code
    assert capsys.readouterr().err == "error: it is so\n  do that\n"


def test_internal_error_is_one_line_and_exits_1(monkeypatch, capsys):
    divide = functools.partial(operator.truediv, 1, 0)  # in none of the user's files
    monkeypatch.setattr("lantern_bench.storage.run_directory.known_runs", divide)
    assert cli.main(["show", "x"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: internal: ZeroDivisionError: division by zero",
        "  This is a bug in lantern-bench; --debug shows where it happened.",
    ]
    assert cli.main(["show", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interruption_exits_130(failing, monkeypatch):
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    failing(KeyboardInterrupt())
    assert cli.main(["show", "x"]) == 130
    monkeypatch.setattr(cli, "build_program", lambda **_: interrupt)  # outside a command
    assert cli.main(["--version"]) == 130


@pytest.mark.parametrize(
    ("typed", "message", "command"),
    [
        (["show", "--nosuch"], "error: No such option: --nosuch", "lantern-bench show"),
        (["show"], "error: Missing argument 'RUN'", "lantern-bench show"),
        (["nosuch"], "error: No such command 'nosuch'", "lantern-bench"),
        (["explore", "trees", "--verify", "x"], "error: --verify", "lantern-bench explore"),
    ],
)
def test_errors_of_the_parser_look_like_all_others(typed, message, command, capsys):
    assert cli.main(typed) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(message)
    assert second == f"  `{command} -h` shows what it takes."


def test_a_wrong_number_of_the_parser_is_named(capsys):
    assert cli.main(["explore", "trees", "--verify", "-31"]) == 2
    first, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --verify")
    assert "-31" in first
    assert "Input should" not in first


def test_the_list_of_models_has_one_line_for_each(capsys):
    assert cli.main(["models", "--format", "table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line]) == len(registry.models()) + 2
    assert max(map(len, lines)) <= 100


def test_curves_name_their_folder_and_the_main_chart(results, capsys):
    assert cli.main(["curves", "first"]) == 0
    written = capsys.readouterr()
    folder = results / "first-1234" / "figures"
    pictures = list(folder.glob("*.png"))
    assert len(pictures) > 2
    assert f"{len(pictures)} charts in {folder}, each" in written.err
    main = Path(written.out.rstrip())
    assert main.name.startswith("speed-quality")
    assert main.resolve() in pictures


def test_curves_of_several_runs_share_the_axes(results, monkeypatch):
    drawn = []

    def draw(**arguments):
        drawn.append(arguments)
        return [Path("both/a.png")]

    monkeypatch.setattr("lantern_bench.report.draw.draw_curves", draw)
    assert cli.main(["curves", "first", "second", "--out", "both"]) == 0
    [arguments] = drawn
    assert [run.name for run in arguments.pop("runs")] == ["first-1234", "second"]
    assert arguments == {"folder": Path("both"), "by": "mode", "cells": [], "width": "two"}


def test_compare_prints_effects_and_verdicts(results, capsys):
    assert cli.main(["compare", "first", "second"]) == 0
    written = capsys.readouterr()
    table = pd.read_csv(io.StringIO(written.out))
    seconds = table[table["quantity"] == "latency_s"]
    assert seconds["effect"].tolist() == pytest.approx([2.0, 2.0, 2.0])
    assert "Holm" in written.err
    count = (table["verdict"] == "not distinguishable").sum()
    assert written.err.splitlines()[0] == f"B against A: {count} not distinguishable"
    assert cli.main(["compare", "first", "second", "--format", "md"]) == 0
    written = capsys.readouterr()
    assert written.out.count("not distinguishable") == count
    assert written.out.count("| latency_s |") == 0, "which is not tested"
    assert f"{table['verdict'].isna().sum()} rows without a test" in written.err


def test_compare_fails_below_a_ratio_of_speedups_and_by_verdicts_of_a_margin(
    results, refuse, capsys
):
    typed = ["compare", "first", "second"]
    assert (
        cli.main(
            [
                *typed,
                "--fail-below",
                "0.95",
                "--margin",
                "clip_score=0.01",
                "--fail-if",
                "different",
            ]
        )
        == 0
    )
    assert "equivalent" in capsys.readouterr().out, "which is not different"
    refuse(
        [*typed, "--fail-below", "nan"],
        2,
        "--fail-below nan: must be a number",
        "For example 0.95.",
    )
    assert cli.main([*typed, "--fail-below", "9"]) == 5
    assert (
        "--fail-below 9: true of 2 of 2, speculative-static-small-7-t1" in capsys.readouterr().err
    )
    refuse([*typed, "--margin", "fid=1"], 3, "--margin fid: no tested difference", "clip_score")


@pytest.mark.parametrize("form", FORMATS)
def test_recommend_names_the_fastest_cell_in_every_format(results, capsys, form):
    assert (
        cli.main(["recommend", "first", "second", "--within", "clip_score=0.01", "--format", form])
        == 0
    )
    written = capsys.readouterr()
    assert all(word in written.out for word in ("lambda2", "not settled", "lossless"))
    assert "keep clip_score_vs_ar >= -0.01" in written.err


def test_recommend_refuses_a_run_without_the_figure(results, refuse):
    refuse(["recommend", "first"], 3, "no cell has distance", "lantern-bench score RUN")


def test_recommend_takes_one_limit(results, capsys, refuse):
    typed = ["recommend", "first", "--max-emitted-tv", "0.1"]
    assert cli.main(typed) == 0
    assert "keep emitted_tv <= 0.1" in capsys.readouterr().err
    refuse([*typed, "--max-distance", "0.1"], 2, "--max-distance and --max-emitted-tv: give one")


def test_compare_needs_across_for_other_weights(results, capsys):
    manifest = json.loads((results / "second" / "manifest.json").read_text())
    for name, digest in (("first-1234", "aa"), ("second", "bb")):
        written = manifest | {"key": {"weights": {"lanterns/target": digest}}}
        (results / name / "manifest.json").write_text(json.dumps(written))
    assert cli.main(["compare", "first", "second"]) == 3
    written = capsys.readouterr()
    assert written.out == ""
    assert "--across weights" in written.err
    assert cli.main(["compare", "first", "second", "--across", "weights"]) == 0
    assert "warning: the runs differ in weights of lanterns/target" in capsys.readouterr().err


def test_report_writes_one_html_file(results, capsys):
    assert cli.main(["report", "first"]) == 0
    written = capsys.readouterr()
    assert written.out.strip() == str(results / "first-1234" / "report.html")
    assert "MB" in written.err
    out = results / "both.html"
    assert cli.main(["-q", "report", "first", "second", "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""
    assert "second: ar" in out.read_text(encoding="utf-8")


def test_experiments_lists_shipped_experiments(capsys):
    assert cli.main(["experiments"]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert "lanterns" in set(listed["experiment"])
    assert listed["about"].notna().all()


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lantern-bench {__version__}\n"
    module = subprocess.run(
        [sys.executable, "-m", "lantern_bench", "--version"], check=True, capture_output=True
    )
    assert module.stdout.decode().startswith("lantern-bench ")
    assert cli.main([]) == 2
    assert "Usage: lantern-bench" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "Exit codes" in shown
    assert "show" in shown
    assert "\x1b" not in shown


def commands() -> dict[tuple[str, ...], Any]:
    """Every command by the words that are typed for it."""
    tree = {}
    for name, command in cli.build_program().commands.items():
        below = getattr(command, "commands", None)
        tree |= (
            {(name, last): leaf for last, leaf in below.items()} if below else {(name,): command}
        )
    return tree


def flags_shown(capsys, *typed: str) -> set[str]:
    assert cli.main([*typed]) == 0
    return set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE))


def test_rarely_used_flags_are_shown_by_help_all(capsys):
    often = flags_shown(capsys, "sweep", "--help")
    every = flags_shown(capsys, "sweep", "--help-all")
    assert often < every
    assert {"--neighbour-metric", "--worker-timeout", "--pool-devices"} <= every - often
    assert {"--delta", "--images", "--seed"} <= often
    assert flags_shown(capsys, "show", "--help") == flags_shown(capsys, "show", "--help-all")


def test_help_shows_options_in_groups_with_what_their_values_are(capsys):
    assert cli.main(["sweep", "-h"]) == 0
    shown = capsys.readouterr().out
    titles = ["Arguments:", "What:", "Decoding:", "Run:", "Output:", "Options:", "  Examples:"]
    assert [line for line in shown.splitlines() if line in titles] == titles
    for flag in (
        "--modes MODES",
        "--delta NUMBERS",
        "--tree TREE",
        "--residual exact|official",
        "--out PATH",
    ):
        assert f"  {flag} " in shown
    examples = re.findall("^  lantern-bench (sweep .*)$", shown, flags=re.MULTILINE)
    assert len(examples) == 2
    assert cli.main([*examples[0].split(), "--dry-run"]) == 0
    for path, command in commands().items():
        assert cli.main([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        ranges = re.compile(r"results/(explore-)?<name>-<hash>|\d+<=x<=\d+")
        assert "<" not in ranges.sub("", shown), (path, command)


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        (["sweep", "--modes", "ar,sc"], ["ar,scd"]),
        (["generate", "x", "--mode", "lantern"], ["lantern", "lantern++"]),
        (["sweep", "--drafting", "ja"], ["jacobi"]),
        (["sweep", "--rule", "stri"], ["strict"]),
        (["sweep", "lanterns"], ["lanterns-quality", "lanterns-trees", "lanterns"]),
        (["train", "drafter", "--target", "lumina-mgpt-"], ["lumina-mgpt-7b-768"]),
        (["sweep", "--device", "c"], ["cpu", "cuda"]),
        (["predict", "--device", "a1"], ["a100", "a100-40gb"]),
        (["compare", "first-1234", "sec"], ["second"]),
    ],
)
def test_a_shell_completes_names(results, capsys, monkeypatch, typed, completions):
    monkeypatch.setenv("_LANTERN_BENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["lantern-bench", *typed]))
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    assert cli.main([]) == 0
    assert capsys.readouterr().out.split() == completions


PREDICT = ["predict", "first", "--device", "a100", "--model", "lumina-mgpt-7b-768"]


@pytest.mark.parametrize(
    ("typed", "heavy"),
    [
        (["--help"], {"torch", "pandas", "scipy", "matplotlib", "numpy", "rich"}),
        (["sweep", "--dry-run"], {"torch", "torchvision", "open_clip", "torch_fidelity"}),
        (PREDICT, {"torch"}),
        (["curves", "first"], {"torch"}),
        (["generate", "two round red lanterns over a lake at dusk"], {"sympy", "torch._dynamo"}),
    ],
)
def test_heavy_packages_are_imported_only_where_they_are_needed(results, typed, heavy):
    code = (
        "import sys; from lantern_bench.cli.main import main; code = main(sys.argv[1:]);"
        f"heavy = {heavy} & set(sys.modules); assert code == 0 and not heavy, (code, heavy)"
    )
    subprocess.run([sys.executable, "-c", code, *typed], check=True, stdout=subprocess.DEVNULL)


def test_a_run_is_not_compared_with_itself(results):
    with pytest.raises(UserError, match="is the same run as"):
        lantern_bench.compare(results / "second", results / "second" / ".." / "second")


def test_scoring_a_run_without_its_pictures_is_refused(results, capsys):
    for protocol in ([], ["--protocol", "lantern-coco"]):
        assert cli.main(["score", str(results / "second"), *protocol]) == 3
        assert "pictures is here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        (["sweep", "--out", "/data/runs/a"], "lantern-bench sweep --out a"),
        (
            ["sweep", "--out=/data/a", "--prompts", "coco:/x/y.json"],
            "lantern-bench sweep --out=a --prompts coco:y.json",
        ),
        (["sweep", "--ray", "ray://host:10001"], "lantern-bench sweep --ray ray://host:10001"),
        (["sweep", "runs/mine.yaml"], "lantern-bench sweep runs/mine.yaml"),
    ],
)
def test_a_recorded_command_names_no_folder_of_the_machine(typed, recorded):
    assert cli._as_recorded(typed) == recorded
