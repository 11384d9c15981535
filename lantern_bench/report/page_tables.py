"""The tables of a report page, ready for its template: what came out, published figures, settings, machine.

Figures are written as in every other table (`reading.written`); beside the text stands what a table is sorted by. An
interval is drawn to the scale of its column, so that overlap can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.config.paper import read_paper
from lantern_bench.report.format_tables import readable, written
from lantern_bench.report.labels import CellKey, cell_key, is_given
from lantern_bench.report.reproduction import comparability, reproduction_rows
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

    Tables = Mapping[str, pd.DataFrame]


# Column, head, what it is, whether less is better (None: neither).
_COLUMNS: tuple[tuple[str, str, str, bool | None], ...] = (
    ("images", "images", "images behind the means of the row", None),
    ("failed", "failed", "images that failed; they take no part in any mean", None),
    ("speedup", "speedup", "seconds of AR over seconds of the cell, same prompts, same run", False),
    ("mean_accepted_length", "MAL", "tokens a step commits, the target's own token included; AR has 1", False),
    ("acceptance_rate", "acceptance", "depths accepted over depths offered", False),
    ("fid", "FID", "Fréchet distance to the reference", True),
    ("kid", "KID", "kernel distance to the reference", True),
    ("clip_score", "CLIP", "mean cosine between picture and caption, not scaled", False),
    ("prompt_accuracy", "accuracy", "share of pictures that show all attributes of the caption", False),
    ("precision", "precision", "share of pictures inside the reference's manifold", False),
    ("recall", "recall", "share of the reference inside the pictures' manifold", False),
)
_ALWAYS = ("speedup", "mean_accepted_length")


class Head(NamedTuple):
    """A column's head, what it means, and which end is the good one (`up`, `down` or empty)."""

    key: str
    text: str
    meaning: str
    good: str


class Entry(NamedTuple):
    """A figure in a table: as text, its interval as text, what it sorts by, and its bar.

    bar: left end, right end and value as shares of the column's width; None without an interval.
    """

    text: str
    interval: str
    order: float | None
    bar: tuple[float, float, float] | None
    best: bool


class Summary(NamedTuple):
    """The table of what came out: heads, rows of (cell number, protocol, entries), notes below."""

    heads: list[Head]
    rows: list[tuple[int, str, list[Entry]]]
    notes: list[str]


class Tile(NamedTuple):
    """A headline figure: what it is, its value and interval as text, whose it is, and how sure that is."""

    what: str
    value: str
    interval: str
    cell: int
    name: str
    remark: str


class RunFacts(NamedTuple):
    """What stands behind one run: each block a list of (name, value)."""

    name: str
    title: str
    machine: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    weights: list[tuple[str, str]]
    cells: list[dict[str, str]]
    experiment: str
    published: list[dict[str, str]]
    published_title: str
    published_notes: list[str]


def summary(made: Mapping[str, Tables], numbers: Mapping[CellKey, int]) -> Summary:
    """Return the summary of all runs, a row for each cell and protocol that scored it."""
    table = _joined(made)
    shown = [column for column in _COLUMNS if column[0] in _ALWAYS or _has(table, column[0])]
    heads = [Head(key, text, meaning, _good(less)) for key, text, meaning, less in shown]
    columns = [_entries(table, key, less) for key, _, _, less in shown]
    several = table["protocol"].nunique() > 1
    rows = [
        (numbers[cell_key(row)], str(row["protocol"]) if several and is_given(row["protocol"]) else "", list(entries))
        for (_, row), *entries in zip(table.iterrows(), *columns, strict=True)
    ]
    notes = [note for tables in made.values() for note in readable(tables["summary"], "summary").notes]
    return Summary(heads, rows, list(dict.fromkeys(notes)))


def highlights(made: Mapping[str, Tables], numbers: Mapping[CellKey, int], names: Sequence[str]) -> list[Tile]:
    """Return the best cell for speedup, accepted length and the first quality figure there is, and how sure that is."""
    table = _joined(made)
    quality = next((name for name in ("prompt_accuracy", "clip_score", "fid") if _has(table, name)), None)
    tiles = []
    for name, what in (
        ("speedup", "fastest"),
        ("mean_accepted_length", "longest steps"),
        (quality, "best pictures by"),
    ):
        if name is None or not _has(table, name):
            continue
        there = table[table[name].notna()]
        values = [float(value) for value in there[name]]
        best = there.iloc[values.index(min(values) if name == "fid" else max(values))]
        ends = [best.get(f"{name}{end}") for end in ("_low", "_high")]
        text, _, interval = written(name, float(best[name]), *ends).partition(" [")
        number = numbers[cell_key(best)]
        said = f"{what} {name.replace('_', ' ')}" if name == quality else what
        remark = _how_sure(there, best, name)
        tiles.append(Tile(said, text, f"[{interval}" if interval else "", number, names[number], remark))
    return tiles


def _how_sure(table: pd.DataFrame, best: pd.Series, name: str) -> str:
    """In words: does another cell's interval reach that of the best one?"""
    if f"{name}_low" not in table or not is_given(best[f"{name}_low"]):
        return "one value a cell, without an interval"
    others = table[[cell_key(row) != cell_key(best) for _, row in table.iterrows()]]
    near = others[others[f"{name}_high"].astype(float) >= float(best[f"{name}_low"])]
    reaching = near["cell_id"].nunique()
    if not reaching:
        return "no other cell's 95 % interval reaches it"
    return f"the 95 % intervals of {reaching} other {'cell' if reaching == 1 else 'cells'} overlap it"


