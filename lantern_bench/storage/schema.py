"""Every column of every table, declared once, in the order of the files.

A quantity has one name in code, flag, column, axis and documentation: the one declared here.
docs/results-format.md is written from this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.methods.catalog import (
    DRAFTINGS,
    IN_SUMMARY,
    METRICS,
    MODES,
    OF_IMAGES,
    OF_SETS,
    OF_TOKENS,
    PARAMETERS,
    RULES,
)
from lantern_bench.methods.metrics import Metric
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.text import listed

if TYPE_CHECKING:
    import pandas as pd


SCHEMA_VERSION = 2
"""The version of runs that this program reads, in every record key: a run never mixes two."""

Row: TypeAlias = dict[str, Any]
"""A row of a table: values by column."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    dtype: str  # string, int, float, bool, list[int], list[list[int]] or list[float]
    unit: str
    meaning: str


def text(name: str, meaning: str) -> Column:
    """Return a column of text."""
    return Column(name=name, dtype="string", unit="", meaning=meaning)


def count(name: str, unit: str, meaning: str) -> Column:
    """Return a column of whole numbers.

    Args:
        name: The name of the column.
        unit: The unit, empty without one.
        meaning: What the numbers are.
    """
    return Column(name=name, dtype="int", unit=unit, meaning=meaning)


def number(name: str, unit: str, meaning: str) -> Column:
    """Return a column of real numbers.

    Args:
        name: The name of the column.
        unit: The unit, empty without one.
        meaning: What the numbers are.
    """
    return Column(name=name, dtype="float", unit=unit, meaning=meaning)


def figure(
    name: str, unit: str, meaning: str, interval: str = "95% interval"
) -> tuple[Column, Column, Column]:
    """Return the columns of an uncertain figure and of the two ends of its interval.

    Args:
        name: The name of the figure; `_low` and `_high` are appended for the ends.
        unit: The unit, empty without one.
        meaning: What the figure is.
        interval: What the interval is. Figures made of seconds have `REPEAT`. All others have
            95% confidence intervals over prompts.
    """
    return (
        number(name, unit, meaning),
        number(f"{name}_low", unit, f"lower end of the {interval} of {name}"),
        number(f"{name}_high", unit, f"upper end of the {interval} of {name}"),
    )


REPEAT = "95% prediction interval for a repeat on this machine"

_SPEEDUP = figure(
    name="speedup",
    unit="",
    meaning="seconds of ar / seconds of the cell, sums over the same prompts of one run",
    interval=REPEAT,
)
_OVER_LOSSLESS = (
    *figure(
        name="speedup_over_lossless",
        unit="",
        meaning="seconds of lossless_cell / seconds of the cell, same prompts",
        interval=REPEAT,
    ),
    text("lossless_cell", "fastest lossless cell of the run with the cell's model and sampling"),
)
_MODEL = text("model", "name of the model")
_CELL = text("cell_id", "the cell")
_METHOD = (
    text("method", "the mode"),
    text("parameters", "what is set beyond the mode, for reading"),
)
_ACCEPTED_LENGTH = figure(
    "mean_accepted_length", "tokens/step", "tokens committed per step, bonus token included"
)
_PROTOCOL_VERSION = count(
    "protocol_version", "", "version of the protocol, which the manifest describes"
)
CHECKSUM = text("checksum", "first 16 hex digits of the SHA-256 of the line's bytes before it")
_DISTURBED = count(
    "disturbed", "images", "images whose threads lacked a core; empty where not recorded"
)

NOTE = text("note", "why a figure is missing, or what to know about it")


def _parameter_columns() -> Iterator[Column]:
    for name, parameter in PARAMETERS.items():
        if parameter.column is not None:
            dtype, unit = parameter.column
            yield Column(name, dtype, unit, meaning=parameter.help.rstrip("."))


