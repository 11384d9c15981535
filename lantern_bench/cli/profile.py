"""`lantern-bench profile`: where the time of a step goes, what the device allows, and what a tree must accept to pay.

Forwards of the target by number of nodes, steps of autoregressive decoding and of each tree by part, the bound that
bandwidth and matrix rate give, memory; a table, its CSV and a plot. `--search` looks for the fastest static tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.cli.options import compile_steps
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.profile.roofline import Rates
    from lantern_bench.profile.steps import StepCost
    from lantern_bench.profile.tree_search import Found
    from lantern_bench.runs.devices import Place


# ---- `lantern-bench profile --search`: the fastest static trees by measured acceptance and costs, measured themsel

# Wide enough to see at which ranks drafts are accepted, at every depth.
_PROBE = tuple([(r,) for r in range(5)] + [(*[0] * d, r) for d in range(1, 8) for r in range(3)])
_RANKS, _MOST_NODES, _SHOWN = 5, 26, 5
_SEARCHED_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_FORWARDS = 100


def search_trees(
    model: LoadedModel,
    rule: Mapping[str, Any],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    console: Console,
) -> None:
    """Print trees to be written into an experiment, with what they were expected to do and what they did.

    `rule` is the acceptance rule with guidance, as settings of a `Decoding`; `rows` are those of the profile, among
    them the step of autoregressive decoding and of a static tree or more. Raises `UserError` without the latter.
    """
    import pandas as pd

    from lantern_bench.config.decoding import Decoding
    from lantern_bench.profile.steps import forward_ms, step_cost
    from lantern_bench.profile.tree_search import acceptance_by_rank, best_trees, interpolated

    levels = _levels()
    static = [row for row in rows if row["what"] == "step" and row["name"] in levels]
    if not static:
        raise UserError("--search: needs the cost of a static tree", "Add one to --tree, such as chain-5.")
    traces = step_cost(model, Decoding(**rule, topology=_PROBE), prompts, seed + 1).traces
    rates = acceptance_by_rank(traces, _RANKS)
    condition = model.condition(prompts[:1])
    scale = float(rule["cfg_scale"])
    forward = interpolated({nodes: forward_ms(model, condition, nodes, scale, _FORWARDS) for nodes in _SEARCHED_NODES})
    level_ms = sum(row["draft_ms"] for row in static) / sum(levels[row["name"]] for row in static)
    rest = sum(row["verify_ms"] + row["other_ms"] for row in static) / len(static)
    found = best_trees(
        rates, _MOST_NODES, lambda paths: forward(len(paths) + 1) + level_ms * len(paths[-1]) + rest, _SHOWN
    )
    console.say("accepted at depth 1, 2, ... by rank: " + "; ".join(" ".join(f"{r:.2f}" for r in d) for d in rates))
    measured = [_measured(model, rule, one, prompts, seed, console) for one in found]
    console.table(pd.DataFrame(measured).round(3), title=" ".join(f"{key}={value:g}" for key, value in _shown(rule)))


def _measured(
    model: LoadedModel, rule: Mapping[str, Any], one: Found, prompts: Sequence[str], seed: int, console: Console
) -> dict[str, Any]:
    """A tree found, decoded with, and autoregressive decoding right after it: machines change their pace."""
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.profile.steps import step_cost

    text = " ".join("".join(map(str, path)) for path in one.topology)
    console.say(f"measuring {text}")
    cost = step_cost(model, Decoding(**rule, topology=one.topology), prompts, seed)
    settings: dict[str, Any] = {"mode": "ar", "cfg_scale": rule["cfg_scale"]}
    plain = step_cost(model, Decoding(**settings), prompts, seed)
    row = {"tree": text, "nodes": len(one.topology), "levels": len(one.topology[-1])}
    row |= {"expected_length": one.length, "expected_ms": one.milliseconds}
    row |= {"mean_accepted_length": cost.mean_accepted_length, "milliseconds": cost.total, "ar_ms": plain.total}
    return row | {"speedup": cost.mean_accepted_length * plain.total / cost.total}


def _shown(rule: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What of a rule is a number."""
    return [(key, value) for key, value in rule.items() if isinstance(value, int | float)]


def _levels() -> dict[str, int]:
    """How many drafter forwards each named tree takes."""
    from lantern_bench.config.trees import STATIC_TREES

    return {name: len(paths[-1]) for name, paths in STATIC_TREES.items()}


