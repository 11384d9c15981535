"""Write the measured figures of the documentation, each from one run of results/reference.

    python -m scripts.docs.figures

A comment after a text lists its figures in their order, each with its run, its cell and its form,
in which braces hold columns of the run's tables:

    <!-- figures
    2.79x [2.41, 3.23] = frontier-h200: scd w64-row-maximal: {speedup}
    -->

A column has the digits of all tables of the package, and its interval; `{speedup:alone}` leaves the
interval out, and `{speedup:.1f}` the unit too. `CELL / CELL` divides the columns of one cell by
the columns of the other. README keeps its list in readme_figures.txt, to stay short.
`OTHER_SOURCES` lists sources that are not runs. A function of `TABLES` makes each table:

    <!-- frontier-h200: table of speed -->...<!-- end -->

A figure or table whose run has changed is replaced. All other text is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lantern_bench.methods.catalog import output_of
from lantern_bench.report.format_tables import format_figure
from lantern_bench.storage.records import read_frame
from lantern_bench.storage.run_directory import RECORDS
from scripts.bench.aa import CHOSEN

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
README_FIGURES = ROOT / "scripts" / "docs" / "readme_figures.txt"
REFERENCE = ROOT / "results" / "reference"
WEIGHTS = ROOT / "lantern_bench" / "models" / "families" / "lanterns" / "weights"
TRAINING = WEIGHTS / "training_report.json"
NOT_IN_EVERY_RUN = ("distance", "distance_p", "emitted_tv")
SCORED = "frontier"  # the run with emitted TV of the same cells
SIGNIFICANT = 0.001  # of `distance_p`, which is corrected for the number of cells
LISTED = re.compile(r"(?<=<!-- figures\n)(?:.* = .*\n)+")
TABLE = re.compile(r"(<!-- ([\w-]+): table of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A figure of a cell. Its text has the digits of every table, and its interval."""

    column: str
    value: Any
    low: Any = None
    high: Any = None

    def __format__(self, spec: str) -> str:
        if spec == "alone":
            return format_figure(self.column, self.value)
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        return format_figure(self.column, self.value, low=self.low, high=self.high)


Row = dict[Any, Any]
Cell = dict[str, Figure]


def pages() -> list[Path]:
    """The pages that may have measured figures."""
    return [README, *sorted((ROOT / "docs").glob("*.md"))]


def read_page(page: Path) -> str:
    """Return the text of a page with the list of its figures."""
    text = page.read_text(encoding="utf-8")
    return text + README_FIGURES.read_text(encoding="utf-8") if page == README else text