CELL_COLUMNS: tuple[Column, ...] = (
    text("cell_id", "the cell: one fully resolved decoding configuration"),
    text("mode", f"one of {', '.join(MODES)}"),
    text("drafting", ", ".join(f"{name} ({row.about})" for name, row in DRAFTINGS.items())),
    text("tree", "name of the static tree, or nodes, depth and beam of the dynamic one"),
    text("rule", f"acceptance rule: {', '.join(RULES)}"),
    *_parameter_columns(),
    count("batch", "images", "images decoded at once"),
    _MODEL,
)


# ---- The tables of `lantern-bench certify`: the certificate, its power, and the audit

_CERTIFICATE = (
    _MODEL,
    text("check", "what is checked"),
    text("setting", "how it was decoded"),
    text("figure", "what the number is"),
    *figure("measured", "", "the number"),
    text("wanted", "what it must be"),
    text("passed", "yes, NO, or weak (few tokens are tested)"),
    count("n", "", "images or prompts behind it"),
    NOTE,
)

_LOSSLESS_TESTS = (
    _MODEL,
    text("setting", "how it was decoded, and whether on the tables or with the model"),
    text("test", "the test (docs/algorithms.md, section 6)"),
    number("p_value", "", "its p-value"),
    number("p_holm", "", "corrected for all tests of the command"),
    count("images", "images", "images tested"),
    count("tokens", "tokens", "tokens tested"),
    count(
        "edge_tokens",
        "tokens",
        "tokens left out because rounding may change whether they pass the filters",
    ),
)

_POWER = (
    _MODEL,
    text("fault", "what is wrong on purpose"),
    text("setting", "how it was decoded"),
    text("tested_on", "tables or model"),
    count("images", "images", "images decoded until a test rejected it; empty: none did"),
    count("decoded", "images", "images decoded"),
    text("test", "the test with the smallest p-value"),
    number("p_value", "", "its p-value; rejected below 0.001 / number of tests of the certificate"),
    count(
        "images_needed",
        "images",
        "estimate from p_value where nothing rejects it and p_value is below 0.05",
    ),
)

_AUDIT = (
    *CELL_COLUMNS,
    text("form", "values that differ from the mode; empty for the mode itself"),
    text("claim", "what its authors claim of its tokens: lossless or relaxed"),
    text("source", "arXiv number of their paper"),
    text("verdict", "the claim beside what was measured"),
    text(
        "passed",
        "yes, NO, or weak (a broken method not rejected); empty for claims that are not ours",
    ),
    number(
        "p_holm",
        "",
        "smallest p-value of its tests, corrected for the tests of all claims to be lossless",
    ),
    number("p_first", "", "G-test of the first two tokens on the tables"),
    number("p_joint", "", "G-test of the first three tokens on the tables"),
    number(
        "p_later",
        "",
        "G-tests of later three tokens on the tables: the smallest, times their number",
    ),
    number("p_batch", "", "test on the tables of images that are decoded together"),
    number(
        "p_images", "", "smallest p-value of the whole-image tests with the model, not corrected"
    ),
    count("table_images", "images", "images decoded on the tables"),
    count("images", "images", "images decoded with the model"),
    number("power_p", "", "smallest p-value of the method without its residual, on the tables"),
    *figure(
        name="table_tv",
        unit="",
        meaning="TV of three successive tokens on the tables, of what is not lossless",
        interval="two estimates",
    ),
    NOTE,
)


def _quality_columns(names: Iterable[str]) -> Iterator[Column]:
    """Yield each quality figure with its interval and its comparison with ar."""
    for name in names:
        metric = METRICS[name]
        yield from figure(name, "", metric.meaning)
        if metric.has_spread:
            spread = f"{name} of further ar images of the same prompts with other seeds"
            yield from figure(f"{name}_ar_spread", "", spread)
            yield from _verdict(name)
        if metric.is_paired:
            difference = f"{name} minus {name} of ar (mean over its sets) for the same prompts"
            yield from figure(f"{name}_vs_ar", "", difference)
            p_value = f"two-sided p-value of {name}_vs_ar: cell and sets exchanged within prompts"
            yield number(f"{name}_vs_ar_p", "", p_value)
        yield from _extras(metric)


def _extras(metric: Metric) -> Iterator[Column]:
    for name, dtype, unit, meaning in metric.extras:
        yield Column(name, dtype, unit, meaning=meaning)


