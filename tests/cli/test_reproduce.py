"""`reproduce` and `score` from end to end on the bundled model: pictures, scores, manifest,
comparison.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import yaml

from lantern_bench.cli import main as cli
from lantern_bench.config.experiment import shipped_experiments
from lantern_bench.metrics.protocols import protocol_of
from lantern_bench.storage.run_directory import RESULTS_VARIABLE, read_manifest, read_scores

TABLE = """
name: small-table
model: lanterns
compile: false
models:
  lanterns: {images: 2, tree: small-7, neighbours: 100, lambda: [2, 10]}
  llamagen-t2i-stage1: {images: 1000, neighbours: 1000, lambda: [5, 10]}
cells:
  - {mode: ar}
  - {mode: lantern++}
paper:
  title: A paper, Table 1
  model: LlamaGen-XL
  hardware: one RTX 3090
  images: 1000
  fid_features: inception-v3
  clip_model: ViT-B-32
  columns: [speedup, mean_accepted_length, fid, clip_score]
  missing: Half of the table could not be had.
  rows:
    - name: vanilla AR
      match: {mode: ar}
      figures: {speedup: {value: 1, source: by definition, confidence: definition}}
    - name: its rule
      match: {mode: lantern++}
      models: {lanterns: {lambda: 10}}
      figures:
        mean_accepted_length: {value: 3.5, source: the abstract, confidence: paper}
        clip_score: {value: 0.31, source: a note, confidence: secondary}
    - {name: a row to fill, match: {mode: lantern++}, models: {lanterns: {lambda: 2}}}
    - name: another method
      figures: {speedup: {value: 2.5, source: a note, confidence: secondary}}
"""


class Finished(NamedTuple):
    """A finished reproduction: its run directory, and what the command printed."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One reproduction; the commands of the tests then find its images and decode none."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("reproduce")
        patch.chdir(folder)
        patch.setenv(RESULTS_VARIABLE, str(folder / "results"))
        patch.setenv("TORCH_HOME", str(folder))
        patch.delenv("LANTERN_BENCH_WEIGHTS", raising=False)
        (folder / "table.yaml").write_text(TABLE)
        out = io.StringIO()
        err = io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(["reproduce", "table.yaml", "--out", str(folder / "run")])
        assert code == 0, err.getvalue()
        yield Finished(folder / "run", out.getvalue(), err.getvalue())


@pytest.fixture
def run(finished: Finished) -> Path:
    """The run directory of the reproduction."""
    return finished.folder


def test_a_run_has_all_its_files_and_says_nothing_else(finished: Finished) -> None:
    ours = (
        "run: ",
        "100 prompts from held-out, ",
        "published: ",
        "images",
        "scoring",
        "distance from",
        "tables: ",
        "warning: ",
        "Not comparable",
        "MAL ",
        "Half of ",
    )
    assert [line for line in finished.err.splitlines() if not line.startswith(ours)] == []
    tables = {
        f"{name}.csv" for name in ("speed", "quality", "acceptance", "summary", "reproduction")
    }
    files = {path.name for path in finished.folder.iterdir()} - {".lock"}
    assert files == {"manifest.json", "records.jsonl", "scores.jsonl", "images"} | tables
    summary = pd.read_csv(finished.folder / "summary.csv")
    assert summary.loc[0, ["speedup", "mean_accepted_length"]].tolist() == [1.0, 1.0]
    assert (summary["failed"] == 0).all()
    assert (summary["images"] == 2).all()
    assert (summary["mean_accepted_length"] >= 1).all()


def test_manifest_has_no_paths_and_resolves_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(run)
    text = json.dumps(manifest)
    assert str(run.parent) not in text
    (command,) = manifest["commands"]
    assert command.startswith("lantern-bench reproduce ")
    assert command.endswith(f"--out {run.name}")
    assert str(Path.home()) + "/" not in text
    assert set(manifest["key"]["weights"]) == {
        "lanterns/target",
        "lanterns/drafter",
        "lanterns/tokenizer",
    }
    assert all(len(digest) == 64 for digest in manifest["key"]["weights"].values())
    again = run.parent / "again.yaml"
    again.write_text(json.dumps(manifest["experiment"]))
    assert cli.main(["reproduce", str(again), "--dry-run", "--out", str(run)]) == 0
    assert "10 images, 10 done, 0 to do" in capsys.readouterr().err


