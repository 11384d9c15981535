"""Scoring a run: which rows are written, what they contain, and that scoring is repeatable.

The scorers are real classes with random weights; the pictures are files in a folder laid out like a
run's.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from lantern_bench.analysis.tables import write_tables
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import make_plan
from lantern_bench.devices.compute import Compute
from lantern_bench.methods.catalog import METRICS
from lantern_bench.metrics import extractors, image_scorers, score_run
from lantern_bench.metrics.extractors import PictureReference, folder_reference, read_picture
from lantern_bench.metrics.protocols import PROTOCOLS, Protocol
from lantern_bench.metrics.score_run import Scorers
from lantern_bench.metrics.token_sums import finished_by_cell, score_tokens
from lantern_bench.models import registry
from lantern_bench.models.families.lanterns import modules as classifier
from lantern_bench.models.families.lanterns.description import HELD_OUT
from lantern_bench.models.families.lanterns.modules import AttributeClassifier
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.pictures import png_bytes
from lantern_bench.storage.records import line_of
from lantern_bench.storage.run_directory import read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import TABLES
from lantern_bench.sweeps.decode_missing import key_fields
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.progress import Emit, Note, ProgressEvent, ignore_events
from scripts.train_lanterns.part_tasks import CLIP_CONFIG, save_clip
from scripts.train_lanterns.parts import write_weights
from scripts.train_lanterns.scenes import render
from tests.helpers.tiny_model import TinyModel

EMBEDDED = PROTOCOLS["embedded"]
NOTHING = Protocol("nothing", 1, "scorers nothing")
PROMPTS = [HELD_OUT[number].caption() for number in range(5)] + ["a photo of a cat"]


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> Scorers:
    folder = tmp_path_factory.mktemp("scorers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        write_weights(AttributeClassifier().state_dict(), folder / "features.safetensors")
        save_clip(open_clip.CLIP(**CLIP_CONFIG["model_cfg"]), folder / "clip")
    path = folder / "features.safetensors"
    scorer = image_scorers.load_clip(weights=folder / "clip")
    images = {
        "clip_score": scorer,
        "prompt_accuracy": image_scorers.accuracy_by(classifier.load_classifier(path)),
    }
    return Scorers(EMBEDDED, images, [extractors.find_extractor(weights=path)])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PictureReference:
    folder = tmp_path_factory.mktemp("twenty")
    for number, pixels in enumerate(render(HELD_OUT[:20], 8)):
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder_reference(folder)._replace(label="twenty scenes")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(tmp_path / "cache"))


Run = tuple[Path, list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two cells of six pictures each, and one record that failed."""
    painted = render(HELD_OUT[:6] * 2, 4)
    records: list[dict[str, Any]] = []
    for number, pixels in enumerate(painted):
        cell = "ar-none-none-t1" if number < 6 else "speculative-static-small-7-t1"
        name = f"images/{cell}/{number % 6:06d}.png"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
        records.append(
            _record(key=f"key{number}", cell=cell, prompt=PROMPTS[number % 6], image=name)
        )
    failed = _record(
        key="key99", cell="ar-none-none-t1", prompt=PROMPTS[0], image="", status="failed"
    )
    return tmp_path, [*records, failed]


def _record(key: str, cell: str, prompt: str, image: str, status: str = "ok") -> dict[str, Any]:
    return {
        "record_key": key,
        "cell_id": cell,
        "prompt": prompt,
        "repeat": 0,
        "image": image,
        "status": status,
    }


def _score(
    run: Run, scorers: Scorers, reference: PictureReference | None = None
) -> list[dict[str, Any]]:
    folder, records = run
    against = dataclasses.replace(scorers, reference=reference)
    cells = finished_by_cell(records)
    return list(score_run.score_pictures(cells, folder, against, emit=ignore_events))


def test_a_row_for_each_picture_and_each_cell(
    run: Run, scorers: Scorers, reference: PictureReference
) -> None:
    rows = _score(run, scorers, reference)
    assert rows == _score(run, scorers, reference)
    assert [row["level"] for row in rows] == (["image"] * 6 + ["cell"]) * 2
    assert {row["record_key"] for row in rows if row["level"] == "image"} == {
        f"key{number}" for number in range(12)
    }
    declared = {column.name for column in TABLES["scores"]}
    assert all(set(row) <= declared and row["protocol"] == "embedded" for row in rows)


