"""What a sweep does with neighbour spaces, prompt sets and text encoders. On a model of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.errors import RefusedError
from lantern_bench.models import registry
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.runs.store import RESULTS_VARIABLE, read_manifest, read_records
from tests.tiny_model import EXPERIMENT, TinyModel


class PreparedModel(TinyModel):
    """Its model is called once with all prompts before decoding starts, as one with a text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[str]] = []
        self.refusal: RefusedError | None = None

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        model = super().load(device, dtype)
        decode = model.condition

        def prepare(prompts: Sequence[str]) -> Iterator[tuple[int, int]]:
            if self.refusal is not None:
                raise self.refusal
            self.heard.append(list(prompts))
            yield from ((done, len(prompts)) for done in range(len(prompts) + 1))

        def condition(prompts: Sequence[str]) -> object:
            assert self.heard and set(prompts) <= set(self.heard[-1])
            return decode(prompts)

        model.prepare, model.condition = prepare, condition
        return model


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> PreparedModel:
    model = PreparedModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("tiny.yaml").write_text(EXPERIMENT)
    return model


def test_neighbour_space_is_part_of_the_record_key(tiny, capsys) -> None:
    typed = ["sweep", "tiny.yaml", "--images", "1", "--modes", "lantern++"]
    assert cli.main([*typed, "--out", "a"]) == 0
    assert cli.main([*typed, "--out", "b", "--neighbour-space", "normalised"]) == 0
    plain, other = read_manifest(Path("a")), read_manifest(Path("b"))
    assert "neighbour_space" not in plain["experiment"] and "tiny/neighbours" not in plain["key"]["weights"]
    assert other["experiment"]["neighbour_space"] == "normalised"
    assert other["key"]["weights"]["tiny/neighbours"] == "normalised"
    keys = [{row["record_key"] for row in read_records(Path(run))} for run in "ab"]
    assert not keys[0] & keys[1]
    capsys.readouterr()
    assert cli.main([*typed, "--out", "a", "--neighbour-space", "normalised"]) == 3
    assert cli.main([*typed, "--out", "c", "--neighbour-space", "cosine"]) == 2
    assert "--neighbour-space cosine: must be raw or normalised" in capsys.readouterr().err


def test_records_and_manifest_name_the_prompt_source(tiny, capsys) -> None:
    rows = [{"image_id": 9 + n, "caption": text} for n, text in enumerate(["one red", "two blue lanterns"])]
    rows.append({"image_id": 9, "caption": "one red lantern"})
    Path("captions.json").write_text(json.dumps({"annotations": rows}))
    typed = ["sweep", "tiny.yaml", "--modes", "ar", "--images", "2", "--prompts", "coco:captions.json", "--out", "run"]
    assert cli.main(typed) == 0
    found = {row["prompt_source"]: row["prompt"] for row in read_records(Path("run"))}
    assert found == {"coco:9": "one red lantern", "coco:10": "two blue lanterns"}
    said = read_manifest(Path("run"))["prompts"]
    assert said["set"] == "coco:captions.json" and said["prompts"] == 2 and len(said["file_sha256"]) == 64


def test_only_pending_captions_are_encoded(tiny, capsys) -> None:
    typed = ["sweep", "tiny.yaml", "--modes", "ar", "--out", "run"]
    assert cli.main([*typed, "--images", "2"]) == 0
    assert "captions for tiny: 2 of 2" in capsys.readouterr().err
    assert cli.main([*typed, "--images", "3"]) == 0
    assert [len(prompts) for prompts in tiny.heard] == [2, 1]
    sessions = read_manifest(Path("run"))["sessions"]
    assert all(session["prepare_seconds"] >= 0 and session["complete"] for session in sessions)


def test_interruption_while_encoding_captions(tiny, capsys, monkeypatch) -> None:
    def interrupted(*_given: object) -> Iterator[tuple[int, int]]:
        raise KeyboardInterrupt
        yield 0, 1

    whole = PreparedModel.load

    def load(self: PreparedModel, *given: object) -> LoadedModel:
        model = whole(self, *given)  # type: ignore[arg-type]
        model.prepare = interrupted
        return model

    monkeypatch.setattr(PreparedModel, "load", load)
    assert cli.main(["sweep", "tiny.yaml", "--modes", "ar", "--out", "run"]) == 130
    assert "interrupted before the first image" in capsys.readouterr().err and not Path("run").exists()


def test_missing_text_encoder_exits_3(tiny, capsys) -> None:
    tiny.refusal = RefusedError("tiny needs its text encoder", "Type `lantern-bench weights get tiny`.")
    assert cli.main(["sweep", "tiny.yaml", "--modes", "ar", "--out", "run"]) == 3
    written = capsys.readouterr()
    assert "error: tiny needs its text encoder\n  Type" in written.err and written.out == ""
    assert not Path("run").exists()