def test_reproduce_compares_both_residuals_with_the_paper(finished: Finished) -> None:
    listed = pd.read_csv(io.StringIO(finished.out))
    assert listed.equals(pd.read_csv(finished.folder / "reproduction.csv"))
    relaxed = listed[
        (listed["figure"] == "mean_accepted_length") & (listed["method"] == "lantern++")
    ]
    assert sorted(zip(relaxed["parameters"], relaxed["residual"], strict=True)) == [
        ("small-7 k=100 lambda=10", "exact"),
        ("small-7 k=100 lambda=10", "official"),
        ("small-7 k=100 lambda=2", "exact"),
        ("small-7 k=100 lambda=2", "official"),
    ]
    for _, row in relaxed[relaxed["paper_row"] == "its rule"].iterrows():
        assert row["published"] == 3.5
        assert row["source"] == "the abstract"
        assert row["confidence"] == "paper"
        assert row["difference"] == pytest.approx(row["ours"] - 3.5, abs=1e-5)
        assert pd.isna(row["ours_low"])  # fewer than four prompts
    empty = listed[listed["paper_row"] == "a row to fill"]
    assert empty["published"].isna().all()
    assert empty["note"].str.contains("no published figure could be had").all()
    assert empty.loc[empty["figure"] == "mean_accepted_length", "ours"].notna().all()
    uncovered = listed[listed["paper_row"] == "another method"]
    assert uncovered["published"].tolist() == [2.5]
    assert uncovered["cell_id"].isna().all()
    assert uncovered["note"].tolist() == ["no mode of ours covers this row"]
    clip = listed[(listed["figure"] == "clip_score") & listed["published"].notna()]
    assert clip["difference"].isna().all()
    assert clip["measured_by"].str.startswith("lanterns-clip@").all()
    accuracy = listed[listed["figure"] == "prompt_accuracy"]
    assert len(accuracy) == 5
    assert accuracy["ours"].between(0, 1).all()


def test_reproduce_needs_the_name_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce"]) == 2
    assert "such as lantern-table2" in capsys.readouterr().err


def test_reproduce_names_what_is_not_comparable(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again decodes nothing and shows the same; in a table the remarks stand below
    it.
    """
    assert cli.main(["reproduce", "table.yaml", "--out", str(run), "--format", "md"]) == 0
    written = capsys.readouterr()
    for sentence in (
        "Not comparable, model: published LlamaGen-XL; ours lanterns.",
        "Not comparable, hardware: published one RTX 3090; ours",
        "Not comparable, n: published 1000 images; ours 2 a cell.",
        "Not comparable, extractor: published inception-v3; ours lanterns-features-64@",
        "Not comparable, CLIP model: published ViT-B-32; ours lanterns-clip@",
        "Half of the table could not be had.",
    ):
        assert sentence in written.out
    assert "10 images kept, 0 to do" in written.err
    assert "| its rule |" in written.out
    assert "3.50" in written.out
    assert "(none)" in written.out


def test_a_run_is_scored_again_by_its_protocol(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_scores(run)
    records = (run / "records.jsonl").read_bytes()
    tokens = sum(row["level"] == "tokens" for row in before)
    assert cli.main(["score", str(run)]) == 0
    assert "nothing to add" in capsys.readouterr().err
    assert read_scores(run) == before
    assert cli.main(["score", str(run), "--again", "--fid-infinity"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    assert (listed["protocol"] == "embedded").all()
    assert (listed["protocol_version"] == protocol_of("embedded").version).all()
    assert listed["note"].str.contains("fid_infinity needs 143 images; there are 2").all()
    assert len(read_scores(run)) == 2 * len(before) - tokens
    assert (run / "records.jsonl").read_bytes() == records
    assert read_manifest(run)["protocols"]["embedded"]["features"] == "lanterns-features"


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["--protocol", "lantern-cocoa"], 2, "did you mean lantern-coco?"),
        (["--protocol", "lantern-coco"], 3, "weights-inception-2015-12-05-6726825d.pth"),
        (["--protocol", "image-reward"], 3, "has ImageReward.pt (scoring downloads nothing)"),
        (["--protocol", "hpsv2"], 3, "HPS_v2.1_compressed.pt"),
        (["--reference", "nowhere"], 2, "--reference nowhere: no such folder or file"),
    ],
)
def test_scores_that_are_refused(
    run: Path, refuse: Callable[..., None], typed: list[str], code: int, message: str
) -> None:
    refuse(["score", str(run), *typed], code, message)


REPRODUCED = [
    name
    for name, path in shipped_experiments().items()
    if "paper" in yaml.safe_load(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("name", REPRODUCED)
def test_every_table_is_planned_with_both_residuals(
    name: str, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert cli.main(["reproduce", name, "--model", "lanterns", "--dry-run"]) == 0
    plan = pd.read_csv(io.StringIO(capsys.readouterr().out))
    relaxed = [cell for cell in plan["cell"] if cell.startswith("lantern") and "-t0" not in cell]
    official = {
        cell
        for cell in relaxed
        if cell.endswith("residualofficial") or "-residualofficial-" in cell
    }
    assert {cell.replace("-residualofficial", "") for cell in official} == set(relaxed) - official
    assert relaxed or name in ("sjd-windows", "scd-janus", "sjdpac-emu3", "gsd", "csd-table2"), (
        "it has no cell of LANTERN"
    )
    assert plan["images"].sum() <= 800, "minutes on two cores"