def test_image_rows_hold_each_scorers_answer(run: Run, scorers: Scorers) -> None:
    folder, records = run
    images = [row for row in _score(run, scorers) if row["level"] == "image"]
    for row, record in zip(images, records[:12], strict=True):
        picture = read_picture(folder / record["image"])
        assert row["clip_score"] == pytest.approx(
            scorers.of_pictures["clip_score"]([picture], [record["prompt"]])[0], abs=1e-5
        )
        assert row["clip_model"] == scorers.label
    pictures = torch.stack(
        [torch.from_numpy(np.array(Image.open(folder / r["image"]))) for r in records[:5]]
    )
    network = classifier.load_classifier(scorers.extractors[0].weights)
    with torch.inference_mode():
        answers = network(pictures.permute(0, 3, 1, 2).float() / 255)
    seen = zip(*(logits.argmax(1).tolist() for logits in answers), strict=True)
    expected = [float(row == HELD_OUT[number].indices()) for number, row in enumerate(seen)]
    assert [row["prompt_accuracy"] for row in images[:5]] == expected
    assert images[5]["prompt_accuracy"] is None, (
        "a prompt outside the grammar has no prompt accuracy"
    )


def test_cell_rows_have_fidelity_extractor_and_reference(
    run: Run, scorers: Scorers, reference: PictureReference
) -> None:
    first, second = (row for row in _score(run, scorers, reference) if row["level"] == "cell")
    assert first["n"] == second["n"] == 6
    assert first.keys().isdisjoint({"fid", "kid", "kid_low", "kid_subset", "precision"})
    assert "fid and kid need 128 images" in first["note"]
    assert "precision and recall need 256 images" in first["note"]
    assert first["extractor"] == scorers.extractors[0].label
    assert first["reference"] == "twenty scenes"


