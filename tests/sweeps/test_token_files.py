"""Tokens of other engines as runs: the same distances as our own runs, and engines that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from lantern_bench.cli.main import main
from lantern_bench.storage.pictures import read_tokens
from lantern_bench.storage.run_directory import read_records, read_scores

CELLS = {
    "ar": [],
    "lantern++": ["lambda=5", "drafting=static", "tree=chain-7", "neighbours=5"],
}


EXPERIMENT = """
model: lanterns
images: 2
cells:
  - {mode: ar}
  - {mode: lantern++, lambda: 5, drafting: static, tree: chain-7, neighbours: 5}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of the bundled model in each cell."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "two.yaml").write_text(EXPERIMENT)
    out = folder / "run"
    typed = ["sweep", str(folder / "two.yaml"), "--metrics", "distance", "--dtype", "float32"]
    assert main([*typed, "--out", str(out)]) == 0
    return out


def tokens_of(run: Path, mode: str) -> dict[str, Any]:
    records = [record for record in read_records(run) if record["mode"] == mode]
    tokens = [read_tokens(run / record["image"]) for record in records]
    return {
        "prompts": [record["prompt"] for record in records],
        "tokens": torch.stack([grid for grid in tokens if grid is not None]).numpy(),
        "seconds": [record["seconds"] for record in records],
    }


def write_npz(path: Path, content: dict[str, Any]) -> None:
    np.savez(path.with_suffix(".npz"), **content)


def write_safetensors(path: Path, content: dict[str, Any]) -> None:
    arrays = {name: np.asarray(content[name]) for name in content if name != "prompts"}
    metadata = {"prompts": json.dumps(content["prompts"])}
    save_file(arrays, path.with_suffix(".safetensors"), metadata)


def write_jsonl(path: Path, content: dict[str, Any]) -> None:
    rows = [
        {"prompt": prompt, "tokens": tokens.tolist()}
        for prompt, tokens in zip(content["prompts"], content["tokens"], strict=True)
    ]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def score(file: Path, out: Path, mode: str, values: list[str]) -> int:
    typed = ["score", "--tokens", str(file), "--model", "lanterns", "--out", str(out)]
    for value in [*values, "dtype=float32"]:
        typed += ["--set", value]
    return main([*typed, "--mode", mode])


@pytest.mark.parametrize(
    ("mode", "write"), [("ar", write_npz), ("lantern++", write_safetensors), ("ar", write_jsonl)]
)
def test_our_own_tokens_have_the_scores_of_the_run(
    run: Path, tmp_path: Path, mode: str, write: Callable[[Path, dict[str, Any]], None]
) -> None:
    write(tmp_path / "tokens", tokens_of(run, mode))
    (file,) = tmp_path.iterdir()
    out = tmp_path / "out"
    assert score(file, out, mode, CELLS[mode]) == 0
    cells = {record["cell_id"] for record in read_records(out)}
    assert len(cells) == 1
    sums = ("tokens", "impossible_tokens", "entropy", "features", "feature_sums")
    own = [row for row in read_scores(run) if {row["cell_id"]} == cells]
    again = read_scores(out)
    assert len(own) == len(again) == 2
    for mine, other in zip(own, again, strict=True):
        for name in sums:
            assert mine[name] == other[name]
    for command in ("show", "report"):
        assert main([command, str(out)]) == 0


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"tokens": np.zeros((2, 255), int)}, "has 255 tokens an image"),
        ({"tokens": np.full((2, 256), -1)}, "from -1 to -1; lanterns has 256, from 0 to"),
        ({"tokens": np.zeros((2, 256))}, "tokens float64 [2, 256]"),
        ({"tokens": np.zeros((1, 256), int)}, "2 prompts, tokens int64 [1, 256]"),
        ({"seconds": [1.0, 0.0]}, "seconds [1. 0.]"),
        ({"seconds": [1.0]}, "seconds [1.]"),
        ({"prompts": ["one red lantern", "word"]}, "word"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], wrong: str
) -> None:
    content = {"prompts": ["one red lantern"] * 2, "tokens": np.zeros((2, 256), int)}
    write_npz(tmp_path / "tokens", content | change)
    assert score(tmp_path / "tokens.npz", tmp_path / "out", "ar", []) == 2
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_files_and_missing_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"a.npz": "x", "a.jsonl": "{}\n", "a.safetensors": "x"}.items():
        (tmp_path / name).write_text(content)
        assert score(tmp_path / name, tmp_path / "out", "ar", []) == 2
        assert f"{name}: cannot be read" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("x")
    assert score(tmp_path / "a.txt", tmp_path / "out", "ar", []) == 2
    assert "unknown file type" in capsys.readouterr().err
    tokens = ["--tokens", str(tmp_path / "a.npz")]
    for typed, wrong in (
        ([], "needs RUN, or --tokens FILE with --model MODEL"),
        (tokens, "score --tokens: needs the model"),
        (["--model", "lanterns"], "--model has no meaning without --tokens"),
        (
            [*tokens, "--model", "lanterns", "--again", "--protocol", "p"],
            "--protocol, --again has no meaning with --tokens",
        ),
    ):
        assert main(["score", *typed]) == 2
        assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("value", ["images=3", "batch=2", "metrics=speed", "repeats=2"])
