"""One HTML file that shows one run or several: no network, no second file, links to the picture files.

A Jinja template takes the tables and a tree of plain values; the JavaScript in `assets/` draws curves, pictures and
maps from that tree. Plotly draws the curves; the page contains its whole library, compressed. Without JavaScript the
page still shows its tables: figures formatted as in every other table, with the value that a table is sorted by.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench import __version__
from lantern_bench.config.paper import read_paper
from lantern_bench.errors import UserError
from lantern_bench.methods.tables import METRICS, OF_IMAGES, ON_CURVES
from lantern_bench.models.io.files import write_atomically
from lantern_bench.report import curves
from lantern_bench.report.charts import Chart, symbol_of, to_plotly
from lantern_bench.report.curves import SPEEDS, Tables
from lantern_bench.report.format_tables import format_figure, readable
from lantern_bench.report.labels import BOUNDS, CELL, GROUPINGS, CellKey, cell_key, is_given, labels
from lantern_bench.report.records import CellRecords, Row, load_runs, run_cells
from lantern_bench.report.reproduction import comparability, reproduction_rows, side_by_side
from lantern_bench.report.tables import frame, sort_scores
from lantern_bench.runs.records import rows_of
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

# In the order in which they build on each other.
_SCRIPTS = ("state.js", "chips.js", "table.js", "charts.js", "pictures.js", "stage.js", "maps.js", "start.js")


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of these runs to `out` and return it.

    Raises as `records.load_runs`, and `UserError` when the file cannot be written.
    """
    text = render(load_runs(directories), out.parent)
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}", "Choose a writable file.") from error
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; `home` is the folder it will lie in, to which links to pictures are relative."""
    import jinja2

    tables = {name: curves.curve_tables(run) for name, run in runs.items()}
    data = page_data(runs, tables, home)
    numbers = {(cell["run"], cell["model"], cell["cell"]): number for number, cell in enumerate(data["cells"])}
    # Nothing in this JSON can end the script element that contains it or begin a comment.
    script = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    script = script.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", "assets"), undefined=jinja2.StrictUndefined,
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    assets = resources.files("lantern_bench.report").joinpath("assets")
    return environment.get_template("report.html.j2").render(
        title=" + ".join(runs),
        version=__version__,
        cells=data["cells"],
        figures={figure: title for figure, (title, _) in _FIGURES.items()},
        grid=data["grid"],
        pictures=len(data["pictures"]),
        prompts=len(data["prompts"]),
        left_out=data["left_out"],
        highlights=highlights(tables, numbers, [cell["name"] for cell in data["cells"]]),
        summary=summary(tables, numbers),
        runs=[run_facts(name, run, tables[name]) for name, run in runs.items()],
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        scripts="\n".join(assets.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
        data=script,
        plotly=_packed_plotly(),
    )


@cache
def _packed_plotly() -> str:
    """Plotly's library, compressed; without a time the same library gives the same bytes."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")


# ---- The data of the page: cells, curves, fronts, maps, prompts, pictures

Plain: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[CellKey, int]

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

PICTURES = 6_000
"""Most pictures of a page: with more, browsers get slow, and the thumbnails exceed their budget."""

# Figures of the page: titles, and how the names of their charts begin; a menu lists these where there are several.
_FIGURES = {
    "front": ("Speed against quality", ("speed-quality-", "length-quality-")),
    "depth": ("Acceptance rate by depth of the draft tree", ("acceptance-by-depth",)),
    "lengths": ("Share of steps by tokens committed", ("accepted-lengths",)),
    "position": ("Acceptance rate by position in the image", ("acceptance-by-position",)),
    "bound": ("Mean accepted length against a parameter", ("mean-accepted-length-by-",)),
}


def page_data(runs: Mapping[str, RunData], tables: Mapping[str, Tables], home: Path) -> Plain:
    """Return the data of a page in the folder `home`; `tables` are the runs' `curve_tables`."""
    speed, styles = curves.stack_runs(tables, "speed"), curves.run_styles(tables)
    grouped = ((name, cell) for name, run in runs.items() for cell in run_cells(run))
    records = {(name, cell.columns["model"], cell.cell_id): cell for name, cell in grouped}
    cells: list[Plain] = []
    for (_, row), name in zip(speed.iterrows(), labels(speed), strict=True):
        style = styles[cell_key(row)]
        marker, dash = symbol_of(style)
        cells.append(
            {
                "run": row["run"], "model": row["model"], "cell": row["cell_id"], "name": name, "mode": row["mode"],
                "colour": style.colour, "dark": style.colour_on_dark, "marker": marker, "dash": dash,
                "map": length_map(records[cell_key(row)]),
            }
        )  # fmt: skip
    numbers = {cell_key(row): number for number, (_, row) in enumerate(speed.iterrows())}
    # A parameter whose lines all have one point is worth no chart, unless it is a bound.
    worth = (chart for chart in curves.charts(tables, GROUPINGS[1:]) if chart.x not in _SETTINGS or _is_curve(chart))
    charts = [_plain(to_plotly(chart, styles, numbers)) for chart in worth]
    return {
        "cells": cells,
        "figures": {
            figure: [chart for chart in charts if chart["name"].startswith(names)]
            for figure, (_, names) in _FIGURES.items()
        },
        "metrics": {name: [METRICS[name].heading, METRICS[name].digits] for name in OF_IMAGES},
        **_pictures(runs, records, numbers, home),
    }