def test_sets_of_ar_images_give_ar_spread(
    run: Run, scorers: Scorers, reference: PictureReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewest pictures of 6, so that six pictures a cell have every figure but FID."""
    for name in ("kid", "precision", "recall"):
        fewest = dataclasses.replace(METRICS[name], min_images=6, min_images_per_feature=0)
        monkeypatch.setitem(METRICS, name, fewest)
    folder, records = run
    both = [
        record | {"mode": "ar", "seed_set": int(number >= 6)}
        for number, record in enumerate(records)
    ]
    *rows, spread = _score((folder, both), scorers, reference)
    assert spread["level"] == "ar_spread"
    assert (spread["n"], spread["ar_spread_sets"]) == (6, 2)
    assert spread["cell_id"] == records[0]["cell_id"]
    assert "fid" not in spread
    for name in ("kid", "precision", "recall"):
        assert spread[f"{name}_low"] <= spread[name] <= spread[f"{name}_high"]
    assert {row["precision"] for row in rows if row["level"] == "image"} <= {0.0, 1.0}
    other = [
        record | {"mode": "ar", "temperature": number >= 6} for number, record in enumerate(records)
    ]
    assert all(row["level"] != "ar_spread" for row in _score((folder, other), scorers, reference))


def test_a_missing_picture_is_noted(
    run: Run, scorers: Scorers, reference: PictureReference
) -> None:
    folder, records = run
    (folder / records[0]["image"]).unlink()
    rows = _score(run, scorers, reference)
    assert "key0" not in {row.get("record_key") for row in rows}
    cell = next(row for row in rows if row["level"] == "cell")
    assert cell["n"] == 5
    assert "1 pictures are missing" in cell["note"]


def test_the_last_record_of_a_key_counts(run: Run) -> None:
    folder, records = run
    failed_first = [{**records[0], "status": "failed"}, *records]
    rows = _score((folder, failed_first), Scorers(NOTHING))
    assert [row["record_key"] for row in rows].count("key0") == 1


def test_scoring_reports_progress_by_cell(run: Run) -> None:
    events: list[object] = []
    folder, records = run
    cells = finished_by_cell(records)
    rows = score_run.score_pictures(cells, folder, Scorers(NOTHING), emit=events.append)
    assert {row["level"] for row in rows} == {"image"}
    assert events == [ProgressEvent("scoring", 1, 2), ProgressEvent("scoring", 2, 2)]
    assert _score((folder, []), Scorers(NOTHING)) == []


def test_scoring_says_how_many_captions_were_cut(run: Run, scorers: Scorers) -> None:
    events: list[object] = []
    folder, records = run
    records = [{**records[0], "prompt": "red " * 80}, *records[1:]]
    without_sets = dataclasses.replace(scorers, extractors=[])
    cells = finished_by_cell(records)
    list(score_run.score_pictures(cells, folder, without_sets, emit=events.append))
    notes = [event for event in events if isinstance(event, Note)]
    text = "clip_score: 1 of 7 captions are longer than its network reads"
    assert [(note.text, note.level) for note in notes] == [(text, "warning")]


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
def store(tmp_path: Path) -> RunStore:
    """A real run's closed folder with five pictures in each of two cells."""
    (tmp_path / "scored.yaml").write_text(EXPERIMENT)
    experiment = load_experiment(tmp_path / "scored.yaml", {"lanterns": {}})
    key = key_fields({}, experiment.settings, Compute(torch.device("cpu"), torch.float32))
    painted = dict(zip(PROMPTS, render(HELD_OUT[:5], 4), strict=False))
    with RunStore.open(tmp_path / "run", experiment, key) as store:
        for task in make_plan(experiment, [Prompt(text) for text in PROMPTS[:5]]).tasks:
            png = io.BytesIO()
            Image.fromarray(painted[task.prompt.text]).save(png, "PNG")
            store.append(task, {}, png.getvalue())
    return store


def score_again(folder: Path, scorers: Scorers, reference: PictureReference) -> int:
    with RunStore.to_score(folder) as store:
        against = dataclasses.replace(scorers, reference=reference)
        return score_run.score_cells(store, against, ignore_events)


def test_other_scorer_or_reference_scores_again(
    store: RunStore, scorers: Scorers, reference: PictureReference
) -> None:
    assert score_again(store.folder, scorers, reference) == 12
    assert score_again(store.folder, scorers, reference) == 0
    assert score_again(store.folder, scorers, reference._replace(label="other scenes")) == 12
    newer = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, version=99))
    assert score_again(store.folder, newer, reference) == 12
    other = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, name="other"))
    assert score_again(store.folder, other, reference) == 12


