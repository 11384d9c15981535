"""What tests of commands share: an empty folder to work in, the tiny model, and a run of the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_bench.models import registry
from lantern_bench.runs.store import RESULTS_VARIABLE
from tests.tiny_model import EXPERIMENT, TinyModel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder in which a command runs; results and caches are in it too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    """The only model there is, and the experiment tiny.yaml on it."""
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    return model
