"""Check every line, picture, count and table of a run, and drop what is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.analysis.tables import stale_tables, write_tables
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import Plan, Shard, make_plan
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
    broken: set[str]  # the record keys whose picture is missing or damaged


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
    problems: list[Problem] = []
    record_rows = _undamaged_rows(folder / RECORDS, problems)
    score_rows = _undamaged_rows(folder / SCORES, problems)
    lines_are_undamaged = not problems

    # 2. Pictures and their hashes.
    records = {row.record_key: row for row in record_rows}
    has_pictures = not manifest.get(PICTURES_LEFT_OUT)
    pictured = [row for row in records.values() if row.status == "ok" and row.image is not None]
    broken = set()
    for row in pictured if has_pictures else ():
        damage = _damage(folder / row.image, row.image_sha256)
        if damage:
            broken.add(row.record_key)
            problems.append(Problem(row.image, damage))

    # 3. Counts, against the plan of the experiment.
    try:
        problems += _plan_problems(_plan_of(manifest), manifest, records.values())
    except LanternError as error:
        problems.append(
            Problem(
                "manifest.json",
                f"its images cannot be counted: {error.message}",
                repairable=False,
            )
        )
    orphans = [
        row
        for row in score_rows
        if row.level in ("image", "tokens") and row.record_key not in records
    ]
    if orphans:
        problems.append(
            Problem(
                SCORES,
                f"{len(orphans)} rows score images that have no record",
                repairable=False,
            )
        )

    # 4. Tables, against the records.
    if lines_are_undamaged and records:
        problems += [
            Problem(name, "differs from the table of the records") for name in stale_tables(folder)
        ]
    return RunCheck(
        records=len(records),
        pictures=len(pictured) if has_pictures else None,
        scores=len(score_rows),
        problems=problems,
        broken=broken,
    )


def repair_run(folder: Path, checked: RunCheck) -> int:
    """Drop damaged lines and the records of damaged pictures, then write the tables.

    Returns:
        The number of dropped lines. The sweep that made the run decodes their images again.
    """
    dropped = 0
    with lock_run(folder):
        for name, broken in ((RECORDS, checked.broken), (SCORES, set())):
            path = folder / name
            lines = list(read_lines(path, path.stem))
            kept = [
                line.content
                for line in lines
                if line.row is not None and line.row.record_key not in broken
            ]
            if len(kept) < len(lines):
                write_atomically(path, kept)
            dropped += len(lines) - len(kept)
    if (folder / RECORDS).stat().st_size:
        write_tables(folder)
    return dropped


def _undamaged_rows(path: Path, problems: list[Problem]) -> list[Any]:
    """The rows of the undamaged lines of a file; the problems of other lines are added."""
    rows = []
    rest = path.stat().st_size if path.is_file() else 0
    for line in read_lines(path, path.stem):
        rest -= len(line.content)
        if line.row is None:
            problems.append(Problem(path.name, f"line {line.number}: {line.problem}"))
        else:
            rows.append(line.row)
    if rest:
        problems.append(Problem(path.name, f"ends in the middle of a line, {rest} bytes"))
    return rows


def _damage(picture: Path, sha256: str) -> str | None:
    """What is wrong with a picture; None if it is undamaged."""
    try:
        if file_sha256(picture) == sha256:
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror}" if picture.exists() else "missing"
    return "damaged, its SHA-256 differs from the one in the record"


def _plan_of(manifest: Mapping[str, Any]) -> Plan:
    """Return the images that the run's experiment asks for."""
    experiment = load_experiment(manifest["experiment"], defaults_of)
    settings = experiment.settings
    model = model_of(settings.model[0])
    prompts = load_prompts(settings.prompts, model, column=settings.prompt_column)
    plan = make_plan(experiment, prompts)
    shard = manifest.get("shard")
    return plan if shard is None else plan.shard(Shard(shard["index"], shard["count"]))


def _plan_problems(
    plan: Plan, manifest: Mapping[str, Any], records: Iterable[Any]
) -> Iterator[Problem]:
    """Yield the missing and failed images of each cell, and the records outside the plan."""
    recorded = {(row.cell_id, row.prompt_id, row.repeat): row for row in records}
    wanted = Counter(task.cell.cell_id for task in plan.tasks)
    lost: Counter[tuple[str, str]] = Counter()  # images by cell and by what is wrong
    for task in plan.tasks:
        row = recorded.pop(task.key, None)
        if row is None:
            lost[task.cell.cell_id, "have no record"] += 1
            continue
        if row.status != "ok":
            lost[task.cell.cell_id, "failed"] += 1
        key = record_key(task, manifest["key"])
        if row.record_key != key:
            yield Problem(
                RECORDS,
                f"{task.image}: record key {row.record_key}, its settings give {key}",
                repairable=False,
            )
    for (cell_id, words), count in lost.items():
        yield Problem(RECORDS, f"{cell_id}: {count} of {wanted[cell_id]} images {words}")
    if recorded:
        yield Problem(
            RECORDS,
            f"{len(recorded)} records belong to no image of the experiment",
            repairable=False,
        )
