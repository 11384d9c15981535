"""Check a run directory: every line, hash, key and count; and make anew only what is missing or damaged.

The CSV tables, which `report/` rebuilds from the records at any time, are left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import Plan, Shard, make_plan
from lantern_bench.config.values import Overrides
from lantern_bench.errors import CheckFailedError, LanternError
from lantern_bench.models.io.files import file_sha256, write_atomically
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts import load_prompts
from lantern_bench.runs.events import Emit
from lantern_bench.runs.keys import record_key
from lantern_bench.runs.request import prepare
from lantern_bench.runs.store import (
    RECORDS,
    SCORES,
    Line,
    cannot_write,
    lock_run,
    read_manifest,
    read_records,
    scan_lines,
    whole_lines,
)
from lantern_bench.runs.sweep import run

Row: TypeAlias = dict[str, Any]
_TABLES = {"records": RECORDS, "scores": SCORES}


class Problem(NamedTuple):
    """What is missing or damaged: the file, its line or picture, and what is wrong; `again`: --repair makes it anew."""

    file: str
    problem: str
    again: bool = True


class Checked(NamedTuple):
    """What a check read, and what is wrong.

    `dropped`: the record keys whose lines a repair leaves out. `lines_whole`: no line of a file is damaged.
    """

    records: int
    pictures: int
    scores: int
    problems: list[Problem]
    dropped: frozenset[str]
    lines_whole: bool


def verify(folder: Path) -> Checked:
    """Check a run directory; writes nothing and needs no lock. Raises as `read_manifest`."""
    manifest = read_manifest(folder)
    problems: list[Problem] = []
    rows: dict[str, list[Row]] = {}
    for table, name in _TABLES.items():
        rows[table] = []
        for line in scan_lines(folder / name, table):
            if line.row is None:
                problems.append(Problem(name, f"line {line.number}: {line.problem}"))
            else:
                rows[table].append(line.row)
        problems += _cut_off(folder / name)
    whole = not problems
    records = list({row["record_key"]: row for row in rows["records"]}.values())
    made = [row for row in records if row["status"] == "ok"]
    broken = {row["record_key"]: problem for row in made if (problem := _picture(folder, row)) is not None}
    problems += broken.values()
    plan, told = _plan(manifest)
    problems += told
    if plan is not None:
        problems += _counts(plan, manifest, records)
    keys = {row["record_key"] for row in records}
    of_no_record = sum(row["record_key"] not in keys for row in rows["scores"] if row["level"] == "image")
    if of_no_record:
        problems.append(Problem(SCORES, f"{of_no_record} rows score images that have no record", again=False))
    pictures = sum(row["image"] is not None for row in made)
    return Checked(len(records), pictures, len(rows["scores"]), problems, frozenset(broken), whole)


def _cut_off(path: Path) -> Iterator[Problem]:
    if path.is_file():
        with path.open("rb") as file:
            rest = path.stat().st_size - whole_lines(file)
        if rest:
            yield Problem(path.name, f"ends in the middle of a line, {rest} bytes")


def _picture(folder: Path, row: Row) -> Problem | None:
    """What is wrong with the picture of a record; None where it is whole, or none was written."""
    if row["image"] is None:
        return None
    path = folder / row["image"]
    try:
        same = file_sha256(path) == row["image_sha256"]
    except OSError as error:
        return Problem(row["image"], "missing" if not path.exists() else f"cannot be read: {error.strerror}")
    return None if same else Problem(row["image"], "damaged, its SHA-256 is not that of the record")


def _plan(manifest: Mapping[str, Any]) -> tuple[Plan | None, list[Problem]]:
    """The images that the run's experiment asks for; without its model or prompts the problem that keeps them away."""
    try:
        experiment = load_experiment(_experiment(manifest), defaults_of)
        model, *_ = (model_of(name) for name in experiment.settings.model)
        plan = make_plan(experiment, load_prompts(experiment.settings.prompts, model))
    except LanternError as error:
        return None, [Problem("manifest.json", f"its images cannot be counted: {error.message}", again=False)]
    shard = manifest.get("shard")
    return plan if shard is None else plan.shard(Shard(shard["index"], shard["count"])), []


def _experiment(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment of a run; runs of earlier versions have a key `lossless`, which changes no image."""
    return {key: value for key, value in manifest["experiment"].items() if key != "lossless"}


def _counts(plan: Plan, manifest: Mapping[str, Any], records: Iterable[Row]) -> Iterator[Problem]:
    """What is missing of each cell, and what is in the records and not in the plan."""
    done = {(row["cell_id"], row["prompt_id"], row["repeat"]): row for row in records}
    strange = set(done)
    for cell in plan.cells:
        tasks = [task for task in plan.tasks if task.cell == cell]
        found = [done.get((cell.cell_id, task.prompt.id, task.repeat)) for task in tasks]
        failed = sum(row is not None and row["status"] != "ok" for row in found)
        if missing := sum(row is None for row in found):
            yield Problem(RECORDS, f"{cell.cell_id}: {missing} of {len(tasks)} images have no record")
        if failed:
            yield Problem(RECORDS, f"{cell.cell_id}: {failed} of {len(tasks)} images failed")
        for task, row in zip(tasks, found, strict=True):
            strange.discard((cell.cell_id, task.prompt.id, task.repeat))
            key = record_key(manifest["key"], cell.settings(), task.prompt.id, task.repeat, task.seed)
            if row is not None and row["record_key"] != key:
                what = f"{task.image}: its record key {row['record_key']} is not that of its settings, {key}"
                yield Problem(RECORDS, what, again=False)
    if strange:
        yield Problem(RECORDS, f"{len(strange)} records are of no image of the experiment", again=False)


def repair(folder: Path, found: Checked, emit: Emit) -> None:
    """Make anew what `verify` found, and only that.

    Damaged lines and the records of damaged pictures are left out of the files, then the run is resumed. Raises
    `CheckFailedError` when an image comes out with other tokens than its record had, and as `prepare` and `run`.
    """
    manifest = read_manifest(folder)
    lock = lock_run(folder)
    try:
        before = {row["record_key"]: row["tokens_sha256"] for row in _whole(folder, "records")}
        for table, name in _TABLES.items():
            _rewrite(folder / name, table, found.dropped if table == "records" else frozenset())
    finally:
        lock.release()
    shard = manifest.get("shard")
    part = None if shard is None else f"{shard['index']}/{shard['count']}"
    run(prepare(_experiment(manifest), Overrides(), out=folder, shard=part), emit)
    other = [
        row["record_key"]
        for row in read_records(folder)
        if row["status"] == "ok" and before.get(row["record_key"]) not in (None, row["tokens_sha256"])
    ]
    if other:
        what = f"{len(other)} images came out with other tokens than before: {', '.join(other[:5])}"
        raise CheckFailedError(what, "The machine or its software changed; start a new run.")


def _whole(folder: Path, table: str) -> Iterator[Row]:
    return (line.row for line in scan_lines(folder / _TABLES[table], table) if line.row is not None)


def _rewrite(path: Path, table: str, without: frozenset[str]) -> None:
    """Leave damaged lines and those of the records `without` out of a file; it is replaced as a whole."""

    def stays(line: Line) -> bool:
        return line.row is not None and line.row["record_key"] not in without

    if not all(map(stays, scan_lines(path, table))):
        try:
            write_atomically(path, (line.content for line in scan_lines(path, table) if stays(line)))
        except OSError as error:
            raise cannot_write(path.parent, error) from error
