"""Records as columns: the rows that were written, in a fraction of their memory; what is damaged is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_bench.errors import UserError
from lantern_bench.runs.columns import Coded, Numbers, Records, read_columns
from lantern_bench.runs.store import line_of
from lantern_bench.schema import SCHEMA_VERSION, columns
from tests.made_up_run import LOOSE, WALKS, make_record, make_records

NAMES = [column.name for column in columns("records")]


def complete(row: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(NAMES) | row


def many(count: int) -> list[dict[str, Any]]:
    """Records of which every other has no steps; seeds do not fit into float64, marks are true, false or missing."""
    rows = []
    for number in range(count):
        row = make_record(LOOSE, number % 7, WALKS if number % 2 else [[]], 0.1 * number)
        row |= {"record_key": f"key{number}", "seed": 2**62 + number, "disturbed": (True, False, None)[number % 3]}
        rows.append(complete(row | {"image": f"images/{number}.png", "prompt": f"“{number % 7}”\n"}))
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("count", [0, 1, 5, 9_000])  # 9,000: more than two chunks, whose keys hardly repeat
def test_rows_read_back_as_they_were_written(tmp_path: Path, count: int) -> None:
    rows = many(count)
    read = read_columns(written(tmp_path / "r.jsonl", rows), "records")
    assert list(read) == rows and len(read) == count
    assert [read[at] for at in range(-min(count, 3), min(count, 3))] == [
        rows[at] for at in range(-min(count, 3), min(count, 3))
    ]
    for row, again in zip(rows[:20], read, strict=False):
        assert {name: type(value) for name, value in row.items()} == {
            name: type(value) for name, value in again.items()
        }


def test_columns_equal_those_of_the_rows() -> None:
    rows = [complete(row) for row in make_records()]
    records = Records.of(rows)
    assert isinstance(records.column("cell_id"), Coded) and isinstance(records.column("seconds"), Numbers)
    for name in NAMES:
        assert list(records.column(name)) == [row[name] for row in rows], name
    assert records.is_value("status", "ok").tolist() == [row["status"] == "ok" for row in rows]
    chosen = records.take(np.array([5, 0, 5]))
    assert list(chosen) == [rows[5], rows[0], rows[5]] and chosen[1:] == [rows[0], rows[5]]
    assert next(records.without({"seconds"}).rows("seconds", "seed")) == {"seconds": None, "seed": 0}
    ids = records.column("prompt_id")
    order = records.order_of("prompt_id")
    assert [ids[at] for at in np.argsort(order, kind="stable")] == sorted(ids)


def test_the_last_record_of_a_key_counts_at_its_first_place() -> None:
    rows = many(4)
    again = rows[1] | {"status": "failed"}
    assert [row["status"] for row in Records.of([*rows, again]).latest()] == ["ok", "failed", "ok", "ok"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("7", "not a JSON object"),
        ("", "not a JSON object"),
        ('{"seconds": NaN}', "not a JSON object"),
        ('{"seconds": "long"}', "seconds is not float"),
        ('{"prompt": 3}', "prompt is not string"),
        ('{"start_per_step": 3}', "start_per_step is not list[int]"),
        ('{"cell_id": {}}', "cell_id is not string"),
        ('{"mode": 3}', "mode is not string"),
        ('{"delta": "small"}', "delta is not float"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path / "r.jsonl", many(3))
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(UserError) as raised:
        read_columns(path, "records")
    assert f"{path} line 4: damaged, {said}" in raised.value.message


def test_a_line_with_another_checksum_is_named(tmp_path: Path) -> None:
    lines = [line_of(row) for row in many(3)]
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(lines))
    assert [row["seed"] for row in read_columns(path, "records")] == [2**62, 2**62 + 1, 2**62 + 2]
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"seconds": 0.1', b'"seconds": 0.7'), lines[2]]))
    with pytest.raises(UserError, match="line 2: damaged, its checksum differs"):
        read_columns(path, "records")


def test_a_flipped_bit_anywhere_is_noticed_whatever_columns_are_read(tmp_path: Path) -> None:
    first, second = (line_of(row | {"schema_version": SCHEMA_VERSION}) for row in many(2))
    path = tmp_path / "r.jsonl"
    for at in range(len(first)):
        flipped = bytes([first[at] ^ (1 << at % 8)])
        path.write_bytes(first[:at] + flipped + first[at + 1 :] + second)
        with pytest.raises(UserError, match=r"line [12]: damaged"):
            read_columns(path, "records", {"record_key", "status"})


def test_lines_mixed_into_each_other_are_noticed(tmp_path: Path) -> None:
    first, second = (line_of(row | {"schema_version": SCHEMA_VERSION}) for row in many(2))
    path = tmp_path / "r.jsonl"
    for at in range(1, len(first), 7):
        for mixed in (first[:at] + second, first[:at] + second[:-1] + first[at:], first[:at] + second[at:]):
            path.write_bytes(mixed)
            if mixed not in (first, second):
                with pytest.raises(UserError, match="line 1: damaged"):
                    read_columns(path, "records", {"record_key", "status"})


def test_a_line_that_is_not_ended_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", many(3))
    path.write_text(path.read_text()[:-1])
    assert len(read_columns(path, "records")) == 2


def test_a_record_takes_less_than_a_kilobyte(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [row | {"start_per_step": []} for row in many(12_000)[::2]])
    tracemalloc.start()
    read = read_columns(path, "records")
    used, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(read) < 1000
