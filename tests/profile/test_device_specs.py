"""Speedups of runs on several devices: paired within a device, pooled over kinds on request."""

from __future__ import annotations

import pytest

from lantern_bench.analysis.compare import compare_runs
from tests.helpers.made_up_run import AR, STRICT, WALKS, Row, build_tables, make_record, run_of


def records(devices: dict[str, list[tuple[str, str]]]) -> list[Row]:
    """Records of two cells; `devices` has the (name, id) of each prompt by mode.

    Device `a` is slow.
    """
    rows = []
    for cell, seconds in ((AR, 1.2), (STRICT, 0.6)):
        for prompt, (name, device_id) in enumerate(devices[cell.mode]):
            walks = [[]] * 6 if cell is AR else WALKS
            took = (seconds + 0.01 * prompt) / (1 if device_id == "a" else 2)
            rows.append(
                make_record(
                    cell=cell,
                    prompt=prompt,
                    walks=walks,
                    seconds=took,
                    device=name,
                    device_id=device_id,
                    process="abc".index(device_id),
                )
            )
    return rows


SLOW = ("L40S", "a")
FAST = ("L40S", "b")
OTHER = ("H100", "c")


def speedup(rows: list[Row], *, pool: bool = False) -> tuple[float | None, str]:
    table = build_tables(rows, pool_devices=pool)["speed"].set_index("mode")
    row = table.loc["speculative"]
    return row["speedup"], str(row["note"])


def test_seconds_of_two_devices_are_never_divided() -> None:
    same = [SLOW, FAST, SLOW, FAST]
    value, _ = speedup(records({"ar": same, "speculative": same}))
    assert value == pytest.approx(
        (1.2 + 1.22 + (1.21 + 1.23) / 2) / (0.6 + 0.62 + (0.61 + 0.63) / 2)
    )
    swapped = [SLOW, FAST, FAST, SLOW]
    value, note = speedup(records({"ar": same, "speculative": swapped}))
    assert value == pytest.approx((1.2 + 1.21 / 2) / (0.6 + 0.61 / 2)), "the prompts of one device"
    assert "speedup over the 2 of 4 images that ar has too" in note


def test_several_kinds_of_device_give_no_speedup_unless_pooled() -> None:
    mixed = [SLOW, OTHER, SLOW, OTHER]
    rows = records({"ar": mixed, "speculative": mixed})
    value, note = speedup(rows)
    assert value != value, "not a figure"
    assert "no speedup: images of 2 kinds of device; --pool-devices pools them" in note
    assert "seconds of several kinds of device: 2 on H100, 2 on L40S" in note
    value, note = speedup(rows, pool=True)
    assert value == pytest.approx(
        (1.2 + 1.22 + (1.21 + 1.23) / 2) / (0.6 + 0.62 + (0.61 + 0.63) / 2)
    )
    assert "2 on H100, 2 on L40S" in note


def test_compare_makes_no_speedup_of_several_kinds() -> None:
    alike, mixed = (
        run_of(records({"ar": devices, "speculative": devices}))
        for devices in ([SLOW] * 4, [SLOW, OTHER] * 2)
    )
    compared, same = (
        compare_runs(alike, other)
        .table.set_index(["quantity", "cell_id"])
        .loc["speedup", STRICT.cell_id]
        for other in (mixed, alike)
    )
    assert compared["effect"] != compared["effect"]
    assert compared["note"] == "not compared: a run has several kinds of device"
    assert same["a"] > 1
