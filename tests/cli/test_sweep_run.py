"""Sweeps that resume, are interrupted, or have failed images, on a tiny model of logit tables."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lantern_bench.cli import main as cli
from lantern_bench.cli.sweep import Renderer
from lantern_bench.console import Console
from lantern_bench.methods.tables import DRAFTINGS, MODES
from lantern_bench.models import registry
from lantern_bench.runs.store import RESULTS_VARIABLE, read_records
from lantern_bench.runs.threads import Calibrated
from tests.tiny_model import EXPERIMENT, TinyModel


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> TinyModel:
    """A family of one tiny model, an experiment beside it, and an empty results folder."""
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    Path("tiny.yaml").write_text(EXPERIMENT)
    Path("broken.txt").write_text("one red lantern\nbroken\ntwo blue lanterns\n")
    return model


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0.04, ""), (0.2, "warning: other programs"), (0.63, "warning: speed cannot be measured now: other programs")],
)
def test_a_busy_processor_is_named_before_the_first_image(capsys, lost: float, said: str) -> None:
    console = Console()
    with console.progress() as progress:
        for note in Calibrated(1, {1: 4.0, 2: 5.0}, lost).notes():
            Renderer(console, progress).show(note)
    written = capsys.readouterr().err
    assert written.startswith(said) and bool(written) == bool(said)


def runs() -> list[Path]:
    return sorted(Path("results").iterdir())


def test_sweep_prints_its_run_directory_first_and_last(tiny, capsys) -> None:
    assert cli.main(["sweep", "tiny.yaml"]) == 0
    written = capsys.readouterr()
    (run,) = runs()
    lines = written.err.splitlines()
    assert lines[0] == lines[-1] == f"run: {run}"
    assert any(line.startswith("images: 18 of 18") for line in lines) and "mal " in written.err
    assert "s/image" in written.err
    assert len(pd.read_csv(io.StringIO(written.out))) == 6


def test_same_command_resumes_unless_no_resume(tiny, capsys) -> None:
    assert cli.main(["sweep", "tiny.yaml", "--images", "2"]) == 0
    before = {row["record_key"]: row["seconds"] for row in read_records(runs()[0])}
    capsys.readouterr()
    assert cli.main(["sweep", "tiny.yaml", "--images", "2"]) == 0
    assert "12 images kept, 0 to do" in capsys.readouterr().err
    assert {row["record_key"]: row["seconds"] for row in read_records(runs()[0])} == before
    assert cli.main(["sweep", "tiny.yaml", "--images", "2", "--no-resume"]) == 0
    assert runs()[1].name == f"{runs()[0].name}-2"
    assert {row["record_key"] for row in read_records(runs()[1])} == set(before)


def test_more_images_extend_a_run(tiny, capsys) -> None:
    assert cli.main(["sweep", "tiny.yaml", "--images", "1", "--out", "run"]) == 0
    assert cli.main(["sweep", "tiny.yaml", "--images", "3", "--out", "run"]) == 0
    assert "6 images kept, 12 to do" in capsys.readouterr().err
    assert cli.main(["sweep", "tiny.yaml", "--seed", "1", "--out", "run"]) == 3


def test_sweep_writes_the_table_in_the_asked_format(tiny, capsys) -> None:
    assert cli.main(["sweep", "tiny.yaml", "-q", "--format", "table"]) == 0
    written = capsys.readouterr()
    assert written.err == "" and "speedup" in written.out and "1.00x [1.00, 1.00]" in written.out


def test_failed_images_exit_4_and_are_retried(tiny, capsys) -> None:
    typed = ["sweep", "tiny.yaml", "--prompts", "broken.txt", "--out", "run"]
    assert cli.main(typed) == 4
    written = capsys.readouterr()
    assert "6 of 18 images failed" in written.err and "RuntimeError: no memory left" in written.err
    assert "Traceback" not in written.err
    listed = pd.read_csv(io.StringIO(written.out))
    assert set(listed["failed"]) == {1} and set(listed["images"]) == {2}
    assert cli.main(typed) == 4
    assert "12 images kept, 6 to do" in capsys.readouterr().err


def test_all_images_failed_exits_4(tiny, capsys) -> None:
    Path("broken.txt").write_text("broken\n")
    assert cli.main(["sweep", "tiny.yaml", "--prompts", "broken.txt", "--images", "1"]) == 4
    assert "6 of 6 images failed" in capsys.readouterr().err


def test_interruption_reports_finished_images(tiny, capsys, monkeypatch) -> None:
    from lantern_bench.runs import runner

    whole: Callable[..., Any] = runner.decode_batch
    calls: Iterator[int] = iter(range(100))

    def interrupted(*given: Any, **named: Any) -> Any:
        if named.get("tokens") is None and next(calls) == 4:
            raise KeyboardInterrupt
        return whole(*given, **named)

    monkeypatch.setattr(runner, "decode_batch", interrupted)
    monkeypatch.setattr(runner, "_ATTEMPTS", 1)  # a call is an image, also on a busy machine
    assert cli.main(["sweep", "tiny.yaml", "--out", "run"]) == 130
    written = capsys.readouterr()
    assert "interrupted: 4 of 18 images are done and kept in run" in written.err
    assert "The same command continues." in written.err and written.out == ""
    assert cli.main(["sweep", "tiny.yaml", "--out", "run"]) == 0
    assert "4 images kept, 14 to do" in capsys.readouterr().err


def test_weights_that_changed_are_refused(tiny, capsys) -> None:
    assert cli.main(["sweep", "tiny.yaml", "--out", "run"]) == 0
    load = tiny.load

    def other(*given: Any) -> Any:
        model = load(*given)
        model.weights = {**model.weights, "drafter": "3"}
        return model

    tiny.load = other
    capsys.readouterr()
    assert cli.main(["sweep", "tiny.yaml", "--out", "run"]) == 3
    assert "weights of tiny/drafter changed" in capsys.readouterr().err


def test_missing_scorers_are_refused_before_loading_models(tiny, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(Path.cwd()))
    monkeypatch.delenv("LANTERN_BENCH_WEIGHTS", raising=False)
    assert cli.main(["sweep", "tiny.yaml", "--metrics", "speed,quality"]) == 3
    assert "the weights of the feature extractor inception-v3-compat are not on this machine" in capsys.readouterr().err
    assert cli.main(["sweep", "tiny.yaml", "--metrics", "speed,quality", "--protocol", "embeded"]) == 2
    assert "unknown protocol; did you mean embedded?" in capsys.readouterr().err
    assert tiny.loads == 0 and not Path("results").exists()


def test_generate_repeats_images_at_a_seed(tiny, capsys) -> None:
    typed = ["generate", "one red lantern", "--model", "tiny", "--neighbours", "3", "--images", "3"]
    for name, more in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        assert cli.main([*typed, "--out", f"{name}.png", *more]) == 0
    assert len(pd.read_csv(io.StringIO(capsys.readouterr().out.split("cell_id", 2)[1]))) == 3
    made = [Path(f"{name}.png").read_bytes() for name in "abc"]
    assert made[0] == made[1] != made[2]


def test_generate_with_a_failing_model_exits_4(tiny, capsys) -> None:
    typed = ["generate", "broken", "--model", "tiny", "--mode", "ar", "--out", "a.png"]
    assert cli.main(typed) == 4
    assert "RuntimeError" in capsys.readouterr().err and not Path("a.png").exists()


def test_generate_decodes_all_modes_that_the_model_has_the_parts_for(tiny, capsys, monkeypatch) -> None:
    typed = ["generate", "one red lantern", "--model", "tiny", "--force"]
    assert cli.main([*typed, "--mode", "all", "--neighbours", "3"]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert all(cell.startswith(f"{mode}-") for mode, cell in zip(MODES, listed["cell_id"], strict=True))
    assert (listed[["seconds", "target_forwards", "mean_accepted_length"]] > 0).all(axis=None)
    load = tiny.load

    def without_drafter(*arguments: Any) -> Any:
        model = load(*arguments)
        model.drafter = None
        return model

    monkeypatch.setattr(tiny, "load", without_drafter)
    assert cli.main([*typed, "--mode", "all", "--neighbours", "3"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    able = [name for name, mode in MODES.items() if not DRAFTINGS[mode.drafting].needs_drafter]
    assert all(cell.startswith(f"{mode}-") for mode, cell in zip(able, listed["cell_id"], strict=True))
    assert written.err.count("is left out: mode ") == len(MODES) - len(able) > 0
    assert cli.main([*typed, "--mode", "ar,speculative"]) == 3
    assert "mode speculative needs a drafter" in capsys.readouterr().err
