"""`train drafter` through the command line, on a target of a few thousand numbers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from lantern_bench.cli.main import main
from lantern_bench.models import registry
from lantern_bench.models.registry import model_of
from lantern_bench.storage.run_directory import read_records
from lantern_bench.training import recipe as drafter_recipe
from lantern_bench.training import train_drafter as drafter_run
from lantern_bench.training.recipe import TrainSettings
from lantern_bench.training.train_drafter import COLUMNS
from lantern_bench.training.trainer import TrainEvent, TrainReport, train
from tests.helpers import golden_models, tiny_chameleon
from tests.helpers.tiny_target import CAPTIONS, TinyModel, tiny_model, write_pictures

CPU = torch.device("cpu")
TRAIN = ["train", "drafter", "--target", "tiny"]
QUICK = [
    "--steps",
    "6",
    "--batch",
    "2",
    "--set",
    "autocast=false",
    "--eval-every",
    "3",
    "--eval-images",
    "2",
]
QUICK += ["--final-images", "2", "--device", "cpu"]
KEYS = {
    "embed_tokens.weight",
    "fc.weight",
    "fc.bias",
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


@pytest.fixture
def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    return model


def run(*arguments: str, out: str = "out", quick: list[str] = QUICK) -> int:
    return main([*TRAIN, "--out", out, *quick, *arguments])


def weights(folder: str = "out") -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_captions_alone_are_sampled_and_drafter_is_written(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data", "all", "--images", "8", "--format", "csv") == 0
    written = capsys.readouterr()
    assert set(weights()) == KEYS
    assert torch.equal(
        weights()["embed_tokens.weight"], tiny_model().target.transformer.tok_embeddings.weight
    )  # type: ignore[attr-defined]
    config = json.loads(Path("out/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (32, 1, 32)
    log = pd.read_csv("out/log.csv")
    assert tuple(log.columns) == COLUMNS
    assert list(log["step"]) == [6]
    assert log["mal"].notna().all()
    assert (log["mal_images"] == 2).all()
    assert (log["lr"] > 0).all()
    header, row = written.out.splitlines()
    report = json.loads(Path("out/training_report.json").read_text())
    assert header.startswith("drafter,one_minus_tv,tree,images,mal")
    assert row.startswith("trained,")
    assert report["steps"] == 6
    assert report["recipe"]["batch"] == 2
    assert report["decoding"]["cfg_scale"] == 2.0
    assert 1 <= report["drafters"]["trained"]["mal"] <= 6
    assert "wrote out; use it: --model out/model.yaml" in written.err
    assert "sampling from the target: 100%" in written.err


def test_trained_drafter_is_a_model_for_every_command(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data", "all", "--images", "8") == 0
    loaded = model_of("out/model.yaml").load(CPU, torch.float32)
    state = loaded.drafter.state_dict()  # type: ignore[union-attr]
    assert torch.equal(state["fc.weight"], weights()["fc.weight"])
    assert loaded.drafter.mask_padding
    assert loaded.weights["target"] == "a" * 64
    assert len(loaded.weights["drafter"]) == 64
    assert model_of("out/model.yaml").defaults["cfg_scale"] == 2.0
    Path("e.yaml").write_text(
        "name: e\nmodel: out/model.yaml\nprompts: all\nimages: 2\nmetrics: [speed]\n"
        "compile: false\ncells: [{mode: ar}, {mode: speculative}]\n"
    )
    assert main(["sweep", "e.yaml", "--out", "run"]) == 0
    records = read_records(Path("run"))
    assert {record["status"] for record in records} == {"ok"}
    assert len(records) == 4


def test_drafter_starts_from_another_and_is_compared_with_it(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data", "all", "--images", "8") == 0
    again = [
        "--steps",
        "1",
        "--lr",
        "1e-9",
        "--batch",
        "2",
        "--set",
        "autocast=false",
        "--final-images",
        "2",
    ]
    for init in ("out", "shipped"):
        arguments = [
            "--target",
            "out/model.yaml",
            "--data",
            "all",
            "--images",
            "8",
            "--init",
            init,
            "--out",
            "two",
        ]
        capsys.readouterr()
        assert main(["train", "drafter", *arguments, *again, "--no-resume", "--format", "csv"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(",")[0] for line in lines] == ["drafter", "trained", "the model's own"]
        first = weights()
        second = weights("two")
        assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in KEYS)
        assert Path("two/model.yaml").read_text().startswith("model: ../out/model.yaml")
    assert model_of("two/model.yaml").load(CPU, torch.float32).drafter is not None


@pytest.mark.parametrize("beside", [True, False])
def test_pictures_with_captions_are_encoded_by_the_tokenizer(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str], *, beside: bool
) -> None:
    write_pictures(Path("pictures"), 6, beside=beside)
    assert run("--data", "pictures", "--mirror") == 0
    assert "encoding pictures: 100%" in capsys.readouterr().err
    tokens = torch.cat(
        [
            load_file(path)["tokens"]
            for path in sorted(Path("out/work").glob("tokens-*/*.safetensors"))
        ]
    )
    assert tokens.shape == (12, 16)
    assert int(tokens.max()) < 32
    assert not torch.equal(tokens[:6], tokens[6:])
    (manifest,) = Path("out/work").glob("tokens-*/manifest.json")
    assert json.loads(manifest.read_text())["key"]["tokenizer"] == "b" * 64


def stop_after(step: int) -> Callable[..., TrainReport]:
    """The training loop, interrupted after a step's event."""

    def stopping(*values: Any, on_event: Callable[[TrainEvent], None], processes: Any) -> Any:
        def hear(event: TrainEvent) -> None:
            on_event(event)
            if event.step == step:
                raise KeyboardInterrupt

        return train(*values, on_event=hear, processes=processes)

    return stopping


