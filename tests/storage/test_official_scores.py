"""Exports are read by the rules of the official scorers, and their results are read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lantern_bench import load_run
from lantern_bench.analysis.tables import write_tables
from lantern_bench.cli.main import main
from lantern_bench.storage.layouts import export_run
from lantern_bench.storage.official_scores import import_scores
from lantern_bench.storage.pictures import png_bytes
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import AR, STRICT, make_record, write_run

SIDE = 4
TAGS = ("counting", "colors", "counting", "counting", "counting")


def grey(prompt: int, repeat: int) -> int:
    return 40 * prompt + 8 * repeat


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two cells over five prompts, each with five images of one grey."""
    records = []
    for cell in (AR, STRICT):
        for number in range(25):
            repeat, prompt = divmod(number, 5)
            image = f"images/{cell.cell_id}/{number:06d}.png"
            records.append(
                make_record(
                    cell=cell,
                    prompt=prompt,
                    walks=[[]],
                    seconds=1.0,
                    record_key=f"{cell.cell_id}/{prompt}/{repeat}",
                    repeat=repeat,
                    order_index=number,
                    image=image,
                    prompt_source=f"prompts:{prompt}",
                    prompt_metadata={"tag": TAGS[prompt], "include": [], "id": f"item{prompt}"},
                )
            )
            path = tmp_path / "run" / image
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (SIDE, SIDE), (grey(prompt, repeat),) * 3).save(path)
    made = write_run(tmp_path / "made", records, [])
    for file in made.iterdir():
        file.rename(tmp_path / "run" / file.name)
    return tmp_path / "run"


def read_geneval(folder: Path) -> Iterator[dict[str, Any]]:
    """Read a folder as evaluate_images.py does; pictures below grey 100 are correct."""
    for place in folder.iterdir():
        if not place.is_dir() or not place.name.isdigit():
            continue
        (line,) = (place / "metadata.jsonl").read_text().splitlines()
        metadata = json.loads(line)
        for path in (place / "samples").iterdir():
            yield {
                "filename": str(path),
                "tag": metadata["tag"],
                "prompt": metadata["prompt"],
                "correct": int(np.asarray(Image.open(path)).max()) < 100,
                "reason": "",
                "metadata": line,
                "details": "{}",
            }


def geneval_results(run: Path, cell: str) -> list[dict[str, Any]]:
    out = run.parent / "pictures"
    if not out.exists():
        assert export_run(run, out, "geneval") == 4
    return list(read_geneval(out / cell))


def write_results(run: Path, results: list[dict[str, Any]]) -> Path:
    path = run.parent / "results.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    return path


def quality(run: Path, cell: str) -> pd.DataFrame:
    table = write_tables(run)["quality"]
    table = table[table["cell_id"] == cell]
    return table.set_index(table["category"].fillna("all"))


def test_tokens_of_every_image_are_exported(run: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted((run / "images" / AR.cell_id).iterdir())):
        pixels = torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8)
        path.write_bytes(png_bytes(pixels, torch.tensor([number, 7])))
    out = tmp_path / "tokens"
    # No picture of the second cell holds tokens.
    with pytest.raises(RefusedError, match="is missing, or holds no tokens"):
        export_run(run, out, "tokens")
    assert not out.exists()
    shutil.copytree(
        run / "images" / AR.cell_id, run / "images" / STRICT.cell_id, dirs_exist_ok=True
    )
    export_run(run, out, "tokens", decoder_input=lambda model, tokens: {model: tokens + 1})
    files = sorted((out / AR.cell_id).glob("*.safetensors"))
    assert len(files) == 25
    assert files[7].name == "00001-0002.safetensors"  # prompt 1, repeat 2: image 11 of the run
    assert load_file(files[7])["lanterns"].tolist() == [[12, 8]]
    assert files[7].with_suffix(".txt").read_text() == "prompt 1\n"


