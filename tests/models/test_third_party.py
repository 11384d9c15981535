"""A family of another package, found by its entry point, from the command line in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "third_party_family"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the example is installed: its module, and the metadata that its pyproject.toml makes."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    place = tmp_path / "site"
    info = place / f"lantern_bench_stripes-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (place / "stripes.py").write_text((EXAMPLE / "stripes.py").read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


def run(environment: dict[str, str], *typed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lantern_bench", *typed]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_third_party_model_is_listed_and_generates(installed: dict[str, str], tmp_path: Path) -> None:
    listed = run(installed, "models", "--format", "csv")
    assert listed.returncode == 0 and "\nstripes," in listed.stdout
    out = tmp_path / "picture.png"
    typed = ["generate", "dark", "--model", "stripes", "--mode", "lantern++", "--neighbours", "2"]
    generated = run(installed, *typed, "--out", str(out), "--format", "csv")
    assert generated.returncode == 0, generated.stderr
    assert out.is_file() and ",16," in generated.stdout
    refused = run(installed, "generate", "green", "--model", "stripes", "--out", str(tmp_path / "other.png"))
    assert refused.returncode == 2 and "'green': unknown" in refused.stderr
    checked = run(installed, "check-model", "stripes", "--format", "csv")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "\ntree,pass" in checked.stdout and "\nlogits,none" in checked.stdout
    unbuilt = run(installed, "generate", "--model", "stripes", "--random-weights", "--dry-run")
    assert unbuilt.returncode == 2 and "need a model whose architecture is known" in unbuilt.stderr
