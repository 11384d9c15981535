"""The certificate: one row a check, with what was wanted and whether it held. Plain numbers in, rows out.

What is checked and with which bar is written here and nowhere else, after algorithms.md, section 6. A figure without a
bar is reported: that relaxation costs more than its bound is a finding, not a fault of the model or of the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from lantern_bench.report.records import Row, joined
from lantern_bench.report.stats import proportion, ratio_of_sums
from lantern_bench.report.tables import parameters
from lantern_bench.schema import AMBIGUITY, CELL_COLUMNS

# ---- Token ambiguity as tables: over the whole image, along its rows, along its positions, with intervals over pro

_KEPT = ("model", "temperature", "top_k", "top_p", "cfg_scale")


def ambiguity_table_rows(places: Iterable[Row], width: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `ambiguity` from those of `ambiguity_places`; `width` is that of the image's grid of tokens."""
    rows = list(places)
    yield _means(rows, "all", None)
    for axis, divisor in (("row", width), ("position", 1)):
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(int(row["position"]) // divisor, []).append(row)
        for index in sorted(groups):
            yield _means(groups[index], axis, index)


def _means(rows: Sequence[Row], axis: str, index: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {key: rows[0][key] for key in _KEPT} | {"axis": axis, "index": index}
    found |= {"places": len(rows), "prompts": len({row["prompt_id"] for row in rows})}
    notes: list[str] = []
    for name in AMBIGUITY:
        there = [row for row in rows if row.get(name) is not None]
        mean = ratio_of_sums(
            [float(row[name]) for row in there], [1.0] * len(there), [str(row["prompt_id"]) for row in there]
        )
        found |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
        if mean.note == "no data":
            notes.append("nobody drafts the first token" if axis == "position" else "no drafter")
        elif mean.note:
            notes.append(mean.note)
    return {**found, "note": joined(notes)}


# ---- What relaxation costs, from the places it was measured at: means over places with intervals over prompts


APART = 0.1
"""Two estimates of one mean that differ by more than this share of it are too few draws."""


def cost_rows(places: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `emitted_tv` from those of `emitted_tv_places`, cells in the order they come."""
    cells: dict[str, list[Row]] = {}
    for row in places:
        cells.setdefault(f"{row['model']} {row['cell_id']}", []).append(row)
    for rows in cells.values():
        yield _cell(rows)


def _cell(rows: list[Row]) -> dict[str, Any]:
    tv = [float(row["emitted_tv"]) for row in rows]
    prompts = [str(row["prompt_id"]) for row in rows]
    ones = [1.0] * len(rows)
    mean = ratio_of_sums(tv, ones, prompts)
    row: dict[str, Any] = {column.name: rows[0].get(column.name) for column in CELL_COLUMNS}
    row |= {"places": len(rows), "prompts": len(set(prompts)), "emitted_tv_median": median(tv)}
    row |= {"emitted_tv": mean.value, "emitted_tv_low": mean.low, "emitted_tv_high": mean.high}
    row["emitted_tv_max"] = max(tv)
    for name in ("emitted_tv_crossed", "moved_mass"):
        values = [float(place[name]) for place in rows if place.get(name) is not None]
        row[name] = sum(values) / len(values) if values else None
    if row["delta"] is not None:
        above = ratio_of_sums([float(value > row["delta"]) for value in tv], ones, prompts)
        row |= {"above_delta": above.value, "above_delta_low": above.low, "above_delta_high": above.high}
        row["times_delta"] = mean.value / row["delta"] if mean.value is not None else None
    return {**row, "note": joined(note for note in (mean.note, _draws(row)) if note)}


def _draws(row: Row) -> str | None:
    """Say where the two estimates are too far apart to be called one figure."""
    crossed, value = row["emitted_tv_crossed"], row["emitted_tv"]
    if crossed is None or value is None or value - crossed <= APART * value:
        return None
    return "more draws are needed: the mean lies between emitted_tv_crossed and emitted_tv, and they are apart"


# ----

_LOSSLESS, _BROKEN, _ROUNDING = 1e-3, 1e-6, 1e-5
_NEAR_TIES = "near-ties (rounding may choose either): "


def lossless_row(model: str, setting: str, p_value: float, samples: int, impossible: int) -> dict[str, Any]:
    """Whether the first tokens of whole decodes follow the target's law."""
    note = f"{impossible} samples have no probability under the target" if impossible else None
    row = _row(model, "lossless first tokens", setting, "p-value of the G-test", p_value, samples)
    return _judged(row, f"> {_LOSSLESS:g}", p_value > _LOSSLESS) | {"note": note}


def broken_row(model: str, setting: str, p_value: float, samples: int) -> dict[str, Any]:
    """Whether the same test, with as many samples, rejects the rule without its residual."""
    row = _row(model, "broken rule rejected", setting, "p-value of the G-test", p_value, samples)
    note = "the residual was left out on purpose: this is the power of the test above"
    if p_value >= _BROKEN:
        note = "the test above is too weak to see a residual that was left out: give more --samples"
    return _judged(row, f"< {_BROKEN:g}", p_value < _BROKEN) | {"note": note}


def identity_row(
    model: str, setting: str, same: int, near_ties: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Whether greedy speculation is greedy decoding; differences are pairs of a position and the margin there."""
    n = same + len(near_ties) + len(others)
    share = proportion(same, n)
    row = _row(model, "greedy identity", setting, "share of prompts with equal tokens", share.value, n)
    row |= {"measured_low": share.low, "measured_high": share.high}
    notes = [_NEAR_TIES + _places(near_ties)] if near_ties else []
    notes += ["different: " + _places(others)] if others else []
    return _judged(row, "equal, or a near-tie", not others) | {"note": "; ".join(notes) or None}


def strict_row(model: str, setting: str, places: Sequence[Row]) -> dict[str, Any]:
    """Whether the strict rule emits the target itself, exactly, at places of real images."""
    worst = max(float(place["emitted_tv"]) for place in places)
    row = _row(model, "strict rule emits the target", setting, "largest emitted TV", worst, len(places))
    return _judged(row, f"<= {_ROUNDING:g}", worst <= _ROUNDING)


def cost_check_rows(means: Sequence[Row], places: Sequence[Row]) -> list[dict[str, Any]]:
    """The emitted TV of each relaxed cell, and for deterministic drafts under `exact` whether it keeps what is proved.

    What is proved: at each place the emitted TV is at most the mass that the children move, each by the chance that it
    is tried. Of sampled drafts, and of `official`, nothing of the kind is true.
    """
    rows = []
    for mean in means:
        here = [place for place in places if place["cell_id"] == mean["cell_id"]]
        row = _row(mean["model"], "emitted TV", _setting(mean), "mean", mean["emitted_tv"], mean["places"])
        row |= {"measured_low": mean["emitted_tv_low"], "measured_high": mean["emitted_tv_high"]}
        row["note"] = _beside_bound(mean)
        if mean["moved_mass"] is not None and mean["residual"] == "exact":
            excess = max(float(place["emitted_tv"]) - float(place["moved_mass"]) for place in here)
            row = _judged(row, "<= mass moved, at each place", excess <= _ROUNDING)
        rows.append(row)
    return rows


def failures(rows: Sequence[Row]) -> list[str]:
    """Return the checks that did not hold, in words."""
    return [f"{row['check']} ({row['setting']})" for row in rows if row.get("passed") == "NO"]


def _row(model: str, check: str, setting: str, figure: str, measured: float | None, n: int) -> dict[str, Any]:
    return {"model": model, "check": check, "setting": setting, "figure": figure, "measured": measured, "n": n}


def _judged(row: dict[str, Any], wanted: str, held: bool) -> dict[str, Any]:
    return row | {"wanted": wanted, "passed": "yes" if held else "NO"}


def _places(differences: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"token {position}, margin {margin:.1e}" for position, margin in differences)


def _setting(cell: Row) -> str:
    """The mode and what is set beyond it, the residual always."""
    text = f"{cell['mode']} {parameters(cell, [cell])}".removesuffix(" official residual")
    return f"{text} {cell['residual']} residual"


def _beside_bound(mean: Row) -> str | None:
    notes = [str(mean["note"])] if mean.get("note") else []
    if mean.get("times_delta") is not None:
        share = f"above it at {mean['above_delta']:.0%} of places"
        notes.insert(0, f"{mean['times_delta']:.2g} times delta {mean['delta']:g}, {share}")
    elif mean["lambda"] is not None:
        notes.insert(0, f"lambda {mean['lambda']:g}")
    return " | ".join(notes) or None