def write_page(page: Path, text: str) -> None:
    """Write what `read_page` returns."""
    if page == README:
        text, start, figures = text.partition("<!-- figures")
        README_FIGURES.write_text(start + figures, encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def figure_of(source: str) -> str:
    """Return the figure of `RUN: CELL: FORM`."""
    run, name, form = source.split(": ", maxsplit=2)
    return form.format_map(cell_of(run, name))


def render(page: str, figure: Callable[[str], str] = figure_of) -> str:
    """Return the text of a page with its figures and tables made anew.

    Args:
        page: The text of the page.
        figure: Returns the text of a figure from its source.

    Raises:
        KeyError: A run has no such cell, or a cell no such column.
        ValueError: The text before a list does not contain one of its figures.
    """
    page = TABLE.sub(lambda mark: f"{mark[1]}\n{table_text(mark[3], mark[2])}\n{mark[4]}", page)
    made = ""
    end = 0
    for listed in LISTED.finditer(page):
        text = page[end : listed.start()]
        lines = ""
        start = 0
        for line in listed[0].splitlines():
            old, source = line.strip().split(" = ", maxsplit=1)
            new = figure(source)
            start = text.index(old, start)
            text = text[:start] + text[start:].replace(old, new, 1)
            start += len(new)
            lines += line.replace(old, new, 1) + "\n"
        made += text + lines
        end = listed.end()
    return made + page[end:]


def table_text(name: str, run: str) -> str:
    """Return a table of a run, without columns that nothing fills."""
    columns = [column for column in zip(*TABLES[name](run), strict=True) if any(column[1:])]
    head, *rows = zip(*columns, strict=True)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell_of(run: str, name: str) -> Cell:
    """Return the figures of a cell of a run, or the ratios of two cells (`CELL / CELL`)."""
    above, _, below = name.partition(" / ")
    cell = cells_of(run)[above]
    if not below:
        return cell
    other = cells_of(run)[below]
    return {
        column: Figure(column, figure.value / other[column].value)
        for column, figure in cell.items()
        if isinstance(figure.value, float) and other[column].value
    }


@cache
def cells_of(run: str) -> dict[str, Cell]:
    """Return the cells of a run by name; of `ar`, the first set of seeds."""
    if run in OTHER_SOURCES:
        return {name: cell_from(row) for name, row in OTHER_SOURCES[run]().items()}
    folder = REFERENCE if run == "reference" else REFERENCE / run
    table = pd.read_csv(folder / "speed.csv")
    for name in ("summary", "quality"):
        path = folder / f"{name}.csv"
        if path.exists():
            other = pd.read_csv(path)
            new = [column for column in other if column not in table]
            table = table.merge(other[["cell_id", *new]], on="cell_id", how="left")
    table = table.reindex(columns=list(dict.fromkeys([*table, *NOT_IN_EVERY_RUN])))
    cells: dict[str, Cell] = {}
    for row in table[table["seed_set"] == 0].to_dict("records"):
        cells[name_of(row)] = cell_from(row)
    return cells


def name_of(row: Row) -> str:
    """The name of a cell: method and parameters; its id where the run has no summary."""
    if "method" not in row:
        return str(row["cell_id"])
    parameters = "" if pd.isna(row["parameters"]) else row["parameters"]
    return f"{row['method']} {parameters}".strip()


def cell_from(row: Mapping[Any, Any]) -> Cell:
    """Return the figures of a row, with their intervals."""
    return {
        name: Figure(name, value, row.get(f"{name}_low"), row.get(f"{name}_high"))
        for name, value in row.items()
    }


def pairs_of_runs() -> dict[str, Row]:
    """How many intervals of one run of a pair contain the figure of the other run."""
    pairs = pd.read_csv(REFERENCE / "aa" / "figures.csv")
    chosen = pairs.loc[pairs["method"] == CHOSEN, ["a_covers", "b_covers"]]
    return {"intervals": {"held": int(chosen.to_numpy().sum()), "all": chosen.size}}


def training() -> dict[str, Row]:
    """The figures of the bundled weights when they were trained."""
    report = json.loads(TRAINING.read_text(encoding="utf-8"))
    return {name: part["figures"] for name, part in report.items()}


def durations() -> dict[str, Row]:
    """How long each run took, from its first model to its last image, and how long it decoded."""
    rows = {}
    for path in REFERENCE.rglob("manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["ended"]:
            times = [datetime.fromisoformat(manifest[name]) for name in ("started", "ended")]
            seconds = read_frame(path.parent / RECORDS, "records", ["seconds"])["seconds"].sum()
            rows[path.parent.name] = {
                "minutes": (times[1] - times[0]).total_seconds() / 60,
                "decoding": seconds / 60,
            }
    return rows


def hardware() -> dict[str, Row]:
    """Forwards and steps at the sizes of LlamaGen-XL, by their names."""
    table = pd.read_csv(ROOT / "experiments" / "hardware" / "h100-profile.csv")
    return {row["name"]: row for row in table.to_dict("records")}


OTHER_SOURCES: dict[str, Callable[[], dict[str, Row]]] = {
    "aa": pairs_of_runs,
    "durations": durations,
    "hardware": hardware,
    "training": training,
}


def sorted_cells(run: str, column: str) -> Iterator[tuple[str, Cell]]:
    """The cells of a run, sorted by a column."""
    yield from sorted(cells_of(run).items(), key=lambda named: named[1][column].value)


def first_table(run: str) -> Iterator[Sequence[str]]:
    """The cells of README's first table: a run, with emitted TV from another run of its cells."""
    yield "cell", "output", "MAL", "s per image", "speedup", "distance", "emitted TV"
    for name in _FIRST:
        cell = cells_of(run)[name]
        length = f"{cell['mean_accepted_length']:.2f}"
        seconds = f"{cell['latency_s']:.3f}"
        emitted_tv = f"{cells_of(SCORED)[name]['emitted_tv']:alone}"
        speed = length, seconds, str(cell["speedup"])
        yield f"`{name}`", output(cell), *speed, marked_distance(cell), emitted_tv


# Of README: autoregressive decoding, the strict rule with a drafter and with a window, the fastest
# lossless cell, the fastest relaxed ones (within a distance of 0.01, and of all), and relaxed
# chains: LANTERN, and LANTERN++ with the same settings as the window.
_FIRST = (
    "ar",
    "speculative chain-7",
    "sjd w16-row",
    "scd w64-row-maximal",
    "cool-sd jacobi w32-row-maximal strength=2 decay=0",
    "lantern++ jacobi w32-row-maximal k=100 lambda=5",
    "lantern++ chain-7 k=100 lambda=5",
    "lantern static chain-7 k=5 delta=0.2",
)


def speed_table(run: str) -> Iterator[Sequence[str]]:
    """Speed and distance of every cell of a run, from the slowest to the fastest."""
    yield "cell", "output", "MAL", "speedup", "distance", "emitted TV"
    for name, cell in sorted_cells(run, "speedup"):
        length = f"{cell['mean_accepted_length']:alone}"
        changes = marked_distance(cell), str(cell["emitted_tv"])
        yield name, output(cell), length, str(cell["speedup"]), *changes


def marked_distance(cell: Cell) -> str:
    """The distance of a cell, with a dagger where the test detects a shift."""
    detected = cell["distance_p"].value < SIGNIFICANT
    return f"{cell['distance']} †" if detected else str(cell["distance"])


def fid_table(run: str) -> Iterator[Sequence[str]]:
    """MAL and FID of every cell of a run, from few tokens a step to many."""
    yield "cell", "output", "MAL", "FID"
    for name, cell in sorted_cells(run, "mean_accepted_length"):
        fid = f"{cell['fid']:.1f}"
        if cell["fid_verdict"].value == "outside":
            fid = f"{fid} †"
        yield name, output(cell), f"{cell['mean_accepted_length']:alone}", fid


def default_table(run: str) -> Iterator[Sequence[str]]:
    """Speed and distance of the sampled cells of a run, in its own order."""
    columns = {
        "method": "{method}",
        "parameters": "{parameters}",
        "speedup": "{speedup}",
        "MAL": "{mean_accepted_length:alone}",
        "distance (at least)": "{distance}",
        "distance_p": "{distance_p}",
    }
    yield list(columns)
    for cell in cells_of(run).values():
        if not pd.isna(cell["distance"].value):
            yield [form.format_map(cell) for form in columns.values()]


def window_table(run: str) -> Iterator[Sequence[str]]:
    """MAL of every mode without a drafter, by its window."""
    names = {
        "`sjd`, uniform": "sjd w{}",
        "`scd`, uniform": "scd w{}-maximal",
        "`scd`, uniform, Gumbel": "scd w{}-gumbel",
        "`scd`": "scd w{}-row-maximal",
        "`block-scd`": "block-scd w{}-row-maximal",
        "`hybrid`, 2 positions": "hybrid w{}d2-row-maximal",
    }
    yield "window", *names
    for window in (4, 8, 16, 32, 64):
        cells = [cells_of(run).get(name.format(window)) for name in names.values()]
        yield str(window), *(str(cell["mean_accepted_length"]) if cell else "" for cell in cells)


TABLES: dict[str, Callable[[str], Iterator[Sequence[str]]]] = {
    "first": first_table,
    "speed": speed_table,
    "fid": fid_table,
    "default": default_table,
    "windows": window_table,
}


def output(cell: Cell) -> str:
    """`lossless` or `relaxed`."""
    return str(output_of(cell["drafting"].value, cell["rule"].value))


if __name__ == "__main__":
    for page in pages():
        write_page(page, render(read_page(page)))
