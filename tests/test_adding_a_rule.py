"""docs/adding-a-rule.md is true: its rule, outside the package, is found, swept against LANTERN++ and in every table.

The example package lies beside the tests and is found through its dist-info on the path, as an installed one would be;
the commands run in a process of their own, because rules are found when modes are first needed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantern_bench.decoding.acceptance import relaxation
from lantern_bench.decoding.acceptance.relaxation import Relaxation, merged_mass
from lantern_bench.decoding.acceptance.tree_acceptance import accept_children
from lantern_bench.decoding.compile import Engine
from lantern_bench.plugins import Rule

# Whole commands in processes of their own, on machines that may be busy.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "tests" / "examples" / "ambiguity_rule"
FILES = ("ambiguity_rule.py", "pyproject.toml", "ambiguity.yaml")


def run(folder: Path, *commands: list[str], path: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(path)]), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [json.dumps(command) for command in commands]
    script = [sys.executable, str(ROOT / "tests" / "examples" / "with_tiny_family.py"), *words]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=1100)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rule() -> Rule:
    space: dict[str, object] = {}
    exec(compile((EXAMPLE / "ambiguity_rule.py").read_text(), "ambiguity_rule.py", "exec"), space)
    found = space["RULE"]
    assert isinstance(found, Rule)
    return found


def test_the_page_shows_the_example_and_it_is_short() -> None:
    page = (ROOT / "docs" / "adding-a-rule.md").read_text(encoding="utf-8")
    for name in FILES:
        assert f"\n{(EXAMPLE / name).read_text(encoding='utf-8')}```" in page, name
    assert sum(len((EXAMPLE / name).read_text(encoding="utf-8").splitlines()) for name in FILES) < 40


def test_a_rule_from_outside_is_swept_shown_drawn_and_measured(tmp_path: Path) -> None:
    experiment = str(EXAMPLE / "ambiguity.yaml")
    tiny = ["--model", "tiny", "--neighbours", "3"]
    sweep = ["sweep", experiment, *tiny, "--images", "6", "--metrics", "speed", "--no-compile", "--out", "run"]
    certify = ["certify", "tiny", "--neighbours", "3", "--experiment", experiment, "--emitted-tv"]
    done = run(
        tmp_path,
        sweep,
        ["curves", "run"],
        ["curves", "run", "--by", "bound", "--out", "by-bound"],
        ["report", "run", "--out", "page.html"],
        [*certify, "--positions", "6", "--draws", "8", "--out", "cost"],
    )
    assert done.returncode == 0, done.stderr
    cells = {f"ambiguity-static-small-7-k3-bound{bound}-t1": bound for bound in ("0.1", "0.3", "0.6")}
    for table in ("speed", "acceptance"):
        found = {row["cell_id"]: row for row in rows(tmp_path / "run" / f"{table}.csv")}
        assert set(cells) <= set(found)
        for cell, bound in cells.items():
            assert (found[cell]["mode"], found[cell]["rule"], found[cell]["bound"]) == ("ambiguity", "ambiguity", bound)
    summary = {row["cell_id"]: row for row in rows(tmp_path / "run" / "summary.csv")}
    assert summary["ambiguity-static-small-7-k3-bound0.3-t1"]["parameters"] == "small-7 k=3 bound=0.3"
    assert all(float(summary[cell]["mean_accepted_length"]) > 1 for cell in cells)

    drawn = rows(tmp_path / "run" / "figures" / "acceptance-by-depth.csv")
    assert {"by ambiguity bound=0.1", "by ambiguity bound=0.3", "by ambiguity bound=0.6"} < {r["label"] for r in drawn}
    lengths = rows(tmp_path / "by-bound" / "mean-accepted-length-by-bound.csv")
    assert {row["bound"] for row in lengths} == set(cells.values())
    assert "by ambiguity bound=0.6" in (tmp_path / "page.html").read_text(encoding="utf-8")

    cost = {row["cell_id"]: row for row in rows(tmp_path / "cost" / "emitted_tv.csv")}
    assert set(cells) < set(cost)
    assert {row["mode"] for row in cost.values()} == {"ambiguity", "lantern++"}
    assert float(cost["ambiguity-static-small-7-k3-bound0.6-t1"]["emitted_tv"]) > 0


def test_an_edited_rule_does_not_continue_a_run(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for path in EXAMPLE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            copy = package / path.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    sweep = ["sweep", str(package / "ambiguity.yaml"), "--model", "tiny", "--neighbours", "3", "--metrics", "speed"]
    sweep += ["--modes", "ambiguity", "--images", "1", "--no-compile", "--out", "run"]
    assert run(tmp_path, sweep, sweep, path=package).returncode == 0
    module = package / "ambiguity_rule.py"
    module.write_text(module.read_text().replace("bound * entropy", "bound * bound * entropy"))
    refused = run(tmp_path, sweep, path=package)
    assert refused.returncode == 3
    assert "code of the rule ambiguity changed" in refused.stderr


def test_a_rule_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "broken-1.0.dist-info").mkdir(parents=True)
    (package / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (package / "broken-1.0.dist-info" / "entry_points.txt").write_text("[lantern_bench.rules]\nmine = broken:RULE\n")
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(package)])}
    script = [sys.executable, "-m", "lantern_bench", "sweep", str(EXAMPLE / "ambiguity.yaml")]
    refused = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100)
    assert refused.returncode == 3
    assert "error: the rule mine cannot be loaded: ModuleNotFoundError" in refused.stderr
    assert "Traceback" not in refused.stderr
    listed = subprocess.run([*script[:3], "models"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr


@pytest.fixture
def installed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> Rule:
    monkeypatch.setitem(relaxation.RULES, rule.name, rule)
    return rule


def test_the_rule_keeps_its_limit_and_takes_as_much_as_it_may(installed: Rule) -> None:
    noise = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(40, 32, generator=noise, dtype=torch.float64), dim=-1)
    table = torch.stack([torch.randperm(31, generator=noise) for _ in range(32)])
    tokens = torch.randint(0, 32, (40,), generator=noise)
    mass, taken = merged_mass(p, tokens, table, Relaxation("ambiguity", 8, 0.4))
    entropy = torch.special.entr(p).sum(-1)
    most = 0.4 * entropy / torch.tensor(32.0).log()
    near = p.gather(1, table[tokens, :8])
    assert (mass <= most + 1e-12).all()
    counts = taken.sum(1)
    assert 0 < counts.double().mean() < 8
    following = torch.where(counts < 8, near.gather(1, counts.clamp_max(7)[:, None]).squeeze(1), torch.inf)
    assert (mass + following > most).all()


def test_after_a_rejection_the_rule_sees_the_residual(installed: Rule) -> None:
    p = torch.tensor([[0.5, 0.2, 0.15, 0.15]], dtype=torch.float64)
    table = torch.tensor([[1, 2, 3], [2, 3, 0], [3, 1, 0], [1, 2, 0]])
    tokens = torch.tensor([[0, 2]])
    decided = accept_children(p.clone(), None, tokens, tokens >= 0, Relaxation("ambiguity", 1, 0.9), table)
    # The first draft takes token 1 along. What is left are two halves, of half the largest entropy: the second draft
    # may borrow .45 and its neighbour has .5. Of the whole p it might have borrowed .8.
    entropy = float(torch.special.entr(p).sum()) / math.log(4)
    assert 0.9 * entropy > 0.5 > 0.9 * 0.5
    torch.testing.assert_close(decided.accept, torch.tensor([[0.7, 0.5]], dtype=torch.float64))


def test_the_rule_is_compiled_whole(installed: Rule) -> None:
    noise = torch.Generator().manual_seed(1)
    p, q = torch.softmax(2 * torch.randn(2, 6, 16, generator=noise), dim=-1)
    table = torch.stack([torch.randperm(15, generator=noise) for _ in range(16)])
    tokens = torch.stack([torch.randperm(16, generator=noise)[:3] for _ in range(6)])

    def decided(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return accept_children(p, q, tokens, tokens >= 0, Relaxation("ambiguity", 4, 0.4), table).accept

    compiled = Engine(compile=True, backend="aot_eager").program("accept", decided, torch.device("cpu"))
    torch.testing.assert_close(compiled(p.clone(), q.clone()), decided(p.clone(), q.clone()))
