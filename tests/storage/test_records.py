"""Records as columns: the rows that were written, in a fraction of their memory; what is damaged is
named.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lantern_bench.storage.records import line_of, read_frame, read_rows, rows_of
from lantern_bench.storage.run_directory import read_records, read_run
from lantern_bench.storage.schema import SCHEMA_VERSION, columns
from lantern_bench.utils.errors import UserError
from tests.helpers.made_up_run import LOOSE, WALKS, make_record, with_checksum

NAMES = [column.name for column in columns("records")]


def complete(row: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(NAMES) | row


def many(count: int) -> list[dict[str, Any]]:
    """Records of which every other has no steps; seeds do not fit into float64, marks are true,
    false or missing.
    """
    rows = []
    for number in range(count):
        row = make_record(
            cell=LOOSE, prompt=number % 7, walks=WALKS if number % 2 else [[]], seconds=0.1 * number
        )
        row |= {
            "record_key": f"key{number}",
            "seed": 2**62 + number,
            "disturbed": {0: True, 1: False}.get(number % 3),
        }
        rows.append(
            complete(row | {"image": f"images/{number}.png", "prompt": f"“{number % 7}”\n"})
        )
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(map(line_of, rows)))
    return path


@pytest.mark.parametrize("count", [0, 1, 5, 2_500])  # 2,500: more than one chunk
def test_rows_read_back_as_they_were_written(tmp_path: Path, count: int) -> None:
    path = written(tmp_path / "r.jsonl", many(count))
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(rows) == count
    assert [msgspec.structs.asdict(row) for row in read_rows(path, "records")] == rows
    frame = read_frame(path, "records")
    assert rows_of(frame) == rows
    assert list(frame) == NAMES
    for row, again in zip(rows[:20], rows_of(frame), strict=False):
        assert {name: type(value) for name, value in row.items()} == {
            name: type(value) for name, value in again.items()
        }


def test_a_frame_has_the_wanted_columns_with_dtypes_of_the_schema(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", many(3))
    frame = read_frame(path, "records", {"seconds", "seed", "disturbed", "start_per_step"})
    dtypes = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert dtypes == {
        "record_key": "object",
        "seed": "Int64",
        "status": "object",
        "start_per_step": "object",
        "seconds": "float64",
        "disturbed": "boolean",
    }


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    rows = many(4)
    written(tmp_path / "records.jsonl", [*rows, rows[1] | {"status": "failed"}])
    assert [row["status"] for row in read_records(tmp_path)] == ["ok", "ok", "ok", "failed"]
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION}))
    by_key = read_run(tmp_path).records.set_index("record_key")["status"].to_dict()
    assert by_key == {row["record_key"]: row["status"] for row in read_records(tmp_path)}


@pytest.mark.parametrize(
    ("line", "problem"),
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
        ('{"seed": 9223372036854775808}', "seed is not int"),  # columns have 64 bits
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path / "r.jsonl", many(3))
    whole = path.read_bytes()
    path.write_bytes(whole + with_checksum(line.encode()) + whole)
    with pytest.raises(UserError) as raised:
        list(read_rows(path, "records"))
    assert f"{path} line 4: damaged, {problem}" in raised.value.message
    path.write_bytes(whole + line.encode() + b"\n" + whole)
    with pytest.raises(UserError, match="line 4: damaged, its checksum differs"):
        list(read_rows(path, "records"))


def test_a_flipped_bit_anywhere_is_noticed_whatever_columns_are_read(tmp_path: Path) -> None:
    first, second = (line_of(row | {"schema_version": SCHEMA_VERSION}) for row in many(2))
    path = tmp_path / "r.jsonl"
    for position in range(0, len(first), 3):
        flipped = bytes([first[position] ^ (1 << position % 8)])
        path.write_bytes(first[:position] + flipped + first[position + 1 :] + second)
        with pytest.raises(UserError, match=r"line [12]: damaged"):
            list(read_rows(path, "records", {"record_key", "status"}))


def test_lines_mixed_into_each_other_are_noticed(tmp_path: Path) -> None:
    first, second = (line_of(row | {"schema_version": SCHEMA_VERSION}) for row in many(2))
    path = tmp_path / "r.jsonl"
    for position in range(1, len(first), 23):
        for mixed in (
            first[:position] + second,
            first[:position] + second[:-1] + first[position:],
            first[:position] + second[position:],
        ):
            path.write_bytes(mixed)
            if mixed not in (first, second):
                with pytest.raises(UserError, match="line 1: damaged"):
                    list(read_rows(path, "records", {"record_key", "status"}))


def test_a_record_takes_about_a_kilobyte(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [row | {"start_per_step": []} for row in many(4_000)[::2]])
    tracemalloc.start()
    read = read_frame(path, "records")
    used, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(read) < 1400  # bytes, with the checksum