_SETTINGS = set(GROUPINGS[1:]) - set(BOUNDS)


def _is_curve(chart: Chart) -> bool:
    return any(len(rows) > 1 for rows in chart.groups())


def _plain(value: Any) -> Any:
    """Numbers of six digits, as in the CSV files; None for what is missing or not finite."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], numbers: Numbers, home: Path
) -> Plain:
    """Prompts by first appearance in the plan, and a picture for each completed record with its own figures.

    A page holds at most `PICTURES` of them: all cells of the first prompts. `left_out` counts the other prompts.
    """
    thumbnails, pictures = Thumbnails(), []
    prompts: dict[str, int] = {}
    scores = {name: list(sort_scores(run.scores).values()) for name, run in runs.items()}
    sides = {grid_side(cell.good) for cell in records.values() if len(cell.good)}
    grid = sides.pop() if len(sides) == 1 else None
    shown, left_out = _shown_prompts(records.values())
    drawn = [
        (key, row)
        for key, cell in records.items()
        for row in rows_of(cell.good[cell.good["image"].notna() & cell.good["prompt"].isin(shown)])
    ]
    for key, row in sorted(drawn, key=lambda pair: pair[1].get("order_index") or 0):
        file = runs[key[0]].folder / str(row["image"])
        steps = row.get("committed_per_step") or ()
        scored = [protocol.images.get(str(row["record_key"]), {}) for protocol in scores[key[0]]]
        # Under the first protocol that has a score of the image.
        figures = {name: [score[name] for score in scored if score.get(name) is not None] for name in OF_IMAGES}
        digits = "".join(_DIGITS[min(length, len(_DIGITS) - 1)] for length in step_lengths(row))
        pictures.append(
            {
                "cell": numbers[key], "prompt": prompts.setdefault(str(row["prompt"]), len(prompts)),
                "repeat": int(row["repeat"]), "thumb": thumbnails.place(file), "file": _link(file, home),
                "seconds": _plain(row.get("seconds")), "length": _plain(sum(steps) / len(steps) if steps else None),
                "steps": len(steps), **{name: _plain(values[0]) for name, values in figures.items() if values},
                "runs": digits if grid and row.get("drafting") != "none" else None,
            }
        )  # fmt: skip
    return {
        "prompts": list(prompts), "pictures": pictures, "thumbs": thumbnails.encoded(), "grid": grid,
        "left_out": left_out,
    }  # fmt: skip


def _shown_prompts(cells: Iterable[CellRecords]) -> tuple[list[str], int]:
    """The prompts whose pictures a page shows, and the number of those left out."""
    import pandas as pd

    drawn = [cell.good.loc[cell.good["image"].notna(), ["prompt", "order_index"]] for cell in cells]
    prompts = pd.concat(drawn).fillna({"order_index": 0}).groupby("prompt")["order_index"].agg(["min", "count"])
    prompts = prompts.sort_values("min", kind="stable")
    within = prompts.index[prompts["count"].cumsum() <= PICTURES]
    shown = list(within if len(within) else prompts.index[:1])
    return shown, len(prompts) - len(shown)


def step_lengths(row: Row) -> list[int]:
    """Return for each token of an image the length of the step that committed it; 0 for the first token."""
    lengths = [0] * int(row.get("tokens") or 0)
    for start, length in zip(row.get("start_per_step") or (), row.get("committed_per_step") or (), strict=False):
        end = min(start + length, len(lengths))
        lengths[start:end] = [int(length)] * (end - start)
    return lengths


def length_map(cell: CellRecords) -> list[float | None] | None:
    """Return the mean step length at each position over the cell's images, None where no step committed a token.

    A cell that drafts nothing, or whose tokens fill no square, has no map.
    """
    import pandas as pd

    if grid_side(cell.good) is None or cell.columns["drafting"] == "none":
        return None
    rows = rows_of(cell.good[["tokens", "start_per_step", "committed_per_step"]])
    lengths = pd.DataFrame([step_lengths(row) for row in rows])
    return [None if pd.isna(mean) else round(float(mean), 3) for mean in lengths.where(lengths > 0).mean()]


def grid_side(rows: pd.DataFrame) -> int | None:
    """Return the side of the square that the tokens of these images fill, row by row; None where they fill none."""
    sizes = {int(count) for count in rows["tokens"].fillna(0).unique()}
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side * side} else None


def _link(file: Path, home: Path) -> str | None:
    """The relative link from the page to a file; None without a file or on another drive."""
    try:
        return Path(os.path.relpath(file, home)).as_posix() if file.is_file() else None
    except ValueError:
        return None


# ---- The tables of the page: the summary, published figures, settings, machine


class _Head(NamedTuple):
    """A column of the summary."""

    key: str
    text: str
    meaning: str
    good: str = "up"  # the good end: up, down or neither


_HEADS = (
    _Head("images", "images", "images behind the means of the row", ""),
    _Head("failed", "failed", "images that failed; they take no part in any mean", ""),
    _Head("speedup", "speedup", "seconds of AR over seconds of the cell, same prompts, same run"),
    _Head("speedup_over_lossless", "over lossless", "the same over the run's fastest lossless cell, same sampling"),
    _Head("mean_accepted_length", "MAL", "tokens a step commits, the target's own token included; AR has 1"),
    _Head("acceptance_rate", "acceptance", "depths accepted over depths offered"),
    *(
        _Head(name, metric.heading, metric.meaning, "down" if metric.better == "lower" else "up")
        for name, metric in METRICS.items()
    ),
)


def summary(tables: Mapping[str, Tables], numbers: Numbers) -> Plain:
    """Return the summary of all runs, a row for each cell and protocol that scored it.

    heads: `_Head`s; rows: (number of the cell, protocol, entries); notes: sentences below.
    """
    table = curves.stack_cells(tables)
    heads = [head for head in _HEADS if head.key in SPEEDS or _says_something(table, head.key)]
    columns = [_entries(table, head) for head in heads]
    names_protocol = table["protocol"].nunique() > 1
    rows = [
        (numbers[cell_key(row)], row["protocol"] if names_protocol and is_given(row["protocol"]) else "", entries)
        for (_, row), *entries in zip(table.iterrows(), *columns, strict=True)
    ]
    notes = [note for of_run in tables.values() for note in readable(of_run["summary"], "summary").notes]
    return {"heads": heads, "rows": rows, "notes": list(dict.fromkeys(notes))}


def highlights(tables: Mapping[str, Tables], numbers: Numbers, names: Sequence[str]) -> list[Plain]:
    """Return the best cell for speedup, accepted length and the first available quality figure, and how sure that is.

    Dicts of title, value, interval, cell (its number), name, remark.
    """
    table = curves.stack_cells(tables)
    quality = [name for name in reversed(ON_CURVES) if _says_something(table, name)][:1]
    tiles = []
    for name in (name for name in (*SPEEDS, *quality) if _says_something(table, name)):
        measured = table[table[name].notna()]
        values = measured[name].astype(float)
        is_lower_better = name in METRICS and METRICS[name].better == "lower"
        best = measured.iloc[int(values.argmin() if is_lower_better else values.argmax())]
        titles = {"speedup": "fastest", "mean_accepted_length": "longest steps"}
        title = titles.get(name) or f"best pictures by {METRICS[name].heading}"
        number = numbers[cell_key(best)]
        tiles.append(
            _figure(name, float(best[name]), best.get(f"{name}_low"), best.get(f"{name}_high"))
            | {"title": title, "remark": _how_sure(table, best, name), "cell": number, "name": names[number]}
        )
    return tiles


def _how_sure(table: pd.DataFrame, best: pd.Series, name: str) -> str:
    """How the best quality figure compares with AR; for speed whether another cell's interval reaches it, in words."""
    if name not in SPEEDS and best["mode"] == "ar":
        return "AR itself"
    if is_given(best.get(f"{name}_vs_ar_p")):
        p_value = float(best[f"{name}_vs_ar_p"])
        return f"{best[f'{name}_vs_ar']:+.3g} against AR over the same prompts, p = {p_value:.2g}"
    if is_given(best.get(f"{name}_verdict")):
        return f"{best[f'{name}_verdict']} AR's own spread"
    if f"{name}_low" not in table or not is_given(best[f"{name}_low"]):
        return "one value a cell, without an interval"
    others = table[(table[CELL] != best[CELL]).any(axis=1)]
    near = others[others[name].notna() & (others[f"{name}_high"] >= best[f"{name}_low"])]
    reaching = near["cell_id"].nunique()
    if not reaching:
        return "no other cell's 95 % interval reaches it"
    return f"the 95 % intervals of {reaching} other {'cell' if reaching == 1 else 'cells'} reach it"


