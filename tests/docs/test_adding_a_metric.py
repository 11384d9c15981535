"""docs/adding-a-metric.md is true: its metric, outside the package, reaches every table and the
report page.

The example package lies beside the tests and is found through its dist-info on the path, as an
installed one would be; the commands run in a process of their own, because metrics are found when
they are first needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_bench.methods import catalog
from lantern_bench.methods.catalog import METRICS
from lantern_bench.methods.metrics import Metric
from lantern_bench.methods.plugins import find_rows
from lantern_bench.metrics import fidelity
from lantern_bench.metrics.extractors import FeatureSet
from lantern_bench.metrics.fidelity import FeatureSets, measure_sets
from lantern_bench.storage.run_directory import read_records
from tests.docs.test_adding_a_rule import ROOT, rows, run

# Whole commands in processes of their own, on machines that may be busy.
pytestmark = pytest.mark.timeout(1200)

EXAMPLE = ROOT / "tests" / "examples" / "sharpness_metric"
TINY = {
    "name": "sharp",
    "model": "tiny",
    "images": 3,
    "cells": [{"mode": "ar"}, {"mode": "lantern++", "lambda": 2}],
}


def test_a_metric_from_outside_is_scored_shown_drawn_compared_and_reported(tmp_path: Path) -> None:
    (tmp_path / "sharp.yaml").write_text(json.dumps(TINY))
    flags = [
        "--neighbours",
        "3",
        "--metrics",
        "speed,quality",
        "--protocol",
        "sharpness",
        "--no-compile",
    ]
    done = run(
        tmp_path,
        ["sweep", "sharp.yaml", *flags, "--out", "run"],
        ["sweep", "sharp.yaml", *flags, "--out", "other"],
        ["show", "run", "--table", "quality"],
        ["curves", "run"],
        ["compare", "run", "other", "--format", "csv"],
        ["report", "run", "--out", "page.html"],
        path=EXAMPLE,
    )
    assert done.returncode == 0, done.stderr
    scores = [
        json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()
    ]
    images = {record["record_key"]: record for record in read_records(tmp_path / "run")}
    for score in scores:
        pixels = np.asarray(
            Image.open(tmp_path / "run" / images[score["record_key"]]["image"]), dtype=np.float64
        )
        assert score["sharpness"] == pytest.approx(
            np.abs(np.diff(pixels, axis=1)).mean() / 255, rel=1e-5
        )
        assert score["clip_model"].startswith("sharpness@")
        assert score["protocol"] == "sharpness"
    ar, *_, relaxed = rows(tmp_path / "run" / "quality.csv")
    assert float(ar["sharpness"]) == pytest.approx(
        np.mean([s["sharpness"] for s in scores if s["cell_id"] == ar["cell_id"]])
    )
    assert relaxed["sharpness_vs_ar"]
    assert not ar["sharpness_vs_ar"]
    assert (tmp_path / "run" / "figures" / "speed-quality-sharpness.csv").is_file()
    assert ",sharpness,sharpness," in done.stdout, "quantity and protocol of a row of compare"
    assert "sharpness" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_name_of_a_metric_has_no_hyphen() -> None:
    entry: Any = SimpleNamespace(
        name="x", dist=None, load=lambda: Metric("my-metric", "a name", "a:b")
    )
    usable, refused = find_rows(
        group="", row_class=Metric, taken=dict.fromkeys(METRICS), draftings=(), entry_points=[entry]
    )
    assert not usable
    assert "must be lower-case letters, digits and _" in str(refused["x"])


def test_a_metric_of_sets_is_measured_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of the means, which FID has as one of its terms."""

    def shift(sets: FeatureSets) -> fidelity.Figure:
        return lambda rows: float(
            np.linalg.norm(
                sets.pictures[torch.from_numpy(rows)].numpy().mean(0) - sets.reference.mean
            )
        )

    row = Metric(
        "shift", "distance of the means", shift, level="set", against_ar="spread", min_images=10
    )
    monkeypatch.setitem(catalog.METRICS, "shift", row)
    monkeypatch.setattr(fidelity, "OF_SETS", (*catalog.OF_SETS, "shift"))
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    columns, _, notes = measure_sets([FeatureSets(features + 1, FeatureSet.of(features))])
    assert columns["shift"] == pytest.approx(6**0.5, rel=1e-5)
    assert columns["shift_low"] < columns["shift"] < columns["shift_high"]
    few = measure_sets([FeatureSets(features[:9], FeatureSet.of(features))])
    assert "shift" not in few.columns
    assert any("shift needs 10 images; there are 9" in note for note in few.notes)
    assert not any("shift" in note for note in notes)
