"""The sentences on top of a page: they claim no more than the intervals of the run allow."""

from __future__ import annotations

from itertools import product

from lantern_bench.analysis.tables import tables_of
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.verdict import hardware, verdicts
from tests.helpers.made_up_run import AR, LOOSE, STRICT, WALKS, make_record, run_of

GUIDED = {"cfg_scale": 2, "cfg_default": 2}
LOOSER = Decoding(**{"mode": "lantern++", "tree": "small-7", "lambda": 5, **GUIDED})
BLOCK = Decoding(mode="speculative", tree="chain-5", rule="block", **GUIDED)
SECONDS = {AR: 2.4, STRICT: 2.0, BLOCK: 1.6, LOOSE: 1.2, LOOSER: 0.8}

Ends = tuple[float | None, float | None, float | None]
FAST = (1.5, 1.4, 1.6)
FASTER = (2.0, 1.9, 2.1)
CLOSE = (0.001, 0.0, 0.002)
FAR = (0.03, 0.02, 0.04)
UNSETTLED = (0.001, -0.02, 0.02)


def said(
    speedups: dict[Decoding, Ends], distances: dict[Decoding, Ends] | None = None
) -> list[str]:
    """The verdicts on a run of ar and of these cells, each with its speedup and distance."""
    records = [
        make_record(cell=cell, prompt=n, walks=[[]] if cell is AR else WALKS, seconds=SECONDS[cell])
        for cell, n in product((AR, *speedups), range(6))
    ]
    run = run_of(records)
    tables = tables_of(run)
    for name, column, figures in (
        ("speed", "speedup", speedups),
        ("quality", "distance", distances or {}),
    ):
        for cell, ends in figures.items():
            is_cell = tables[name]["cell_id"] == cell.cell_id
            tables[name].loc[is_cell, [column, f"{column}_low", f"{column}_high"]] = ends
    return verdicts(run, tables)


def test_a_lossless_cell_is_faster_only_if_its_whole_interval_is() -> None:
    assert said({STRICT: FAST, BLOCK: FASTER}) == [
        "speculative block chain-5 is the fastest of 2 lossless cells: 2.00x [1.90, 2.10]."
    ]
    assert said({STRICT: (1.1, 0.9, 1.3)}) == [
        "No lossless cell is shown to beat ar: speculative, the only lossless cell, has "
        "1.10x [0.90, 1.30]."
    ]
    assert said({STRICT: (3.0, None, None)}) == [
        "No lossless cell is shown to beat ar: speculative, the only lossless cell, has "
        "3.00x without an interval."
    ]


def test_a_relaxed_cell_is_named_if_speed_and_distance_are_settled() -> None:
    speedups = {LOOSE: FAST, LOOSER: FASTER}
    named = (
        "Of 2 relaxed cells, lantern++ lambda=2 is the fastest shown to stay within a distance of "
        "0.01: 1.50x [1.40, 1.60]"
    )
    assert said(speedups, {LOOSE: CLOSE, LOOSER: FAR}) == [f"{named}."]
    assert said(speedups, {LOOSE: CLOSE, LOOSER: UNSETTLED}) == [
        f"{named}; 1 faster cell is not settled."
    ]
    none = "No relaxed cell is shown to beat ar within a distance of 0.01"
    assert said(speedups, {LOOSE: FAR, LOOSER: FAR}) == [f"{none}."]
    assert said(speedups, {LOOSE: UNSETTLED, LOOSER: UNSETTLED}) == [
        f"{none}; 2 cells are not settled."
    ]
    slow = (0.8, 0.7, 0.9)
    assert said({LOOSE: slow}, {LOOSE: CLOSE}) == [f"{none}."]
    # More images would not make it faster than ar.
    assert said({LOOSE: slow}, {LOOSE: UNSETTLED}) == [f"{none}."]
    assert said(speedups) == ["The distance of the relaxed cells was not measured."]


def test_a_run_without_speedups_has_no_verdict() -> None:
    nothing = ["No speedup over ar was measured."]
    assert said({}) == nothing
    assert said({STRICT: (None, None, None)}) == nothing


def test_samplings_have_a_verdict_each() -> None:
    greedy = [
        Decoding(mode="ar", temperature=0, **GUIDED),
        Decoding(mode="speculative", tree="small-7", temperature=0, **GUIDED),
    ]
    seconds = [2.4, 3.0]
    records = [
        make_record(cell=cell, prompt=n, walks=WALKS, seconds=time * (1 + n / 100))
        for (cell, time), n in product(
            zip((AR, BLOCK, *greedy), (2.4, 1.6, *seconds), strict=True), range(6)
        )
    ]
    run = run_of(records)
    sampled, at_zero = verdicts(run, tables_of(run))
    assert sampled.startswith("speculative block chain-5 is the only lossless cell: 1.50x")
    assert at_zero.startswith("T=0: No lossless cell is shown to beat ar")


def test_hardware_is_what_the_manifest_states() -> None:
    manifest = {
        "device": "cpu",
        "threads": 1,
        "dtype": "bfloat16",
        "compile": True,
        "machine": {"cpu": {"model": "A processor"}},
    }
    assert hardware(manifest) == "A processor, 1 thread, bfloat16, compiled steps"
    changes = {"device": "A card", "compile": False}
    assert hardware(manifest | changes) == "A card, bfloat16, steps not compiled"
    assert hardware({}) == ""
