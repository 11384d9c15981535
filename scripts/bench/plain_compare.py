"""`make compare-plain`: milliseconds a step of the plain implementation and of the package, interleaved, in one run.

The plain one counts only while it is no slower than the published code: its step over a bare eager float32 forward of
as many nodes is shown beside the published code's. Ratios are above 1 where the package is faster: medians over the
images of what was measured one after the other, as a machine's pace changes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd
import torch

from lantern_bench.cli.console import Console
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.compute import choose_compute
from lantern_bench.devices.threads import set_threads
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.models.families.lanterns.description import GUIDANCE, HELD_OUT
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.load import compile_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.random_model import random_model_of_size, read_size
from lantern_bench.profile.step_costs import forward_ms
from lantern_bench.utils.clock import collect_garbage
from scripts.bench.plain_decoding import Plain
from scripts.bench.plain_network import PlainDrafter, PlainTarget

# (mode, settings of ours, settings of the plain one, nodes, step over bare forward of the published code)
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], int, float | None]] = {
    "ar": ({"mode": "ar"}, {}, 1, 1.25),
    "small-7": (
        {"mode": "speculative", "tree": "small-7"},
        {"paths": STATIC_TREES["small-7"]},
        8,
        None,
    ),
    "eagle1-25": (
        {"mode": "speculative", "tree": "eagle1-25"},
        {"paths": STATIC_TREES["eagle1-25"]},
        26,
        1.6,
    ),
    "58n5d10b": (
        {"mode": "speculative", "drafting": "dynamic", "nodes": 58, "depth": 5, "beam": 10},
        {"dynamic": (58, 5, 10)},
        59,
        1.5,
    ),
}


def ours(
    model: LoadedModel, decoding: Decoding, caption: str, seed: int, tokens: int | None = None
) -> float:
    """Milliseconds a step."""
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
    if size is None:
        return Lanterns().load(device, dtype)
    return random_model_of_size(
        config=read_size(size),
        device=device,
        dtype=dtype,
        generator=torch.Generator(device).manual_seed(0),
    )


def main() -> None:
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
    problem = compile_models(models.values(), compute)
    if problem is not None:
        console.warn(f"nothing is compiled: {problem}")
    plain = Plain(
        target=PlainTarget(eager.target),
        drafter=PlainDrafter(eager.drafter),
        table=eager.table(20),
        scale=GUIDANCE,
    )
    bare = eager.condition([HELD_OUT[0].caption()])
    rows = []
    for name in chosen.cells.split(","):
        settings, theirs, nodes, published = CELLS[name]
        decoding = Decoding(**settings, cfg_scale=GUIDANCE)
        courses: dict[str, Callable[[str, int], float]] = {"plain": _plain(plain, theirs, eager)}
        for kind, model in models.items():
            courses[kind] = _bind(model, decoding)
            ours(
                model=model, decoding=decoding, caption=HELD_OUT[0].caption(), seed=0, tokens=24
            )  # compiled before it is timed
        collect_garbage()
        times: dict[str, list[float]] = defaultdict(list)
        for seed in range(chosen.images):
            for kind, course in courses.items():
                times[kind].append(course(HELD_OUT[seed].caption(), seed))
            times["bare"].append(
                forward_ms(model=eager, condition=bare, nodes=nodes, cfg_scale=GUIDANCE, repeats=20)
            )
            times["bare_default"].append(
                forward_ms(
                    model=models["default"],
                    condition=bare,
                    nodes=nodes,
                    cfg_scale=GUIDANCE,
                    repeats=20,
                )
            )
        ms = {kind: median(values) for kind, values in times.items()}
        row = {"cell": name, "nodes": nodes, "plain_ms": ms["plain"], "bare_float32_ms": ms["bare"]}
        row |= {"plain_over_bare": _ratio(times, "plain", "bare"), "published_over_bare": published}
        row |= {
            "equal_dtype_ms": ms["equal"],
            "default_ms": ms["default"],
            "default_bare_ms": ms["bare_default"],
        }
        row |= {"default_over_bare": _ratio(times, "default", "bare_default")}
        row |= {f"ratio_{kind}": _ratio(times, "plain", kind) for kind in models}
        rows.append(row)
        console.say(
            f"{name}: plain {ms['plain']:.2f}, equal {ms['equal']:.2f}, default {ms['default']:.2f} ms a step"
        )
    title = f"{chosen.size or 'embedded model'}, {compute.dtype_name} by default, {torch.get_num_threads()} threads"
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


def _bind(model: LoadedModel, decoding: Decoding) -> Callable[[str, int], float]:
    return lambda caption, seed: ours(model=model, decoding=decoding, caption=caption, seed=seed)


if __name__ == "__main__":
    main()
