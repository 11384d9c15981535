"""Every column of every table, declared once, in the order of the files; docs/results-format.md is made from it.

A quantity has one name in code, flag, column, axis and documentation: the one declared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lantern_bench.errors import UserError
from lantern_bench.methods.metrics import Metric, listed
from lantern_bench.methods.tables import DRAFTINGS, IN_SUMMARY, METRICS, MODES, OF_IMAGES, OF_SETS, PARAMETERS, RULES


class Column(NamedTuple):
    """One column; `dtype` is `string`, `int`, `float`, `bool`, `list[int]` or `list[list[int]]`."""

    name: str
    dtype: str
    unit: str
    meaning: str


def figure(name: str, unit: str, meaning: str, interval: str = "95 % interval") -> tuple[Column, Column, Column]:
    """Return an uncertain figure with the two ends of its interval."""
    return (
        Column(name, "float", unit, meaning),
        Column(f"{name}_low", "float", unit, f"lower end of the {interval} of {name}"),
        Column(f"{name}_high", "float", unit, f"upper end of the {interval} of {name}"),
    )


REPEAT = "interval of 95 % of repeated runs"
"""Figures made of seconds: where a repeat has its figure. All others: a 95 % confidence interval over prompts."""

_SPEEDUP = figure("speedup", "", "seconds of ar / seconds of the cell, sums over the same prompts of one run", REPEAT)
_OVER_LOSSLESS = (
    *figure("speedup_over_lossless", "", "seconds of lossless_cell / seconds of the cell, same prompts", REPEAT),
    Column("lossless_cell", "string", "", "fastest lossless cell of the run with the cell's model and sampling"),
)
CHECKSUM = Column("checksum", "string", "", "of the line's bytes in front of it: SHA-256, the first 16 hex digits")
_DISTURBED = Column("disturbed", "int", "images", "images whose threads lacked a core; empty where not recorded")


CELL_COLUMNS: tuple[Column, ...] = (
    Column("cell_id", "string", "", "the cell: one fully resolved decoding configuration"),
    Column("mode", "string", "", f"one of {', '.join(MODES)}"),
    Column("drafting", "string", "", ", ".join(f"{name} ({row.about})" for name, row in DRAFTINGS.items())),
    Column("tree", "string", "", "name of the static tree, or nodes, depth and beam of the dynamic one"),
    Column("rule", "string", "", f"acceptance rule: {', '.join(RULES)}"),
    *(Column(key, *row.column, row.help.rstrip(".")) for key, row in PARAMETERS.items() if row.column),
    Column("batch", "int", "images", "images decoded at once"),
    Column("model", "string", "", "name of the model"),
)

NOTE = Column("note", "string", "", "why a figure is missing, or what to know about it")


# ---- The tables of `lantern-bench certify`: emitted TV, the certificate and the audit


_PLACE = (
    Column("prompt_id", "string", "", "12 hex digits of the hash of the prompt's text"),
    Column("repeat", "int", "", "earlier uses of the prompt in the measurement"),
    Column("position", "int", "tokens", "tokens of the image committed before the place"),
)

_EMITTED_TV_PLACES = (
    *CELL_COLUMNS,
    *_PLACE,
    Column(
        "emitted_tv", "float", "", "TV of target and first token of a step; an estimate that errs upwards if sampled"
    ),
    Column("emitted_tv_crossed", "float", "", "estimate from the same draws that errs downwards (sampled)"),
    Column(
        "moved_mass", "float", "", "neighbour mass of the root's children, by the chance to try them (deterministic)"
    ),
)

_EMITTED_TV = (
    *CELL_COLUMNS,
    Column("places", "int", "places", "sampled places"),
    Column("prompts", "int", "prompts", "prompts among them: what is resampled"),
    *figure(
        "emitted_tv", "", "mean TV of target and first token of a step; for sampled drafts midway of two estimates"
    ),
    Column("emitted_tv_crossed", "float", "", "mean of the estimate that errs downwards (sampled)"),
    Column("emitted_tv_median", "float", "", "median over places"),
    Column("emitted_tv_max", "float", "", "largest at any place"),
    Column("moved_mass", "float", "", "most the mean may be under exact, from the masses moved (deterministic)"),
    Column("times_delta", "float", "", "mean emitted TV / delta"),
    *figure("above_delta", "", "share of places whose emitted TV is above delta"),
    NOTE,
)

_MODEL = next(column for column in CELL_COLUMNS if column.name == "model")
_CERTIFICATE = (
    Column("model", "string", "", "name of the model"),
    Column("check", "string", "", "what is checked"),
    Column("setting", "string", "", "how it was decoded"),
    Column("figure", "string", "", "what the number is"),
    *figure("measured", "", "the number"),
    Column("wanted", "string", "", "what it must be; empty where it is only reported"),
    Column(
        "passed",
        "string",
        "",
        "yes, NO, or weak (a broken rule is not rejected, few tokens are tested); empty: nothing is wanted",
    ),
    Column("n", "int", "", "images, prompts or places behind it"),
    NOTE,
)

_LOSSLESS_TESTS = (
    _MODEL,
    Column("setting", "string", "", "how it was decoded, in an audit also where: on the tables or with the model"),
    Column("broken", "string", "", "what is wrong on purpose; empty for the method itself"),
    Column("test", "string", "", "the test (docs/algorithms.md, section 6)"),
    Column("p_value", "float", "", "its p-value"),
    Column("p_holm", "float", "", "corrected for all tests of the command; broken methods: for as many tests"),
    Column("images", "int", "images", "images tested; a broken rule is decoded until it is rejected"),
    Column("tokens", "int", "tokens", "tokens tested"),
    Column("edge_tokens", "int", "tokens", "tokens left out because rounding may change whether they pass the filters"),
)

_AUDIT = (
    *CELL_COLUMNS,
    Column("form", "string", "", "values that differ from those of the mode; empty for the mode itself"),
    Column("claim", "string", "", "what its authors claim of its tokens: lossless or relaxed"),
    Column("source", "string", "", "arXiv number of their paper"),
    Column("verdict", "string", "", "the claim beside what was measured"),
    Column(
        "passed", "string", "", "yes, NO, or weak (a broken method not rejected); empty for claims that are not ours"
    ),
    Column("p_holm", "float", "", "smallest p-value of its tests, corrected for all tests of claims that say lossless"),
    Column("p_first", "float", "", "G-test of the first two tokens on the tables"),
    Column("p_joint", "float", "", "G-test of the first three tokens on the tables"),
    Column("p_later", "float", "", "G-tests of later three tokens on the tables: the smallest, times their number"),
    Column("p_images", "float", "", "smallest p-value of the whole-image tests with the model, not corrected"),
    Column("table_images", "int", "images", "images decoded on the tables"),
    Column("images", "int", "images", "images decoded with the model"),
    Column("broken", "string", "", "what was broken on purpose, each with its smallest p-value"),
    Column("power_p", "float", "", "the largest p-value among what was broken, on the tables"),
    *figure("table_tv", "", "TV of three successive tokens on the tables, of what is not lossless", "two estimates"),
    *figure("emitted_tv", "", "of a relaxed mode with the model: mean TV of target and first token of a step"),
    NOTE,
)

SCHEMA_VERSION = 2
READABLE = (1, 2)
"""The versions of runs that are read. A run is continued only in its own, since the version is in every key.

