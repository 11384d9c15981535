"""The tables of `lantern-bench certify`: emitted TV, token ambiguity, and the certificate.

They are of a model and not of a run; `schema.py` has them beside the tables of runs.
"""

from __future__ import annotations

from lantern_bench.spec.columns import CELL_COLUMNS, NOTE, Column, figure

__all__ = ["AMBIGUITY", "CHECK_TABLES"]

_PLACE = (
    Column("prompt_id", "string", "", "12 hex digits of the hash of the prompt's text"),
    Column("repeat", "int", "", "how often the prompt was used before in the measurement"),
    Column("position", "int", "tokens", "tokens of the image committed before the place"),
)

_EMITTED_TV_PLACES = (
    *CELL_COLUMNS,
    *_PLACE,
    Column("emitted_tv", "float", "", "TV between the target and the law of a step's first token; static: estimated"),
    Column("emitted_tv_crossed", "float", "", "estimate from the same draws that errs downwards (static only)"),
    Column("moved_mass", "float", "", "mass taken by the root's children, by the chance to try them (dynamic only)"),
)

_EMITTED_TV = (
    *CELL_COLUMNS,
    Column("places", "int", "places", "sampled places"),
    Column("prompts", "int", "prompts", "prompts among them: what is resampled"),
    *figure("emitted_tv", "", "mean TV between the target and the law of a step's first token"),
    Column(
        "emitted_tv_crossed", "float", "", "the same, erring downwards: the truth lies between the two (static only)"
    ),
    Column("emitted_tv_median", "float", "", "median over places"),
    Column("emitted_tv_max", "float", "", "largest at any place"),
    Column("moved_mass", "float", "", "most the mean may be under exact, from the masses moved (dynamic only)"),
    Column("times_delta", "float", "", "mean emitted TV / delta"),
    *figure("above_delta", "", "share of places whose emitted TV is above delta"),
    NOTE,
)

_SAMPLING = tuple(column for column in CELL_COLUMNS if column.name in ("temperature", "top_k", "top_p", "cfg_scale"))
_MODEL = next(column for column in CELL_COLUMNS if column.name == "model")
AMBIGUITY = {
    "top1": ("", "probability of the likeliest code"),
    "top10": ("", "probability of the ten likeliest codes together"),
    "ambiguous": ("", "share of tokens whose likeliest code has a probability below 0.05"),
    "entropy": ("nats", "entropy of the target's distribution"),
    "accepted_sampled": ("", "chance that the strict rule accepts one draft sampled from the drafter: 1 - TV(p, q)"),
    "accepted_best": ("", "chance that the strict rule accepts the drafter's likeliest code"),
}
"""Figures of token ambiguity: unit and meaning."""

_AMBIGUITY_PLACES = (
    _MODEL,
    *_SAMPLING,
    *_PLACE,
    *(Column(name, "float", unit, meaning) for name, (unit, meaning) in AMBIGUITY.items()),
)

_AMBIGUITY_MEANS = (
    _MODEL,
    *_SAMPLING,
    Column("axis", "string", "", "all (the whole image), row (of the image's grid) or position"),
    Column("index", "int", "", "the row or the position, from 0; empty for all"),
    Column("places", "int", "places", "tokens behind the row"),
    Column("prompts", "int", "prompts", "prompts among them: what is resampled"),
    *(column for name, (unit, meaning) in AMBIGUITY.items() for column in figure(name, unit, meaning + ", mean")),
    NOTE,
)

_CERTIFICATE = (
    Column("model", "string", "", "name of the model"),
    Column("check", "string", "", "what is checked"),
    Column("setting", "string", "", "how it was decoded"),
    Column("figure", "string", "", "what the number is"),
    *figure("measured", "", "the number"),
    Column("wanted", "string", "", "what it must be; empty where it is only reported"),
    Column("passed", "string", "", "yes or NO; empty where nothing is wanted"),
    Column("n", "int", "", "images, prompts or places behind it"),
    NOTE,
)

CHECK_TABLES: dict[str, tuple[Column, ...]] = {
    "emitted_tv_places": _EMITTED_TV_PLACES,
    "emitted_tv": _EMITTED_TV,
    "ambiguity_places": _AMBIGUITY_PLACES,
    "ambiguity": _AMBIGUITY_MEANS,
    "certificate": _CERTIFICATE,
}
