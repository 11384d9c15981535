"""The console: data on stdout, words on stderr, plain text where there is no terminal, and nothing
ever cut.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest

from lantern_bench.cli.console import Console
from lantern_bench.config.experiment import load_experiment
from lantern_bench.models.registry import defaults_of
from lantern_bench.report.format_tables import readable
from lantern_bench.storage.schema import without_unused
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import Note, ProgressEvent, heard_by, slow_task
from lantern_bench.utils.text import duration
from tests.helpers.made_up_run import build_tables, make_record, make_records, make_scores

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("lantern_bench.utils.progress.now", lambda: clock.seconds)
    return clock


@pytest.fixture
def summary():
    records = make_records()
    return build_tables(records, make_scores(records))["summary"]


def console(
    *, terminal: bool = False, form: str | None = None, **flags
) -> tuple[Console, io.StringIO, io.StringIO]:
    kind = Terminal if terminal else io.StringIO
    out = kind()
    err = kind()
    made = Console(stdout=out, stderr=err, **flags)
    made.format = form or made.format
    return made, out, err


def test_a_pipe_gets_csv_and_a_terminal_a_table(summary):
    piped, out, err = console()
    piped.table(summary, "summary")
    assert pd.read_csv(io.StringIO(out.getvalue())).shape == without_unused(summary).shape
    assert err.getvalue() == ""
    drawn, out, _ = console(terminal=True)
    drawn.table(summary, "summary", title="a run")
    assert "a run" in out.getvalue()
    assert "2.09x [1.98, 2.21]" in out.getvalue()
    assert ESCAPE in out.getvalue()


def test_a_terminal_breaks_lines_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "results/" + "x" * 50
    texts = [
        f"the tables of the run lantern-bench made are in {path}",
        "a\n  second line is that of the advice",
    ]
    drawn, out, err = console(terminal=True)
    for text in texts:
        drawn.say(text)
        drawn.table(pd.DataFrame({"n": [1]}), notes=[text])
    for written in (err.getvalue(), out.getvalue()):
        assert not Counter(" ".join(texts).split()) - Counter(written.split())
        assert all(len(line) <= 40 or path in line for line in written.splitlines())


def test_the_summary_of_the_default_sweep_fits_120_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    records = []
    for cell in load_experiment("lanterns", defaults_of).cells:
        walks = [[]] * 6 if cell.decoding.mode == "ar" else [[0, 1], [0, -1], [-1]]
        records += [
            make_record(cell=cell.decoding, prompt=prompt, walks=walks, seconds=1.0, disturbed=True)
            for prompt in range(4)
        ]
    table = build_tables(records, make_scores(make_records()))["summary"].assign(
        distance=0.1234, fid=None
    )
    drawn, out, _ = console(terminal=True)
    drawn.table(table, "summary")
    lines = out.getvalue().splitlines()
    last_words = ["speedup", "lossless", "MAL", "output", "least)", "most)"]
    assert sum(line.split()[-6:] == last_words for line in map(plain, lines)) == 1
    assert "disturbed" not in plain(lines[1]) + plain(lines[2])
    assert any("4 of 4 images disturbed" in line for line in lines)


def plain(line: str) -> str:
    return re.sub("\x1b.*?m", "", line)


def test_heads_wrap_to_the_width_of_their_values():
    drawn, out, _ = console(terminal=True)
    drawn.table(pd.DataFrame({"target forwards / image": ["12.0", "345"], "n": ["1", "2"]}))
    assert max(map(len, plain(out.getvalue()).splitlines())) < 20


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_codes_with_no_color_or_dumb_terminal(summary, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    drawn, out, err = console(terminal=True)
    drawn.table(summary, "summary", title="a run")
    with drawn.events() as emit:
        emit(ProgressEvent("images", 1, 2))
    drawn.warn("careful")
    assert "2.09x" in out.getvalue()
    assert "images" in err.getvalue()
    assert ESCAPE not in out.getvalue() + err.getvalue()


@pytest.mark.parametrize("name", ["summary", "speed", "quality", "acceptance"])
@pytest.mark.parametrize("columns", ["200", "80", "60"])
def test_nothing_is_cut_on_a_narrow_terminal(monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    records = make_records()
    table = build_tables(records, make_scores(records))[name]
    narrow, out, _ = console(terminal=True)
    narrow.table(table, name)
    wide, whole, _ = console(form="table")
    wide.table(table, name)
    assert "…" not in out.getvalue() + whole.getvalue()
    figures = Counter(word for word in whole.getvalue().split() if word[0].isdigit())
    assert figures.total() > 3 * len(table.groupby("cell_id"))
    shown = readable(table, name, intervals=columns == "200").frame
    if columns == "200" or name != "summary":
        assert not figures - Counter(out.getvalue().split())
    cells = shown.to_numpy().ravel()
    intervals = [cell for cell in cells if "[" in cell]
    assert intervals
    assert all(cell in out.getvalue() for cell in intervals)


def test_a_table_in_a_pipe_is_as_wide_as_it_needs_to_be():
    long = "x" * 300
    piped, out, _ = console(form="table")
    piped.table(pd.DataFrame({"about": [long], "n": [1]}))
    assert long in out.getvalue()
    assert not any(line != line.rstrip() for line in out.getvalue().splitlines())


def test_json_keeps_figures_and_gaps(summary):
    written, out, _ = console(form="json")
    written.table(summary, "summary")
    rows = json.loads(out.getvalue())
    assert rows[1]["speedup"] == pytest.approx(summary["speedup"].iloc[1], rel=1e-12)
    assert rows[0]["argmax_mismatch"] is None
    assert list(rows[0]) == list(without_unused(summary).columns)


def test_markdown_and_latex(summary):
    written, out, _ = console(form="md")
    written.table(summary, "summary", title="a run")
    lines = out.getvalue().splitlines()
    assert lines[0] == "**a run**"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(summary)
    assert len({line.count(" | ") for line in table}) == 1
    written, out, _ = console(form="latex")
    written.table(summary.assign(method="50%_x"), "summary")
    assert r"50\%\_x" in out.getvalue()
    assert r"\end{tabular}" in out.getvalue()


def test_quiet_leaves_errors_alone(clock):
    quiet, out, err = console(quiet=True)
    quiet.say("hello")
    quiet.note(Note("more", None, "detail"))
    quiet.warn("careful", "do this")
    with quiet.events() as emit:
        emit(ProgressEvent("images", 1, 2))
        clock.seconds = 1e6
        emit(ProgressEvent("images", 2, 2))
    quiet.error(UserError("--delta 2: must lie between 0 and 1", "For example:\n--delta 0.1"))
    assert out.getvalue() == ""
    assert (
        err.getvalue()
        == "error: --delta 2: must lie between 0 and 1\n  For example:\n  --delta 0.1\n"
    )


def test_details_need_verbose_and_warnings_carry_advice():
    warning = "warning: the machine slowed down\n  run it again\n"
    for verbose, wanted in ((False, warning), (True, "more\n" + warning)):
        console_, _, err = console(verbose=verbose)
        console_.note(Note("more", None, "detail"))
        console_.warn("the machine slowed down", "run it again")
        assert err.getvalue() == wanted


def test_a_log_gets_at_most_one_a_minute(clock):
    console_, _, err = console()
    with console_.events() as emit:
        emit(ProgressEvent("images", 0, 400))
        for number in range(400):
            clock.seconds += 1.0
            figures = {"mal": 1.5, "s_per_image": 0.7123}
            emit(ProgressEvent("images", number + 1, 400, figures))
    lines = err.getvalue().splitlines()
    assert lines[0] == "images: 400"
    assert lines[1] == "images: 60 of 400, 5 min 40 s left, mal 1.5, s/image 0.712"
    assert lines[-1] == "images: 400 of 400 in 6 min 40 s, mal 1.5, s/image 0.712"
    assert len(lines) == 1 + 6 + 1


def loading(clock, emit, seconds):
    """A task of ten parts."""
    with heard_by(emit):
        loaded = slow_task("loading target.pt", 10)
        for _ in range(10):
            clock.seconds += seconds / 10
            loaded(1)


def test_time_before_the_first_part_does_not_count_for_the_time_left(clock):
    console_, _, err = console()
    with console_.events() as emit:
        emit(ProgressEvent("images", 0, 100))
        clock.seconds += 3600.0  # compiles
        for number in range(100):
            clock.seconds += 2.0
            emit(ProgressEvent("images", number + 1, 100, {}, 2.0))
    lines = err.getvalue().splitlines()
    assert lines[1] == "images: 1 of 100, 3 min 18 s left"
    assert lines[-1] == "images: 100 of 100 in 3 min 20 s"


def test_a_task_of_seconds_is_shown_with_the_time_left_and_a_short_one_is_not(clock):
    console_, _, err = console()
    with console_.events() as emit:
        loading(clock, emit, seconds=1.9)
        assert err.getvalue() == ""
        loading(clock, emit, seconds=30.0)
        clock.seconds += 5.0
        emit(ProgressEvent("images", 0, 4))
    assert err.getvalue().splitlines() == [
        "loading target.pt: 10%, 27 s left",
        "loading target.pt: 100% in 30 s",
        "images: 4",
        "images: 0 of 4 in 0 s",
    ]


def test_a_bar_of_a_task_of_seconds_counts_from_its_beginning(clock, monkeypatch):
    console_, _, err = console(terminal=True)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.seconds)
    with console_.events() as emit:
        loading(clock, emit, seconds=30.0)
    shown = err.getvalue()
    assert "20%|##        | 00:06, 00:24 left" in shown


def test_a_share_is_shown_as_per_cent_also_when_work_fails(clock):
    console_, _, err = console()
    with pytest.raises(KeyboardInterrupt), console_.events() as emit:
        emit(ProgressEvent("training target", 0))
        clock.seconds = 100.0
        emit(ProgressEvent("training target", 0.25, figures={"loss": 4.2}))
        raise KeyboardInterrupt
    assert err.getvalue().splitlines() == [
        "training target",
        "training target: 25%, 5 min 00 s left, loss 4.2",
        "training target: 25% in 1 min 40 s, loss 4.2",
    ]


def test_a_terminal_gets_bars_with_messages_above():
    console_, out, err = console(terminal=True)
    with console_.events() as emit:
        for number in range(4):
            emit(ProgressEvent("images", number + 1, 4, {"mal": 2.5}))
        console_.warn("the machine slowed down")
    console_.say("finished")
    text = err.getvalue()
    assert "4/4" in text
    assert "mal 2.5" in text
    assert "warning: the machine slowed down" in text
    assert text.endswith("finished\n")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (252, "4 min 12 s"), (3780, "1 h 03 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
