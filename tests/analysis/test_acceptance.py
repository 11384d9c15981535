"""Acceptance along the walks, counted by hand and by the identities of docs/algorithms.md, section
7.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern_bench.analysis.cells import run_cells
from lantern_bench.analysis.tables import acceptance_rows
from tests.helpers.made_up_run import AR, STRICT, WALKS, make_record, run_of


def counts(cell, axis, name="offered"):
    """The counts of `name` along `axis`, without zeros."""
    found = cell.offers.groupby(axis)[name].sum()
    return found[found > 0].to_dict()


def test_offers_match_hand_counts():
    """Steps from positions 1, 4 and 6: [0, 1] ran out of children, [0, -1] was rejected at depth 2,
    [-1] at depth 1.

    A draft of depth d would fill position start + d - 1.
    """
    (cell,) = run_cells(run_of([make_record(cell=STRICT, prompt=0, walks=WALKS, seconds=1.0)]))
    assert counts(cell, "depth") == {1: 3, 2: 2}
    assert counts(cell, "depth", "accepted") == {1: 2, 2: 1}
    assert counts(cell, "position") == {1: 1, 2: 1, 4: 1, 5: 1, 6: 1}
    assert counts(cell, "position", "accepted") == {1: 1, 2: 1, 4: 1}


def test_acceptance_rows_have_rates_with_intervals():
    rows = list(
        acceptance_rows(
            run_cells(
                run_of(
                    [
                        make_record(cell=STRICT, prompt=number, walks=WALKS, seconds=1.0)
                        for number in range(2)
                    ]
                )
            )[0]
        )
    )
    assert [(row["axis"], row["index"]) for row in rows[:2]] == [("depth", 1), ("depth", 2)]
    first = rows[0]
    assert (first["offered"], first["accepted"], first["rate"]) == (6, 4, pytest.approx(2 / 3))
    assert first["rate_low"] < 2 / 3 < first["rate_high"]
    assert (
        list(
            acceptance_rows(
                run_cells(run_of([make_record(cell=AR, prompt=0, walks=[[]] * 5, seconds=1.0)]))[0]
            )
        )
        == []
    )


_STEP = st.tuples(st.lists(st.integers(0, 3), max_size=5), st.booleans()).map(
    lambda pair: pair[0] + [-1] if pair[1] else pair[0]
)


@given(st.lists(_STEP, min_size=1, max_size=20))
def test_counts_satisfy_their_identities(steps):
    """Acceptances are the accepted drafts, both axes count the same offers, steps go on where they
    were accepted.
    """
    record = make_record(cell=STRICT, prompt=0, walks=steps, seconds=1.0)
    (cell,) = run_cells(run_of([record]))
    offered = counts(cell, "depth")
    accepted = counts(cell, "depth", "accepted")
    assert (
        sum(accepted.values())
        == sum(record["accepted_per_step"])
        == sum(counts(cell, "position", "accepted").values())
    )
    assert sum(offered.values()) == sum(counts(cell, "position").values())
    assert offered.get(1, 0) <= len(steps)
    for depth in range(1, 6):
        assert offered.get(depth + 1, 0) <= accepted.get(depth, 0) <= offered.get(depth, 0)
