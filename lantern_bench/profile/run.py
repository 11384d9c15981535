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
from lantern_bench.report.cost_model import Setting, StepTimes, fit_device, named_draft, step_samples
from lantern_bench.report.curves import save_figure
from lantern_bench.report.reproduction import device_in_words
from lantern_bench.report.tables import write_csv
from lantern_bench.runs.devices import Compute, machine_block
from lantern_bench.runs.runner import compute_block

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

_NODES = (1, 8, 16, 32, 64)  # of the forwards that are measured
_PARTS = {"draft_ms": "#0072B2", "target_ms": "#009E73", "verify_ms": "#D55E00", "other_ms": "#999999"}


class ProfiledModel(NamedTuple):
    """A model, and with what it is decoded."""

    model: LoadedModel
    is_trained: bool
    prompts: Sequence[str]  # one for each image
    cfg_scale: float
    seed: int
    tokens: int | None  # decoded of each image; None: all

    @property
    def is_guided(self) -> bool:
        """Whether a forward has unconditional rows."""
        return self.cfg_scale != 1

    def nodes(self, decoding: Decoding) -> int:
        """Return how many nodes the target scores in a step of `decoding`."""
        return drafting_of(decoding, self.model.target).nodes if decoding.drafts else 1


def load_profiled_model(
    name: str, size: str | None, random: bool, compute: Compute, images: int, seed: int, tokens: int | None
) -> ProfiledModel:
    """Load the model (or make a random one) with prompts that it accepts; raises as `read_size` and `Model.load`."""
    noise = torch.Generator(compute.device).manual_seed(seed)
    if size is not None:
        loaded = random_model_of_size(read_size(size), *compute, noise)
        return ProfiledModel(loaded, False, [""] * images, 2.0, seed, tokens)
    model = model_of(name)
    prompts = next((texts for texts in model.prompt_sets.values() if texts), ("anything",))
    loaded = random_model(name, *compute, noise) if random else model.load(*compute)
    cfg_scale = float(model.defaults.get("cfg_scale", 1.0))
    cycled = [prompts[number % len(prompts)] for number in range(images)]
    return ProfiledModel(loaded, not random, cycled, cfg_scale, seed, tokens)


def step_of(tree: str, decoding: Decoding) -> Decoding:
    """Return `decoding` with a tree by name; `58n5d10b` is dynamic. Raises `UserError` for one that cannot be."""
    dynamic = re.fullmatch(r"(\d+)n(\d+)d(\d+)b", tree)
    values: dict[str, Any] = {"drafting": "static", "tree": tree}
    if dynamic:
        sizes = map(int, dynamic.groups())
        values = {"drafting": "dynamic", **dict(zip(("nodes", "depth", "beam"), sizes, strict=True))}
    problem = chain_problem(decoding.rule, values["drafting"], () if dynamic else topology_of(tree), tree)
    unfit = DRAFTINGS[values["drafting"]].problem(values)
    if unfit is not None:
        problem = f"{unfit[0]} {values[unfit[0]]}: {unfit[1]}"
    if problem is not None:
        raise UserError(f"--tree {tree}: {problem}")
    return with_drafting(decoding, values)


# ---- The rows


def measure(profiled: ProfiledModel, steps: Mapping[str, Decoding], rates: Rates, on_progress: OnProgress) -> list[Row]:
    """Measure target forwards by number of nodes, then each kind of step by name, in turns; one step is `ar`."""
    # Memory before the steps take turns: what other trees allocate stays allocated.
    memory = []
    for number, decoding in enumerate(steps.values(), start=1):
        memory.append(_memory(profiled, decoding))  # its programs are compiled here
        on_progress("measuring memory", number / len(steps))
    condition = profiled.model.condition(profiled.prompts[:1])
    forwards: list[Row] = []
    for number, nodes in enumerate(_NODES, start=1):
        milliseconds = forward_ms(profiled.model, condition, nodes, profiled.cfg_scale)
        label = {"what": "forward", "name": f"{nodes} nodes"}
        forwards.append(label | _bounded(profiled, nodes, milliseconds, rates))
        on_progress("measuring forwards", number / len(_NODES))
    costs = step_costs(
        profiled.model,
        list(steps.values()),
        profiled.prompts,
        profiled.seed,
        profiled.tokens,
        partial(on_progress, "measuring steps"),
    )
    ar_ms, one_node_ms = costs[list(steps).index("ar")].total, forwards[0]["milliseconds"]
    rows: list[Row] = []
    for (name, decoding), cost, memory_row in zip(steps.items(), costs, memory, strict=True):
        row = {"what": "step", "name": name} | _bounded(profiled, profiled.nodes(decoding), cost.total, rates)
        rows.append(row | _step_columns(cost, decoding, ar_ms, one_node_ms, profiled.is_trained) | memory_row)
    return forwards + rows