def _verdict(name: str) -> tuple[Column, Column]:
    return (
        text(f"{name}_verdict", f"{name} against ar's own spread: within or outside"),
        number(
            f"{name}_detectable", "", f"shift of {name} that would be outside with probability 0.8"
        ),
    )


def _score_columns() -> Iterator[Column]:
    """Yield the columns of metrics of sets.

    A row of level cell holds the figure and its interval, a row of level ar_spread the centre and
    the ends of the spread.
    """
    for name in OF_SETS:
        metric = METRICS[name]
        levels = "levels cell and ar_spread"
        if metric.image_meaning:
            levels += f"; of an image: {metric.image_meaning}"
        yield from figure(name, "", f"{metric.meaning} ({levels})")
        yield from _extras(metric)


def _summary_of_quality() -> Iterator[Column]:
    """Yield the metrics of the summary; a scorer follows its first metric."""
    of_sets = listed([name for name in IN_SUMMARY if name in OF_SETS])
    of_images = listed([name for name in IN_SUMMARY if name in OF_IMAGES])
    scorers = {
        "fid_features": f"feature extractor behind {of_sets}",
        "clip_model": f"CLIP model behind {of_images}",
    }
    for name in IN_SUMMARY:
        metric = METRICS[name]
        yield from figure(name, "", metric.meaning)
        if metric.has_spread:
            yield from _verdict(name)
        if name in OF_TOKENS:
            yield from _extras(metric)
        if metric.scored_by in scorers:
            yield text(metric.scored_by, scorers.pop(metric.scored_by))


_PHASES = {"draft": "drafting", "target": "target", "verify": "verification"}
_PER_STEP = [number(f"{phase}_ms", "ms", f"{words}, per step") for phase, words in _PHASES.items()]
_IMAGES = (
    count("images", "images", "images behind the means of this row"),
    count("failed", "images", "images that failed and take no part in any mean"),
)

_RECORDS = (
    count("schema_version", "", "version of this schema"),
    text("record_key", "hash of all that can change the tokens of this image"),
    *CELL_COLUMNS,
    text("prompt_id", "12 hex digits of the hash of the prompt's text"),
    text("prompt", "the prompt"),
    text("prompt_source", "the prompt's name in its set, for example coco:391895"),
    count("repeat", "", "earlier uses of the prompt in this cell"),
    count("seed", "", "seed of the image's generator, the same in all cells"),
    count("order_index", "", "place in the run's order of execution"),
    count(
        "process", "", "process that made the image, counted over the sessions of the run, from 0"
    ),
    text("device", "name of the GPU or CPU that made the image"),
    text("device_id", "tells devices of one name apart; a hash that names no host"),
    count("clock_mhz", "MHz", "clock of the device just after decoding, read at most every 10 s"),
    count("clock_max_mhz", "MHz", "its highest clock"),
    text("driver", "version of the GPU's driver"),
    text("status", "ok or failed"),
    text("error", "what went wrong, when it failed"),
    count("tokens", "tokens", "image tokens kept"),
    count("target_forwards", "forwards", "forward passes of the target, prefill included"),
    count("drafter_forwards", "forwards", "forward passes of the drafter"),
    Column(
        name="start_per_step",
        dtype="list[int]",
        unit="tokens",
        meaning="image position at the start of each step",
    ),
    Column(
        name="committed_per_step",
        dtype="list[int]",
        unit="tokens",
        meaning="tokens committed by each step and kept",
    ),
    Column(
        name="accepted_per_step",
        dtype="list[int]",
        unit="tokens",
        meaning="drafts accepted by each step, bonus token not counted",
    ),
    Column(
        name="offered_depth_per_step",
        dtype="list[int]",
        unit="levels",
        meaning="depth drafted in each step",
    ),
    Column(
        name="child_rank_per_step",
        dtype="list[list[int]]",
        unit="",
        meaning="child taken at each depth; -1 offered and rejected",
    ),
    number(
        "mean_accepted_length", "tokens/step", "tokens committed per step, bonus token included"
    ),
    number(
        "mal_uncut", "tokens/step", "the same with the last step uncut, as published code counts"
    ),
    number(
        "step_compression", "tokens/forward", "tokens kept per target forward, prefill included"
    ),
    number("seconds", "s", "decoding, without text encoding and pixels"),
    *(
        number(f"{phase}_seconds", "s", f"part of seconds: {words}")
        for phase, words in _PHASES.items()
    ),
    number("other_seconds", "s", "the rest of seconds"),
    number("pixel_seconds", "s", "tokens to pixels, outside seconds"),
    number("cpu_seconds", "s", "CPU time of all threads of the process within seconds"),
    number(
        "waited_seconds",
        "s",
        "thread-seconds within seconds that could run and got no core (Linux)",
    ),
    count(
        "involuntary_switches",
        "",
        "times within the batch's seconds that a thread lost its core to another",
    ),
    number(
        "steal_seconds",
        "s",
        "core-seconds within seconds that the hypervisor took from usable cores",
    ),
    Column(
        name="disturbed",
        dtype="bool",
        unit="",
        meaning="whether threads lacked a core for more than 5% of seconds",
    ),
    count("attempts", "", "times the image was decoded; seconds are of the least disturbed"),
    count("peak_memory_bytes", "bytes", "peak memory while decoding"),
    number("neighbour_mass", "", "neighbour mass, summed over accepted drafts"),
    number("neighbour_mass_tried", "", "neighbour mass, summed over tried drafts"),
    text("tokens_sha256", "SHA-256 of the tokens as little-endian int32"),
    text("image_sha256", "SHA-256 of the PNG file"),
    text("image", "the PNG file, relative to the run directory; empty when none was written"),
    CHECKSUM,
)

