"""`make compare-plain`: milliseconds per step of the plain implementation and of the package.

The plain implementation is a fair baseline only while it is no slower than the published code.
Therefore its step over a bare eager float32 forward of the same number of nodes is shown beside the
same figure of the published code. A ratio above 1 means that the package is faster. It is the
median over images of measurements made one right after the other, since a machine's pace changes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
import torch

from lantern_bench.cli.console import Console
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.compute import choose_compute, set_threads
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.models.families.lanterns.description import GUIDANCE, HELD_OUT
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.load import compile_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.random_weights import random_model_of_size, read_size
from lantern_bench.profile.step_costs import forward_ms
from lantern_bench.utils.clock import collect_garbage
from scripts.bench.plain_decoding import Plain
from scripts.bench.plain_network import PlainDrafter, PlainTarget


class Cell(NamedTuple):
    """A way to decode, by both implementations."""

    ours: dict[str, Any]  # settings of `Decoding`
    plain: dict[str, Any]  # arguments of `Plain.speculative`; empty: autoregressive
    nodes: int  # of a forward
    published: float | None = None  # step over bare forward of the published code


CELLS = {
    "ar": Cell(ours={"mode": "ar"}, plain={}, nodes=1, published=1.25),
    "small-7": Cell(
        ours={"mode": "speculative", "tree": "small-7"},
        plain={"paths": STATIC_TREES["small-7"]},
        nodes=8,
    ),
    "eagle1-25": Cell(
        ours={"mode": "speculative", "tree": "eagle1-25"},
        plain={"paths": STATIC_TREES["eagle1-25"]},
        nodes=26,
        published=1.6,
    ),
    "58n5d10b": Cell(
        ours={"mode": "speculative", "drafting": "dynamic", "nodes": 58, "depth": 5, "beam": 10},
        plain={"dynamic": (58, 5, 10)},
        nodes=59,
        published=1.5,
    ),
}


def ours(
    model: LoadedModel, decoding: Decoding, caption: str, seed: int, *, tokens: int | None = None
) -> float:
    """Return milliseconds per step of the package."""
    noise = [torch.Generator().manual_seed(seed)]
    trace = decode(
        model=model,
        condition=model.condition([caption]),
        decoding=decoding,
        generators=noise,
        tokens=tokens,
        engine=model.engine,
    )[0].trace
    return 1e3 * (trace.seconds - trace.phases["prefill"]) / max(1, len(trace.committed))


def load(size: str | None, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load the bundled model, or make one of random weights."""
    if size is None:
        return Lanterns().load(device, dtype)
    return random_model_of_size(
        config=read_size(size),
        device=device,
        dtype=dtype,
        generator=torch.Generator(device).manual_seed(0),
    )


def main() -> None:
    """Measure all cells and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--images", type=int, default=8)
    arguments.add_argument("--cells", default=",".join(CELLS))
    arguments.add_argument(
        "--size", help="LAYERSxWIDTHxVOCABULARYxSIDE: random weights, not the bundled model"
    )
    arguments.add_argument("--threads", type=int)
    chosen = arguments.parse_args()
    console = Console()
    set_threads(chosen.threads)
    cpu = torch.device("cpu")
    compute = choose_compute("cpu", fast=True)
    models = {
        "equal": load(chosen.size, cpu, torch.float32),
        "default": load(chosen.size, *compute),
    }
    eager = load(chosen.size, cpu, torch.float32)
    computes = {"equal": compute._replace(dtype=torch.float32), "default": compute}
    for kind, model in models.items():
        # Programs are saved by dtype.
        console.note(compile_models([model], computes[kind]))
    plain = Plain(
        target=PlainTarget(eager.target),
        drafter=PlainDrafter(eager.drafter),
        table=eager.table(20),
        scale=GUIDANCE,
    )
    bare = eager.condition([HELD_OUT[0].caption()])
    rows = []
    for name in chosen.cells.split(","):
        cell = CELLS[name]
        decoding = Decoding(**cell.ours, cfg_scale=GUIDANCE)
        courses: dict[str, Callable[[str, int], float]] = {
            "plain": _plain(plain, cell.plain, eager)
        }
        for kind, model in models.items():
            courses[kind] = partial(ours, model, decoding)
            # Compile before timing.
            ours(model, decoding, HELD_OUT[0].caption(), seed=0, tokens=24)
        collect_garbage()
        times: dict[str, list[float]] = defaultdict(list)
        for seed in range(chosen.images):
            for kind, course in courses.items():
                times[kind].append(course(HELD_OUT[seed].caption(), seed))
            for kind, model in (("bare", eager), ("bare_default", models["default"])):
                milliseconds = forward_ms(
                    model=model,
                    condition=bare,
                    nodes=cell.nodes,
                    cfg_scale=GUIDANCE,
                    repeats=20,
                )
                times[kind].append(milliseconds)
        ms = {kind: median(values) for kind, values in times.items()}
        row = {
            "cell": name,
            "nodes": cell.nodes,
            "plain_ms": ms["plain"],
            "bare_float32_ms": ms["bare"],
            "plain_over_bare": _ratio(times, "plain", "bare"),
            "published_over_bare": cell.published,
            "equal_dtype_ms": ms["equal"],
            "default_ms": ms["default"],
            "default_bare_ms": ms["bare_default"],
            "default_over_bare": _ratio(times, "default", "bare_default"),
            "ratio_equal": _ratio(times, "plain", "equal"),
            "ratio_default": _ratio(times, "plain", "default"),
        }
        rows.append(row)
        shown = ", ".join(f"{kind} {ms[kind]:.2f}" for kind in courses)
        console.say(f"{name}: {shown} ms per step")
    threads = torch.get_num_threads()
    title = f"{chosen.size or 'bundled model'}, {compute.dtype_name} by default, {threads} threads"
    console.table(pd.DataFrame(rows).round(3), title=title)


def _ratio(times: Mapping[str, Sequence[float]], above: str, below: str) -> float:
    return median(above / below for above, below in zip(times[above], times[below], strict=True))


def _plain(
    plain: Plain, settings: dict[str, Any], model: LoadedModel
) -> Callable[[str, int], float]:
    def course(caption: str, seed: int) -> float:
        condition = model.condition([caption])
        noise = torch.Generator().manual_seed(seed)
        if settings:
            result = plain.speculative(condition, noise, plain.grid, **settings)
        else:
            result = plain.autoregressive(condition, noise, plain.grid)
        return 1e3 * result.seconds / len(result.committed)

    return course


if __name__ == "__main__":
    main()
