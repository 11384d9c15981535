"""Acceptance along the walks, counted by hand and by the identities of docs/algorithms.md, section 7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern_bench.report.acceptance import acceptance_rows, walks
from lantern_bench.report.records import group
from tests.made_up_run import AR, STRICT, WALKS, make_record


def test_by_depth_by_hand():
    """Three steps: [0, 1] ran out of children, [0, -1] was rejected at depth 2, [-1] at depth 1."""
    counts = walks([make_record(STRICT, 0, WALKS, 1.0)], "depth")
    assert dict(counts.offered) == {1: 3, 2: 2}
    assert {depth: counts.accepted[depth] for depth in (1, 2)} == {1: 2, 2: 1}
    assert counts.rate == pytest.approx(3 / 5)


def test_by_position_by_hand():
    """Steps start at positions 1, 4 and 6: a draft of depth d would fill position start + d - 1."""
    counts = walks([make_record(STRICT, 0, WALKS, 1.0)], "position")
    assert dict(counts.offered) == {1: 1, 2: 1, 4: 1, 5: 1, 6: 1}
    assert {place for place in counts.offered if counts.accepted[place]} == {1, 2, 4}


def test_rows_of_a_cell():
    rows = list(acceptance_rows(group([make_record(STRICT, number, WALKS, 1.0) for number in range(2)])[0]))
    assert [(row["axis"], row["index"]) for row in rows[:2]] == [("depth", 1), ("depth", 2)]
    first = rows[0]
    assert (first["offered"], first["accepted"], first["rate"]) == (6, 4, pytest.approx(2 / 3))
    assert first["rate_low"] < 2 / 3 < first["rate_high"]


def test_ar_offers_nothing():
    cell = group([make_record(AR, 0, [[]] * 5, 1.0)])[0]
    assert walks(cell.good, "depth").rate is None
    assert list(acceptance_rows(cell)) == []


_STEP = st.tuples(st.lists(st.integers(0, 3), max_size=5), st.booleans()).map(
    lambda pair: pair[0] + [-1] if pair[1] else pair[0]
)


@given(st.lists(_STEP, min_size=1, max_size=20))
def test_identities(steps):
    """Acceptances are the accepted drafts, both axes count the same things, walks go on where they were accepted."""
    record = make_record(STRICT, 0, steps, 1.0)
    by_depth, by_position = walks([record], "depth"), walks([record], "position")
    assert by_depth.accepted.total() == sum(record["accepted_per_step"]) == by_position.accepted.total()
    assert by_depth.offered.total() == by_position.offered.total()
    assert by_depth.offered[1] <= len(steps)
    for depth in range(1, 6):
        assert by_depth.offered[depth + 1] <= by_depth.accepted[depth] <= by_depth.offered[depth]
