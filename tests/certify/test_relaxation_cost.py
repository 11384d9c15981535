"""Emitted TV at positions of sampled images: same positions for all cells, exact values, batch invariance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lantern_bench.certify.relaxation import emitted_tv_rows, generators
from lantern_bench.certify.tabular import table_model
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.rule import rule_of
from lantern_bench.decoding.emitted_tv import emitted, total_variation
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide, most_probable
from lantern_bench.errors import RefusedError
from lantern_bench.models.loaded_model import LoadedModel
from tests.decoding.rules import at_start
from tests.tiny_model import PROMPTS, TOKENS, TinyModel

ALL = [Prompt(text) for text in PROMPTS]
DYNAMIC = {"drafting": "dynamic", "nodes": 3, "depth": 1, "beam": 3}


def cell(mode: str, **values: Any) -> Cell:
    return Cell("tiny", Decoding(**{"mode": mode, "cfg_scale": 2.0, "cfg_default": 2.0, **values}))


RELAXED = [
    cell("lantern", **DYNAMIC, neighbours=4, delta=0.2),
    cell("lantern", **DYNAMIC, neighbours=4, delta=0.2, residual="official"),
    cell("lantern++", tree="small-7", neighbours=4, **{"lambda": 4}),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return TinyModel().load(torch.device("cpu"), torch.float32)


def test_all_cells_share_the_positions(model: LoadedModel) -> None:
    rows = list(emitted_tv_rows(model, RELAXED, ALL, positions=14, per_image=4, draws=4))
    places = {cell.cell_id: [] for cell in RELAXED}
    for row in rows:
        places[row["cell_id"]].append((row["prompt_id"], row["repeat"], row["position"]))
    first = places[RELAXED[0].cell_id]
    assert len(first) == len(set(first)) == 14
    assert all(of_cell == first for of_cell in places.values())
    assert {position for *_, position in first} <= set(range(1, TOKENS - 1))


def test_dynamic_emitted_tv_is_exact(model: LoadedModel) -> None:
    """Recompute it from the tables of the model: the drafts are the most probable codes of q at the last token."""
    rows = list(emitted_tv_rows(model, RELAXED[:1], ALL, positions=6, per_image=2, draws=4))
    chosen, plain = ALL[:3], RELAXED[0].decoding.autoregressive()
    condition, streams = model.condition(PROMPTS[:3]), generators(model, [record_seed(0, p.id, 0) for p in chosen])
    decoded = decode(model, condition, plain, streams)
    images = {prompt.id: image.tokens.long() for prompt, image in zip(chosen, decoded, strict=True)}
    target, drafter = model.target, model.drafter
    rule = rule_of(RELAXED[0].decoding, model)
    for row in rows:
        last = images[row["prompt_id"]][row["position"] - 1]
        p, q = (guide(part.cond[last], part.uncond[last], 2.0).softmax(-1)[None] for part in (target, drafter))  # type: ignore[union-attr]
        tokens, valid = most_probable(q, 3)
        emission = emitted(p, None, tokens, valid, rule, at_start(p))
        expected = total_variation(p, emission.distribution)
        assert row["emitted_tv"] == pytest.approx(float(expected), abs=1e-6)
        assert row["emitted_tv"] <= row["moved_mass"] + 1e-6


def test_strict_rule_has_zero_tv_and_batch_size_is_irrelevant(model: LoadedModel) -> None:
    cells = [cell("speculative", **DYNAMIC), cell("speculative", tree="small-7"), RELAXED[2]]
    sizes = {"positions": 12, "per_image": 3, "draws": 6}
    together = list(emitted_tv_rows(model, cells, ALL, **sizes, batch=8))
    alone = list(emitted_tv_rows(model, cells, ALL, **sizes, batch=1))
    assert max(row["emitted_tv"] for row in together if row["rule"] == "strict") < 1e-6

    def by_place(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
        return {(r["cell_id"], r["prompt_id"], r["repeat"], r["position"]): r["emitted_tv"] for r in rows}

    in_batches, by_themselves = by_place(together), by_place(alone)
    assert in_batches.keys() == by_themselves.keys()
    assert all(by_themselves[key] == pytest.approx(value, abs=1e-6) for key, value in in_batches.items())
    assert max(in_batches.values()) > 0.01


def test_images_that_are_too_short_are_refused(model: LoadedModel) -> None:
    with pytest.raises(RefusedError, match="too short for 11 positions"):
        next(emitted_tv_rows(model, RELAXED, ALL, positions=14, draws=4, per_image=11))


@pytest.mark.parametrize("drafting", ["jacobi", "hybrid"])
def test_drafts_of_earlier_steps_have_an_emitted_tv(drafting: str) -> None:
    values = {"mode": "lantern++", "drafting": drafting, "window": 3, "lambda": 3.0}
    cells = [Cell("tables", Decoding(**{**values, "neighbours": k})) for k in (0, 2)]
    sizes = {"positions": 12, "per_image": 2, "draws": 64, "batch": 4}
    rows = list(emitted_tv_rows(table_model(), cells, [Prompt("one"), Prompt("two")], **sizes))
    assert len(rows) == 24
    for cell in cells:
        here = [row for row in rows if row["cell_id"] == cell.cell_id]
        images = {(row["prompt_id"], row["repeat"]) for row in here}
        assert images == {(Prompt(text).id, repeat) for text in ("one", "two") for repeat in range(3)}
        assert all(1 <= row["position"] <= 5 for row in here)
        tv = [row["emitted_tv"] for row in here]
        if cell.decoding.neighbours:
            assert min(tv) >= 0 and sum(tv) / 12 > 0.02
        else:
            assert max(tv) < 1e-6
