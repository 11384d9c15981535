"""What relaxation costs: the emitted TV of relaxed modes at sampled places of real images, one row a place and mode.

All modes are measured at the same places, so they are compared within a place. Static drafts are drawn afresh many
times from the drafter's own q, with the same draws for every rule; dynamic drafts are what they are (algorithms.md,
section 4). Means and intervals are made of the rows in `certify/tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.certify.contexts import Made, generators, lossless_images, plain
from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.relaxation import Relaxation
from lantern_bench.decoding.drafting.static import drafting_of
from lantern_bench.decoding.emitted_tv import emitted, emitted_tv_sampled, total_variation
from lantern_bench.decoding.loop import drafter_and_table, relaxation_of
from lantern_bench.decoding.sampling import Draws, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import drafts_along, drafts_at
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.loaded_model import LoadedModel

# ---- Token ambiguity: how sure the target is of each token, and how often an exact draft can be accepted at all


_MOST = 10
AMBIGUOUS = 0.05
"""A token whose likeliest code is less probable than this counts as ambiguous."""


@torch.inference_mode()
def ambiguity_rows(
    model: LoadedModel,
    decoding: Decoding,
    prompts: Sequence[Prompt],
    images: int,
    *,
    seed: int = 0,
    batch: int = 16,
    on_progress: OnProgress = unheard,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `ambiguity_places` (`schema.py`), one a token of each image.

    `decoding` says the sampling settings; its filters apply to p and q as in decoding. Without a drafter the figures
    of drafts are left out, as they are at the first token, which nobody drafts.
    """
    for made in lossless_images(model, prompts, images, decoding, seed=seed, batch=batch, on_progress=on_progress):
        scores = made.forced.scores
        p = decoding_probabilities(guide(scores.cond, scores.uncond, decoding.cfg_scale), decoding)
        figures = _certainty(p) | _acceptance(model, made, p, decoding)
        listed = {name: values.tolist() for name, values in figures.items()}
        for image, prompt in enumerate(made.prompts):
            who = {"model": model.name, "prompt_id": prompt.id, "repeat": made.repeats[image]}
            who |= {key: getattr(decoding, key) for key in ("temperature", "top_k", "top_p", "cfg_scale")}
            for position in range(p.shape[1]):
                here = {name: values[image][position] for name, values in listed.items()}
                # nan stands where there is no draft.
                yield {**who, "position": position, **{n: None if v != v else v for n, v in here.items()}}


def _certainty(p: Tensor) -> dict[str, Tensor]:
    """How sure p [B, N, V] is: each figure [B, N]."""
    top = p.topk(min(_MOST, p.shape[-1]), dim=-1).values
    figures = {"top1": top[..., 0], "top10": top.sum(-1), "entropy": torch.special.entr(p).sum(-1)}
    return figures | {"ambiguous": (top[..., 0] < AMBIGUOUS).float()}


def _acceptance(model: LoadedModel, made: Made, p: Tensor, decoding: Decoding) -> dict[str, Tensor]:
    """What the strict rule accepts of a first draft at each position of p [B, N, V], the drafter fed true features."""
    if model.drafter is None:
        return {}
    sampled = torch.full(p.shape[:2], torch.nan, device=p.device)
    best = sampled.clone()
    for position, drafts in enumerate(drafts_along(model.drafter, made.forced), start=1):
        q = decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)[:, 0]
        here = p[:, position]
        sampled[:, position] = torch.minimum(here, q).sum(-1)
        best[:, position] = here.gather(1, q.argmax(dim=1, keepdim=True)).squeeze(1)
    return {"accepted_sampled": sampled, "accepted_best": best}


# ----

Row = dict[str, Any]
# The place of the first step, and what stays free behind the last: a draft and its bonus.
_FIRST, _FREE = 1, 2


