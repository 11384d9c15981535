"""A model of another package, found by its entry point, from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.utils.errors import RefusedError

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_family"


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the example: its module, and the metadata that its pyproject.toml makes."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"lantern_bench_stripes-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "stripes.py").write_text((EXAMPLE / "stripes.py").read_text())
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    registry.find_models.cache_clear()
    yield
    registry.find_models.cache_clear()


def test_a_broken_model_is_refused_only_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lantern_bench.models]\nlost = no_such_module:MODEL\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.find_models.cache_clear()
    try:
        assert "lost" not in registry.models()
        with pytest.raises(RefusedError, match="the model lost of the package broken cannot be"):
            registry.model_of("lost")
        with pytest.raises(RefusedError, match="No module named 'no_such_module'"):
            registry.defaults_of(["lost"])
    finally:
        registry.find_models.cache_clear()


@pytest.mark.usefixtures("_installed")
def test_third_party_model_is_listed_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "--format", "csv"]) == 0
    assert "\nstripes," in capsys.readouterr().out
    out = tmp_path / "picture.png"
    typed = ["generate", "dark", "--model", "stripes", "--mode", "lantern++", "--neighbours", "2"]
    assert cli.main([*typed, "--out", str(out)]) == 0
    assert out.is_file()
    assert (
        cli.main(["generate", "green", "--model", "stripes", "--out", str(tmp_path / "other.png")])
        == 2
    )
    assert "'green': unknown" in capsys.readouterr().err
    assert cli.main(["check-model", "stripes", "--format", "csv"]) == 0
    checked = capsys.readouterr().out
    assert "\ntree,pass" in checked
    assert "\nlogits,none" in checked
    assert cli.main(["generate", "--model", "stripes", "--random-weights", "--dry-run"]) == 2
    assert "need a model whose architecture is known" in capsys.readouterr().err
