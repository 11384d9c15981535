"""Check every line, hash, key and count of a run; drop what is damaged, so that it is made again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import ImageTask, Plan, Shard, make_plan
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.storage.records import read_lines, record_key
from lantern_bench.storage.run_directory import (
    PICTURES_LEFT_OUT,
    RECORDS,
    SCORES,
    read_manifest,
    without_records,
)
from lantern_bench.storage.run_store import lock_run
from lantern_bench.utils.errors import LanternError
from lantern_bench.utils.files import file_sha256, write_atomically

_FILES = {"records": RECORDS, "scores": SCORES}


class Problem(NamedTuple):
    """What is missing or damaged."""

    file: str
    problem: str
    repairable: bool = True  # whether a repair and the same sweep make it again


@dataclass(frozen=True)
class Checked:
    """What a check has read, and what is wrong."""

    records: int
    pictures: int | None  # None: the run was copied without its pictures
    scores: int
    problems: list[Problem]
    broken: frozenset[str]  # the record keys whose picture is missing or damaged
    lines_are_undamaged: bool


def verify(folder: Path) -> Checked:
    """Check a run directory; writes nothing and needs no lock. Raises `RefusedError` for tables without records."""
    manifest = read_manifest(folder)
    problems = list[Problem]()
    if not (folder / RECORDS).exists() and any(folder.glob("*.csv")):
        raise without_records(folder)
    has_pictures = not manifest.get(PICTURES_LEFT_OUT)
    rows: dict[str, list[Any]] = {table: [] for table in _FILES}
    for table, name in _FILES.items():
        path = folder / name
        size = 0
        for line in read_lines(path, table):
            size += len(line.content)
            if line.row is None:
                problems.append(Problem(name, f"line {line.number}: {line.problem}"))
            else:
                rows[table].append(line.row)
        if path.is_file() and (rest := path.stat().st_size - size):
            problems.append(Problem(name, f"ends in the middle of a line, {rest} bytes"))
    lines_are_undamaged = not problems
    records = {row.record_key: row for row in rows["records"]}
    finished = [row for row in records.values() if row.status == "ok"]
    pictured = [row for row in finished if row.image is not None and has_pictures]
    pictures = {row.record_key: _picture_problem(folder, row) for row in pictured}
    broken = {key: problem for key, problem in pictures.items() if problem is not None}
    problems += broken.values()
    try:
        problems += _compare(_plan_of(manifest), manifest, records.values())
    except LanternError as error:
        problems.append(
            Problem(
                "manifest.json", f"its images cannot be counted: {error.message}", repairable=False
            )
        )
    orphans = sum(
        row.record_key not in records for row in rows["scores"] if row.level in ("image", "tokens")
    )
    if orphans:
        problems.append(
            Problem(SCORES, f"{orphans} rows score images that have no record", repairable=False)
        )
    count = len(pictures) if has_pictures else None
    return Checked(
        records=len(records),
        pictures=count,
        scores=len(rows["scores"]),
        problems=problems,
        broken=frozenset(broken),
        lines_are_undamaged=lines_are_undamaged,
    )


def _picture_problem(folder: Path, row: Any) -> Problem | None:
    """Say what is wrong with the picture of a record; None where it is undamaged."""
    path = folder / row.image
    try:
        undamaged = file_sha256(path) == row.image_sha256
    except OSError as error:
        return Problem(
            row.image, "missing" if not path.exists() else f"cannot be read: {error.strerror}"
        )
    return (
        None if undamaged else Problem(row.image, "damaged, its SHA-256 is not that of the record")
    )


def _plan_of(manifest: Mapping[str, Any]) -> Plan:
    """Return the images that the run's experiment asks for."""
    # Runs of earlier versions have a key `lossless`, which changes no image.
    recorded = {key: value for key, value in manifest["experiment"].items() if key != "lossless"}
    experiment = load_experiment(recorded, defaults_of)
    prompts = load_prompts(experiment.settings.prompts, model_of(experiment.settings.model[0]))
    plan = make_plan(experiment, prompts)
    shard = manifest.get("shard")
    return plan if shard is None else plan.shard(Shard(shard["index"], shard["count"]))


def _compare(plan: Plan, manifest: Mapping[str, Any], records: Iterable[Any]) -> Iterator[Problem]:
    """Yield what is missing of each cell, and what is in the records and not in the plan."""
    recorded = {(row.cell_id, row.prompt_id, row.repeat): row for row in records}
    by_cell: dict[str, list[ImageTask]] = {}
    for task in plan.tasks:
        by_cell.setdefault(task.cell.cell_id, []).append(task)
    for cell_id, tasks in by_cell.items():
        rows = [recorded.pop(task.key, None) for task in tasks]
        if missing := rows.count(None):
            yield Problem(RECORDS, f"{cell_id}: {missing} of {len(tasks)} images have no record")
        if failed := sum(row is not None and row.status != "ok" for row in rows):
            yield Problem(RECORDS, f"{cell_id}: {failed} of {len(tasks)} images failed")
        for task, row in zip(tasks, rows, strict=True):
            if row is not None and row.record_key != (key := record_key(task, manifest["key"])):
                problem = f"{task.image}: its record key {row.record_key} is not that of its settings, {key}"
                yield Problem(RECORDS, problem, repairable=False)
    if recorded:
        yield Problem(
            RECORDS, f"{len(recorded)} records are of no image of the experiment", repairable=False
        )


def repair(folder: Path, checked: Checked) -> int:
    """Drop damaged lines, and the records of damaged pictures; return how many lines were dropped."""
    count = 0
    with lock_run(folder):
        for table, name in _FILES.items():
            lines = list(read_lines(folder / name, table))
            dropped = checked.broken if table == "records" else ()
            remaining = [
                line.content
                for line in lines
                if line.row is not None and line.row.record_key not in dropped
            ]
            if len(remaining) < len(lines):
                write_atomically(folder / name, remaining)
            count += len(lines) - len(remaining)
    return count
