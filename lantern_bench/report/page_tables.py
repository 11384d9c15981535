"""The tables of a report page, ready for its template: the summary, published figures, settings, machine.

Figures are formatted as in every other table (`format_tables.format_figure`), with the value that a table is sorted by.
Intervals are drawn to the scale of their column, so that overlap is visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lantern_bench.config.paper import read_paper
from lantern_bench.report.curve_data import Tables
from lantern_bench.report.format_tables import format_figure, readable
from lantern_bench.report.labels import CellKey, cell_key, is_given
from lantern_bench.report.reproduction import comparability, reproduction_rows
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

# Column, head, meaning, and which end is the good one (`up`, `down` or neither).
_COLUMNS = (
    ("images", "images", "images behind the means of the row", ""),
    ("failed", "failed", "images that failed; they take no part in any mean", ""),
    ("speedup", "speedup", "seconds of AR over seconds of the cell, same prompts, same run", "up"),
    ("mean_accepted_length", "MAL", "tokens a step commits, the target's own token included; AR has 1", "up"),
    ("acceptance_rate", "acceptance", "depths accepted over depths offered", "up"),
    ("fid", "FID", "Fréchet distance to the reference", "down"),
    ("kid", "KID", "kernel distance to the reference", "down"),
    ("clip_score", "CLIP", "mean cosine between picture and caption, not scaled", "up"),
    ("prompt_accuracy", "accuracy", "share of pictures that show all attributes of the caption", "up"),
    ("precision", "precision", "share of pictures inside the reference's manifold", "up"),
    ("recall", "recall", "share of the reference inside the pictures' manifold", "up"),
)
_ALWAYS = ("speedup", "mean_accepted_length")


def summary(made: Mapping[str, Tables], numbers: Mapping[CellKey, int]) -> dict[str, Any]:
    """Return the summary of all runs, a row for each cell and protocol that scored it.

    heads: dicts of key, text, meaning, good; rows: (number of the cell, protocol, entries); notes: sentences below.
    """
    table = _joined(made)
    shown = [column for column in _COLUMNS if column[0] in _ALWAYS or _says_something(table, column[0])]
    columns = [_entries(table, key, good) for key, _, _, good in shown]
    several = table["protocol"].nunique() > 1
    rows = [
        (numbers[cell_key(row)], str(row["protocol"]) if several and is_given(row["protocol"]) else "", entries)
        for (_, row), *entries in zip(table.iterrows(), *columns, strict=True)
    ]
    notes = [note for tables in made.values() for note in readable(tables["summary"], "summary").notes]
    heads = [dict(zip(("key", "text", "meaning", "good"), column, strict=True)) for column in shown]
    return {"heads": heads, "rows": rows, "notes": list(dict.fromkeys(notes))}


def highlights(
    made: Mapping[str, Tables], numbers: Mapping[CellKey, int], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the best cell for speedup, accepted length and the first available quality figure, and how sure that is.

    Dicts of what, value, interval, cell (its number), name, remark.
    """
    table = _joined(made)
    quality = [name for name in ("prompt_accuracy", "clip_score", "fid") if _says_something(table, name)][:1]
    tiles = []
    for name in ("speedup", "mean_accepted_length", *quality):
        if not _says_something(table, name):
            continue
        known = table[table[name].notna()]
        values = known[name].astype(float)
        best = known.iloc[int(values.argmin() if name == "fid" else values.argmax())]
        what = {"speedup": "fastest", "mean_accepted_length": "longest steps"}.get(name)
        tiles.append(
            _figure(name, float(best[name]), best.get(f"{name}_low"), best.get(f"{name}_high"))
            | {"what": what or f"best pictures by {name.replace('_', ' ')}", "remark": _how_sure(table, best, name)}
            | {"cell": numbers[cell_key(best)], "name": names[numbers[cell_key(best)]]}
        )
    return tiles


def _how_sure(table: pd.DataFrame, best: pd.Series, name: str) -> str:
    """Whether another cell's interval reaches that of the best one, in words."""
    if f"{name}_low" not in table or not is_given(best[f"{name}_low"]):
        return "one value a cell, without an interval"
    others = table[(table[["run", "model", "cell_id"]] != best[["run", "model", "cell_id"]]).any(axis=1)]
    near = others[others[name].notna() & (others[f"{name}_high"] >= best[f"{name}_low"])]
    reaching = near["cell_id"].nunique()
    if not reaching:
        return "no other cell's 95 % interval reaches it"
    return f"the 95 % intervals of {reaching} other {'cell' if reaching == 1 else 'cells'} overlap it"


def _joined(made: Mapping[str, Tables]) -> pd.DataFrame:
    """Quality rows with the speed of their cell, in the order of the tables."""
    import pandas as pd

    parts = []
    for name, tables in made.items():
        # An image without a score counts as an image: `images` is that of the speed table.
        quality, speed = tables["quality"].drop(columns="images"), tables["speed"].drop(columns=["note", "failed"])
        own = [column for column in speed if column not in quality or column in ("cell_id", "model")]
        parts.append(quality.merge(speed[own], on=["cell_id", "model"], how="left").assign(run=name))
    return pd.concat(parts, ignore_index=True)


