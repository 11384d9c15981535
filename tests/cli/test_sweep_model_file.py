"""Sweeps of models described by YAML files: from checkpoint files to tables, and everything that
may be missing.

The models are tiny and lie on disk as the published ones do, the text encoder of transformers
included.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lantern_bench.cli import main as cli
from lantern_bench.devices.compute import Compute
from lantern_bench.models.load import bytes_of_weights
from lantern_bench.models.registry import model_of
from lantern_bench.storage.run_directory import read_manifest, read_records
from tests.helpers import tiny_chameleon, tiny_llamagen
from tests.helpers.tiny_t5 import save_tiny_t5

EXPERIMENT = """
name: tiny
model: lanterns
images: 2
metrics: [speed]
cells:
  - {mode: ar}
  - {mode: speculative, tree: small-7}
  - {mode: lantern, neighbours: 5, delta: 0.2, nodes: 6, depth: 2, beam: 2}
  - {mode: lantern++, neighbours: 5, lambda: 2, tree: small-7}
"""


@pytest.fixture(autouse=True)
def experiment(folder: Path) -> None:
    """The experiment, in a folder with no file of any published model in reach."""
    Path("tiny.yaml").write_text(EXPERIMENT)


def write_model(kind: str, folder: str = "model", **parts: Any) -> str:
    """A model file; its path as it would be typed."""
    if kind == "chameleon":
        tiny_chameleon.write_model_file(Path(folder), "anole", (4, 4))
    else:
        if kind == "t2i":
            parts = {"text_encoder": {"dir": save_tiny_t5(Path(folder + "-t5"))}} | parts
        tiny_llamagen.write_model_file(Path(folder), kind, **parts)
    return f"{folder}/model.yaml"


def change(path: str, **values: Any) -> None:
    """Change top-level keys of a model file."""
    data = yaml.safe_load(Path(path).read_text()) | values
    Path(path).write_text(yaml.safe_dump(data))


def spoil(path: Path) -> None:
    """Change a weight of a checkpoint."""
    pickled = path.suffix != ".safetensors"
    state: Any = torch.load(path, weights_only=True) if pickled else load_file(path)
    inner = state.get("model", state)
    name = next(name for name, value in inner.items() if value.dim() == 2)
    inner[name] = inner[name] + 1
    if pickled:
        torch.save(state, path)
    else:
        save_file(state, path, metadata={"format": "pt"})


PARTS = {
    "c2i": {"target", "sizes", "drafter", "tokenizer"},
    "t2i": {"target", "sizes", "drafter", "tokenizer", "text_encoder"},
    "chameleon": {"target", "sizes", "drafter", "tokenizer"},
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_model_file_is_swept_from_files_to_tables(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts are the model's own, since neither the experiment nor the command names any."""
    model = write_model(kind)
    if kind == "chameleon":
        Path("prompts.txt").write_text("a red lantern\nan image of a lantern\n")
    prompts = ["--prompts", "prompts.txt"] if kind == "chameleon" else []
    typed = ["sweep", "tiny.yaml", "--model", model, *prompts, "--out", "run"]
    assert cli.main(typed) == 0
    records = read_records(Path("run"))
    assert len(records) == 8
    assert {row["status"] for row in records} == {"ok"}
    assert {row["mode"] for row in records} == {"ar", "speculative", "lantern", "lantern++"}
    assert all((Path("run") / row["image"]).is_file() and row["model"] == model for row in records)
    assert all(row["prompt_id"] and row["prompt_source"] for row in records)
    manifest = read_manifest(Path("run"))
    assert {name.removeprefix(f"{model}/") for name in manifest["key"]["weights"]} == PARTS[kind]
    assert manifest["experiment"]["prompts"] == (prompts[1] if prompts else "examples")
    assert Path("run/summary.csv").read_text().count("\n") == 5
    written = capsys.readouterr()
    assert "Loading weights" not in written.err
    assert written.out.count("\n") == 5
    assert cli.main(typed) == 0
    assert "8 images kept, 0 to do" in capsys.readouterr().err


def sizes_of(model: str) -> None:
    change(
        model,
        target={"checkpoint": "target.pt", "config": {**tiny_llamagen.CONFIGS["c2i"], "n_head": 6}},
    )


def norms_of(model: str) -> None:
    change(model, target={"checkpoint": "target", "config": {"swin_norm": True}})


