"""The Python API: the same runs and figures as the command line, and the example of its page."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.storage.run_directory import RESULTS_VARIABLE
from lantern_bench.sweeps.events import ImageDone, Started
from lantern_bench.utils.errors import RecordsFailedError, RefusedError, UserError
from lantern_bench.utils.progress import Note
from tests.helpers.tiny_model import EXPERIMENT, PROMPTS, TOKENS, TinyModel

PAGE = Path(__file__).parent.parent / "docs" / "python-api.md"
CONTENT = yaml.safe_load(EXPERIMENT)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    Path("tiny.yaml").write_text(EXPERIMENT)
    return model


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, lantern_bench;"
        "heavy = {'torch', 'pandas', 'numpy', 'pydantic', 'yaml'} & set(sys.modules);"
        "assert not heavy, heavy; assert set(lantern_bench.__all__) <= set(dir(lantern_bench));"
        "lantern_bench.load_run; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'swep'"):
        lantern_bench.swep  # noqa: B018


@pytest.mark.parametrize("name", [name for name in lantern_bench.__all__ if name != "__version__"])
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    thing = getattr(lantern_bench, name)
    assert inspect.getdoc(thing)
    assert f"`{name}" in PAGE.read_text(encoding="utf-8")
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Signature.empty not in [*annotations, signature.return_annotation]


@pytest.mark.parametrize("experiment", ["tiny.yaml", Path("tiny.yaml"), CONTENT])
def test_sweep_takes_a_name_a_path_or_a_mapping(tiny: TinyModel, experiment: object) -> None:
    run = lantern_bench.sweep(experiment, images=1, modes="ar")  # type: ignore[arg-type]
    assert run.cells == ["ar-t1"]
    assert len(run.records) == 1
    assert run.path.parent == Path("results")
    assert (run.path / "summary.csv").is_file()


def test_a_sweep_without_quality_imports_no_scorers(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take seconds to import."""
    for name in ("metrics.score_run", "metrics.extractors"):
        monkeypatch.setitem(sys.modules, f"lantern_bench.{name}", None)
    assert len(lantern_bench.sweep("tiny.yaml", images=1, modes="ar").records) == 1


def test_sweep_and_the_command_make_the_same_run(tiny: TinyModel) -> None:
    run = lantern_bench.sweep("tiny.yaml", out="a", seed=4, **{"lambda": [2, 3]})
    assert (
        cli.main(["sweep", "tiny.yaml", "--out", "b", "--lambda", "2,3", "--seed", "4", "-q"]) == 0
    )
    other = lantern_bench.load_run("b")
    assert run.cells == other.cells
    assert len(run.cells) == 6
    same = ["record_key", "cell_id", "tokens_sha256", "image_sha256", "seed", "accepted_per_step"]
    pd.testing.assert_frame_equal(run.records[same], other.records[same])


def test_progress_receives_the_events(tiny: TinyModel) -> None:
    events: list[object] = []
    lantern_bench.sweep("tiny.yaml", images=1, progress=events.append)
    notes = [
        event.text.split()[0]
        for event in events
        if isinstance(event, Note) and event.level == "detail"
    ]
    assert notes == ["device", "threads"] + ["warm-up"] * 5
    quiet = [
        type(event) for event in events if not isinstance(event, Note) or event.level != "warning"
    ]
    assert quiet == [Note] * 2 + [Started] + [Note] * 5 + [ImageDone] * 6


def test_sweep_resumes_and_refuses_as_the_command(tiny: TinyModel) -> None:
    lantern_bench.sweep("tiny.yaml", out="run", images=1)
    events: list[object] = []
    run = lantern_bench.sweep("tiny.yaml", out="run", images=2, progress=events.append)
    assert len(run.records) == 12
    assert Started(6, dict.fromkeys(run.cells, 1)) in events
    with pytest.raises(RefusedError, match="seed changed"):
        lantern_bench.sweep("tiny.yaml", out="run", seed=1)
    assert lantern_bench.sweep("tiny.yaml", out="run", images=1, resume=False).path == Path("run-2")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"delta": 1.5}, "--delta 1.5: must"),
        ({"detla": 0.1}, "detla"),
        ({"modes": "lantrn"}, "did you mean lantern?"),
        ({"prompts": "none.txt"}, "--prompts none.txt: no such file"),
    ],
)
def test_wrong_overrides_are_user_errors(
    tiny: TinyModel, changes: dict[str, object], wrong: str
) -> None:
    with pytest.raises(UserError) as caught:
        lantern_bench.sweep(CONTENT, **changes)  # type: ignore[arg-type]
    assert wrong in caught.value.message
    assert not Path("results").exists()


def test_failed_images_raise_and_the_run_can_be_read(tiny: TinyModel) -> None:
    Path("broken.txt").write_text("one red lantern\nbroken\n")
    with pytest.raises(RecordsFailedError, match="6 of 12 images failed"):
        lantern_bench.sweep("tiny.yaml", out="run", prompts="broken.txt", images=2)
    run = lantern_bench.load_run("run")
    assert repr(run) == "Run('run': 6 cells, 6 of 12 images, 6 failed)"
    assert set(run.records["status"]) == {"ok", "failed"}
    assert (run.summary["failed"] == 1).all()
    assert len(run.pictures(run.cells[0])) == 1