_SCORES = (
    count("schema_version", "", "version of this schema"),
    text(
        "level",
        "what the row scores: image, cell, ar_spread (ar with other seeds) or tokens of an image",
    ),
    text("protocol", "name of the scoring protocol; empty at level tokens"),
    _PROTOCOL_VERSION,
    text("cell_id", "the cell; at level ar_spread the first ar cell"),
    text("record_key", "the image's record (levels image and tokens)"),
    *(number(name, "", f"{METRICS[name].image_meaning} (level image)") for name in OF_IMAGES),
    text("clip_model", "the CLIP or reward model and its weights"),
    *_score_columns(),
    count("n", "images", "pictures scored (level cell), or of one set (level ar_spread)"),
    count("ar_spread_sets", "sets", "sets of ar images with different seeds (level ar_spread)"),
    text("extractor", "feature extractor and its weights (level cell)"),
    text("reference", "reference set, its size and hash (level cell)"),
    count(
        "tokens", "tokens", "tokens of the image that are not forced (level tokens, as all below)"
    ),
    count("impossible_tokens", "tokens", "tokens that the target cannot give"),
    count(
        "mismatched_tokens",
        "tokens",
        "at temperature 0, tokens that are not the target's most likely",
    ),
    number("entropy", "nats", "mean entropy of the target's distributions"),
    number("largest_p", "", "mean largest probability of these distributions"),
    number("ten_largest_p", "", "mean sum of their ten largest probabilities"),
    text("features", "names of the features of a token"),
    Column(
        name="feature_sums",
        dtype="list[float]",
        unit="",
        meaning="each feature minus its mean, then the upper triangle of the covariance",
    ),
    NOTE,
    CHECKSUM,
)