def _bounded(profiled: ProfiledModel, nodes: int, milliseconds: float, rates: Rates) -> Row:
    """The columns of measured milliseconds beside the least that the device allows."""
    needed, operations = forward_need(profiled.model.target, nodes, profiled.is_guided)  # type: ignore[arg-type]
    bound = 1e3 * max(needed / rates.bytes_per_s, operations / rates.operations_per_s)
    return {"nodes": nodes, "milliseconds": milliseconds, "bound_ms": bound, "over_bound": milliseconds / bound}


def _step_columns(cost: StepCost, decoding: Decoding, ar_ms: float, one_node_ms: float, is_trained: bool) -> Row:
    # An autoregressive step samples inside the target's program: what exceeds a bare forward is outside the target.
    outside = cost.parts["verify_ms"] + cost.parts["other_ms"] if decoding.drafts else cost.total - one_node_ms
    # Drafts of random weights are accepted by chance, so their accepted length means nothing.
    length = cost.mean_accepted_length if is_trained else float("nan")
    columns = {"outside_share": outside / cost.total, "break_even_mal": cost.total / ar_ms}
    return cost.parts | columns | {"mean_accepted_length": length, "speedup": length * ar_ms / cost.total}


def _memory(profiled: ProfiledModel, decoding: Decoding) -> Row:
    decode_image = partial(step_costs, profiled.model, [decoding], profiled.prompts[:1], tokens=24)
    peak, accounted = decode_memory(profiled.model, profiled.nodes(decoding), profiled.is_guided, decode_image)
    return {"peak_memory_mb": peak / 1e6, "accounted_memory_mb": accounted / 1e6}


# ---- Files


def save_device(profiled: ProfiledModel, rows: Sequence[Row], compute: Compute, path: Path) -> None:
    """Fit a device to the rows of `measure` and write its file, for `lantern-bench predict --device`.

    Raises `UserError` where the file cannot be written.
    """
    model, config = profiled.model, profiled.model.target.config  # type: ignore[attr-defined]
    is_gpu, weight_bytes = compute.device.type == "cuda", compute.dtype.itemsize
    context = config.prefix + config.image_tokens // (1 if is_gpu else 2)
    setting = Setting(config, 1, profiled.is_guided, context)
    # Forwards by themselves find weights and cache where the forward before left them: a step's own take longer.
    steps = {row["name"]: StepTimes(**{part: row[part] for part in _PARTS}) for row in rows if row["what"] == "step"}
    samples = []
    for name, times in steps.items():
        samples += step_samples(setting, named_draft(name), weight_bytes, times)
    host_ms = [times.other_ms for name, times in steps.items() if name != "ar"]
    device = fit_device(
        samples,
        name=path.stem,
        about=device_in_words({"machine": machine_block()} | compute_block(compute, model.engine.compile)),
        kind="gpu" if is_gpu else "cpu",
        weight_bytes=weight_bytes,
        code="compiled" if model.engine.compile else "eager",
        step_us=round(1e3 * median(host_ms), 2) if host_ms else 0.0,
        sources=(f"fitted to {len(samples)} times of `lantern-bench profile`: {model.name}, {compute.dtype_name}",),
    )
    try:
        write_atomically(path, yaml.safe_dump(device.model_dump(mode="json"), sort_keys=False).encode())
    except OSError as error:
        raise UserError(f"--save-device {path}: cannot be written: {error.strerror}") from error


def save_profile(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`; raises `UserError` if it cannot be written."""
    files = [folder / "profile.csv", folder / "profile.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table, files[0])
        save_figure(_drawn(table[table["what"] == "step"]), files[1], dpi=160, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def _drawn(steps: pd.DataFrame) -> Any:
    """Draw the parts of each step, and speedup by mean accepted length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    costs, speedups = figure.subplots(1, 2)
    left = steps["milliseconds"] * 0.0
    for part, colour in _PARTS.items():
        costs.barh(steps["name"], steps[part], left=left, color=colour, label=part.removesuffix("_ms"))
        left = left + steps[part]
    costs.invert_yaxis()
    costs.set_xlabel("milliseconds per step")
    costs.legend(frameon=False)
    drafted = steps[steps["name"] != "ar"]
    longest = max([6.0, *(drafted["mean_accepted_length"].dropna() + 1)])
    for number, row in enumerate(drafted.to_dict("records")):
        colour, even, length = f"C{number}", row["break_even_mal"], row["mean_accepted_length"]
        style = ("-", "--", "-.", ":")[number % 4]
        speedups.plot([1.0, longest], [1.0 / even, longest / even], label=row["name"], color=colour, linestyle=style)
        speedups.plot([length], [length / even], marker="o", color=colour)  # nan, of random weights, draws nothing
    speedups.axhline(1.0, color="black", linewidth=0.8)
    speedups.set_xlabel("mean accepted length (points: measured)")
    speedups.set_ylabel("speedup over ar")
    if len(drafted):
        speedups.legend(frameon=False)
    figure.tight_layout()
    return figure