def test_only_cells_with_new_images_are_scored_again(
    store: RunStore,
    scorers: Scorers,
    reference: PictureReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = read_records(store.folder)
    monkeypatch.setattr(score_run, "read_records", lambda _folder: records[1:])
    score_again(store.folder, scorers, reference)
    monkeypatch.setattr(score_run, "read_records", lambda _folder: records)
    assert score_again(store.folder, scorers, reference) == 6


def test_a_run_without_images_is_not_scored(store: RunStore) -> None:
    (store.folder / "records.jsonl").write_text("")
    (store.folder / "scores.jsonl").unlink(missing_ok=True)
    with pytest.raises(RefusedError, match="no images to score"):
        RunStore.to_score(store.folder)
    assert not (store.folder / "scores.jsonl").exists()


def test_fidelity_without_a_reference_has_a_note(run: Run, scorers: Scorers) -> None:
    bare = dataclasses.replace(scorers, protocol=dataclasses.replace(EMBEDDED, reference=None))
    cells = [row for row in _score(run, bare) if row["level"] == "cell"]
    assert [row.get("fid") for row in cells] == [None, None]
    assert all("--reference" in row["note"] and row["reference"] is None for row in cells)


def test_rewards_fill_their_own_columns(run: Run, scorers: Scorers) -> None:
    protocol = Protocol("hpsv2", 1, "a stand-in", metrics=("hpsv2",))
    rows = _score(run, Scorers(protocol, {"hpsv2": scorers.of_pictures["clip_score"]}))
    by_clip = [row for row in _score(run, scorers) if row["level"] == "image"]
    assert [row["hpsv2"] for row in rows] == [row["clip_score"] for row in by_clip]
    assert all("clip_score" not in row for row in rows)


# ---- The tokens


@pytest.fixture
def tiny_copy(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny run, which has no scores yet, and the family that it was decoded with."""
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def score_all_tokens(folder: Path, emit: Emit) -> int:
    with RunStore.to_score(folder) as store:
        return score_tokens(store, "cpu", emit)


def of_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["record_key"]: row for row in read_scores(folder) if row["level"] == "tokens"}


def test_tokens_are_scored_once_and_reach_the_tables(tiny_copy: Path) -> None:
    events: list[Any] = []
    assert score_all_tokens(tiny_copy, events.append) == 18
    assert score_all_tokens(tiny_copy, events.append) == 0
    progress = [event for event in events if isinstance(event, ProgressEvent)]
    assert [event.done for event in progress] == [3, 6, 9, 12, 15, 18]
    assert {event.total for event in progress} == {18}
    assert set(of_tokens(tiny_copy)) == {record["record_key"] for record in read_records(tiny_copy)}
    summary = write_tables(tiny_copy)["summary"].set_index("cell_id")
    sampled = summary[summary["parameters"] != "T=0"].filter(like="t1", axis=0)
    assert sampled[["distance", "distance_p", "impossible"]].notna().all(axis=None)
    assert sampled["note"].str.contains("3 of the 4 prompts").all()
    greedy = summary.filter(like="t0", axis=0)
    assert (greedy["argmax_mismatch"] == 0).all()
    assert greedy["distance"].isna().all()


def test_scores_of_version_1_are_replaced_if_the_pictures_are_here(tiny_copy: Path) -> None:
    score_all_tokens(tiny_copy, lambda _event: None)
    current = of_tokens(tiny_copy)
    path = tiny_copy / "scores.jsonl"
    lines = []
    is_old = True
    for row in current.values():
        if row["features"] and is_old:
            names = row["features"].split()
            names.remove("alike")
            lines.append(line_of(row | {"features": " ".join(names), "feature_sums": [0.0]}))
        else:
            lines.append(line_of(row))
        is_old = not is_old
    path.write_bytes(b"".join(lines))
    old = sum("alike" not in (row["features"] or "alike") for row in of_tokens(tiny_copy).values())
    assert 0 < old < len(current)
    assert score_all_tokens(tiny_copy, lambda _event: None) == old
    again = of_tokens(tiny_copy)
    assert {key: row["features"] for key, row in again.items()} == {
        key: row["features"] for key, row in current.items()
    }


def test_images_of_an_earlier_session_count_as_earlier(tiny_copy: Path) -> None:
    """The images of a cell that are scored later have the sums that one session gives them."""
    score_all_tokens(tiny_copy, lambda _event: None)
    whole = of_tokens(tiny_copy)
    path = tiny_copy / "scores.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1]))
    score_all_tokens(tiny_copy, lambda _event: None)
    for key, row in of_tokens(tiny_copy).items():
        if row["features"]:
            np.testing.assert_allclose(row["feature_sums"], whole[key]["feature_sums"], atol=1e-3)


def test_pictures_without_the_tokens_of_their_records_are_left_out(tiny_copy: Path) -> None:
    score_all_tokens(tiny_copy, lambda _event: None)
    rows = of_tokens(tiny_copy)
    (tiny_copy / "scores.jsonl").unlink()
    records = read_records(tiny_copy)
    # Other tokens, no tokens, and no picture at all.
    forged = png_bytes(torch.zeros(3, 4, 3, dtype=torch.uint8), torch.zeros(12, dtype=torch.int32))
    (tiny_copy / records[0]["image"]).write_bytes(forged)
    with Image.open(tiny_copy / records[1]["image"]) as picture:
        picture.copy().save(tiny_copy / records[1]["image"])
    (tiny_copy / records[2]["image"]).unlink()
    left_out = {record["record_key"] for record in records[:3]}
    events: list[Any] = []
    assert score_all_tokens(tiny_copy, events.append) == 15
    again = of_tokens(tiny_copy)
    assert again.keys() == rows.keys() - left_out
    # `alike` counts only images that are here.
    assert all(row["entropy"] == rows[key]["entropy"] for key, row in again.items())
    assert "leaves out 3 images" in events[-1].text
