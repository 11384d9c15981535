"""Token ambiguity of a model made of tables, from which every expected value is read."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.certify.relaxation import ambiguity_rows, sampled_contexts
from lantern_bench.certify.tables import ambiguity_table_rows
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.report.tables import frame
from tests.tiny_family import PROMPTS, TOKENS, TinyFamily


def test_ambiguity_equals_values_of_the_tables() -> None:
    model = TinyFamily().load("tiny", torch.device("cpu"), torch.float32)
    prompts, decoding = [Prompt(text) for text in PROMPTS], Decoding(mode="ar", temperature=0.8)
    rows = list(ambiguity_rows(model, decoding, prompts, 4, batch=3))
    assert len(rows) == 4 * TOKENS
    tokens = torch.cat([made.forced.tokens for made in sampled_contexts(model, prompts, 4, decoding, batch=3)])
    p = (model.target.cond / 0.8).softmax(-1)  # type: ignore[attr-defined]
    q = (model.drafter.cond / 0.8).softmax(-1)  # type: ignore[union-attr]
    for number, row in enumerate(rows):
        image, position = divmod(number, TOKENS)
        assert row["position"] == position
        before = int(tokens[image, position - 1]) if position else len(p) - 1
        assert row["top1"] == pytest.approx(float(p[before].max()), abs=1e-6)
        assert row["top10"] == pytest.approx(float(p[before].topk(10).values.sum()), abs=1e-5)
        assert row["entropy"] == pytest.approx(float(torch.special.entr(p[before]).sum()), abs=1e-5)
        assert row["ambiguous"] == float(p[before].max() < 0.05)
        if position:
            overlap = torch.minimum(p[before], q[before]).sum()
            assert row["accepted_sampled"] == pytest.approx(float(overlap), abs=1e-5)
            assert row["accepted_best"] == pytest.approx(float(p[before, q[before].argmax()]), abs=1e-6)
        else:
            assert row["accepted_sampled"] is row["accepted_best"] is None
    frame("ambiguity_places", rows)

    table = frame("ambiguity", ambiguity_table_rows(rows, width=4))
    assert list(table["axis"]) == ["all"] + ["row"] * 3 + ["position"] * TOKENS
    everything = table.iloc[0]
    assert everything["places"] == 4 * TOKENS
    assert everything["prompts"] == 3
    assert everything["top1"] == pytest.approx(sum(row["top1"] for row in rows) / len(rows))
    assert everything["top1_low"] < everything["top1"] < everything["top1_high"]
    first = table[(table["axis"] == "position") & (table["index"] == 0)].iloc[0]
    assert first["note"] == "the first token is not drafted"
