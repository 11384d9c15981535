"""The A/A harness on made-up runs: it decodes nothing that is finished, and misses its bars when
runs differ.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scripts.bench import aa
from tests.helpers.made_up_run import AR, LOOSE, STRICT, WALKS, make_record, write_run


def make_pairs(folder, pairs, shift):
    """Finished runs; in the second of each pair STRICT takes `shift` times as long."""
    generator = np.random.default_rng(3)
    names = [f"pair-{number + 1:02d}" for number in range(pairs)]
    for name in sorted([f"{name}a" for name in names] + [f"{name}b" for name in names]):
        moved = np.exp(generator.normal(0, 0.03, (3, 3)))
        records = []
        for prompt in range(12):
            process = prompt % 3
            for number, cell in enumerate((AR, STRICT, LOOSE)):
                seconds = moved[number, process] * generator.normal(1, 0.02)
                seconds *= shift if cell is STRICT and name.endswith("b") else 1.0
                walks = [[]] * 6 if cell is AR else WALKS
                records.append(
                    make_record(
                        cell=cell, prompt=prompt, walks=walks, seconds=seconds, process=process
                    )
                )
        (write_run(folder / "12-images-3-processes" / name, records, []) / "speed.csv").touch()


def exit_code(folder, pairs):
    with pytest.raises(SystemExit) as ended:
        aa.main(["--pairs", str(pairs), "--out", str(folder)])
    return ended.value.code


def test_equal_runs_meet_the_bars(tmp_path, monkeypatch):
    make_pairs(tmp_path, 6, 1.0)
    monkeypatch.setattr(aa.subprocess, "run", None)  # finished runs are not made again
    assert exit_code(tmp_path, 6) == 0
    figures = pd.read_csv(tmp_path / "12-images-3-processes" / "figures.csv")
    assert set(figures["cell_id"]) == {STRICT.cell_id, LOOSE.cell_id}
    assert figures["pair"].nunique() == 6
    assert {aa.CHOSEN, aa.OVER_PROMPTS, "Hodges-Lehmann, processes"} < set(figures["method"])


def test_runs_that_differ_miss_the_bars(tmp_path):
    make_pairs(tmp_path, 3, 2.0)
    assert exit_code(tmp_path, 3) == 1
    figures = pd.read_csv(tmp_path / "12-images-3-processes" / "figures.csv")
    moved = figures[(figures["cell_id"] == STRICT.cell_id) & (figures["method"] == aa.CHOSEN)]
    assert not moved[["a_covers", "b_covers"]].any(axis=None)
    assert (pd.read_csv(tmp_path / "12-images-3-processes" / "verdicts.csv")["false"] > 0).all()