_SPEED = (
    *CELL_COLUMNS,
    *_IMAGES,
    _DISTURBED,
    count(
        "held_up", "images", "images whose seconds count less here than in the records (Intervals)"
    ),
    *figure(name="latency_s", unit="s", meaning="mean seconds per image", interval=REPEAT),
    number("latency_p50_s", "s", "50th percentile of the seconds per image"),
    number("latency_p95_s", "s", "95th percentile of the seconds per image"),
    number("tokens_per_s", "tokens/s", "tokens kept per second"),
    *_SPEEDUP,
    *_OVER_LOSSLESS,
    *figure(
        "step_compression",
        "tokens/forward",
        "tokens kept per target forward, prefill included; 1 for ar",
    ),
    *_ACCEPTED_LENGTH,
    number("mal_uncut", "tokens/step", "the same with last steps uncut, as published code counts"),
    number("accepted_drafts", "tokens/step", "drafts accepted per step, bonus token not counted"),
    number("acceptance_rate", "", "depths accepted / depths offered"),
    number("target_forwards", "forwards", "mean forward passes of the target per image"),
    number("drafter_forwards", "forwards", "mean forward passes of the drafter per image"),
    *_PER_STEP,
    number("other_ms", "ms", "the rest, per step"),
    number("peak_memory_mb", "MB", "largest peak memory of an image"),
    NOTE,
)

_QUALITY = (
    *CELL_COLUMNS,
    *_IMAGES,
    *_quality_columns(OF_TOKENS),
    *_quality_columns(OF_SETS),
    count("ar_spread_sets", "sets", "sets of ar images behind the columns *_ar_spread"),
    *_quality_columns(OF_IMAGES),
    count("ar_sets", "sets", "sets of ar images (seed_set) whose mean *_vs_ar compares with"),
    text("fid_features", f"feature extractor behind {listed(OF_SETS)}"),
    text("clip_model", "CLIP model behind clip_score, or the reward model"),
    text("reference", "reference set"),
    text("protocol", "name of the scoring protocol"),
    _PROTOCOL_VERSION,
    number("neighbour_mass", "", "mean neighbour mass per accepted draft"),
    NOTE,
)

_ACCEPTANCE = (
    *CELL_COLUMNS,
    text("axis", "depth (of the tree) or position (in the image)"),
    count("index", "", "the depth, from 1, or the position, from 0"),
    count(
        "offered",
        "steps",
        "steps that reached this depth or position with a draft token left to test",
    ),
    count("accepted", "steps", "offered steps that accepted a draft token there"),
    *figure("rate", "", "accepted / offered"),
    NOTE,
)

_LENGTHS = (
    *CELL_COLUMNS,
    count("length", "tokens", "tokens a step committed, bonus token included"),
    count("steps", "steps", "steps of that length"),
    *figure("share", "", "steps of that length / steps"),
)

_COMPARISON = (
    text("cell_id", "the cell, the same in both runs"),
    _MODEL,
    text("quantity", "what is compared, by the name of its column"),
    text("protocol", "scoring protocol behind a quality figure"),
    number("a", "", "the figure in the first run, over the pairs"),
    number("b", "", "the figure in the second run, over the pairs"),
    text("kind", "ratio (how many times better, above 1 for the second run) or difference (b - a)"),
    *figure("effect", "", "the ratio or the difference"),
    number("p_value", "", "two-sided: runs exchanged within prompts; speedup: t over processes"),
    number("p_holm", "", "the same after Holm, over all comparisons of the table"),
    text(
        "verdict",
        "better, worse, not distinguishable; with --margin equivalent, not settled; "
        "empty: not tested",
    ),
    count("pairs", "images", "(prompt, repeat) pairs that both runs have"),
    count("prompts", "prompts", "prompts among them"),
    NOTE,
)

_RECOMMENDATION = (
    _MODEL,
    _CELL,
    *_SPEEDUP,
    *_OVER_LOSSLESS[:3],
    text("condition", "limit of a column of `quality`, which its whole interval must keep"),
    *figure("measured", "", "the figure"),
    text(
        "verdict",
        "keeps, lossless (keeps every condition), "
        "or not settled and how many images would settle it",
    ),
    count("images", "images", "images behind the figure"),
    NOTE,
)

_SUMMARY = (
    _CELL,
    _MODEL,
    *_METHOD,
    *_IMAGES,
    _DISTURBED,
    *_SPEEDUP,
    *_OVER_LOSSLESS,
    *_ACCEPTED_LENGTH,
    *_summary_of_quality(),
    NOTE,
)

