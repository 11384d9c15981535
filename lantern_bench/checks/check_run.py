"""Check every line, picture, count and table of a run, and drop what is damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.analysis.tables import stale_tables, write_tables
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import ImageTask, Plan, Shard, make_plan
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.storage.records import Line, read_lines, record_key
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


class Problem(NamedTuple):
    """Something missing or damaged."""

    file: str
    problem: str
    repairable: bool = True  # whether `repair_run` and the same sweep make it again


@dataclass(frozen=True)
class RunCheck:
    """What a check has counted, and the problems that it found."""

    records: int
    pictures: int | None  # None: the run was copied without its pictures
    scores: int
    problems: list[Problem]
    broken: frozenset[str]  # the record keys whose picture is missing or damaged


def check_run(folder: Path) -> RunCheck:
    """Check a run directory without writing to it; no lock is needed.

    Tables are compared with the records only if no line is damaged.

    Raises:
        RefusedError: The directory has tables, but no records.
    """
    manifest = read_manifest(folder)
    if not (folder / RECORDS).exists() and any(folder.glob("*.csv")):
        raise without_records(folder)

    # 1. Lines and their checksums.
    record_rows, problems = _check_lines(folder, RECORDS, "records")
    score_rows, score_problems = _check_lines(folder, SCORES, "scores")
    problems += score_problems
    lines_are_undamaged = not problems

    # 2. Pictures and their hashes.
    records = {row.record_key: row for row in record_rows}
    has_pictures = not manifest.get(PICTURES_LEFT_OUT)
    pictured = [row for row in records.values() if row.status == "ok" and row.image is not None]
    broken: dict[str, Problem] = {}
    for row in pictured if has_pictures else ():
        damage = _picture_problem(folder, row)
        if damage is not None:
            broken[row.record_key] = damage
    problems += broken.values()

    # 3. Counts, against the plan of the experiment.
    try:
        problems += _plan_problems(_plan_of(manifest), manifest, records.values())
    except LanternError as error:
        problem = f"its images cannot be counted: {error.message}"
        problems.append(Problem("manifest.json", problem, repairable=False))
    scored = [row.record_key for row in score_rows if row.level in ("image", "tokens")]
    orphans = sum(key not in records for key in scored)
    if orphans:
        problem = f"{orphans} rows score images that have no record"
        problems.append(Problem(SCORES, problem, repairable=False))

    # 4. Tables, against the records.
    if lines_are_undamaged and records:
        stale = stale_tables(folder)
        problems += [Problem(name, "differs from the table of the records") for name in stale]
    return RunCheck(
        records=len(records),
        pictures=len(pictured) if has_pictures else None,
        scores=len(score_rows),
        problems=problems,
        broken=frozenset(broken),
    )


def repair_run(folder: Path, checked: RunCheck) -> int:
    """Drop damaged lines and the records of damaged pictures, then write the tables.

    Returns:
        The number of dropped lines. The sweep that made the run decodes their images again.
    """
    with lock_run(folder):
        records = list(read_lines(folder / RECORDS, "records"))
        scores = list(read_lines(folder / SCORES, "scores"))
        kept_records = _undamaged(records, checked.broken)
        kept_scores = _undamaged(scores)
        if len(kept_records) < len(records):
            write_atomically(folder / RECORDS, kept_records)
        if len(kept_scores) < len(scores):
            write_atomically(folder / SCORES, kept_scores)
    if kept_records:
        write_tables(folder)
    return len(records) - len(kept_records) + len(scores) - len(kept_scores)


def _undamaged(lines: Sequence[Line], dropped: frozenset[str] = frozenset()) -> list[bytes]:
    """The undamaged lines whose record key is not dropped."""
    rows = [(line.row, line.content) for line in lines if line.row is not None]
    return [content for row, content in rows if row.record_key not in dropped]


def _check_lines(folder: Path, name: str, table: str) -> tuple[list[Any], list[Problem]]:
    """The rows of the undamaged lines of a file, and the problems of the other lines."""
    path = folder / name
    rows = []
    problems = []
    size = 0
    for line in read_lines(path, table):
        size += len(line.content)
        if line.row is None:
            problems.append(Problem(name, f"line {line.number}: {line.problem}"))
        else:
            rows.append(line.row)
    rest = path.stat().st_size - size if path.is_file() else 0
    if rest:
        problems.append(Problem(name, f"ends in the middle of a line, {rest} bytes"))
    return rows, problems


def _picture_problem(folder: Path, row: Any) -> Problem | None:
    """The problem of the picture of a record; None if it is undamaged."""
    path = folder / row.image
    try:
        sha256 = file_sha256(path)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}" if path.exists() else "missing"
        return Problem(row.image, reason)
    if sha256 == row.image_sha256:
        return None
    return Problem(row.image, "damaged, its SHA-256 differs from the one in the record")


def _plan_of(manifest: Mapping[str, Any]) -> Plan:
    """Return the images that the run's experiment asks for."""
    experiment = load_experiment(manifest["experiment"], defaults_of)
    prompts = load_prompts(experiment.settings.prompts, model_of(experiment.settings.model[0]))
    plan = make_plan(experiment, prompts)
    shard = manifest.get("shard")
    return plan if shard is None else plan.shard(Shard(shard["index"], shard["count"]))


def _plan_problems(
    plan: Plan, manifest: Mapping[str, Any], records: Iterable[Any]
) -> Iterator[Problem]:
    """Yield the missing and failed images of each cell, and the records outside the plan."""
    recorded = {(row.cell_id, row.prompt_id, row.repeat): row for row in records}
    by_cell: dict[str, list[ImageTask]] = {}
    for task in plan.tasks:
        by_cell.setdefault(task.cell.cell_id, []).append(task)
    for cell_id, tasks in by_cell.items():
        rows = {task.image: recorded.pop(task.key, None) for task in tasks}
        made = [(task, rows[task.image]) for task in tasks if rows[task.image] is not None]
        missing = len(tasks) - len(made)
        if missing:
            yield Problem(RECORDS, f"{cell_id}: {missing} of {len(tasks)} images have no record")
        failed = sum(row.status != "ok" for _, row in made)
        if failed:
            yield Problem(RECORDS, f"{cell_id}: {failed} of {len(tasks)} images failed")
        for task, row in made:
            key = record_key(task, manifest["key"])
            if row.record_key != key:
                problem = f"{task.image}: record key {row.record_key}, its settings give {key}"
                yield Problem(RECORDS, problem, repairable=False)
    if recorded:
        problem = f"{len(recorded)} records belong to no image of the experiment"
        yield Problem(RECORDS, problem, repairable=False)
