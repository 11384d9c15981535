"""docs/adding-a-rule.md is true: its rule, outside the package, is found, swept against LANTERN++
and in every table.

The example package lies beside the tests and is found through its dist-info on the path, as an
installed one would be; the commands run in a process of their own, because rules are found when
modes are first needed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.methods.catalog import RULES
from tests.helpers.rules import accept, neighbour_mass, rule_named, view_of

# Whole commands in processes of their own, on machines that may be busy.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "examples" / "distance_rule"
SURE = ROOT / "tests" / "examples" / "sure_rule"


def run(
    folder: Path, *commands: list[str], path: Path = EXAMPLE, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = [json.dumps(command) for command in commands]
    script = [sys.executable, str(ROOT / "tests" / "examples" / "with_tiny_family.py"), *words]
    return subprocess.run(
        script, cwd=folder, env=environment, capture_output=True, text=True, timeout=1100
    )


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_rule_from_outside_is_swept_shown_drawn_and_measured(tmp_path: Path) -> None:
    experiment = str(EXAMPLE / "distance.yaml")
    tiny = ["--model", "tiny", "--neighbours", "3"]
    sweep = [
        "sweep",
        experiment,
        *tiny,
        "--images",
        "6",
        "--metrics",
        "speed",
        "--no-compile",
        "--out",
        "run",
    ]
    done = run(
        tmp_path,
        sweep,
        ["curves", "run"],
        ["curves", "run", "--by", "bound", "--out", "by-bound"],
        ["report", "run", "--out", "page.html"],
        [
            "explore",
            experiment,
            *tiny,
            "--images",
            "4",
            "--no-compile",
            "--verify",
            "0",
            "--out",
            "explored",
        ],
        [
            "certify",
            "tiny",
            "--neighbours",
            "3",
            "--modes",
            "by-distance",
            "--samples",
            "8",
            "--out",
            "audit",
        ],
    )
    assert done.returncode == 0, done.stderr
    cells = {
        f"by-distance-static-small-7-k3-bound{bound}-t1": bound for bound in ("0.1", "0.3", "1")
    }
    for table in ("speed", "acceptance"):
        by_cell = {row["cell_id"]: row for row in rows(tmp_path / "run" / f"{table}.csv")}
        assert set(cells) <= set(by_cell)
        for cell, bound in cells.items():
            shown = [by_cell[cell][name] for name in ("mode", "rule", "bound")]
            assert shown == ["by-distance", "by-distance", bound]
    summary = {row["cell_id"]: row for row in rows(tmp_path / "run" / "summary.csv")}
    assert (
        summary["by-distance-static-small-7-k3-bound0.3-t1"]["parameters"]
        == "small-7 k=3 bound=0.3"
    )
    assert all(float(summary[cell]["mean_accepted_length"]) > 1 for cell in cells)

    drawn = rows(tmp_path / "run" / "figures" / "acceptance-by-depth.csv")
    assert {f"by-distance bound={bound} (relaxed)" for bound in ("0.1", "0.3", "1")} < {
        r["label"] for r in drawn
    }
    lengths = rows(tmp_path / "by-bound" / "mean-accepted-length-by-bound.csv")
    assert {row["bound"] for row in lengths} == set(cells.values())
    assert "by-distance bound=1" in (tmp_path / "page.html").read_text(encoding="utf-8")

    predicted = {row["cell_id"]: row for row in rows(tmp_path / "explored" / "surface.csv")}
    for cell in cells:
        swept = float(summary[cell]["mean_accepted_length"])
        assert float(predicted[cell]["mean_accepted_length"]) == pytest.approx(swept, rel=0.3)

    (audited,) = rows(tmp_path / "audit" / "audit.csv")
    assert (audited["mode"], audited["claim"], audited["verdict"][:7]) == (
        "by-distance",
        "relaxed",
        "relaxed",
    )


def test_a_probability_rule_from_outside_is_swept_and_audited(tmp_path: Path) -> None:
    tiny = ["--model", "tiny", "--no-compile", "--images", "6", "--metrics", "speed"]
    done = run(
        tmp_path,
        ["sweep", str(SURE / "sure.yaml"), *tiny, "--neighbours", "3", "--out", "run"],
        ["certify", "tiny", "--modes", "sure", "--samples", "8", "--out", "audit"],
        path=SURE,
    )
    assert done.returncode == 0, done.stderr
    lengths = {
        row["bound"]: float(row["mean_accepted_length"])
        for row in rows(tmp_path / "run" / "speed.csv")
        if row["mode"] == "sure"
    }
    assert list(lengths) == ["0.1", "0.2", "0.4"]
    assert 1 < lengths["0.1"] < lengths["0.4"]
    (audited,) = rows(tmp_path / "audit" / "audit.csv")
    assert (audited["mode"], audited["claim"]) == ("sure", "relaxed")


def test_the_probability_rule_adds_the_certainty_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, "sure", runpy.run_path(str(SURE / "sure_rule.py"))["sure"])
    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.2], [0.5, 0.25, 0.25]], dtype=torch.float64)
    decided = accept(p=p, q=q, tokens=torch.tensor([[1], [0]]), rule=rule_named("sure", 0, 0.4))
    certain = math.exp(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    expected = torch.tensor([[0.25 / 0.6 + 0.4 * certain], [0.4]], dtype=torch.float64)
    torch.testing.assert_close(decided.accept, expected)


def test_an_edited_rule_does_not_continue_a_run(tmp_path: Path) -> None:
    package = shutil.copytree(EXAMPLE, tmp_path / "package", ignore=shutil.ignore_patterns("*.pyc"))
    sweep = [
        "sweep",
        str(package / "distance.yaml"),
        "--model",
        "tiny",
        "--neighbours",
        "3",
        "--metrics",
        "speed",
    ]
    sweep += ["--modes", "by-distance", "--images", "1", "--no-compile", "--out", "run"]
    assert run(tmp_path, sweep, sweep, path=package).returncode == 0
    module = package / "distance_rule.py"
    module.write_text(
        module.read_text().replace(
            "weights * draft.neighbour_p", "0.5 * weights * draft.neighbour_p"
        )
    )
    refused = run(tmp_path, sweep, path=package)
    assert refused.returncode == 3
    assert "code of the rule by-distance changed" in refused.stderr


def test_a_broken_package_is_named_and_disables_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "broken-1.0.dist-info").mkdir(parents=True)
    (package / "broken-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n"
    )
    rows_of_it = (
        "[lantern_bench.rules]\nmine = broken:RULE\n[lantern_bench.metrics]\nmine = broken:METRIC\n"
    )
    (package / "broken-1.0.dist-info" / "entry_points.txt").write_text(rows_of_it)
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    sweep = [
        "sweep",
        str(EXAMPLE / "distance.yaml"),
        "--model",
        "tiny",
        "--neighbours",
        "3",
        "--metrics",
        "speed",
    ]
    sweep += ["--modes", "lantern++", "--images", "1", "--no-compile", "--out", "run"]
    both = Path(os.pathsep.join([str(EXAMPLE), str(package)]))
    done = run(tmp_path, sweep, ["show", "run"], ["models"], ["experiments"], path=both)
    assert done.returncode == 0, done.stderr
    score = ["score", "run", "--protocol", "mine"]
    for kind, command in (
        ("rule", [*sweep[:-2], "--rule", "mine", "--out", "other"]),
        ("metric", score),
    ):
        refused = run(tmp_path, command, path=both)
        assert refused.returncode == 3, refused.stderr
        assert (
            f"error: the {kind} mine of the package a-package cannot be loaded: ModuleNotFound"
            in refused.stderr
        )
        assert "Traceback" not in refused.stderr


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RULES, "by-distance", runpy.run_path(str(EXAMPLE / "distance_rule.py"))["by_distance"]
    )


def drafts_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """p [count, 32], the codes [32, 3], their table and a draft of each row."""
    noise = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(count, 32, generator=noise, dtype=torch.float64), dim=-1)
    codes = torch.randn(32, 3, generator=noise, dtype=torch.float64)
    return p, codes, nearest_codes(codes, 31), torch.randint(0, 32, (count,), generator=noise)


def most(
    p: torch.Tensor, codes: torch.Tensor, table: torch.Tensor, *, x: int, k: int, bound: float
) -> float:
    """The rule in numbers: one draft after the other."""
    near = table[x, :k].tolist()
    weights = [math.exp(-float((codes[x] - codes[code]).norm()) / bound) for code in near]
    lent = sum(weight * float(p[code]) for weight, code in zip(weights, near, strict=True))
    return lent / sum(weights)


def test_the_rule_keeps_its_limit_and_takes_as_much_as_it_may(installed: None) -> None:
    p, codes, table, tokens = drafts_of(40)
    rule = rule_named("by-distance", 8, 0.4, table=table, codebook=codes)
    mass, taken = neighbour_mass(view_of(p, tokens, rule), rule)
    limits = torch.tensor(
        [
            most(p=row, codes=codes, table=table, x=x, k=8, bound=0.4)
            for row, x in zip(p, tokens.tolist(), strict=True)
        ]
    )
    assert (mass <= limits + 1e-7).all()
    counts = taken.sum(1)
    assert 0 < counts.double().mean() < 8
    near = p.gather(1, table[tokens, :8].long())
    following = torch.where(
        counts < 8, near.gather(1, counts.clamp_max(7)[:, None]).squeeze(1), torch.inf
    )
    assert (mass + following > limits - 1e-7).all()


def test_after_a_rejection_the_rule_sees_the_residual(installed: None) -> None:
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64)
    codes = torch.tensor([[0.0], [1.0], [3.0], [3.5]], dtype=torch.float64)
    tokens = torch.tensor([[0, 2]])
    decided = accept(
        p=p,
        q=None,
        tokens=tokens,
        rule=rule_named("by-distance", 1, 0.9, table=nearest_codes(codes, 3), codebook=codes),
    )
    # With one neighbour the limit is its probability. The first draft takes token 1 along; of the
    # .3 that are left the second has .2, and its neighbour, token 3, the rest.
    torch.testing.assert_close(decided.accept, torch.tensor([[0.7, 1.0]], dtype=torch.float64))


def test_the_rule_is_compiled_whole(installed: None) -> None:
    p, codes, table, _ = drafts_of(6)
    rule = rule_named("by-distance", 4, 0.4, table=table, codebook=codes)
    q = p.roll(1, 0)
    tokens = torch.stack([torch.arange(3), torch.arange(3, 6)] * 3)

    def decided(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return accept(p=p, q=q, tokens=tokens, rule=rule).accept

    compiled = Engine(compile=True, backend="aot_eager").program(
        "accept", decided, torch.device("cpu")
    )
    torch.testing.assert_close(compiled(p, q), decided(p, q))