@dataclass(frozen=True)
class CostSettings:
    """How much is measured: `positions` places in all, `per_image` of them in an image, `draws` of a static draft."""

    positions: int = 200
    per_image: int = 4
    draws: int = 256
    seed: int = 0
    batch: int = 16

    @property
    def images(self) -> int:
        """How many images are needed."""
        return -(-self.positions // self.per_image)


class _Place(NamedTuple):
    """One place in each of B images: tokens committed there [B], and the target's guided logits for the next [B, V]."""

    made: Made
    positions: Tensor
    logits: Tensor


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise `UserError` where the emitted TV is not defined: at temperature 0, and where nothing is drafted."""
    for cell in cells:
        if cell.decoding.greedy:
            raise UserError(f"{cell.cell_id}: emitted TV is not defined at temperature 0", "Give a --temperature.")
        if cell.decoding.drafting == "none":
            raise UserError(f"{cell.cell_id}: drafts nothing and has no emitted TV", "Leave the mode ar out.")


@torch.inference_mode()
def emitted_tv_rows(
    model: LoadedModel,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    settings: CostSettings,
    on_progress: OnProgress = unheard,
) -> Iterator[Row]:
    """Yield the rows of `emitted_tv_places` (`schema.py`): one a place and cell.

    The cells are of this model; cells of one sampling setting share their images. Raises as `check_cells`, and
    `RefusedError` for a model without a drafter or with images too short to have a place.
    """
    check_cells(cells)
    if model.drafter is None:
        raise RefusedError(f"the model {model.name} has no drafter, so nothing is emitted from drafts")
    if model.target.image_tokens < _FIRST + _FREE + settings.per_image - 1:
        raise RefusedError(f"the images of {model.name} are too short for {settings.per_image} places each")
    groups: dict[Decoding, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(plain(cell.decoding), []).append(cell)
    for sampling, members in groups.items():
        left = settings.positions
        images = lossless_images(model, prompts, settings.images, sampling, seed=settings.seed, batch=settings.batch)
        for made in images:
            for place in _places(made, sampling, settings.per_image):
                rows = list(_measured(model, place, members, settings)) if left > 0 else []
                # The last images may have more places than are asked for.
                yield from (row for row in rows if row.pop("number") < left)
                left -= len(made.prompts)
                on_progress(f"emitted TV of {len(members)} modes", 1 - max(0, left) / settings.positions)


def _places(made: Made, sampling: Decoding, per_image: int) -> Iterator[_Place]:
    """Places of each image, drawn without repetition from all those that a step may start at."""
    tokens = made.forced.tokens
    possible = tokens.shape[1] - _FIRST - _FREE + 1
    drawn = []
    for seed in made.seeds:
        generator = torch.Generator().manual_seed(record_seed(seed, "places", 0))
        drawn.append(torch.randperm(possible, generator=generator)[:per_image].sort().values + _FIRST)
    rows = torch.arange(len(tokens), device=tokens.device)
    scores = made.forced.scores
    for positions in torch.stack(drawn, dim=1).to(tokens.device):
        uncond = None if scores.uncond is None else scores.uncond[rows, positions]
        yield _Place(made, positions, guide(scores.cond[rows, positions], uncond, sampling.cfg_scale))


def _measured(model: LoadedModel, place: _Place, cells: Sequence[Cell], settings: CostSettings) -> Iterator[Row]:
    """Rows of all cells at one place an image; cells that draft alike share the drafts."""
    alike: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        one = cell.decoding
        alike.setdefault((one.drafting, one.paths, one.nodes, one.depth, one.beam), []).append(cell)
    for members in alike.values():
        measure = _static if members[0].decoding.drafting == "static" else _dynamic
        for cell, figures in zip(members, measure(model, place, members, settings), strict=True):
            for number, prompt in enumerate(place.made.prompts):
                row: Row = {**cell.columns(), "prompt_id": prompt.id, "repeat": place.made.repeats[number]}
                row |= {"position": int(place.positions[number]), "number": number}
                yield row | {name: float(values[number]) for name, values in figures.items()}


def _rule(model: LoadedModel, decoding: Decoding) -> tuple[Relaxation, Tensor | None]:
    return relaxation_of(decoding, model.target), drafter_and_table(model, decoding)[1]


def _static(
    model: LoadedModel, place: _Place, cells: Sequence[Cell], settings: CostSettings
) -> Iterator[dict[str, Tensor]]:
    assert model.drafter is not None
    decoding = cells[0].decoding
    _, drafts = drafts_at(model.drafter, place.made.forced, place.positions, 1)
    p = decoding_probabilities(place.logits, decoding)
    q = decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)[:, 0]
    seeds = [
        record_seed(seed, str(int(position)), 0)
        for seed, position in zip(place.made.seeds, place.positions, strict=True)
    ]
    draws = Draws(generators(model, seeds), p.device)
    children = StaticTree.of(decoding.paths).levels[0].fanout
    rules = [_rule(model, cell.decoding) for cell in cells]
    for found in emitted_tv_sampled(p, q, children, settings.draws, rules, lambda: draws.exponential(p.shape[1])):
        yield {"emitted_tv": found.tv, "emitted_tv_crossed": found.crossed}


def _dynamic(
    model: LoadedModel,
    place: _Place,
    cells: Sequence[Cell],
    settings: CostSettings,  # noqa: ARG001  # a deterministic draft is not drawn
) -> Iterator[dict[str, Tensor]]:
    assert model.drafter is not None
    decoding = cells[0].decoding
    drafting = drafting_of(decoding, place.logits.device)
    session, drafts = drafts_at(model.drafter, place.made.forced, place.positions, drafting.nodes)
    rows = torch.arange(len(place.positions), device=place.positions.device)
    root = place.made.forced.tokens[rows, place.positions - 1]
    limit = (model.target.image_tokens - 1 - place.positions).clamp_max(drafting.depth)
    nothing = torch.empty(len(rows), 0, device=rows.device)  # such a draft takes no noise
    tree = drafting.tree(drafting.draft(session, drafts, root, nothing, limit))
    children = tree.children[:, 0]
    tokens = tree.tokens.gather(1, children.clamp_min(0))
    p = decoding_probabilities(place.logits, decoding)
    for cell in cells:
        emission = emitted(p, None, tokens, children >= 0, *_rule(model, cell.decoding))
        yield {"emitted_tv": total_variation(p, emission.law), "moved_mass": emission.moved}