# ----

_NODES = (1, 8, 16, 32, 64)
_TREES = "chain-5,small-7,eagle1-25,58n5d10b"
_MB = 1e6
_NEIGHBOURS = 100


class _Subject(NamedTuple):
    """What is profiled: a model, whether its weights mean anything, prompts, guidance."""

    model: LoadedModel
    real: bool
    prompts: list[str]
    guidance: float


def profile(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="The model.")] = "lanterns",
    size: Annotated[str | None, typer.Option(help="A made-up model instead: LAYERSxWIDTH[xVOCABULARY[xSIDE]].")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Nothing of the model but its shape.")
    ] = False,
    tree: Annotated[list[str] | None, typer.Option(help=f"Trees; static names, or NnDdBb. Default {_TREES}.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Images decoded for each kind of step.")] = 4,
    tokens: Annotated[int | None, typer.Option(min=2, help="End the images after so many tokens.")] = None,
    cfg_scale: Annotated[float | None, typer.Option(min=0, help="Guidance scale; 1 is off.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the steps first.")] = True,
    search: Annotated[bool, typer.Option("--search", help="Look for the fastest static tree as well.")] = False,
    lambda_: Annotated[
        float | None, typer.Option("--lambda", help="Search for the trees of lantern++ with this lambda.")
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=1, help=f"Nearest codes of lantern++ in the search. Default {_NEIGHBOURS}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for profile.csv and profile.png.")] = None,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Measure what decode steps cost, and hold it against what the device allows."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    trees = [name.strip() for text in tree or [_TREES] for name in text.split(",") if name.strip()]
    if search and (random_weights or size is not None):
        raise UserError("--search: needs weights that mean something", "Leave out --random-weights and --size.")
    rule: dict[str, Any] = {"mode": "speculative"}
    if neighbours is not None and lambda_ is None:
        raise UserError(f"--neighbours {neighbours}: is for --search with --lambda")
    if lambda_ is not None:
        if not search or lambda_ <= 1:
            raise UserError(f"--lambda {lambda_:g}: is for --search, and above 1")
        rule = {"mode": "lantern++", "neighbours": neighbours or _NEIGHBOURS, "lambda": lambda_}
    shapes = {"ar": {"mode": "ar"}, **{name: _tree_settings(name) for name in trees}}
    from lantern_bench.runs.devices import choose_place

    place = choose_place(device, dtype, fast=True)
    subject = _subject(model, size, random_weights, seed, images, cfg_scale, place)
    if compile:
        compile_steps([subject.model], place, console)
    import pandas as pd

    rows = _rows(subject, shapes, seed, tokens, console)
    table = pd.DataFrame(rows).round(4)
    console.table(table, title=f"{size or model}, {place.device}, {place.dtype_name}", format=chosen)
    if out is not None:
        from lantern_bench.profile.steps import write_step_costs

        console.say("written: " + ", ".join(str(path) for path in write_step_costs(table, out)))
    if subject.real and place.dtype_name != "float32":
        _rounding(subject, model, place, console)
    if search:
        search_trees(subject.model, rule | {"cfg_scale": subject.guidance}, subject.prompts, rows, seed, console)


def _tree_settings(name: str) -> dict[str, Any]:
    """A tree's settings; `58n5d10b` is a dynamic one."""
    import re

    from lantern_bench.config.trees import topology_of

    found = re.fullmatch(r"(\d+)n(\d+)d(\d+)b", name)
    if found is None:
        topology_of(name)
        return {"mode": "speculative", "tree": name}
    nodes, depth, beam = map(int, found.groups())
    return {"mode": "speculative", "drafting": "dynamic", "nodes": nodes, "depth": depth, "beam": beam}


def _subject(
    name: str, size: str | None, random: bool, seed: int, images: int, scale: float | None, place: Place
) -> _Subject:
    """The model with prompts that it takes."""
    import torch

    from lantern_bench.models.random_model import made_up_model, random_model, read_size
    from lantern_bench.models.registry import card_of, family_of, load_model

    noise = torch.Generator(place.device).manual_seed(seed)
    if size is not None:
        made = made_up_model(read_size(size), *place, noise)
        return _Subject(made, False, [""] * images, 2.0 if scale is None else scale)
    prompts = next((texts for texts in family_of(name).prompt_sets().values() if texts), ("anything",))
    loaded = random_model(name, *place, noise) if random else load_model(name, *place)
    guidance = card_of(name).defaults.get("cfg_scale", 1.0) if scale is None else scale
    return _Subject(loaded, not random, [prompts[n % len(prompts)] for n in range(images)], float(guidance))


