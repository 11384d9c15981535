"""What a decode step costs: a forward of the target by number of nodes, and the parts of a step of each kind.

Measured through the same programs and sessions that decoding uses, after they have run (and compiled) once. What the
device could do at best is `rates`; what follows for a choice of trees is `tree_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.clock import now, settle_garbage, synchronize
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.emitted_tv import total_variation
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import greedy_probabilities, guide
from lantern_bench.decoding.step import scoring
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.errors import UserError
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.report.tables import write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


_WARM_TOKENS = 24
_WARM_FORWARDS = 3


class StepCost(NamedTuple):
    """Milliseconds a step, prefill excluded, and tokens a step; `traces` are the images it was measured on.

    draft: the drafter's forwards and the making of the tree. target: the target's forward (autoregressive decoding
    draws its token in the same program). verify: acceptance, the move of the cache, the copy to the host. other: noise
    and what no phase covers.
    """

    draft: float
    target: float
    verify: float
    other: float
    mean_accepted_length: float
    traces: list[ImageTrace]

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.draft + self.target + self.verify + self.other


@torch.inference_mode()
def forward_ms(model: LoadedModel, condition: Any, nodes: int, cfg_scale: float, repeats: int = 30) -> float:
    """Median milliseconds of one forward of the target over a chain of `nodes`, with half an image in the cache.

    `condition` is that of one image; guidance is part of the forward.
    """
    target = model.target
    device = target.device
    session, run = scoring(target, 1, nodes, cfg_scale, model.engine)
    session.prefill(condition)
    whole = torch.zeros(1, 1, dtype=torch.int64, device=device)
    session.commit(whole, torch.full((1,), target.image_tokens // 2, device=device))
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()[None]
    tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    depths = torch.arange(nodes, device=device)[None]
    seconds = []
    for repeat in range(repeats + _WARM_FORWARDS):
        synchronize(device)
        began = now()
        run(tokens, depths, chain)
        synchronize(device)
        if repeat >= _WARM_FORWARDS:
            seconds.append(now() - began)
    return 1e3 * median(seconds)


def step_cost(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int = 0, tokens: int | None = None
) -> StepCost:
    """Decode an image for each prompt, one at a time, and share the seconds out over the steps."""
    device = model.target.device

    def made(prompt: str, number: int, most: int | None) -> ImageTrace:
        noise = torch.Generator(device).manual_seed(seed + number)
        condition = model.condition([prompt])
        return decode(model, condition, decoding, [noise], tokens=most, engine=model.engine)[0].trace

    made(prompts[0], 0, min(_WARM_TOKENS, tokens or _WARM_TOKENS))
    settle_garbage()
    traces = [made(prompt, number, tokens) for number, prompt in enumerate(prompts)]
    steps = max(1, sum(len(trace.committed) for trace in traces))

    def each(phase: str) -> float:
        return 1e3 * sum(trace.phases.get(phase, 0.0) for trace in traces) / steps

    whole = 1e3 * sum(trace.seconds for trace in traces) / steps - each("prefill")
    draft, target, verify, noise = each("draft"), each("target"), each("verify"), each("noise")
    other = noise + max(0.0, whole - draft - target - verify - noise)
    uncut = sum(sum(trace.uncut) for trace in traces) / steps
    return StepCost(draft, target, verify, other, uncut, traces)


# ---- What a narrower number type does to the distribution: TV against float32, position by position, same tokens b


@torch.inference_mode()
def rounding_tv(
    exact: LoadedModel, rounded: LoadedModel, prompts: Sequence[str], cfg_scale: float, seed: int = 0
) -> Tensor:
    """TV float32 [images * tokens] between the guided distributions of two models at temperature 1, no filters."""
    found = []
    decoding = Decoding.model_validate({"mode": "ar", "cfg_scale": cfg_scale})
    for number, prompt in enumerate(prompts):
        noise = torch.Generator(exact.target.device).manual_seed(seed + number)
        condition = exact.condition([prompt])
        made = decode(exact, condition, decoding, [noise])[0].tokens.long()
        both = [_laws(model, condition, made, cfg_scale) for model in (exact, rounded)]
        found.append(total_variation(*both))
    return torch.cat(found)


def _laws(model: LoadedModel, condition: object, tokens: Tensor, cfg_scale: float) -> Tensor:
    """The distributions [N, V] of all tokens [N] of an image, each given those before it."""
    forced = teacher_forced(model.target, condition, tokens[None].to(model.target.device), cfg_scale != 1)
    return greedy_probabilities(guide(forced.scores.cond, forced.scores.uncond, cfg_scale))[0].cpu()


PARTS = ("draft_ms", "target_ms", "verify_ms", "other_ms")
_COLOURS = ("#0072B2", "#009E73", "#D55E00", "#999999")
_LINES = ("-", "--", "-.", ":")


def write_step_costs(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`; raises `UserError` when it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    steps = table[table["what"] == "step"]
    _draw_parts(left, steps)
    _draw_speedups(right, steps)
    figure.tight_layout()
    files = [folder / "profile.csv", folder / "profile.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table, files[0])
        figure.savefig(files[1], dpi=160, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def _draw_parts(axes: Axes, steps: pd.DataFrame) -> None:
    left = steps["milliseconds"] * 0.0
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        axes.barh(steps["name"], steps[part], left=left, color=colour, label=part.removesuffix("_ms"))
        left = left + steps[part]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.legend(frameon=False)


def _draw_speedups(axes: Axes, steps: pd.DataFrame) -> None:
    drafted = steps[steps["break_even_mal"].notna() & (steps["name"] != "ar")]
    longest = max([6.0, *(drafted["mean_accepted_length"].dropna() + 1)])
    for number, row in enumerate(drafted.to_dict("records")):
        colour, lengths = f"C{number}", [1.0, longest]
        speedups = [length / row["break_even_mal"] for length in lengths]
        axes.plot(lengths, speedups, label=row["name"], color=colour, linestyle=_LINES[number % len(_LINES)])
        measured = row["mean_accepted_length"]
        if measured == measured:  # measured: a model of random weights has none
            axes.plot([measured], [measured / row["break_even_mal"]], marker="o", color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("mean accepted length (points: measured)")
    axes.set_ylabel("speedup over ar")
    if len(drafted):
        axes.legend(frameon=False)