CHANGES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "target": ("c2i", lambda _: spoil(Path("model/target.pt")), "target"),
    "drafter": ("c2i", lambda _: spoil(Path("model/drafter/pytorch_model.bin")), "drafter"),
    "drafter's config": (
        "c2i",
        lambda _: Path("model/drafter/config.json").write_text(
            json.dumps(
                json.loads(Path("model/drafter/config.json").read_text()) | {"rms_norm_eps": 1e-3}
            )
        ),
        "drafter",
    ),
    "what the file says of the target": ("c2i", sizes_of, "sizes"),
    "text encoder": ("t2i", lambda _: spoil(Path("model-t5/model.safetensors")), "text_encoder"),
    "norms": ("chameleon", norms_of, "sizes"),
    "drafter of Chameleon": (
        "chameleon",
        lambda _: spoil(Path("model/drafter/pytorch_model.bin")),
        "drafter",
    ),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_changed_weights_or_sizes_are_refused_on_resume(
    changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, make_change, part = CHANGES[changed]
    model = write_model(kind)
    Path("prompts.txt").write_text("a red lantern\n" if kind != "c2i" else "class 3\n")
    typed = [
        "sweep",
        "tiny.yaml",
        "--model",
        model,
        "--modes",
        "speculative",
        "--images",
        "1",
        "--out",
        "run",
    ]
    typed += ["--prompts", "prompts.txt"]
    assert cli.main(typed) == 0
    make_change(model)
    assert cli.main(typed) == 3
    written = capsys.readouterr().err
    assert f"cannot resume run: weights of {model}/{part} changed" in written
    assert "--no-resume" in written


def with_model(kind: str, **parts: Any) -> Callable[[], list[str]]:
    return lambda: ["--model", write_model(kind, **parts)]


def empty_encoder() -> list[str]:
    Path("empty").mkdir()
    return ["--model", write_model("t2i", text_encoder={"dir": Path("empty")})]


def cut_target() -> list[str]:
    model = write_model("c2i")
    content = Path("model/target.pt").read_bytes()
    Path("model/target.pt").write_bytes(content[: len(content) // 2])
    return ["--model", model]


def code_in_drafter() -> list[str]:
    model = write_model("c2i")
    torch.save({"fc.weight": print}, "model/drafter/pytorch_model.bin")
    return ["--model", model]


MISSING: dict[str, tuple[Callable[[], list[str]], int, str]] = {
    "text encoder": (
        with_model("t2i", text_encoder=None),
        3,
        "needs its text encoder (FLAN-T5-XL), and it is not on this machine",
    ),
    "text encoder's files": (empty_encoder, 2, "is no T5 encoder"),
    "drafter": (with_model("c2i", drafter=None), 3, "needs a drafter, and this model has none"),
    "tokenizer": (
        with_model("c2i", tokenizer=None),
        2,
        "no picture can be drawn: it has no tokenizer",
    ),
    "end of the target": (cut_target, 2, "is truncated"),
    "code": (code_in_drafter, 2, "is a pickle with code in it"),
    "weights": (lambda: ["--model", "llamagen-t2i-stage1"], 3, "not on this machine"),
    "judges": (
        lambda: ["--model", write_model("c2i"), "--metrics", "quality"],
        3,
        "--metrics speed",
    ),
    "reference": (lambda: ["--metrics", "quality", "--reference", "none.json"], 2, "none.json"),
    "other codes": (
        lambda: ["--model", write_model("c2i"), "--neighbours", "32"],
        2,
        "has 32 codes\n  At most 31.",
    ),
    "classes": (
        lambda: ["--model", write_model("c2i"), "--prompts", "imagenet"],
        2,
        "there are 7 classes",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_missing_parts_stop_a_sweep_before_it_writes(
    what: str, refuse: Callable[..., None]
) -> None:
    make, code, message = MISSING[what]
    refuse(["sweep", "tiny.yaml", *make(), "--out", "run"], code, message)


def test_a_missing_tokenizer_stops_before_the_target_is_read(refuse: Callable[..., None]) -> None:
    model = write_model("c2i", tokenizer=None)
    Path("model/target.pt").write_bytes(b"no weights")
    refuse(["sweep", "tiny.yaml", "--model", model, "--out", "run"], 2, "it has no tokenizer")
    refuse(["generate", "--class", "1", "--model", model], 2, "it has no tokenizer")


def other_encoder() -> list[str]:
    folder = save_tiny_t5(Path("narrow"), d_model=16)
    return ["--model", write_model("t2i", text_encoder={"dir": folder})]


def drafter_without_config() -> list[str]:
    model = write_model("t2i")
    Path("model/drafter/config.json").unlink()
    return ["--model", model]


def encoder_without_weights() -> list[str]:
    model = write_model("t2i")
    Path("model-t5/model.safetensors").unlink()
    return ["--model", model]


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        MISSING["text encoder"],
        MISSING["text encoder's files"],
        (other_encoder, 2, "is another T5: its features have 16 numbers"),
        (drafter_without_config, 2, "drafter/config.json: no such file"),
        (encoder_without_weights, 2, "is no whole T5 encoder: it has no weights"),
    ],
)
@pytest.mark.parametrize("command", [["sweep", "tiny.yaml", "--out", "run"], ["generate", "a cat"]])
def test_small_files_are_checked_before_weights_are_read(
    command: list[str],
    make: Callable[[], list[str]],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[..., None],
) -> None:
    monkeypatch.setattr("lantern_bench.models.load.count_numbers", fail)
    refuse([*command, *make()], code, message)


def fail(*_: object, **__: object) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize("kind", ["c2i", "t2i", "chameleon"])
def test_weights_that_do_not_fit_are_not_read(
    kind: str, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    """Each kind has some ten thousand numbers, and half the bytes in bfloat16."""
    model = write_model(kind)
    monkeypatch.setattr("lantern_bench.models.checkpoints.key_map.load_into", fail)
    free = SimpleNamespace(available=40_000)
    monkeypatch.setattr("lantern_bench.devices.machine.psutil.virtual_memory", lambda: free)
    command = ["sweep", "tiny.yaml", "--model", model, "--modes", "ar", "--out", "run"]
    words = (f"the weights of {model} in float32: needs", "--dtype bfloat16")
    refuse([*command, "--dtype", "float32"], 3, *words)


def test_loading_and_hashing_show_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file of a model; in a pipe as plain lines."""
    model = write_model("c2i")
    command = ["sweep", "tiny.yaml", "--model", model, "--modes", "ar", "--images", "1"]
    monkeypatch.setattr("lantern_bench.utils.progress._SLOW_SECONDS", -1.0)
    monkeypatch.setattr("lantern_bench.utils.hashes._WORTH_REMEMBERING", 0)
    assert cli.main([*command, "--out", "run"]) == 0
    lines = capsys.readouterr().err.splitlines()
    for task in ("loading target.pt", "loading vq.pt", "loading drafter", "hashing target.pt"):
        assert f"{task}: 100% in 0 s" in lines


def state_hash(path: str, part: str, sha256: object) -> None:
    stated = yaml.safe_load(Path(path).read_text())[part]
    change(path, **{part: stated | {"sha256": sha256}})


def printed_hashes(capsys: pytest.CaptureFixture[str], model: str) -> dict[str, str]:
    assert cli.main(["models", model]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    return {row["part"]: row["sha256"] for row in rows}


@pytest.mark.parametrize("part", ["target", "tokenizer", "drafter"])
def test_weights_have_the_hash_that_the_model_file_states(
    part: str, capsys: pytest.CaptureFixture[str], refuse: Callable[..., None]
) -> None:
    model = write_model("c2i")
    hashes = printed_hashes(capsys, model)
    command = ["sweep", "tiny.yaml", "--model", model, "--images", "1", "--modes", "speculative"]

    # 1. Another hash is refused, and `models` warns of it.
    other = hashes["target" if part != "target" else "tokenizer"]
    state_hash(model, part, other)
    words = f"has the SHA-256 {hashes[part]}, and the model file states {other}"
    refuse([*command, "--out", "run"], 2, words)
    assert cli.main(["models", model]) == 0
    assert words in capsys.readouterr().err

    # 2. What is no hash is refused with its line.
    state_hash(model, part, "abc")
    refuse([*command, "--out", "run"], 2, f"{part}.sha256", "model.yaml line")

    # 3. The hash that `models` prints is taken, and the run stores it.
    state_hash(model, part, hashes[part])
    assert printed_hashes(capsys, model) == hashes
    assert cli.main([*command, "--out", "run"]) == 0
    stored = read_manifest(Path("run"))["key"]["weights"]
    if part != "drafter":  # its config.json counts too
        assert stored[f"{model}/{part}"] == hashes[part]


def test_two_kinds_of_weights_of_a_text_encoder_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first of them is read, as transformers does."""
    model = write_model("t2i")
    weights = Path("model-t5/model.safetensors")
    torch.save(load_file(weights), Path("model-t5/pytorch_model.bin"))
    command = ["sweep", "tiny.yaml", "--model", model, "--modes", "ar", "--images", "1"]
    assert cli.main([*command, "--out", "run"]) == 0
    named = "model-t5: has model.safetensors and pytorch_model.bin; model.safetensors is read"
    assert named in capsys.readouterr().err


def test_memory_of_weights_depends_on_the_dtype() -> None:
    described = model_of(write_model("c2i"))
    needed = [
        bytes_of_weights(described, Compute(torch.device("cpu"), dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert needed[0] == 2 * needed[1]
    stored = sum(path.stat().st_size for path in Path("model").glob("**/*.[pb][ti]*"))
    assert 0.5 * stored < needed[0] <= stored


def test_number_of_classes_comes_from_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the file nor the command says how many there are: the checkpoint does."""
    model = write_model("c2i")
    assert cli.main(["generate", "--class", "7", "--model", model]) == 2
    assert "--class 7" in capsys.readouterr().err
    assert cli.main(["models", model, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in rows] == ["target", "tokenizer", "drafter"]
    assert all(row["found"] for row in rows)
    assert {row["from"] for row in rows} == {"your model file"}