def _says_something(table: pd.DataFrame, name: str) -> bool:
    """Whether to show a column: the number of images where it differs, failures where there are any."""
    if name == "images":
        return table[name].nunique() > 1
    return bool(table[name].notna().any() and (name != "failed" or (table[name] > 0).any()))


def _entries(table: pd.DataFrame, head: _Head) -> list[Plain]:
    """The column's entries: dicts of value and interval as text, what they sort by, their bar, and whether it is best.

    bar: left end, right end and value as shares of the column's width, on one scale; None without an interval.
    """
    name = head.key
    figures = table.reindex(columns=[name, f"{name}_low", f"{name}_high"]).astype(float)
    lowest, highest = float(figures.min().min()), float(figures.max().max())
    values = figures[name].dropna()
    best = (values.min() if head.good == "down" else values.max()) if head.good and values.nunique() > 1 else None
    entries = []
    for value, low, high in figures.itertuples(index=False):
        if not is_given(value):
            entries.append({"value": "", "interval": "", "order": None, "bar": None, "best": False})
            continue
        # By definition, or of one prompt many times, nothing is uncertain.
        ends = [] if not is_given(low) or not is_given(high) or low == high == value else [low, high]
        bar = [(end - lowest) / (highest - lowest) for end in (*ends, value)] if ends and highest > lowest else None
        text = _figure(name, int(value) if name in ("images", "failed") else value, *(ends or (None, None)))
        entries.append(text | {"order": value, "bar": bar, "best": value == best})
    return entries


