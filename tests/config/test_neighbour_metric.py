"""The metric of neighbours as a setting: named where it is not l2, and older runs keep their ids and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.values import Overrides
from lantern_bench.errors import UserError

MODELS: dict[str, dict[str, Any]] = {"m": {}, "small": {}, "big": {}}


def lantern(**more: Any) -> Decoding:
    return Decoding(**{"mode": "lantern", "delta": 0.1, **more})


def test_the_default_is_unsaid() -> None:
    assert lantern(neighbour_metric="l2") == lantern()
    assert lantern().cell_id == "lantern-dynamic-58n5d10b-k20-delta0.1-t1"
    assert "neighbour_metric" not in lantern().settings()
    assert lantern().columns()["neighbour_metric"] == "l2"
    assert Decoding(mode="speculative", drafting="static", rule="strict").columns()["neighbour_metric"] is None


def test_another_metric_is_in_the_id_and_the_key() -> None:
    random = lantern(neighbour_metric="random", residual="official")
    assert random.cell_id.endswith("-t1-neighbourmetricrandom-residualofficial")
    assert random.settings()["neighbour_metric"] == "random"
    assert lantern(neighbour_metric="cosine", temperature=0).cell_id.endswith("-t0-neighbourmetriccosine")


def test_it_is_a_grid_in_a_file_and_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: m\nbaseline: false\nneighbour_metric: [l2, cosine]\ncells: [{mode: lantern, delta: 0.1}]")
    found = load_experiment(path, MODELS)
    assert [cell.decoding.neighbour_metric for cell in found.cells] == ["l2", "cosine"]
    assert [
        cell.decoding.neighbour_metric
        for cell in load_experiment(path, MODELS, Overrides.from_flags({"neighbour_metric": "random"})).cells
    ] == ["random"]
    with pytest.raises(UserError, match="neighbour-metric l1: unknown value"):
        load_experiment(path, MODELS, Overrides.from_flags({"neighbour_metric": "l1"}))


def test_sizes_of_other_models_may_wait_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: small\nimages: 9\ncells: [{mode: lantern}]\nmodels:\n"
        "  small: {delta: 0.1, images: 3}\n  big: {delta: 0.4, images: 1000, prompts: coco.txt}\n"
    )
    assert load_experiment(path, MODELS).settings.images == 3
    big = load_experiment(path, MODELS, Overrides.from_flags({"model": ["big"]}))
    assert (big.settings.images, big.settings.prompts) == (1000, "coco.txt")
    assert load_experiment(path, MODELS, Overrides.from_flags({"model": ["big"], "images": "5"})).settings.images == 5
    with pytest.raises(UserError, match="differs from another model's"):
        load_experiment(path, MODELS, Overrides.from_flags({"model": ["small", "big"]}))
