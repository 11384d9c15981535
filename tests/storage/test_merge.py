"""Shards of a run become one run, and what is not one run is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lantern_bench.cli.main import main
from lantern_bench.models import registry
from lantern_bench.storage.merge import merge_runs
from lantern_bench.storage.run_directory import read_manifest, read_records
from lantern_bench.utils.errors import LanternError, RefusedError, UserError
from tests.helpers.tiny_model import EXPERIMENT, TinyModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run and its three shards."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "models", lambda: {"tiny": TinyModel()})
        patch.chdir(folder)
        common = ["tiny.yaml", "--threads", "1", "-q"]
        assert main(["sweep", *common, "--out", "whole"]) == 0
        for index in (1, 2, 3):
            assert (
                main(["sweep", *common, "--shard", f"{index}/3", "--out", f"run-shard{index}of3"])
                == 0
            )
    return folder


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> list[Path]:
    """Copies of the shards."""
    return [
        shutil.copytree(folder / f"run-shard{i}of3", tmp_path / f"run-shard{i}of3")
        for i in (1, 2, 3)
    ]


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    columns = (
        "record_key",
        "cell_id",
        "prompt_id",
        "repeat",
        "order_index",
        "tokens_sha256",
        "image_sha256",
        "image",
    )
    return {name: row[name] for name in columns}


def test_merged_shards_are_the_whole_run(
    folder: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *map(str, shards[::-1]), "--format", "csv"]) == 0
    merged = shards[0].with_name("run")
    assert "18 images of 3 shards, 0 failed" in capsys.readouterr().err
    rows = read_records(merged)
    expected = read_records(folder / "whole")
    assert list(map(without_time, rows)) == list(map(without_time, expected))
    assert all(
        (merged / row["image"]).read_bytes() == (folder / "whole" / row["image"]).read_bytes()
        for row in rows
    )
    manifest = read_manifest(merged)
    assert (
        [session["process"] for session in manifest["sessions"]]
        == [0, 1, 2]
        == sorted({row["process"] for row in rows})
    )
    assert manifest["key"] == read_manifest(folder / "whole")["key"]
    assert manifest["shard"] is None
    assert manifest["merged_shards"] == 3
    assert manifest["run"] == "run"
    assert (merged / "summary.csv").is_file()


def manifest_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = read_manifest(folder)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folders: list[Path], error: type[LanternError], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_runs(folders)
    assert not folders[0].with_name("run").exists()


def test_missing_and_double_shards_are_refused(shards: list[Path], tmp_path: Path) -> None:
    refused(shards[:1], RefusedError, r"shards are missing: 2/3, 3/3")
    twice = shutil.copytree(shards[1], tmp_path / "again")
    refused(
        [*shards, twice], RefusedError, r"shard 2/3 is given twice: .*run-shard2of3 and .*again"
    )


def test_a_shard_with_missing_images_is_refused(shards: list[Path]) -> None:
    path = shards[2] / "records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    refused(shards, RefusedError, "shard 3/3 has 5 of 6 images")


def test_a_missing_picture_is_refused(shards: list[Path]) -> None:
    row = read_records(shards[0])[0]
    (shards[0] / row["image"]).unlink()
    refused(shards, RefusedError, f"the picture {row['image']} is missing")


def test_the_same_image_in_two_shards_is_refused(shards: list[Path]) -> None:
    for name in ("records.jsonl", "images"):
        source = shards[0] / name
        target = shards[1] / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    refused(shards, RefusedError, "both have the image")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["experiment"].update(seed=7), "seed differs"),
        (lambda m: m["experiment"].update(images=9), "images differs"),
        (lambda m: m["key"].update(torch_version="1"), "key: torch_version differs"),
        (lambda m: m.update(threads=64), "threads differs"),
        (lambda m: m["shard"].update(count=4), "is a shard of 3, .* of 4"),
    ],
)
def test_shards_of_different_runs_are_refused(
    shards: list[Path], change: Any, message: str
) -> None:
    manifest_with(shards[1], change)
    refused(shards, RefusedError, message)


def test_a_run_that_is_no_shard_and_a_folder_that_exists_are_refused(
    folder: Path, shards: list[Path]
) -> None:
    with pytest.raises(UserError, match="whole is not a shard of a run"):
        merge_runs([folder / "whole"])
    with pytest.raises(UserError, match="exists already"):
        merge_runs(shards, folder / "whole")


def test_a_shard_without_prompts_is_a_run_that_merges(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job array has more jobs than prompts."""
    monkeypatch.setattr(registry, "models", lambda: {"tiny": TinyModel()})
    monkeypatch.chdir(tmp_path)
    common = ["sweep", str(folder / "tiny.yaml"), "--images", "2", "-q"]
    shards = [f"run-shard{index}of3" for index in (1, 2, 3)]
    for index, name in enumerate(shards, start=1):
        # Its number of threads says nothing: nothing was decoded with it.
        threads = "2" if index == 3 else "1"
        typed = [*common, "--shard", f"{index}/3", "--out", name, "--threads", threads]
        assert main(typed) == 0
        assert main(typed) == 0
    assert main([*common, "--shard", "3/3", "--out", "several", "--processes", "2"]) == 0
    capsys.readouterr()
    assert main(["merge", *shards]) == 0
    assert "12 images of 3 shards" in capsys.readouterr().err
    assert len(read_records(Path("run"))) == 12
    for command in ("show", "report", "check-run", "recommend", "score"):
        code = main([command, shards[2]])
        written = capsys.readouterr().err
        assert "internal" not in written, (command, written)
        assert code in (0, 3), command
    assert main(["show", shards[2]]) == 0
