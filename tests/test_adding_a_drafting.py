"""docs/adding-a-drafting.md is true: its drafting is found, swept, certified and lossless."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence

from lantern_bench.certify.tabular import TabularModel
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities
from lantern_bench.methods import tables as method_tables
from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.tables import Mode
from tests.test_adding_a_rule import ROOT, rows, run

EXAMPLE = ROOT / "tests" / "examples" / "echo_drafting"
FILES = ("echo_drafting/__init__.py", "echo_drafting/method.py", "pyproject.toml", "echo.yaml")
VOCABULARY, LENGTH, IMAGES = 3, 4, 3_000


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "adding-a-drafting.md").read_text(encoding="utf-8")
    for name in FILES:
        assert f"\n{(EXAMPLE / name).read_text(encoding='utf-8')}```" in page, name


@pytest.mark.timeout(1200)
def test_an_outside_drafting_is_swept_and_certified(tmp_path: Path) -> None:
    tiny = ["--model", "tiny", "--neighbours", "3"]
    sweep = ["sweep", str(EXAMPLE / "echo.yaml"), *tiny, "--images", "4", "--metrics", "speed", "--no-compile"]
    small = ["--samples", "100", "--positions", "4", "--draws", "4"]
    done = run(
        tmp_path,
        [*sweep, "--out", "run"],
        ["curves", "run"],
        ["certify", "tiny", "--neighbours", "3", *small, "--out", "certificate"],
        path=EXAMPLE,
    )
    assert done.returncode in (0, 5), done.stderr  # 5: so few samples may not reject a broken rule
    speed = {row["cell_id"]: row for row in rows(tmp_path / "run" / "speed.csv")}
    assert {"echo-echo-w2-t1", "echo-echo-w4-t1", "lantern++-echo-w3-k3-lambda5-t1"} < set(speed)
    assert speed["echo-echo-w2-t1"]["tree"] == "w2"
    assert float(speed["echo-echo-w4-t1"]["mean_accepted_length"]) > 1
    drawn = rows(tmp_path / "run" / "figures" / "acceptance-by-depth.csv")
    assert any(row["label"].startswith("echo") for row in drawn)
    certificate = (tmp_path / "certificate" / "certificate.csv").read_text(encoding="utf-8")
    assert "echo w3" in certificate


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafting]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import echo_drafting

    row: Drafting = echo_drafting.DRAFTING
    monkeypatch.setitem(method_tables.DRAFTINGS, "echo", row)
    monkeypatch.setitem(method_tables.MODES, "echo", Mode("echo", "echo", "strict", "echo"))
    monkeypatch.setitem(method_tables.PARAMETERS, "length", echo_drafting.LENGTH)
    yield row
    for name in ("echo_drafting", "echo_drafting.method"):
        sys.modules.pop(name, None)


def g_test(model: TabularModel, decoding: Decoding, engine: Engine | None = None, images: int = IMAGES) -> float:
    """The p-value of the joint distribution of all tokens of an image."""
    model.drafter = None
    generators = [torch.Generator().manual_seed(seed) for seed in range(images)]
    decoded = decode(model, [""] * images, decoding, generators, engine=engine)
    cell_numbers = torch.zeros(images, dtype=torch.int64)
    for token in torch.stack([image.tokens for image in decoded]).long().T:
        cell_numbers = cell_numbers * VOCABULARY + token
    distribution = model.distribution(lambda cond, uncond: decoding_probabilities(cond, decoding)).numpy()
    observed = np.bincount(cell_numbers.numpy(), minlength=len(distribution))
    if observed[distribution == 0].any():
        return 0.0
    possible = distribution > 0
    expected = distribution[possible] / distribution[possible].sum() * images
    return float(power_divergence(observed[possible], expected, lambda_="log-likelihood").pvalue)


def test_a_length_out_of_range_is_refused(echo: Drafting) -> None:
    assert Decoding("echo", length=2).cell_id == "echo-echo-w2-t1"
    with pytest.raises(ParameterError, match="length must be a whole number of at least 1"):
        Decoding("echo", length=0)


@pytest.mark.parametrize("values", [{"length": 2}, {"length": 3, "temperature": 0.9, "top_k": 2}])
def test_it_is_lossless_without_a_drafter(echo: Drafting, values: dict[str, Any]) -> None:
    p = g_test(TabularModel(VOCABULARY, LENGTH, seed=2), Decoding("echo", **values))
    print(f"G-test echo {values}: p = {p:.3f}")
    assert p > 1e-3


def test_a_stale_q_is_rejected(echo: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn from the last distribution but verified with another one."""
    import echo_drafting.method

    def tree(self: Any, drafted: Any) -> Any:
        tokens, q, valid = drafted
        return self.chain.draft(tokens, torch.full_like(q, 1 / VOCABULARY), valid)

    monkeypatch.setattr(echo_drafting.method.Echo, "tree", tree)
    p = g_test(TabularModel(VOCABULARY, LENGTH, seed=2), Decoding("echo", length=2))
    print(f"broken, another q: p = {p:.1e}")
    assert p < 1e-6


def test_greedy_equals_autoregressive_decoding(echo: Drafting) -> None:
    model = TabularModel(VOCABULARY, LENGTH, seed=4)
    model.drafter = None
    generator = [torch.Generator().manual_seed(0)]
    plain = decode(model, [""], Decoding(mode="ar", temperature=0), generator)
    drafted = decode(model, [""], Decoding("echo", length=3, temperature=0), generator)
    assert drafted[0].tokens.tolist() == plain[0].tokens.tolist()
