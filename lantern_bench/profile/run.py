"""The profile of a model: which forwards and steps are measured, their rows, their CSV file and their plot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml

from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.errors import UserError
from lantern_bench.methods.tables import DRAFTINGS, chain_problem
from lantern_bench.methods.trees import topology_of
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.random_model import random_model, random_model_of_size, read_size
from lantern_bench.models.registry import model_of
from lantern_bench.profile.steps import Rates, StepCost, decode_memory, forward_ms, forward_need, step_costs
from lantern_bench.profile.tree_search import with_drafting
from lantern_bench.report.cost_model import (
    Setting,
    StepTimes,
    fit_device,
    named_draft,
    step_samples,
)
from lantern_bench.report.curves import save_figure
from lantern_bench.report.reproduction import device_in_words
from lantern_bench.report.tables import write_csv
from lantern_bench.runs.devices import Compute
from lantern_bench.runs.machine import machine_block
from lantern_bench.runs.runner import compute_block

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Row = dict[str, Any]

_NODES = (1, 8, 16, 32, 64)
_PARTS = {"draft_ms": "#0072B2", "target_ms": "#009E73", "verify_ms": "#D55E00", "other_ms": "#999999"}


class Subject(NamedTuple):
    """What is profiled: a model, whether its weights are trained, prompts, guidance, seed, tokens (None: all)."""

    model: LoadedModel
    trained: bool
    prompts: Sequence[str]
    cfg_scale: float
    seed: int
    tokens: int | None

    @property
    def guided(self) -> bool:
        """Whether a forward has unconditional rows."""
        return self.cfg_scale != 1


def step_of(tree: str, decoding: Decoding) -> Decoding:
    """Return `decoding` with a tree by name; `58n5d10b` is dynamic. Raises `UserError` for one that cannot be."""
    found = re.fullmatch(r"(\d+)n(\d+)d(\d+)b", tree)
    if found is None:
        values: dict[str, Any] = {"drafting": "static", "tree": tree}
    else:
        nodes, depth, beam = map(int, found.groups())
        values = {"drafting": "dynamic", "nodes": nodes, "depth": depth, "beam": beam}
    paths = () if found else topology_of(tree)
    problem = chain_problem(decoding.rule, values["drafting"], paths, tree)
    unfit = DRAFTINGS[values["drafting"]].problem(values)
    if unfit is not None:
        problem = f"{unfit[0]} {values[unfit[0]]}: {unfit[1]}"
    if problem is not None:
        raise UserError(f"--tree {tree}: {problem}")
    return with_drafting(decoding, values)


def load_subject(
    name: str, size: str | None, random: bool, compute: Compute, images: int, seed: int, tokens: int | None
) -> Subject:
    """Load the model (or make a random one) with prompts that it accepts; raises as `read_size` and `Model.load`."""
    noise = torch.Generator(compute.device).manual_seed(seed)
    if size is not None:
        made = random_model_of_size(read_size(size), *compute, noise)
        return Subject(made, False, [""] * images, 2.0, seed, tokens)
    model = model_of(name)
    prompts = next((texts for texts in model.prompt_sets.values() if texts), ("anything",))
    loaded = random_model(name, *compute, noise) if random else model.load(*compute)
    scale = float(model.defaults.get("cfg_scale", 1.0))
    return Subject(loaded, not random, [prompts[n % len(prompts)] for n in range(images)], scale, seed, tokens)


def measure(subject: Subject, steps: Mapping[str, Decoding], rates: Rates, on_progress: OnProgress) -> list[Row]:
    """Measure target forwards by number of nodes, then each kind of step by name, in turns."""
    model, condition = subject.model, subject.model.condition(subject.prompts[:1])
    rows: list[Row] = []
    # Before the steps take turns: what other trees allocate stays allocated.
    memory = {}
    for number, (name, decoding) in enumerate(steps.items(), start=1):
        memory[name] = _memory(subject, decoding)  # its programs are compiled here
        on_progress("measuring memory", number / len(steps))
    for number, nodes in enumerate(_NODES, start=1):
        milliseconds = forward_ms(model, condition, nodes, subject.cfg_scale)
        rows.append(_forward_row(subject, nodes, milliseconds, rates))
        on_progress("measuring forwards", number / len(_NODES))
    tell = partial(on_progress, "measuring steps")
    costs = step_costs(model, list(steps.values()), subject.prompts, subject.seed, subject.tokens, tell)
    for (name, decoding), cost in zip(steps.items(), costs, strict=True):
        rows.append(_step_row(subject, name, decoding, cost, rows, rates) | memory[name])
    return rows


def _forward_row(subject: Subject, nodes: int, milliseconds: float, rates: Rates) -> Row:
    target: Any = subject.model.target
    needed, operations = forward_need(target, nodes, subject.guided)
    bound = 1e3 * max(needed / rates.bytes_per_s, operations / rates.operations_per_s)
    row = {"what": "forward", "name": f"{nodes} nodes", "nodes": nodes, "milliseconds": milliseconds}
    return row | {"bound_ms": bound, "over_bound": milliseconds / bound}


def _step_row(
    subject: Subject, name: str, decoding: Decoding, cost: StepCost, before: Sequence[Row], rates: Rates
) -> Row:
    row = _forward_row(subject, _nodes(subject, decoding), cost.total, rates) | {"what": "step", "name": name}
    row |= cost.parts
    plain = next((one["milliseconds"] for one in before if one["name"] == "ar"), cost.total)
    # An autoregressive step samples inside the target's program: what exceeds a bare forward is outside the target.
    forward = next(one["milliseconds"] for one in before if one["nodes"] == 1)
    outside = cost.total - forward if decoding.drafting == "none" else cost.parts["verify_ms"] + cost.parts["other_ms"]
    row |= {"outside_share": outside / cost.total, "break_even_mal": cost.total / plain}
    # Drafts of random weights are accepted by chance, so their accepted length means nothing.
    length = cost.mean_accepted_length if subject.trained else float("nan")
    return row | {"mean_accepted_length": length, "speedup": length * plain / cost.total}


def _memory(subject: Subject, decoding: Decoding) -> Row:
    one_image = partial(step_costs, subject.model, [decoding], subject.prompts[:1], tokens=24)
    peak, accounted = decode_memory(subject.model, _nodes(subject, decoding), subject.guided, one_image)
    return {"peak_memory_mb": peak / 1e6, "accounted_memory_mb": accounted / 1e6}


def _nodes(subject: Subject, decoding: Decoding) -> int:
    return 1 if decoding.drafting == "none" else drafting_of(decoding, subject.model.target).nodes


def save_device(subject: Subject, rows: Sequence[Row], compute: Compute, path: Path) -> None:
    """Fit a device to the rows of `measure` and write its file, for `lantern-bench predict --device`.

    Raises `UserError` where the file cannot be written.
    """
    sizes = subject.model.target.config  # type: ignore[attr-defined]
    kind, size = "gpu" if compute.device.type == "cuda" else "cpu", compute.dtype.itemsize
    at = Setting(sizes, 1, subject.guided, sizes.prefix + sizes.image_tokens // (1 if kind == "gpu" else 2))
    # Forwards by themselves find weights and cache where the forward before left them: a step's own take longer.
    steps = {row["name"]: StepTimes(**{part: row[part] for part in _PARTS}) for row in rows if row["what"] == "step"}
    samples = [one for name, times in steps.items() for one in step_samples(at, named_draft(name), size, times)]
    host = [times.other_ms for name, times in steps.items() if name != "ar"]
    where = {"machine": machine_block()} | compute_block(compute, subject.model.engine.compile)
    note = f"fitted to {len(samples)} times of `lantern-bench profile`: {subject.model.name}, {compute.dtype_name}"
    facts = {"name": path.stem, "about": device_in_words(where), "kind": kind, "weight_bytes": size}
    facts |= {"code": "compiled" if subject.model.engine.compile else "eager"}
    device = fit_device(samples, **facts, step_us=round(1e3 * median(host), 2) if host else 0.0, sources=(note,))
    try:
        write_atomically(path, yaml.safe_dump(device.model_dump(mode="json"), sort_keys=False).encode())
    except OSError as error:
        raise UserError(f"--save-device {path}: cannot be written: {error.strerror}") from error


def write_step_costs(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`; raises `UserError` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    axes, right = figure.subplots(1, 2)
    steps = table[table["what"] == "step"]
    left = steps["milliseconds"] * 0.0
    for part, colour in _PARTS.items():
        axes.barh(steps["name"], steps[part], left=left, color=colour, label=part.removesuffix("_ms"))
        left = left + steps[part]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step")
    axes.legend(frameon=False)
    _draw_speedups(right, steps)
    figure.tight_layout()
    files = [folder / "profile.csv", folder / "profile.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table, files[0])
        save_figure(figure, files[1], dpi=160, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def _draw_speedups(axes: Axes, steps: pd.DataFrame) -> None:
    drafted = steps[steps["break_even_mal"].notna() & (steps["name"] != "ar")]
    longest = max([6.0, *(drafted["mean_accepted_length"].dropna() + 1)])
    for number, row in enumerate(drafted.to_dict("records")):
        colour, even, length = f"C{number}", row["break_even_mal"], row["mean_accepted_length"]
        style = ("-", "--", "-.", ":")[number % 4]
        axes.plot([1.0, longest], [1.0 / even, longest / even], label=row["name"], color=colour, linestyle=style)
        axes.plot([length], [length / even], marker="o", color=colour)  # nan, of random weights, draws nothing
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("mean accepted length (points: measured)")
    axes.set_ylabel("speedup over ar")
    if len(drafted):
        axes.legend(frameon=False)