def run_facts(name: str, data: RunData, tables: Tables) -> RunFacts:
    """Return what stands behind a run, from its manifest; what was not recorded is left out."""
    manifest = data.manifest
    experiment = dict(manifest.get("experiment") or {})
    paper = read_paper(experiment.get("paper"))
    cells = [{str(k): _plain(v) for k, v in dict(cell).items()} for cell in experiment.get("cells") or ()]
    # A figure that could not be had is worth a word here only where others of its row were.
    published = [_published(row) for row in reproduction_rows(tables, paper) if row.get("published") is not None]
    return RunFacts(
        name=name,
        title=str(experiment.get("description") or experiment.get("name") or name),
        machine=list(_machine(manifest)),
        settings=list(_settings(experiment, manifest)),
        weights=[(part, str(digest)) for part, digest in ((manifest.get("key") or {}).get("weights") or {}).items()],
        cells=cells,
        experiment=json.dumps(experiment, indent=2, ensure_ascii=False),
        published=published,
        published_title=paper.title if paper else "",
        published_notes=[*comparability(tables, paper, manifest), *([paper.missing] if paper.missing else [])]
        if paper
        else [],
    )


def _joined(made: Mapping[str, Tables]) -> pd.DataFrame:
    """Quality rows with the speed of their cell, in the order of the tables."""
    import pandas as pd

    parts = []
    for name, tables in made.items():
        quality, speed = tables["quality"], tables["speed"].drop(columns=["note", "images", "failed"])
        own = [column for column in speed.columns if column not in quality.columns or column in ("cell_id", "model")]
        merged = quality.merge(speed[own], on=["cell_id", "model"], how="left")
        counted = tables["speed"].set_index(["model", "cell_id"])["images"]
        # An image that nobody scored was made all the same.
        merged["images"] = [
            counted[model, cell] for model, cell in zip(merged["model"], merged["cell_id"], strict=True)
        ]
        parts.append(merged.assign(run=name))
    return pd.concat(parts, ignore_index=True)


def _has(table: pd.DataFrame, name: str) -> bool:
    """Whether a column says something: the number of images where it differs, failures where there are any."""
    if name == "images":
        return table[name].nunique() > 1
    return bool(table[name].notna().any() and (name != "failed" or (table[name] > 0).any()))


def _good(less_is_better: bool | None) -> str:
    return "" if less_is_better is None else "down" if less_is_better else "up"


def _entries(table: pd.DataFrame, name: str, less_is_better: bool | None) -> list[Entry]:
    """The column's entries. The best is marked where the rows differ; the ends of all intervals share a scale."""
    ends = [table.get(f"{name}{end}") for end in ("_low", "_high")]
    known = [float(value) for value in table[name].dropna()]
    lows, highs = ([float(v) for v in end.dropna()] if end is not None else [] for end in ends)
    low, high = min(known + lows, default=0.0), max(known + highs, default=0.0)
    best = None if less_is_better is None or len(set(known)) < 2 else (min(known) if less_is_better else max(known))
    entries = []
    for number, value in enumerate(table[name]):
        if not is_given(value):
            entries.append(Entry("", "", None, None, False))
            continue
        own = [None if end is None or not is_given(end.iloc[number]) else float(end.iloc[number]) for end in ends]
        figure = int(value) if name in ("images", "failed") else float(value)
        if own[0] == own[1] == value:  # by definition, or of one prompt many times: nothing is uncertain
            own = [None, None]
        whole = written(name, figure, own[0], own[1])
        text, _, interval = whole.partition(" [")
        bar = _bar(float(value), own, low, high)
        entries.append(Entry(text, f"[{interval}" if interval else "", float(value), bar, float(value) == best))
    return entries


def _bar(value: float, ends: Sequence[float | None], low: float, high: float) -> tuple[float, float, float] | None:
    if None in ends or high <= low:
        return None
    left, right, at = ((float(place or 0.0) - low) / (high - low) for place in (*ends, value))
    return left, right, at


def _published(row: Mapping[str, Any]) -> dict[str, str]:
    figure = str(row["figure"])
    cell = " ".join(str(row[name]) for name in ("method", "parameters") if row.get(name))
    return {
        "row": str(row.get("paper_row") or ""),
        "figure": figure.replace("_", " "),
        "published": written(figure, float(row["published"])),
        "ours": written(figure, _float(row.get("ours")), _float(row.get("ours_low")), _float(row.get("ours_high"))),
        "difference": "" if row.get("difference") is None else f"{row['difference']:+.3g}",
        "cell": cell,
        "source": f"{row.get('source')} ({row.get('confidence')})",
        "note": str(row.get("note") or ""),
    }


def _machine(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    facts: dict[str, object] = {
        "device": manifest.get("device"),
        "processor": cpu.get("model") and f"{cpu['model']}, {cpu.get('cores')} cores, {cpu.get('clock_mhz')} MHz",
        "GPU": ", ".join(str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()) or None,
        "memory": machine.get("memory_bytes") and f"{machine['memory_bytes'] / 1e9:.1f} GB",
        "threads": manifest.get("threads"),
        "dtype": manifest.get("dtype"),
        "system": machine.get("system")
        and f"{machine['system']} {machine.get('release')} {machine.get('architecture')}",
        "Python": machine.get("python"),
        **{str(name): version for name, version in (machine.get("versions") or {}).items()},
        "commit": (machine.get("git") or {}).get("commit"),
    }
    yield from ((name, str(value)) for name, value in facts.items() if value not in (None, ""))


def _settings(experiment: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("model", "prompts", "images", "repeats", "seed", "batch", "metrics", "compile"):
        if experiment.get(name) is not None:
            value = experiment[name]
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    sessions = manifest.get("sessions") or ()
    if manifest.get("started"):
        yield "started", str(manifest["started"])
        yield "ended", str(manifest.get("ended") or "not ended")
        yield "sessions", str(len(sessions))


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _float(value: Hashable | None) -> float | None:
    return None if value is None else float(str(value))