def test_geneval_there_and_back(run: Path) -> None:
    results = geneval_results(run, AR.cell_id) + geneval_results(run, STRICT.cell_id)
    assert len(results) == 2 * 5 * 4
    # The official score: the mean over tags of the mean over images.
    of_ar = pd.DataFrame(results[:20])
    official = of_ar.groupby("tag")["correct"].mean()
    strict = results[20:]
    strict[0]["correct"] = not strict[0]["correct"]
    read = import_scores(run, write_results(run, results))
    assert dict(read.images) == {AR.cell_id: 20, STRICT.cell_id: 20}
    assert read.missing == {}
    table = quality(run, AR.cell_id)
    assert table.loc["all", "geneval"] == pytest.approx(official.mean())
    assert official.mean() != pytest.approx(of_ar["correct"].mean())
    for tag in ("colors", "counting"):
        assert table.loc[tag, "geneval"] == pytest.approx(official[tag])
        assert table.loc[tag, "images"] == (of_ar["tag"] == tag).sum()
    assert table.loc["all", "geneval_low"] < official.mean() < table.loc["all", "geneval_high"]
    changed = pd.DataFrame(strict).groupby("tag")["correct"].mean()
    table = quality(run, STRICT.cell_id)
    difference = changed.mean() - official.mean()
    assert difference != 0
    assert table.loc["all", "geneval_vs_ar"] == pytest.approx(difference)
    assert table.loc["all", "geneval_vs_ar_p"] > 0.05
    assert table.loc["counting", "geneval_vs_ar_p"] > 0.05
    # Tables by the tag of the prompts have the same figures, once.
    parts = load_run(run).tables_by("tag")["quality"]
    parts = parts[(parts["cell_id"] == STRICT.cell_id) & (parts["protocol"] == "geneval")]
    assert parts["category"].tolist() == ["colors", "counting"]
    for row in parts.to_dict("records"):
        for name in ("geneval", "geneval_low", "geneval_high", "geneval_vs_ar", "geneval_vs_ar_p"):
            assert row[name] == pytest.approx(table.loc[row["category"], name], nan_ok=True)
    # The summary has one row per cell still.
    assert len(write_tables(run)["summary"]) == 2


def test_missing_prompts_are_named_and_marked(run: Path, capsys: pytest.CaptureFixture) -> None:
    results = geneval_results(run, AR.cell_id)
    path = write_results(run, [row for row in results if "00003" not in row["filename"]])
    assert main(["import-scores", str(run), str(path)]) == 0
    assert f"{AR.cell_id}: incomplete: 1 of 5 prompts lack scores" in capsys.readouterr().err
    assert "incomplete: 1 of 5 prompts lack scores" in quality(run, AR.cell_id).loc["all", "note"]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"filename": "pictures/ar-t1-cfg2/00005/samples/0000.png"}, "no picture that `export`"),
        ({"filename": "pictures/ar-t1-cfg2/00000/samples/0004.png"}, "no picture that `export`"),
        ({"filename": "other/00000/samples/0000.png"}, "or give --cell, one of"),
        ({"filename": "0000.png"}, "no picture that `export`"),
        ({"prompt": "other"}, "no picture that `export`"),
        ({"correct": "yes"}, "line 1: no result of GenEval"),
    ],
)
def test_wrong_results_are_refused(run: Path, change: dict[str, Any], wrong: str) -> None:
    results = geneval_results(run, AR.cell_id)
    before = (run / "scores.jsonl").read_bytes()
    path = write_results(run, [results[0] | change, *results[1:]])
    with pytest.raises(UserError) as caught:
        import_scores(run, path)
    assert wrong in f"{caught.value.message} {caught.value.advice}"
    assert (run / "scores.jsonl").read_bytes() == before


def test_an_image_is_scored_once(run: Path) -> None:
    results = geneval_results(run, AR.cell_id)
    with pytest.raises(UserError, match=r"line 21: .* or stands twice"):
        import_scores(run, write_results(run, [*results, results[3]]))


def test_a_cell_may_be_named(run: Path) -> None:
    results = geneval_results(run, AR.cell_id)
    for row in results:
        row["filename"] = "/".join(Path(row["filename"]).parts[-3:])
    path = write_results(run, results)
    assert main(["import-scores", str(run), str(path)]) == 2
    assert main(["import-scores", str(run), str(path), "--cell", "none"]) == 2
    assert main(["import-scores", str(run), str(path), "--cell", STRICT.cell_id]) == 0
    assert quality(run, STRICT.cell_id).loc["all", "geneval"] > 0