1: the first. 2: records with neighbour_metric, bound and prompt_source, scores with protocol_version, hpsv2,
image_reward and n_reference; in rows of version 1 they are empty.
"""


def _quality_of(name: str) -> tuple[Column, ...]:
    """A quality figure with its interval, and what it is compared with ar by."""
    metric = METRICS[name]
    columns = list(figure(name, "", metric.meaning))
    if metric.has_spread:
        columns += figure(
            f"{name}_band", "", f"ar's own spread: {name} of further ar images, same prompts, other seeds"
        )
        columns.append(_verdict(name))
    if metric.is_paired:
        columns += _difference(name)
    return (*columns, *_extras(metric))


def _extras(metric: Metric) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in metric.extras)


def _verdict(name: str) -> Column:
    return Column(f"{name}_verdict", "string", "", f"{name} against ar's own spread: within or outside")


def _difference(name: str) -> tuple[Column, ...]:
    return (
        *figure(f"{name}_vs_ar", "", f"{name} minus that of ar, over the same prompts"),
        Column(f"{name}_vs_ar_p", "float", "", f"two-sided p-value of {name}_vs_ar: cells exchanged within prompts"),
    )


def _beside_paper(name: str) -> tuple[Column, Column]:
    return (
        Column(f"{name}_published", "float", "", f"the published {name}, where the experiment names a paper's table"),
        Column(f"{name}_difference", "float", "", f"{name} minus the published one"),
    )


def _scores_of(metric: Metric) -> tuple[Column, ...]:
    """The columns of a metric of sets in rows of level cell and, as centre and ends of the spread, band."""
    also = f"; of an image: {metric.image_meaning}" if metric.image_meaning else ""
    meaning = f"{metric.meaning} (levels cell and band{also})"
    return (*figure(metric.name, "", meaning), *_extras(metric))


_SCORERS = {
    "fid_features": f"feature extractor behind {listed([name for name in IN_SUMMARY if name in OF_SETS])}",
    "clip_model": f"CLIP model behind {listed([name for name in IN_SUMMARY if name in OF_IMAGES])}",
}


def _summary_of_quality() -> Iterator[Column]:
    """The metrics of the summary, each with the published figure; a scorer stands behind its first metric."""
    scorers = dict(_SCORERS)
    for name in IN_SUMMARY:
        metric = METRICS[name]
        yield from figure(name, "", metric.meaning)
        if metric.has_spread:
            yield _verdict(name)
        yield from _beside_paper(name)
        if metric.scored_by in scorers:
            yield Column(metric.scored_by, "string", "", scorers.pop(metric.scored_by))


_IMAGES = (
    Column("images", "int", "images", "images behind the means of this row"),
    Column("failed", "int", "images", "images that failed and take no part in any mean"),
)

_RECORDS = (
    Column("schema_version", "int", "", "version of this schema"),
    Column("record_key", "string", "", "hash of all that can change the tokens of this image"),
    *CELL_COLUMNS,
    Column("prompt_id", "string", "", "12 hex digits of the hash of the prompt's text"),
    Column("prompt", "string", "", "the prompt"),
    Column("prompt_source", "string", "", "what the prompt's set calls it, such as coco:391895"),
    Column("repeat", "int", "", "earlier uses of the prompt in this cell"),
    Column("seed", "int", "", "seed of the image's generator, the same in all cells"),
    Column("order_index", "int", "", "place in the run's order of execution"),
    Column("process", "int", "", "process that made the image, counted over the sessions of the run, from 0"),
    Column("device", "string", "", "name of the device that made the image: the GPU, else the CPU"),
    Column("device_id", "string", "", "tells devices of one name apart; a hash that names no host"),
    Column("clock_mhz", "int", "MHz", "clock of the device just after decoding, read at most every 10 s"),
    Column("clock_max_mhz", "int", "MHz", "its highest clock"),
    Column("driver", "string", "", "version of the GPU's driver"),
    Column("status", "string", "", "ok or failed"),
    Column("error", "string", "", "what went wrong, when it failed"),
    Column("tokens", "int", "tokens", "image tokens kept"),
    Column("target_forwards", "int", "forwards", "forward passes of the target, prefill included"),
    Column("drafter_forwards", "int", "forwards", "forward passes of the drafter"),
    Column("start_per_step", "list[int]", "tokens", "image position at the start of each step"),
    Column("committed_per_step", "list[int]", "tokens", "tokens committed by each step and kept"),
    Column("accepted_per_step", "list[int]", "tokens", "drafts accepted by each step, bonus token not counted"),
    Column("offered_depth_per_step", "list[int]", "levels", "depth drafted in each step"),
    Column("child_rank_per_step", "list[list[int]]", "", "child taken at each depth; -1 offered and rejected"),
    Column("mean_accepted_length", "float", "tokens/step", "tokens committed per step, bonus token included"),
    Column("mal_uncut", "float", "tokens/step", "the same with the last step uncut, as published code counts"),
    Column("step_compression", "float", "tokens/forward", "tokens kept per target forward, prefill included"),
    Column("seconds", "float", "s", "decoding, without text encoding and pixels"),
    Column("draft_seconds", "float", "s", "part of seconds spent drafting"),
    Column("target_seconds", "float", "s", "part of seconds spent in the target"),
    Column("verify_seconds", "float", "s", "part of seconds spent verifying"),
    Column("other_seconds", "float", "s", "the rest of seconds"),
    Column("pixel_seconds", "float", "s", "tokens to pixels, outside seconds"),
    Column("cpu_seconds", "float", "s", "CPU time of all threads of the process within seconds"),
    Column("waited_seconds", "float", "s", "thread-seconds within seconds that could run and got no core (Linux)"),
    Column(
        "involuntary_switches", "int", "", "times within the batch's seconds that a thread lost its core to another"
    ),
    Column("steal_seconds", "float", "s", "core-seconds within seconds that the hypervisor took from usable cores"),
    Column("disturbed", "bool", "", "whether threads lacked a core for more than 5 % of seconds"),
    Column("attempts", "int", "", "times the image was decoded; seconds are of the least disturbed"),
    Column("peak_memory_bytes", "int", "bytes", "peak memory while decoding"),
    Column("moved_mass", "float", "", "neighbour mass, summed over accepted drafts"),
    Column("moved_mass_tried", "float", "", "neighbour mass, summed over tried drafts"),
    Column("tokens_sha256", "string", "", "SHA-256 of the tokens as little-endian int32"),
    Column("image_sha256", "string", "", "SHA-256 of the PNG file"),
    Column("image", "string", "", "the PNG file, relative to the run directory; empty when none was written"),
    CHECKSUM,
)

_SCORES = (
    Column("schema_version", "int", "", "version of this schema"),
    Column("level", "string", "", "what the row scores: image, cell, or band (ar with other seeds)"),
    Column("protocol", "string", "", "name of the scoring protocol"),
    Column("protocol_version", "int", "", "version of the protocol; the manifest holds what it says"),
    Column("cell_id", "string", "", "the cell; of a band the first ar cell"),
    Column("record_key", "string", "", "the image's record (level image)"),
    *(Column(name, "float", "", f"{METRICS[name].image_meaning} (level image)") for name in OF_IMAGES),
    Column("clip_model", "string", "", "the CLIP or reward model and its weights"),
    *(column for name in OF_SETS for column in _scores_of(METRICS[name])),
    Column("n", "int", "images", "pictures scored (level cell), or of one set (level band)"),
    Column("band_sets", "int", "sets", "sets of ar images with different seeds (level band)"),
    Column("extractor", "string", "", "feature extractor and its weights (level cell)"),
    Column("reference", "string", "", "reference set, its size and hash (level cell)"),
    NOTE,
    CHECKSUM,
)

_SPEED = (
    *CELL_COLUMNS,
    *_IMAGES,
    _DISTURBED,
    Column("held_up", "int", "images", "images whose seconds count less here than in the records (Intervals)"),
    *figure("latency_s", "s", "mean seconds per image", REPEAT),
    Column("tokens_per_s", "float", "tokens/s", "tokens kept per second"),
    *_SPEEDUP,
    *_OVER_LOSSLESS,
    *figure("step_compression", "tokens/forward", "tokens kept per target forward, prefill included; 1 for ar"),
    *figure("mean_accepted_length", "tokens/step", "tokens committed per step, bonus token included"),
    Column("mal_uncut", "float", "tokens/step", "the same with last steps uncut, as published code counts"),
    Column("accepted_drafts", "float", "tokens/step", "drafts accepted per step, bonus token not counted"),
    Column("acceptance_rate", "float", "", "depths accepted / depths offered"),
    Column("target_forwards", "float", "forwards", "mean forward passes of the target per image"),
    Column("drafter_forwards", "float", "forwards", "mean forward passes of the drafter per image"),
    Column("draft_ms", "float", "ms", "drafting, per step"),
    Column("target_ms", "float", "ms", "target, per step"),
    Column("verify_ms", "float", "ms", "verification, per step"),
    Column("other_ms", "float", "ms", "the rest, per step"),
    Column("peak_memory_mb", "float", "MB", "largest peak memory of an image"),
    NOTE,
)

_QUALITY = (
    *CELL_COLUMNS,
    *_IMAGES,
    *(column for name in OF_SETS for column in _quality_of(name)),
    Column("band_sets", "int", "sets", "sets of ar images behind the bands"),
    *(column for name in OF_IMAGES for column in _quality_of(name)),
    Column("fid_features", "string", "", f"feature extractor behind {listed(OF_SETS)}"),
    Column("clip_model", "string", "", "CLIP model behind clip_score, or the reward model"),
    Column("reference", "string", "", "reference set"),
    Column("protocol", "string", "", "name of the scoring protocol"),
    Column("protocol_version", "int", "", "version of the protocol; the manifest holds what it says"),
    Column("moved_mass", "float", "", "mean neighbour mass per accepted draft"),
    NOTE,
)

_ACCEPTANCE = (
    *CELL_COLUMNS,
    Column("axis", "string", "", "depth (of the tree) or position (in the image)"),
    Column("index", "int", "", "the depth, from 1, or the position, from 0"),
    Column("offered", "int", "steps", "steps whose walk stood there with a child to try"),
    Column("accepted", "int", "steps", "those of them that moved on"),
    *figure("rate", "", "accepted / offered"),
    NOTE,
)

_LENGTHS = (
    *CELL_COLUMNS,
    Column("length", "int", "tokens", "tokens a step committed, bonus token included"),
    Column("steps", "int", "steps", "steps of that length"),
    *figure("share", "", "steps of that length / steps"),
)

_COMPARISON = (
    Column("cell_id", "string", "", "the cell, the same in both runs"),
    Column("model", "string", "", "name of the model"),
    Column("quantity", "string", "", "what is compared, by the name of its column"),
    Column("protocol", "string", "", "scoring protocol behind a quality figure"),
    Column("a", "float", "", "the figure in the first run, over the pairs"),
    Column("b", "float", "", "the figure in the second run, over the pairs"),
    Column("kind", "string", "", "ratio (how many times better, above 1 for the second run) or difference (b - a)"),
    *figure("effect", "", "the ratio or the difference"),
    Column("p_value", "float", "", "two-sided: runs exchanged within prompts; speedup: t over processes"),
    Column("p_holm", "float", "", "the same after Holm, over all comparisons of the table"),
    Column("verdict", "string", "", "of the second run: better, worse or not distinguishable; empty where not tested"),
    Column("pairs", "int", "images", "(prompt, repeat) pairs that both runs have"),
    Column("prompts", "int", "prompts", "prompts among them"),
    NOTE,
)

_SUMMARY = (
    Column("cell_id", "string", "", "the cell"),
    Column("model", "string", "", "name of the model"),
    Column("method", "string", "", "the mode"),
    Column("parameters", "string", "", "what is set beyond the mode, for reading"),
    *_IMAGES,
    _DISTURBED,
    *_SPEEDUP,
    *_beside_paper("speedup"),
    *_OVER_LOSSLESS,
    *figure("mean_accepted_length", "tokens/step", "tokens committed per step, bonus token included"),
    *_beside_paper("mean_accepted_length"),
    *_summary_of_quality(),
    NOTE,
)

_REPRODUCTION = (
    Column("cell_id", "string", "", "the cell; empty for a published row that no cell stands for"),
    Column("model", "string", "", "name of the model"),
    Column("method", "string", "", "the mode"),
    Column("parameters", "string", "", "what is set beyond the mode, for reading"),
    Column("residual", "string", "", "residual after a relaxed rejection: exact or official"),
    *_IMAGES,
    Column("paper_row", "string", "", "the published row that stands beside the cell"),
    Column("figure", "string", "", "the figure, by the name of its column in the other tables"),
    Column("published", "float", "", "the published figure; empty where none could be had"),
    Column("source", "string", "", "where the published figure was read"),
    Column("confidence", "string", "", "paper, secondary, derived, definition or user"),
    *figure("ours", "", "the figure of this run"),
    Column("difference", "float", "", "ours minus published; empty where the two are not of one kind"),
    Column("measured_by", "string", "", "the network and its weights behind ours, where there is one"),
    NOTE,
)

_PREDICTION = (
    *CELL_COLUMNS,
    Column("device", "string", "", "the device that the row is predicted for"),
    Column("stack", "string", "", "compiled (this package) or eager (code as it is published)"),
    Column("images", "int", "images", "images whose steps were used"),
    Column("mean_accepted_length", "float", "tokens/step", "tokens committed per step in the run"),
    Column("nodes", "int", "nodes", "nodes of a target forward, the root included"),
    Column("drafter_forwards_per_step", "int", "forwards", "forward passes of the drafter per step"),
    Column("speedup", "float", "", "predicted seconds of ar / predicted seconds of the cell"),
    Column("speedup_measured", "float", "", "speedup of the run, on its own machine"),
    Column("speedup_error", "float", "", "speedup / speedup_measured - 1, of a run on the device with the same code"),
    Column("latency_s", "float", "s", "predicted seconds per image"),
    Column("ar_ms", "float", "ms", "predicted, an autoregressive step"),
    Column("step_ms", "float", "ms", "predicted, a step of the cell: draft, target, verify and other"),
    Column("draft_ms", "float", "ms", "drafting, per step"),
    Column("target_ms", "float", "ms", "target, per step"),
    Column("verify_ms", "float", "ms", "verification, per step"),
    Column("other_ms", "float", "ms", "host work outside the programs, per step"),
    Column("read_ms", "float", "ms", "reading weights, cache and distributions, if nothing else took time"),
    Column("multiply_ms", "float", "ms", "products, if nothing else took time"),
    Column("launch_ms", "float", "ms", "kernels, if nothing else took time"),
    Column("hours", "float", "h", "with --prompts: until the last of --devices has decoded its prompts in the cell"),
    Column("device_hours", "float", "h", "hours times devices"),
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
    "summary": _SUMMARY,
    "reproduction": _REPRODUCTION,
    "prediction": _PREDICTION,
    "emitted_tv_places": _EMITTED_TV_PLACES,
    "emitted_tv": _EMITTED_TV,
    "lossless_tests": _LOSSLESS_TESTS,
    "certificate": _CERTIFICATE,
    "audit": _AUDIT,
}


def columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table; an unknown one raises `UserError`."""
    if table not in TABLES:
        raise UserError(f"unknown table '{table}'", f"The tables are {', '.join(TABLES)}.")
    return TABLES[table]


def to_markdown() -> str:
    """Return all tables as Markdown, for the documentation."""
    sections = [f"Schema version {SCHEMA_VERSION}.\n"]
    for name, table in TABLES.items():
        lines = [f"## {name}\n", "| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.meaning} |" for c in table]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)