def _says_something(table: pd.DataFrame, name: str) -> bool:
    """Whether to show a column: the number of images where it differs, failures where there are any."""
    if name == "images":
        return table[name].nunique() > 1
    return bool(table[name].notna().any() and (name != "failed" or (table[name] > 0).any()))


def _entries(table: pd.DataFrame, name: str, good: str) -> list[dict[str, Any]]:
    """The column's entries: dicts of value and interval as text, what they sort by, their bar, and whether it is best.

    bar: left end, right end and value as shares of the column's width, on one scale; None without an interval.
    """
    ends = table.reindex(columns=[name, f"{name}_low", f"{name}_high"]).astype(float)
    low, high = float(ends.min().min()), float(ends.max().max())
    known = ends[name].dropna()
    best = (known.min() if good == "down" else known.max()) if good and known.nunique() > 1 else None
    entries = []
    for value, *own in ends.itertuples(index=False):
        if not is_given(value):
            entries.append({"value": "", "interval": "", "order": None, "bar": None, "best": False})
            continue
        if own[0] == own[1] == value:  # by definition, or of one prompt many times: nothing is uncertain
            own = [None, None]
        bar = None
        if all(map(is_given, own)) and high > low:
            bar = [(place - low) / (high - low) for place in (*own, value)]
        text = _figure(name, int(value) if name in ("images", "failed") else value, *own)
        entries.append(text | {"order": value, "bar": bar, "best": value == best})
    return entries


def _figure(name: str, value: float, low: Any, high: Any) -> dict[str, Any]:
    """A figure and its interval as text."""
    text, bracket, interval = format_figure(name, value, low, high).partition(" [")
    return {"value": text, "interval": bracket.strip() + interval}


def run_facts(name: str, data: RunData, tables: Tables) -> dict[str, Any]:
    """Return the facts behind a run, from its manifest; what was not recorded is left out.

    machine, settings, weights: lists of (name, value); published: dicts of text; published_notes: sentences.
    """
    manifest = data.manifest
    experiment = dict(manifest.get("experiment") or {})
    paper = read_paper(experiment.get("paper"))
    # A figure that is not available is worth a row only in the table of all figures.
    published = [_published(row) for row in reproduction_rows(tables, paper) if row.get("published") is not None]
    return {
        "name": name,
        "title": str(experiment.get("description") or experiment.get("name") or name),
        "machine": _machine(manifest),
        "settings": _settings(experiment, manifest),
        "weights": [(part, str(digest)) for part, digest in ((manifest.get("key") or {}).get("weights") or {}).items()],
        "experiment": json.dumps(experiment, indent=2, ensure_ascii=False),
        "published": published,
        "published_title": paper.title if paper else "",
        "published_notes": comparability(tables, paper, manifest) if paper else [],
    }


def _published(row: Mapping[str, Any]) -> dict[str, str]:
    figure = str(row["figure"])
    ours = [None if row.get(name) is None else float(row[name]) for name in ("ours", "ours_low", "ours_high")]
    return {
        "row": str(row.get("paper_row") or ""),
        "figure": figure.replace("_", " "),
        "published": format_figure(figure, float(row["published"])),
        "ours": format_figure(figure, *ours),
        "difference": "" if row.get("difference") is None else f"{row['difference']:+.3g}",
        "cell": " ".join(str(row[name]) for name in ("method", "parameters") if row.get(name)),
        "source": f"{row.get('source')} ({row.get('confidence')})",
        "note": str(row.get("note") or ""),
    }


def _machine(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    system = [str(machine.get(name)) for name in ("system", "release", "architecture")]
    facts = {
        "device": manifest.get("device"),
        "processor": cpu.get("model") and f"{cpu['model']}, {cpu.get('cores')} cores, {cpu.get('clock_mhz')} MHz",
        "GPU": ", ".join(str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()),
        "memory": machine.get("memory_bytes") and f"{machine['memory_bytes'] / 1e9:.1f} GB",
        "threads": manifest.get("threads"),
        "dtype": manifest.get("dtype"),
        "system": machine.get("system") and " ".join(system),
        "Python": machine.get("python"),
        **(machine.get("versions") or {}),
        "commit": (machine.get("git") or {}).get("commit"),
    }
    return [(str(name), str(value)) for name, value in facts.items() if value not in (None, "")]


def _settings(experiment: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = ("model", "prompts", "images", "repeats", "seed", "batch", "metrics", "compile")
    facts = {name: experiment[name] for name in names if experiment.get(name) is not None}
    if manifest.get("started"):
        facts |= {"started": manifest["started"], "ended": manifest.get("ended") or "not ended"}
        facts["sessions"] = len(manifest.get("sessions") or ())
    return [(name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for name, v in facts.items()]