def read_dpg(folder: Path) -> str:
    """Score a folder as compute_dpg_bench.py does: a picture's score is its grey / 255."""
    text = ""
    shares = []
    for path in sorted(folder.iterdir()):
        grid = np.asarray(Image.open(path).convert("L"))
        left, right = np.hsplit(grid, 2)
        tiles = [*np.vsplit(left, 2), *np.vsplit(right, 2)]
        tiles = [tiles[0], tiles[2], tiles[1], tiles[3]]
        scores = [float(tile.mean()) / 255 for tile in tiles]
        shares.append(np.mean(scores))
        text += f"{path}, {', '.join(map(str, scores))}, {shares[-1]}\n"
    text += "L1 category scores:\n\tentity: 75.0\n\tglobal: 50.0\n"
    text += "L2 category scores:\n\tglobal: 25.0\n\tcolor: 12.5\n"
    return text + f"DPG-Bench score: {100 * np.mean(shares)}\n"


def test_dpg_there_and_back(run: Path) -> None:
    out = run.parent / "grids"
    assert export_run(run, out, "dpg") == 4
    folder = out / STRICT.cell_id
    # Everything in the folder is scored, by the name up to the first dot.
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {
        f"item{prompt}" for prompt in range(5)
    }
    text = read_dpg(folder)
    path = run.parent / "dpg.txt"
    path.write_text(text)
    import_scores(run, path)
    table = quality(run, STRICT.cell_id)
    assert 100 * table.loc["all", "dpg"] == pytest.approx(float(text.split()[-1]))
    scored = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    by_key = {row["record_key"]: row["dpg"] for row in scored if row["level"] == "image"}
    assert by_key[f"{STRICT.cell_id}/1/2"] == pytest.approx(grey(1, 2) / 255)
    assert table["dpg"].drop("all").to_dict() == {
        "entity": 0.75,
        "global": 0.5,
        "L2 global": 0.25,
        "L2 color": 0.125,
    }
    # By a column of the prompts, each prompt counts in its group, and no category of questions.
    parts = load_run(run).tables_by("tag")["quality"]
    parts = parts[parts["cell_id"] == STRICT.cell_id].set_index("category")
    of_colors = [grey(1, repeat) / 255 for repeat in range(4)]
    assert parts["dpg"].index.tolist() == ["colors", "counting"]
    assert parts.loc["colors", "dpg"] == pytest.approx(sum(of_colors) / 4)
    assert parts["prompts"].tolist() == [1, 4]
    path.write_text(text.replace("item3.png", "item9.png"))
    with pytest.raises(UserError, match=r"line 4: .*item9.png with 4 scores is no picture"):
        import_scores(run, path)
    path.write_text(text.replace(", ", ",", 1))
    with pytest.raises(UserError, match=r"line 1: .* is no path, its scores and their mean"):
        import_scores(run, path)


def test_a_plain_folder_has_all_pictures_with_their_prompts(run: Path) -> None:
    out = run.parent / "plain"
    assert main(["export", str(run), str(out)]) == 0
    assert len(list((out / AR.cell_id).glob("*.png"))) == 25
    assert (out / AR.cell_id / "00002-0004.txt").read_text() == "prompt 2\n"
    picture = np.asarray(Image.open(out / AR.cell_id / "00002-0004.png"))
    assert int(picture.max()) == grey(2, 4)
    with pytest.raises(UserError, match="exists already"):
        export_run(run, out, "folder")


def test_what_cannot_be_exported(run: Path) -> None:
    out = run.parent / "out"
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["experiment"] = {"images": 13, "repeats": 2, "cells": [1, 2]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RefusedError, match="50 of 52 images"), pytest.warns(UserWarning):
        export_run(run, out, "geneval")
    (run / "manifest.json").write_text(json.dumps(manifest | {"experiment": {}}))
    records = (run / "records.jsonl").read_text()
    bare = write_run(
        run.parent / "bare",
        [{**json.loads(line), "prompt_metadata": None} for line in records.splitlines()],
        [],
    )
    for layout, wrong in {"geneval": "has no tag and include", "dpg": "is no id of DPG"}.items():
        with pytest.raises(UserError, match=wrong):
            export_run(bare, out, layout)
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
    assert main(["export", str(run), str(out), "--layout", "other"]) == 2