def test_a_run_has_the_tables_and_pictures_of_its_files(tiny: TinyModel) -> None:
    run = lantern_bench.sweep("tiny.yaml", out="run")
    for name in ("speed", "quality", "acceptance", "summary"):
        text = getattr(run, name).to_csv(index=False, float_format="%.6g", lineterminator="\n")
        assert text == (run.path / f"{name}.csv").read_text()
    assert run.summary is run.summary
    assert run.records["tokens"].dtype == "Int64"
    assert run.manifest["experiment"]["name"] == "tiny"
    assert "<table" in run._repr_html_()
    assert "speculative" in run._repr_html_()
    files = [
        Image.open(run.path / "images" / run.cells[1] / f"{number:06d}.png") for number in range(3)
    ]
    pictures = [np.asarray(picture).tolist() for picture in run.pictures(run.cells[1])]
    assert pictures == [np.asarray(picture).tolist() for picture in files]
    with pytest.raises(UserError, match="no such cell"):
        run.pictures("other")


def test_functions_return_what_commands_show(tiny: TinyModel) -> None:
    run = lantern_bench.sweep("tiny.yaml", out="run", images=2, lambda_=[2, 3])
    files = lantern_bench.curves(run, cells=["lantern++"], width="one")
    assert {path.parent for path in files} == {Path("run/figures")}
    assert all(path.is_file() for path in files)
    assert lantern_bench.write_report("run").read_text().startswith("<!")
    other = lantern_bench.sweep("tiny.yaml", out="other", images=2, lambda_=[2, 3])
    assert set(lantern_bench.compare(run, other)["cell_id"]) <= set(run.cells)
    scored = lantern_bench.score(run, protocol="embedded", progress=False)
    assert scored["cell_id"].tolist() == run.quality["cell_id"].tolist()
    assert scored["distance"].notna().any()
    recommended = lantern_bench.recommend(run, max_distance=1.0)
    assert "lossless" in set(recommended["verdict"])
    by_emitted_tv = lantern_bench.recommend(run, max_emitted_tv=1.0)
    assert set(by_emitted_tv["condition"]) == {"emitted_tv <= 1"}
    (run.path / "records.jsonl").rename("records.jsonl")
    pd.testing.assert_frame_equal(
        lantern_bench.recommend("run", max_distance=1.0), recommended, rtol=1e-5
    )
    Path("records.jsonl").rename(run.path / "records.jsonl")
    with pytest.raises(UserError) as caught:
        lantern_bench.predict(run, "h10")
    assert caught.value.advice is not None
    assert caught.value.__notes__ == [caught.value.advice]
    assert len(repr(lantern_bench.load_model("tiny"))) < 120


def test_load_run_finds_names_and_refuses_what_is_no_run(tiny: TinyModel) -> None:
    run = lantern_bench.sweep("tiny.yaml", images=1, modes="ar")
    assert lantern_bench.load_run("tiny").path == run.path
    with pytest.raises(UserError, match="no such run"):
        lantern_bench.load_run("other")
    (run.path / "records.jsonl").write_text("")
    assert lantern_bench.load_run(run.path).cells == run.cells  # from its tables
    for table in run.path.glob("*.csv"):
        table.unlink()
    with pytest.raises(RefusedError, match="no records yet"):
        lantern_bench.load_run(run.path)


def test_decode_gives_the_tokens_of_a_sweep(tiny: TinyModel) -> None:
    run = lantern_bench.sweep("tiny.yaml", out="run", seed=3)
    model = lantern_bench.load_model("tiny", device="cpu")
    images = lantern_bench.decode(model, PROMPTS, mode="lantern", neighbours=3, delta=0.2, seed=3)
    pictures = run.pictures(next(cell for cell in run.cells if cell.startswith("lantern-")))
    for image, picture, prompt in zip(images, pictures, PROMPTS, strict=True):
        assert image.prompt == prompt
        assert image.tokens.shape == (TOKENS,)
        assert image.tokens.dtype == torch.int32
        assert image.picture is not None
        assert np.array_equal(np.asarray(image.picture), np.asarray(picture))
        assert image.mean_accepted_length is not None
        assert image.mean_accepted_length >= 1
        assert image.seconds > 0
        assert (image._repr_png_() or b"").startswith(b"\x89PNG")
        assert repr(image).startswith(f"DecodedImage({prompt!r}: {TOKENS} tokens, ")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"mode": "lantern"}, "delta"),
        ({"mode": "lantrn"}, "lantrn"),
        ({"temperature": [0, 1]}, "decode takes one value per parameter"),
        ({"prompts": ["one pink lantern"]}, "unknown word 'pink'"),
        ({"neighbours": 3}, "reaches no cell"),
    ],
)
def test_decode_refuses_wrong_parameters(
    tiny: TinyModel, changes: dict[str, object], wrong: str
) -> None:
    model = lantern_bench.load_model("tiny")
    with pytest.raises(UserError) as caught:
        lantern_bench.decode(model, **({"prompts": PROMPTS} | changes))  # type: ignore[arg-type]
    assert wrong in str(caught.value)


def test_load_model_refuses_a_missing_device(tiny: TinyModel) -> None:
    with pytest.raises(RefusedError, match="cuda:97"):
        lantern_bench.load_model("tiny", device="cuda:97")


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert len(blocks) == 4
    assert "Run('example-run': 4 cells, 8 images)" in printed
    assert printed.count(" ok ") == 4
    assert Path("first.png").is_file()
    assert Path("relaxed.png").is_file()