def _figure(name: str, value: float, low: Any, high: Any) -> Plain:
    """A figure and its interval as text."""
    text, bracket, interval = format_figure(name, value, low, high).partition(" [")
    return {"value": text, "interval": bracket.strip() + interval}


def run_facts(name: str, data: RunData, tables: Tables) -> Plain:
    """Return the facts behind a run, from its manifest; what was not recorded is left out.

    machine, settings, weights: lists of (name, value); published: a table as text, or None; published_notes: sentences.
    """
    manifest = data.manifest
    experiment = dict(manifest.get("experiment") or {})
    paper = read_paper(experiment.get("paper"))
    names = ("model", "prompts", "images", "repeats", "seed", "batch", "metrics", "compile")
    facts = {name: experiment[name] for name in names if experiment.get(name) is not None}
    if manifest.get("started"):
        facts |= {"started": manifest["started"], "ended": manifest.get("ended") or "not ended"}
        facts["sessions"] = len(manifest.get("sessions") or ())
    rows = (row for row in reproduction_rows(tables, paper) if row.get("published") is not None)
    published = side_by_side(frame("reproduction", rows)) if paper else None
    weights = (manifest.get("key") or {}).get("weights") or {}
    return {
        "name": name,
        "title": str(experiment.get("description") or experiment.get("name") or name),
        "machine": list(_flat({name: manifest.get(name) for name in ("device", "threads", "dtype", "machine")})),
        "settings": list(_flat(facts)),
        "weights": list(weights.items()),
        "experiment": json.dumps(experiment, indent=2, ensure_ascii=False),
        "published": None if published is None or not len(published) else published,
        "published_title": paper.title if paper else "",
        "published_notes": comparability(tables, paper, manifest) if paper else [],
    }


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested mappings with their names, as text; nothing for a missing value."""
    for name, value in facts.items():
        words = f"{prefix} {name.replace('_', ' ')}".strip()
        if isinstance(value, Mapping):
            yield from _flat(value, "" if name in ("machine", "versions") else words)
        elif value not in (None, "", [], ()):
            yield words, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- Thumbnails

SIDE = 128
"""Longest side of a thumbnail in pixels."""

BUDGET = 5_000_000
"""Limit for all thumbnails of a page together, as base64 text, in bytes."""


class Thumbnails:
    """The WebP thumbnails of a page, each once, in order of first use."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[int, int], bytes], int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail; None when the file is missing or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        return self._places.setdefault((small.size, small.tobytes()), len(self._places))

    def encoded(self, budget: int = BUDGET) -> list[str]:
        """Return the thumbnails as base64 of WebP files, within `budget` where the lowest quality allows it."""
        from PIL import Image

        def encode(size: tuple[int, int], pixels: bytes, quality: int) -> str:
            written = io.BytesIO()
            Image.frombytes("RGB", size, pixels).save(written, "WEBP", quality=quality, method=4)
            return base64.b64encode(written.getvalue()).decode("ascii")

        texts: list[str] = []
        for quality in (90, 82, 70, 55, 40, 25):
            texts = [encode(*picture, quality) for picture in self._places]
            if sum(map(len, texts)) <= budget:
                break
        return texts