def test_resumed_training_equals_an_uninterrupted_one(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Often(TrainSettings):
        log_every: int = 1
        checkpoint_every: int = 2

    monkeypatch.setattr(drafter_recipe, "TrainSettings", Often)
    data = ["--data", "all", "--images", "9"]
    assert run(*data, out="whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(drafter_run, "train", stop_after(5))
        assert run(*data) == 130
    assert list(pd.read_csv("out/log.csv")["step"]) == [1, 2, 3, 4, 5]
    assert not Path("out/model.safetensors").exists()
    assert run(*data) == 0
    assert same(weights(), weights("whole"))
    logs = [pd.read_csv(f"{name}/log.csv") for name in ("out", "whole")]
    timing = ["seconds", "tokens_per_s"]
    pd.testing.assert_frame_equal(*(log.drop(columns=timing) for log in logs))
    assert list(logs[0]["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(logs[0]["mal"].notna()) == [False, False, True] * 2

    capsys.readouterr()
    assert run(*data, "--lr", "0.5") == 3
    assert "drafter.ckpt was made with lr = 0.0001, now it is 0.5" in capsys.readouterr().err
    assert run(*data[:-1], "8") == 3
    assert "drafter.ckpt was made with data = " in capsys.readouterr().err
    assert run(*data, "--seed", "1", "--no-resume") == 0
    assert not same(weights(), weights("whole"))


def test_dry_run_shows_the_plan_and_makes_nothing(
    tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(Path("pictures"), 40)
    before = sorted(Path().rglob("*"))
    arguments = ["--data", "pictures", "--mirror", "--dry-run", "--format", "csv"]
    assert run(*arguments, "--epochs", "3", quick=["--batch", "4", "--eval-every", "10"]) == 0
    written = capsys.readouterr()
    assert sorted(Path().rglob("*")) == before
    rows = dict(line.split(",", 1) for line in written.out.replace('"', "").splitlines())
    assert rows["pictures from pictures"] == "40, 40 of them used"
    assert rows["pictures encoded"] == "80 with mirror images"
    assert rows["held out"] == "4 of 80"
    assert rows["tokens"] == "1,280 (16 a picture)"
    assert rows["steps"] == "57 of 4 sequences"
    assert rows["epochs"] == "3"
    assert rows["evaluations"].startswith("5 of 8 images")


def test_published_target_is_planned_without_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--target",
        "llamagen-t2i-stage1",
        "--data",
        "examples",
        "--images",
        "100000",
        "--dry-run",
    ]
    assert main(["train", "drafter", *arguments, "--format", "csv"]) == 0
    out = capsys.readouterr().out.replace('"', "")
    assert "tokens,25,600,000 (256 a picture)" in out
    assert "steps,475,000 of 4 sequences" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "none"], "--data none: no such file and no prompt set"),
        (
            ["--data", "all", "--target", "tinny"],
            "--target tinny: unknown model; did you mean tiny?",
        ),
        (["--data", "empty"], "--data empty: contains no picture"),
        (["--data", "bare"], "--data bare: 1 of 1 pictures have no caption, the first 00.png"),
        (["--data", "wrong"], "--data wrong 00.txt: caption 'red fish': unknown word 'fish'"),
        (["--data", "bare", "--captions", "none.csv"], "--captions none.csv: no such file"),
        (["--data", "pictures", "--images", "9"], "--images 9: --data pictures holds 4 pictures"),
        (["--data", "one.txt"], "--data one.txt: one picture is too few"),
        (["--data", "fish.txt"], "--data fish.txt line 1: caption 'a fish': unknown word"),
        (["--data", "all", "--mirror"], "--mirror: needs pictures"),
        (
            ["--data", "all", "--recipe", "publisht"],
            "--recipe publisht: unknown recipe; did you mean published?",
        ),
        (
            ["--data", "all", "--recipe", "r.yaml"],
            "r.yaml line 2: noise -1: must be greater than or equal to 0",
        ),
        (
            ["--data", "all", "--set", "batches=3"],
            "--set batches: unknown key; did you mean batch? (the keys are lr,",
        ),
        (
            ["--data", "all", "--set", "schedule=step"],
            "--set schedule step: must be one of cosine, linear",
        ),
        (["--data", "all", "--set", "lr"], "--set lr: must be key=value"),
        (["--data", "all", "--lr", "0"], "--lr 0.0: must be greater than 0"),
        (["--data", "all", "--minutes", "0"], "--minutes 0.0: must be greater than 0"),
        (["--data", "all", "--init", "nowhere"], "--init nowhere: no such folder"),
        (["--data", "all", "--tree", "oak"], "--tree oak: unknown tree"),
        (
            ["--data", "all", "--cfg-scale", "-1"],
            "--cfg-scale -1.0: must be a number of at least 0",
        ),
        (
            ["--data", "all", "--device", "gpu"],
            "--device gpu: must be auto, cpu, mps, cuda or cuda:N",
        ),
        (["--data", "all", "--out", "one.txt"], "--out one.txt: one.txt is a file, not a folder"),
    ],
)
def test_usage_errors(
    tiny: TinyModel, refuse: Callable[..., None], arguments: list[str], message: str
) -> None:
    write_pictures(Path("pictures"), 4)
    write_pictures(Path("bare"), 1)
    write_pictures(Path("wrong"), 2)
    Path("bare/00.txt").unlink()
    Path("wrong/00.txt").write_text("red fish")
    Path("empty").mkdir()
    Path("one.txt").write_text(CAPTIONS[0])
    Path("fish.txt").write_text("a fish\n")
    Path("r.yaml").write_text("base: lanterns\nnoise: -1\n")
    refuse([*TRAIN, "--out", "out", *QUICK, *arguments], 2, message)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "broken"], 2, "broken/00.png: cannot be read as a picture"),
        (["--data", "all", "--init", "shipped"], 2, "--init shipped: tiny has no drafter"),
        (["--data", "all", "--init", "broken"], 2, "broken/config.json: no such file"),
        (["--data", "all", "--min-mal", "17"], 5, "--min-mal 17: the drafter's MAL is"),
    ],
)
def test_errors_after_the_start(
    tiny: TinyModel,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    write_pictures(Path("broken"), 2)
    Path("broken/00.png").write_bytes(b"no picture")
    assert run(*arguments) == code
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.count("error:") == 1
    assert "Traceback" not in written.err
    assert Path("out/model.safetensors").exists() == (code == 5)


def test_caption_file_and_recipe_file(tiny: TinyModel) -> None:
    Path("captions.jsonl").write_text("\n".join(json.dumps({"caption": text}) for text in CAPTIONS))
    Path("mine.yaml").write_text("base: lanterns\nlr: 3e-4\nnoise: 0.05\n")
    assert run("--data", "captions.jsonl", "--recipe", "mine.yaml", "--eval-prompts", "all") == 0
    recipe = json.loads(Path("out/training_report.json").read_text())["recipe"]
    assert recipe["lr"] == 3e-4
    assert recipe["noise"] == 0.05
    assert recipe["levels"] == 3
    assert recipe["batch"] == 2


def test_llamagen_target_from_a_model_file(folder: Path) -> None:
    path = golden_models.recorded_target(folder / "model", "c2i")
    few = [
        "--steps",
        "2",
        "--batch",
        "2",
        "--final-images",
        "1",
        "--eval-images",
        "1",
        "--set",
        "autocast=false",
    ]
    Path("classes.txt").write_text("class 1\nclass 2\nclass 3\n")
    name = os.path.relpath(path, folder)
    assert (
        main(["train", "drafter", "--target", name, "--data", "classes.txt", "--out", "out", *few])
        == 0
    )
    assert set(weights()) == KEYS
    assert model_of("out/model.yaml").load(CPU, torch.float32).drafter is not None


def test_captions_without_their_text_encoder_exit_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = golden_models.recorded_target(folder / "model", "t2i")
    few = ["--steps", "2", "--batch", "2", "--final-images", "0"]
    assert (
        main(
            ["train", "drafter", "--target", str(path), "--data", "examples", "--out", "out", *few]
        )
        == 3
    )
    assert "text encoder" in capsys.readouterr().err
    assert not Path("out/model.safetensors").exists()


def test_chameleon_target_from_a_model_file(folder: Path) -> None:
    tiny_chameleon.write_model_file(folder / "model", "lumina-mgpt-7b-768", (4, 4))
    write_pictures(Path("pictures"), 4)
    for text in Path("pictures").glob("*.txt"):
        text.write_text("a red lantern" if text.stem < "02" else "red")
    few = ["--steps", "3", "--batch", "2", "--final-images", "1", "--set", "autocast=false"]
    assert (
        main(
            [
                "train",
                "drafter",
                "--target",
                "model/model.yaml",
                "--data",
                "pictures",
                "--out",
                "out",
                *few,
            ]
        )
        == 0
    )
    assert {"layers.0.self_attn.q_norm.weight", "layers.0.input_layernorm.weight"} < set(weights())
    trained = model_of("out/model.yaml").load(CPU, torch.float32)
    state = trained.drafter.state_dict()  # type: ignore[union-attr]
    assert torch.equal(state["fc.weight"], weights()["fc.weight"])


def test_several_processes_need_a_number_of_steps(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse(
        [*TRAIN, *QUICK, "--data", "all", "--minutes", "1"],
        2,
        "--minutes: clocks of several processes differ",
    )


_WORKER = """
import atexit
import sys
from pathlib import Path

# Called after the functions that the command registers.
@atexit.register
def list_threads():
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    print("threads left:", *(name for name in names if "gloo" in name), file=sys.stderr)

from lantern_bench.models import registry
from tests.helpers.tiny_target import TinyModel
registry.models = lambda: {"tiny": TinyModel()}
from lantern_bench.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_two_processes_train_the_same_drafter_as_one(tiny: TinyModel, tmp_path: Path) -> None:
    data = ["--data", "all", "--images", "9"]
    assert run(*data, out="alone") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    typed = [*TRAIN, "--out", "both", *QUICK, *data]
    root = Path(__file__).parents[2]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, *typed],
            env=os.environ
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(root)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    streams = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], streams
    assert streams[0][0]
    assert not streams[1][0]
    assert [stderr.splitlines()[-1] for _, stderr in streams] == ["threads left:"] * 2
    alone = weights("alone")
    both = weights("both")
    assert all(torch.allclose(alone[name], both[name], atol=1e-5) for name in KEYS)
