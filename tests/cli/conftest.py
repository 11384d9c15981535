"""What tests of commands share: an empty folder to work in, the tiny model, and a check of
refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.storage.run_directory import RESULTS_VARIABLE
from tests.helpers.tiny_model import EXPERIMENT, TinyModel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder in which a command runs; results and caches are in it too, and no published
    weights.
    """
    monkeypatch.chdir(tmp_path)
    for name in (RESULTS_VARIABLE, "LANTERN_BENCH_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    """The only model there is, and the experiment tiny.yaml on it."""
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    return model


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Check that a command exits with a code, writes an error with all of these words, and makes no
    file.
    """

    def check(typed: Sequence[str], code: int, *words: str) -> None:
        capsys.readouterr()
        before = sorted(Path().rglob("*"))
        assert cli.main(typed) == code
        written = capsys.readouterr()
        assert all(word in written.err for word in words), written.err
        assert written.out == ""
        assert written.err.lower().count("error: ") == 1
        assert "Traceback" not in written.err
        assert "internal" not in written.err
        assert sorted(Path().rglob("*")) == before

    return check