def _rows(
    subject: _Subject, shapes: dict[str, dict[str, Any]], seed: int, tokens: int | None, console: Console
) -> list[dict[str, Any]]:
    """A row for each forward and each kind of step."""
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.profile.roofline import device_rates, forward_need
    from lantern_bench.profile.steps import forward_ms, step_cost

    model, guided = subject.model, subject.guidance != 1
    target: Any = model.target
    condition = model.condition(subject.prompts[:1])
    rates = device_rates(target.device, target.dtype, forward_need(target, 1, guided).bytes)
    console.say(
        f"reads {rates.bytes_per_s / 1e9:.1f} GB/s at this size, multiplies {rates.operations_per_s / 1e9:.0f} Gop/s"
    )
    rows: list[dict[str, Any]] = []
    with console.progress() as progress:
        progress.start(len(_NODES) + len(shapes), "measurements")
        for nodes in _NODES:
            milliseconds = forward_ms(model, condition, nodes, subject.guidance)
            rows.append(_forward_row(subject, nodes, milliseconds, rates))
            progress.advance()
        for name, settings in shapes.items():
            decoding = Decoding(**settings, cfg_scale=subject.guidance)
            cost = step_cost(model, decoding, subject.prompts, seed, tokens)
            rows.append(_step_row(subject, name, decoding, cost, rows, rates))
            progress.advance()
    return rows


def _forward_row(subject: _Subject, nodes: int, milliseconds: float, rates: Rates) -> dict[str, Any]:
    from lantern_bench.profile.roofline import forward_need

    target: Any = subject.model.target
    bound = forward_need(target, nodes, subject.guidance != 1).bound_ms(rates)
    row = {"what": "forward", "name": f"{nodes} nodes", "nodes": nodes, "milliseconds": milliseconds}
    return row | {"bound_ms": bound, "over_bound": milliseconds / bound}


def _step_row(
    subject: _Subject,
    name: str,
    decoding: Decoding,
    cost: StepCost,
    before: list[dict[str, Any]],
    rates: Rates,
) -> dict[str, Any]:
    from lantern_bench.decoding.drafting import drafting_of
    from lantern_bench.profile.roofline import decode_memory
    from lantern_bench.profile.steps import step_cost

    model = subject.model
    nodes = 1 if decoding.drafting == "none" else drafting_of(decoding, model.target).nodes
    row = _forward_row(subject, nodes, cost.total, rates) | {"what": "step", "name": name}
    row |= {"draft_ms": cost.draft, "target_ms": cost.target, "verify_ms": cost.verify, "other_ms": cost.other}
    plain = next((one["milliseconds"] for one in before if one["name"] == "ar"), cost.total)
    forward = next(one["milliseconds"] for one in before if one["nodes"] == 1)
    # An autoregressive step draws its token in the target's program: what is outside is what a bare forward is not.
    outside = cost.total - forward if decoding.drafting == "none" else cost.verify + cost.other
    row |= {"outside_share": outside / cost.total, "break_even_mal": cost.total / plain}
    # Random weights accept drafts by chance: their length says nothing and stays empty.
    length = cost.mean_accepted_length if subject.real else float("nan")
    row |= {"mean_accepted_length": length, "speedup": length * plain / cost.total}
    memory = decode_memory(
        model, nodes, subject.guidance != 1, 0, lambda: step_cost(model, decoding, subject.prompts[:1], tokens=24)
    )
    return row | {"peak_memory_mb": memory.peak / _MB, "accounted_memory_mb": memory.accounted / _MB}


def _rounding(subject: _Subject, name: str, place: Place, console: Console) -> None:
    """Say how far the number type moves the distribution."""
    import torch

    from lantern_bench.models.registry import load_model
    from lantern_bench.profile.steps import rounding_tv

    exact = load_model(name, place.device, torch.float32)
    tv = rounding_tv(exact, subject.model, subject.prompts[:2], subject.guidance)
    console.say(
        f"TV of {place.dtype_name} against float32, {len(tv)} positions: mean {tv.mean():.4f}, "
        f"99th per cent {tv.quantile(0.99):.4f}, most {tv.max():.4f}"
    )
