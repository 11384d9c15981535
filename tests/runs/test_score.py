"""Scoring a run: which rows are written, what they contain, and that scoring is repeatable.

The scorers are real classes with random weights; the pictures are files in a folder laid out like a run's.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from experiments.train_lanterns.recipe import write_weights
from experiments.train_lanterns.scenes import render
from experiments.train_lanterns.tasks import CLIP_CONFIG, save_clip
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import Prompt, make_plan
from lantern_bench.config.protocols import PROTOCOLS, Protocol
from lantern_bench.errors import RefusedError
from lantern_bench.methods.tables import METRICS
from lantern_bench.metrics import features, image_scorers
from lantern_bench.metrics.features import Reference, read_picture
from lantern_bench.models.lanterns import HELD_OUT
from lantern_bench.models.lanterns import modules as classifier
from lantern_bench.models.lanterns.modules import AttributeClassifier, predict
from lantern_bench.runs import scoring
from lantern_bench.runs.events import Share
from lantern_bench.runs.store import RunStore, read_records, read_scores
from lantern_bench.schema import TABLES

EMBEDDED = PROTOCOLS["embedded"]
NOTHING = Protocol("nothing", 1, "scorers nothing")
PROMPTS = [HELD_OUT[number].caption() for number in range(5)] + ["a photo of a cat"]


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> scoring.Scorers:
    folder = tmp_path_factory.mktemp("scorers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        write_weights(AttributeClassifier().state_dict(), folder / "features.safetensors")
        save_clip(open_clip.CLIP(**CLIP_CONFIG["model_cfg"]), folder / "clip")
    path = folder / "features.safetensors"
    scorer = image_scorers.load_clip(f"local-dir:{folder / 'clip'}")
    images = {"clip_score": scorer, "prompt_accuracy": image_scorers.PromptAccuracy(classifier.load_classifier(path))}
    return scoring.Scorers(EMBEDDED, images, features.find_extractor(weights=path))


@pytest.fixture(scope="module")
def reference() -> Reference:
    pictures = torch.from_numpy(render(HELD_OUT[:20], 8).transpose(0, 3, 1, 2).copy())
    return Reference(pictures, "twenty scenes")


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Two cells of six pictures each, and one record that failed."""
    painted = render([*HELD_OUT[:5], HELD_OUT[5]] * 2, 4)
    records: list[dict[str, Any]] = []
    for number, pixels in enumerate(painted):
        cell = ("ar-none-none-t1", "speculative-static-small-7-t1")[number // 6]
        name = f"images/{cell}/{number % 6:06d}.png"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
        records.append(_record(f"key{number}", cell, PROMPTS[number % 6], name))
    return tmp_path, [*records, _record("key99", "ar-none-none-t1", PROMPTS[0], "", status="failed")]


def _record(key: str, cell: str, prompt: str, image: str, status: str = "ok") -> dict[str, Any]:
    return {"record_key": key, "cell_id": cell, "prompt": prompt, "repeat": 0, "image": image, "status": status}


def _score(run: tuple[Path, list[dict[str, Any]]], *judge_and_reference: Any) -> list[dict[str, Any]]:
    folder, records = run
    return list(scoring.score_records(records, folder, *judge_and_reference))


def test_a_row_for_each_picture_and_each_cell(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    rows = _score(run, scorers, reference)
    assert [row["level"] for row in rows] == (["image"] * 6 + ["cell"]) * 2
    assert {row["record_key"] for row in rows if row["level"] == "image"} == {f"key{number}" for number in range(12)}
    declared = {column.name for column in TABLES["scores"]}
    assert all(set(row) <= declared and row["protocol"] == "embedded" for row in rows)


def test_image_rows_hold_each_scorers_answer(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    folder, records = run
    images = [row for row in _score(run, scorers, reference) if row["level"] == "image"]
    for row, record in zip(images, records[:12], strict=True):
        picture = read_picture(folder / record["image"])
        assert row["clip_score"] == pytest.approx(
            scorers.images["clip_score"]([picture], [record["prompt"]])[0], abs=1e-5
        )
        assert row["clip_model"] == scorers.label
    pictures = torch.stack([torch.from_numpy(np.array(Image.open(folder / r["image"]))) for r in records[:5]])
    seen = predict(scorers.images["prompt_accuracy"].classifier, pictures.permute(0, 3, 1, 2)).tolist()
    expected = [float(tuple(row) == HELD_OUT[number].indices()) for number, row in enumerate(seen)]
    assert [row["prompt_accuracy"] for row in images[:5]] == expected
    assert images[5]["prompt_accuracy"] is None, "a prompt outside the grammar has no prompt accuracy"


def test_cell_rows_have_fidelity_extractor_and_reference(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    assert scorers.extractor is not None
    first, second = (row for row in _score(run, scorers, reference) if row["level"] == "cell")
    assert first["n"] == second["n"] == 6 and first["kid_subset"] == 3
    assert first["fid"] is None and "fid needs 128 images" in first["note"]
    assert isinstance(first["kid"], float) and first["kid_low"] < first["kid"] < first["kid_high"]
    assert first["precision"] is None and "precision and recall need 256 images" in first["note"]
    assert first["extractor"] == scorers.extractor.label and first["reference"] == "twenty scenes"


def test_sets_of_ar_images_give_a_band(
    run: tuple[Path, list[dict[str, Any]]],
    scorers: scoring.Scorers,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewest pictures of 6, so that six pictures a cell have every figure but FID."""
    for name in ("precision", "recall"):
        monkeypatch.setitem(METRICS, name, dataclasses.replace(METRICS[name], min_images=6))
    folder, records = run
    both = [record | {"mode": "ar", "seed_set": int(number >= 6)} for number, record in enumerate(records)]
    *rows, band = _score((folder, both), scorers, reference)
    assert band["level"] == "band" and (band["n"], band["band_sets"]) == (6, 2)
    assert band["cell_id"] == records[0]["cell_id"] and "fid" not in band
    for name in ("kid", "precision", "recall"):
        assert band[f"{name}_low"] <= band[name] <= band[f"{name}_high"]
    assert {row["precision"] for row in rows if row["level"] == "image"} <= {0.0, 1.0}
    other = [record | {"mode": "ar", "temperature": number >= 6} for number, record in enumerate(records)]
    assert all(row["level"] != "band" for row in _score((folder, other), scorers, reference))


def test_scoring_again_gives_the_same(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    assert _score(run, scorers, reference) == _score(run, scorers, reference)


def test_a_missing_picture_is_noted(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    folder, records = run
    (folder / records[0]["image"]).unlink()
    rows = _score(run, scorers, reference)
    assert "key0" not in {row.get("record_key") for row in rows}
    cell = next(row for row in rows if row["level"] == "cell")
    assert cell["n"] == 5 and "1 images are missing" in cell["note"]


def test_the_last_record_of_a_key_counts(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers, reference: Reference
) -> None:
    folder, records = run
    again = _record("key0", records[0]["cell_id"], PROMPTS[0], records[0]["image"])
    failed_first = [{**records[0], "status": "failed"}, *records[1:], again]
    rows = list(scoring.score_records(failed_first, folder, scorers, reference))
    assert [row.get("record_key") for row in rows].count("key0") == 1


def test_missing_scorers_leave_their_columns_empty(run: tuple[Path, list[dict[str, Any]]]) -> None:
    rows = _score(run, scoring.Scorers(NOTHING))
    assert {row["level"] for row in rows} == {"image"}
    assert all(row["clip_score"] is None and row["prompt_accuracy"] is None for row in rows)


def test_scoring_reports_progress_by_cell(run: tuple[Path, list[dict[str, Any]]]) -> None:
    events: list[object] = []
    folder, records = run
    list(scoring.score_records(records, folder, scoring.Scorers(NOTHING), None, events.append))
    assert events == [Share("scoring", 1, 2), Share("scoring", 2, 2)]


def test_no_records_give_no_rows(tmp_path: Path, scorers: scoring.Scorers) -> None:
    assert list(scoring.score_records([], tmp_path, scorers)) == []


EXPERIMENT = """
name: scored
model: lanterns
prompts: held-out
images: 5
cells:
  - {mode: ar}
  - {mode: speculative, drafting: static, tree: small-7}
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A real run's folder with five pictures in each of two cells."""
    (tmp_path / "scored.yaml").write_text(EXPERIMENT)
    experiment = load_experiment(tmp_path / "scored.yaml", {"lanterns": {}})
    key = dict(
        schema_version=1,
        engine_version="0",
        torch_version="0",
        dtype="float32",
        device_type="cpu",
        compile=False,
        batch=1,
        weights={},
    )
    painted = dict(zip(PROMPTS, render(HELD_OUT[:5], 4), strict=False))
    with RunStore(tmp_path / "run", experiment, key) as store:
        for task in make_plan(experiment, [Prompt(text) for text in PROMPTS[:5]]).tasks:
            png = io.BytesIO()
            Image.fromarray(painted[task.prompt.text]).save(png, "PNG")
            store.append(task, {}, png.getvalue())
        yield store


def test_a_run_is_scored_once(store: RunStore, scorers: scoring.Scorers, reference: Reference) -> None:
    assert scoring.score_run(store, scorers, reference) == 12
    assert scoring.score_run(store, scorers, reference) == 0
    rows = read_scores(store.folder)
    assert [row["level"] for row in rows].count("image") == 10
    cells = {record["cell_id"] for record in read_records(store.folder)}
    assert {row["cell_id"] for row in rows if row["level"] == "cell"} == cells


def test_other_scorer_or_reference_scores_again(
    store: RunStore, scorers: scoring.Scorers, reference: Reference
) -> None:
    scoring.score_run(store, scorers, reference)
    assert scoring.score_run(store, scorers, reference._replace(label="other scenes")) == 12
    newer = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, version=99))
    assert scoring.score_run(store, newer, reference) == 12
    other = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, name="other"))
    assert scoring.score_run(store, other, reference) == 12


def test_only_cells_with_new_images_are_scored_again(
    store: RunStore, scorers: scoring.Scorers, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = read_records(store.folder)
    monkeypatch.setattr(scoring, "read_records", lambda _folder: records[1:])
    scoring.score_run(store, scorers, reference)
    monkeypatch.setattr(scoring, "read_records", lambda _folder: records)
    assert scoring.score_run(store, scorers, reference) == 6


def test_full_size_scorers_are_refused_without_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv("LANTERN_BENCH_WEIGHTS", raising=False)
    with pytest.raises(RefusedError, match="inception-v3-compat"):
        scoring.load_scorers(PROTOCOLS["lantern-coco"])


def test_a_finished_run_is_scored_without_decoding(
    store: RunStore, scorers: scoring.Scorers, reference: Reference
) -> None:
    folder = store.folder
    store.close()
    before = (folder / "records.jsonl").read_bytes()
    with RunStore(folder) as opened:
        assert scoring.score_run(opened, scorers, reference) == 12
        with pytest.raises(RefusedError, match="in use"):
            RunStore(folder)
        assert scoring.score_run(opened, scorers, reference) == 0
        assert scoring.score_run(opened, scorers, reference, again=True) == 12
    assert (folder / "records.jsonl").read_bytes() == before
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["protocols"]["embedded"] == json.loads(json.dumps(dataclasses.asdict(EMBEDDED)))
    assert manifest["experiment"]["name"] == "scored"


def test_a_run_without_images_is_not_scored(store: RunStore) -> None:
    store.close()
    (store.folder / "records.jsonl").write_text("")
    with pytest.raises(RefusedError, match="no images to score"):
        RunStore(store.folder)


def test_fidelity_without_a_reference_has_a_note(
    run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers
) -> None:
    bare = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, reference=None))
    cells = [row for row in _score(run, bare) if row["level"] == "cell"]
    assert [row.get("fid") for row in cells] == [None, None]
    assert all("--reference" in row["note"] and row["reference"] is None for row in cells)


def test_rewards_fill_their_own_columns(run: tuple[Path, list[dict[str, Any]]], scorers: scoring.Scorers) -> None:
    protocol = Protocol("hpsv2", 1, "a stand-in", metrics=("hpsv2",))
    rows = _score(run, scoring.Scorers(protocol, {"hpsv2": scorers.images["clip_score"]}))
    by_clip = [row for row in _score(run, scorers) if row["level"] == "image"]
    assert [row["hpsv2"] for row in rows] == [row["clip_score"] for row in by_clip]
    assert all(row["clip_score"] is None for row in rows)
