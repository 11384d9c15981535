"""Copy a run as it is committed: records, scores, tables and its page, without picture files.

    python -m scripts.commit_run RUN results/reference

The copied manifest says that the pictures are left out; `report.html` has small ones. Git stores at
most 3 MB for a run, so a page that does not fit is left out. Other files of the folder stay.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lantern_bench.analysis.tables import NAMES, save_tables, tables_of
from lantern_bench.checks.check_run import check_run
from lantern_bench.report.page import render
from lantern_bench.storage.run_directory import (
    MANIFEST,
    PICTURES_LEFT_OUT,
    RECORDS,
    SCORES,
    load_runs,
)
from lantern_bench.utils.files import write_atomically

BUDGET = 3_000_000
PAGE = "report.html"


def commit_run(source: Path, folder: Path) -> list[Path]:
    """Copy the run `source` into `folder`; return the files."""
    problems = check_run(source).problems
    if problems:
        advice = f"`lantern-bench check-run {source}` names them"
        sys.exit(f"error: {source}: {len(problems)} problems; {advice}")
    (run,) = load_runs([source]).values()
    run = replace(run, manifest=run.manifest | {"run": folder.name, PICTURES_LEFT_OUT: True})
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, SCORES):
        shutil.copyfile(source / name, folder / name)
    manifest = json.dumps(run.manifest, indent=2, ensure_ascii=False)
    write_atomically(folder / MANIFEST, f"{manifest}\n".encode())
    save_tables(tables_of(run), folder)
    write_atomically(folder / PAGE, render({folder.name: run}, folder).encode())
    files = [
        folder / name
        for name in (MANIFEST, RECORDS, SCORES, *(f"{table}.csv" for table in NAMES), PAGE)
    ]
    if stored_bytes(files) > BUDGET:
        files.pop().unlink()
    return files


def stored_bytes(files: Iterable[Path]) -> int:
    """The bytes that git stores for files, compressed."""
    return sum(len(zlib.compress(path.read_bytes())) for path in files)


if __name__ == "__main__":
    written = commit_run(Path(sys.argv[1]), Path(sys.argv[2]))
    for file in written:
        print(f"{file}: {file.stat().st_size:,} bytes, {stored_bytes([file]):,} in git")
    print(f"in git: {stored_bytes(written) / 1e6:.2f} of {BUDGET / 1e6:.0f} MB")