def test_a_file_is_scored_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    content = {"prompts": ["one red lantern"] * 2, "tokens": np.zeros((2, 256), int)}
    write_npz(tmp_path / "tokens", content)
    key, _, _ = value.partition("=")
    assert score(tmp_path / "tokens.npz", tmp_path / "out", "ar", [value]) == 2
    assert f"--set {key}: a file of tokens is scored whole" in capsys.readouterr().err


def sample_janus(theirs: Any, prompts: torch.Tensor, _null: torch.Tensor, **options: Any) -> Any:
    """Pictures of 16 codes by transformers' own `generate`."""
    return theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), generation_mode="image", **options
    )


def sample_emu3(theirs: Any, prompts: torch.Tensor, null: torch.Tensor, **options: Any) -> Any:
    """Pictures of 4 x 5 codes and four ends of rows by transformers' own `generate`."""
    from tests.helpers import tiny_hosted

    words = tiny_hosted.generate_emu3(theirs, prompts, null, (4, 5), **options)
    numbers = torch.full((theirs.config.text_config.vocab_size,), -1)
    known = tiny_hosted.emu3_words(theirs)
    numbers[known] = torch.arange(len(known))
    return numbers[words]


@pytest.mark.parametrize(("temperature", "is_same"), [(1.0, True), (1.5, False)])
@pytest.mark.parametrize("family", ["janus", "emu3"])
def test_tokens_of_transformers(
    tmp_path: Path, family: str, *, temperature: float, is_same: bool
) -> None:
    """Tokens of transformers are lossless at our temperature, and not at another one."""
    pytest.importorskip("transformers")
    from lantern_bench.models.registry import model_of
    from tests.helpers import tiny_hosted

    write, sample, grid = {
        "janus": (tiny_hosted.write_janus, sample_janus, ""),
        "emu3": (tiny_hosted.write_emu3, sample_emu3, "grid: [4, 5]\n"),
    }[family]
    theirs = write(tmp_path / "weights", tiny_hosted.Shape())
    described = tmp_path / "model.yaml"
    described.write_text(f"family: {family}\n{grid}target: {{checkpoint: weights}}\n")
    text = "a red lantern over the lake"
    model = model_of(str(described)).load(torch.device("cpu"), torch.float32)
    condition = model.condition([text])
    rows = zip(condition.values[0], condition.valid[0], strict=True)
    prompt, null = (values[valid] for values, valid in rows)
    torch.manual_seed(0)
    tokens = sample(
        theirs,
        prompt.expand(128, -1).contiguous(),
        null,
        do_sample=True,
        temperature=temperature,
        guidance_scale=3.0,
        top_k=0,
        top_p=1.0,
    )
    write_npz(tmp_path / "tokens", {"prompts": [text] * 128, "tokens": tokens.numpy()})
    out = tmp_path / "out"
    typed = ["score", "--tokens", str(tmp_path / "tokens.npz"), "--model", str(described)]
    typed += ["--out", str(out), "--set", "cfg_scale=3", "--set", "dtype=float32"]
    for value in ("temperature=1", "top_k=0", "top_p=1"):
        typed += ["--set", value]
    assert main(typed) == 0
    (line,) = (out / "quality.csv").read_text().splitlines()[1:]
    header = (out / "quality.csv").read_text().splitlines()[0]
    p_value = float(dict(zip(header.split(","), line.split(","), strict=False))["distance_p"])
    assert (p_value > 0.001) is is_same
