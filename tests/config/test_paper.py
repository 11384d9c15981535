"""Published figures: what a block must say, and that the shipped ones are those of the sources,
none from memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from lantern_bench.config.experiment import load_experiment, shipped_experiments
from lantern_bench.config.paper import FIGURES, Paper, PaperRow, read_paper
from lantern_bench.storage.schema import columns
from lantern_bench.utils.errors import UserError

ROW: dict[str, Any] = {"name": "a row", "match": {"mode": "lantern", "temperature": 1}}


def papers() -> dict[str, Paper]:
    by_name = {}
    for name, path in shipped_experiments().items():
        paper = read_paper(yaml.safe_load(path.read_text(encoding="utf-8")).get("paper"))
        if paper is not None:
            by_name[name] = paper
    return by_name


def test_the_tables_of_the_papers_are_there() -> None:
    wanted = {
        "lantern-table2",
        "lantern-table3",
        "lantern-figure5",
        "lanternpp",
        "coolsd",
        "gsd",
        "sjd-pac",
        "csd-table2",
        "tree-shapes",
    }
    assert wanted | {"temperature", "guidance"} <= set(papers())


@pytest.mark.parametrize("name", papers())
def test_every_shipped_figure_has_a_source(name: str) -> None:
    paper = papers()[name]
    assert paper.missing, "what could not be had is expected"
    for row in paper.rows:
        for figure in row.figures.values():
            assert figure.confidence in ("paper", "secondary", "derived", "definition")
            assert len(figure.source) > 3
            assert (figure.confidence == "definition") == (figure.source == "by definition")
        assert set(row.figures) <= set(paper.columns)
    assert len({row.name for row in paper.rows}) == len(paper.rows)


def test_known_figures_are_the_published_ones() -> None:
    rows = {row.name: row.figures for row in papers()["lantern-table2"].rows}
    assert rows["EAGLE-2, tau=0"]["speedup"].value == 1.29
    assert rows["EAGLE-2, tau=1"]["speedup"].value == 0.93
    assert rows["LANTERN, tau=1, delta=0.4 k=1000"]["speedup"].value == 1.69
    assert rows["LANTERN, tau=1, delta=0.3 (VVS)"]["step_compression"].value == 2.10
    janus = {row.name: row.figures for row in papers()["scd-janus"].rows}
    assert janus["SCD, Gumbel coupling, window 32"]["speedup"].value == 2.45
    emu3 = {row.name: row.figures for row in papers()["sjdpac-emu3"].rows}
    assert emu3["SJD-PAC, COCO"]["step_compression"].value == 4.31
    assert emu3["SJD-PAC, PartiPrompts"]["clip_score"].value == 0.3187
    best = {row.name: row.figures for row in papers()["lanternpp"].rows}
    pac, gsd = (
        {row.name: row.figures for row in papers()[name].rows} for name in ("sjd-pac", "gsd")
    )
    quoted = {name: figure.value for name, figure in pac["LANTERN++, COCO"].items()}
    assert quoted == {"speedup": 2.28, "step_compression": 3.19, "fid": 29.96, "clip_score": 0.3011}
    assert gsd["GSD G=50, Parti"]["speedup"].value == 4.65
    assert best["LANTERN++, best latency"]["speedup"].confidence == "paper"
    assert best["LANTERN++, best step compression"]["step_compression"].value == 3.63


def test_figures_bear_the_names_of_our_columns() -> None:
    ours = {column.name for column in (*columns("speed"), *columns("quality"))}
    assert set(FIGURES) <= ours


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"figures": {"speedup": {"value": 1, "source": "recall", "confidence": "memory"}}},
            "'paper', 'secondary'",
        ),
        (
            {"figures": {"speedup": {"value": 1, "source": "", "confidence": "paper"}}},
            "at least 1 character",
        ),
        ({"figures": {"speedup": {"value": 1, "source": "x", "confidence": "sure"}}}, "secondary"),
        ({"figures": {"speed": {"value": 1, "source": "x", "confidence": "paper"}}}, "speedup"),
        ({"match": {"speed": 3}}, r"match\.speed[\s\S]*Input should be 'mode', 'drafting'"),
    ],
)
def test_a_row_that_is_wrong(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        PaperRow.model_validate(ROW | change)


def test_problems_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: lanterns\ncells: [{mode: ar}]\n"
        "paper:\n  title: T\n  rows:\n    - {match: {mode: ar}}\n"
    )
    with pytest.raises(UserError, match=r"line 6: paper\.rows\[0\]\.name: field required"):
        load_experiment(path, {"lanterns": {}})


def test_rows_match_by_the_settings_they_name() -> None:
    row = PaperRow.model_validate(ROW | {"models": {"lanterns": {"delta": 0.1}}})
    cell = {
        "mode": "lantern",
        "temperature": 1.0,
        "delta": 0.1,
        "model": "lanterns",
        "residual": "exact",
    }
    assert row.matches(cell)
    assert row.matches(cell | {"residual": "official"})
    assert not row.matches(cell | {"delta": 0.2})
    assert row.matches(cell | {"delta": 0.2, "model": "other"})
    assert not row.matches(cell | {"temperature": 0.0})
    assert not PaperRow.model_validate({"name": "uncovered"}).matches(cell)