_REPRODUCTION = (
    text("cell_id", "the cell; empty for a published row without a cell"),
    _MODEL,
    *_METHOD,
    text("residual", "residual after a relaxed rejection: exact or official"),
    *_IMAGES,
    text("paper_row", "the published row that the cell is compared with"),
    text("figure", "the figure, by the name of its column in the other tables"),
    number("published", "", "the published figure; empty where none could be had"),
    text("source", "where the published figure was read"),
    text("confidence", "paper, secondary, derived, definition or user"),
    *figure("ours", "", "the figure of this run"),
    number("difference", "", "ours minus published; empty where the two are not of one kind"),
    text("measured_by", "the network and its weights behind ours, where there is one"),
    NOTE,
)

_PREDICTION = (
    *CELL_COLUMNS,
    text("device", "the device that the row is predicted for"),
    text("stack", "compiled (this package) or eager (code as it is published)"),
    count("images", "images", "images whose steps were used"),
    number("mean_accepted_length", "tokens/step", "tokens committed per step in the run"),
    count("nodes", "nodes", "nodes of a target forward, the root included"),
    count("drafter_forwards_per_step", "forwards", "forward passes of the drafter per step"),
    number("speedup", "", "predicted seconds of ar / predicted seconds of the cell"),
    number("speedup_measured", "", "speedup of the run, on its own machine"),
    number(
        "speedup_error",
        "",
        "speedup / speedup_measured - 1, of a run on the device with the same code",
    ),
    number("latency_s", "s", "predicted seconds per image"),
    number("ar_ms", "ms", "predicted, an autoregressive step"),
    number("step_ms", "ms", "predicted, a step of the cell: draft, target, verify and other"),
    *_PER_STEP,
    number("other_ms", "ms", "host work outside the programs, per step"),
    number("read_ms", "ms", "reading weights, cache and distributions, if nothing else took time"),
    number("multiply_ms", "ms", "products, if nothing else took time"),
    number("launch_ms", "ms", "kernels, if nothing else took time"),
    number(
        "hours",
        "h",
        "with --prompts: until the last of --devices has decoded its prompts in the cell",
    ),
    number("device_hours", "h", "hours times devices"),
    NOTE,
)

TABLES: dict[str, tuple[Column, ...]] = {
    "records": _RECORDS,
    "scores": _SCORES,
    "speed": _SPEED,
    "quality": _QUALITY,
    "acceptance": _ACCEPTANCE,
    "lengths": _LENGTHS,
    "comparison": _COMPARISON,
    "recommendation": _RECOMMENDATION,
    "summary": _SUMMARY,
    "reproduction": _REPRODUCTION,
    "prediction": _PREDICTION,
    "lossless_tests": _LOSSLESS_TESTS,
    "certificate": _CERTIFICATE,
    "power": _POWER,
    "audit": _AUDIT,
}


def columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table; an unknown one raises `UserError`."""
    if table not in TABLES:
        raise UserError(f"unknown table '{table}'", f"The tables are {', '.join(TABLES)}.")
    return TABLES[table]


ENDS = ("", "_low", "_high")  # endings of the names of a figure and of its interval

# ---- Tables as DataFrames and as files

_DTYPES = {"string": "string", "int": "Int64", "float": "float64"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begin a text that spreadsheets run as a formula


def frame(table: str, rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a DataFrame with exactly the declared columns and types.

    A row may leave columns out. A key that is no column raises `ValueError`.
    """
    import pandas as pd

    given = list(rows)
    dtypes = {column.name: _DTYPES[column.dtype] for column in columns(table)}
    unknown = set[str]().union(*given) - dtypes.keys()
    if unknown:
        raise ValueError(f"not in the schema of {table}: {', '.join(sorted(unknown))}")
    series = {}
    for name, dtype in dtypes.items():
        series[name] = pd.Series([row.get(name) for row in given], dtype=dtype)
    return pd.DataFrame(series)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as `csv_text`, whole or not at all; raises `UserError` if it cannot."""
    write_file(path, csv_text(table).encode())


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV with 6 significant digits; missing values are empty.

    A text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    safe = table.copy()
    for name, values in table.items():
        if values.dtype.kind == "O":
            safe[name] = values.map(_no_formula)
    return str(safe.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _no_formula(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
