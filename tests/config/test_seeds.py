"""Seeds depend on run seed, prompt and repeat alone, and are recorded here so that they never change unnoticed.

A change of these numbers is a change of every result.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lantern_bench.config.plan import order_key, record_seed


def test_recorded_values() -> None:
    assert record_seed(0, "a" * 12, 0) == 3293219018698706467
    assert order_key(0, "a" * 12, 0, "ar-t1") == 8161787362896149727


@given(st.integers(0, 2**63 - 1), st.text(max_size=12), st.integers(0, 1000))
def test_seeds_fit_a_signed_integer_of_64_bits(run_seed: int, prompt_id: str, repeat: int) -> None:
    assert 0 <= record_seed(run_seed, prompt_id, repeat) < 2**63


def test_each_part_matters() -> None:
    seeds = {record_seed(s, p, r, again) for s in range(5) for p in ("a", "b") for r in range(5) for again in range(3)}
    assert len(seeds) == 150
