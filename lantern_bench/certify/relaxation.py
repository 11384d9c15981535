"""Emitted TV of relaxed modes at positions of images that the model decodes autoregressively.

A lossless decode visits the same contexts however it drafts, so these are the contexts of every lossless mode.

All modes are measured at the same positions, so that they can be compared there. Static drafts are drawn many times
from the drafter's q, with the same draws for every rule; dynamic drafts are deterministic. See
docs/algorithms.md, section 4. `certify/tables.py` computes means and intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, rule_of
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.emitted_tv import emitted, emitted_tv_sampled, total_variation
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import Draws, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import Forced, proposer_at, teacher_forced
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.errors import RefusedError
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.models.loaded_model import LoadedModel

Row = dict[str, Any]
_Rules = list[AcceptanceRule]


class Contexts(NamedTuple):
    """A batch of autoregressive images: prompt, repeat and seed of each, and the target along their tokens."""

    prompts: list[Prompt]
    repeats: list[int]
    seeds: list[int]
    forced: Forced


def generators(model: LoadedModel, seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one seeded generator per image, on the model's device."""
    return [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]


@torch.inference_mode()
def sampled_contexts(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    images: int,
    decoding: Decoding,
    *,
    seed: int = 0,
    batch: int = 32,
    on_progress: OnProgress = no_progress,
) -> Iterator[Contexts]:
    """Yield `images` images in batches, cycling through the prompts, with the sampling settings of `decoding`.

    Seeds are those that a sweep gives the same prompts and repeats.
    """
    slots = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]
    for start in range(0, images, batch):
        chosen, repeats = map(list, zip(*slots[start : start + batch], strict=True))
        seeds = [record_seed(seed, prompt.id, repeat) for prompt, repeat in zip(chosen, repeats, strict=True)]
        condition = model.condition([prompt.text for prompt in chosen])
        decoded = decode(model, condition, decoding.autoregressive(), generators(model, seeds), engine=model.engine)
        tokens = torch.stack([image.tokens for image in decoded]).long().to(model.target.device)
        forced = teacher_forced(model.target, condition, tokens, decoding.cfg_scale != 1)
        yield Contexts(chosen, repeats, seeds, forced)
        on_progress("sampling images as contexts", min(start + batch, images) / images)


# The first position where a step starts, and the tokens that a step needs after its start: a draft and the bonus token.
_FIRST, _FREE = 1, 2


@dataclass(frozen=True)
class CostSettings:
    """Sample sizes: `positions` in all, `per_image` of them in one image, `draws` of each static draft."""

    positions: int = 200
    per_image: int = 4
    draws: int = 512
    seed: int = 0
    batch: int = 16


class _Sample(NamedTuple):
    """One position in each of B images: tokens committed before it [B], and the target's guided logits there [B, V]."""

    contexts: Contexts
    positions: Tensor
    logits: Tensor


@torch.inference_mode()
def emitted_tv_rows(
    model: LoadedModel,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    settings: CostSettings,
    on_progress: OnProgress = no_progress,
) -> Iterator[Row]:
    """Yield the rows of `emitted_tv_places` (`schema.py`): one per position and cell.

    The cells have drafts and a temperature above 0; cells with the same sampling settings share their images. Drafts
    that do not come from a drafter are there only while images are decoded: such cells share the images of the strict
    rule with the same drafting. Raises `RefusedError` for a model without a drafter that needs one, and for images too
    short to have `per_image` positions.
    """
    from_drafter = [cell for cell in cells if _from_drafter_alone(cell.decoding)]
    if from_drafter and model.drafter is None:
        raise RefusedError(f"the model {model.name} has no drafter: emitted TV needs drafts")
    if model.target.image_tokens < _FIRST + _FREE + settings.per_image - 1:
        raise RefusedError(f"the images of {model.name} are too short for {settings.per_image} positions each")
    groups: dict[Decoding, list[Cell]] = {}
    for cell in cells:
        if cell not in from_drafter:
            groups.setdefault(_strict(cell.decoding), []).append(cell)
    for strict, members in groups.items():
        yield from _along_steps(model, strict, members, prompts, settings, on_progress)
    groups = {}
    for cell in from_drafter:
        groups.setdefault(cell.decoding.autoregressive(), []).append(cell)
    for sampling, members in groups.items():
        remaining, images = settings.positions, -(-settings.positions // settings.per_image)
        for contexts in sampled_contexts(model, prompts, images, sampling, seed=settings.seed, batch=settings.batch):
            for sample in _samples(contexts, sampling, settings.per_image):
                if remaining > 0:
                    yield from _measured(model, sample, members, settings, remaining)
                remaining -= len(contexts.prompts)
                on_progress(f"emitted TV of {len(members)} modes", 1 - max(0, remaining) / settings.positions)


def _from_drafter_alone(decoding: Decoding) -> bool:
    """Whether a draft depends on the image alone and not on earlier steps: a static tree, or a deterministic draft."""
    row = decoding.drafting_row
    return row.needs_drafter and (bool(decoding.paths) or not row.sampled)


def _samples(contexts: Contexts, sampling: Decoding, per_image: int) -> Iterator[_Sample]:
    """Positions of each image, drawn without replacement from those where a step can start."""
    tokens = contexts.forced.tokens
    possible = tokens.shape[1] - _FIRST - _FREE + 1
    drawn = []
    for seed in contexts.seeds:
        generator = torch.Generator().manual_seed(record_seed(seed, "places", 0))
        drawn.append(torch.randperm(possible, generator=generator)[:per_image].sort().values + _FIRST)
    rows = torch.arange(len(tokens), device=tokens.device)
    scores = contexts.forced.logits
    for positions in torch.stack(drawn, dim=1).to(tokens.device):
        uncond = None if scores.uncond is None else scores.uncond[rows, positions]
        yield _Sample(contexts, positions, guide(scores.cond[rows, positions], uncond, sampling.cfg_scale))


def _measured(
    model: LoadedModel, sample: _Sample, cells: Sequence[Cell], settings: CostSettings, most: int
) -> Iterator[Row]:
    """The rows of all cells at one position of the first `most` images; cells with the same drafting share drafts."""
    alike: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        decoding = cell.decoding
        key = (decoding.drafting, decoding.paths, decoding.nodes, decoding.depth, decoding.beam)
        alike.setdefault(key, []).append(cell)
    for members in alike.values():
        decoding, rules = members[0].decoding, _rules(model, members)
        if decoding.drafting_row.sampled:
            measured = _sampled(model, sample, decoding, rules, settings.draws)
        else:
            measured = _deterministic(model, sample, decoding, rules)
        slots = list(zip(sample.contexts.prompts, sample.contexts.repeats, strict=True))
        yield from _rows(members, slots[:most], sample.positions, measured)


def _rules(model: LoadedModel, cells: Sequence[Cell]) -> _Rules:
    return [rule_of(cell.decoding, model) for cell in cells]


def _rows(
    cells: Sequence[Cell], slots: Sequence[tuple[Prompt, int]], positions: Tensor, measured: Iterable[dict[str, Tensor]]
) -> Iterator[Row]:
    """The rows of the cells at one position of each image, which has a prompt and a repeat."""
    for cell, figures in zip(cells, measured, strict=True):
        for number, (prompt, repeat) in enumerate(slots):
            row: Row = {**cell.columns(), "prompt_id": prompt.id, "repeat": repeat, "position": int(positions[number])}
            yield row | {name: float(values[number]) for name, values in figures.items()}


def _sampled(
    model: LoadedModel, sample: _Sample, decoding: Decoding, rules: _Rules, count: int
) -> Iterator[dict[str, Tensor]]:
    """Estimates from `count` sampled drafts, one per rule."""
    assert model.drafter is not None
    proposer = proposer_at(model.drafter, sample.contexts.forced, sample.positions, 1, decoding)
    p = decoding_probabilities(sample.logits, decoding)
    children = StaticTree.of(decoding.paths).levels[0].fanout
    return _estimates(model, sample.contexts.seeds, sample.positions, p, proposer.root_q[:, 0], children, rules, count)


def _estimates(
    model: LoadedModel, seeds: Sequence[int], positions: Tensor, p: Tensor, q: Tensor, children: int, rules: _Rules,
    count: int,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Estimates at one position of each image, one per rule; `p`, `q` [B, V]."""
    pairs = zip(seeds, positions.tolist(), strict=True)
    draws = Draws(generators(model, [record_seed(seed, str(position), 0) for seed, position in pairs]), p.device)
    noise = partial(draws.exponential, p.shape[1])
    for estimate in emitted_tv_sampled(p, q, children, count, rules, noise, positions):
        yield {"emitted_tv": estimate.tv, "emitted_tv_crossed": estimate.crossed}


def _deterministic(
    model: LoadedModel, sample: _Sample, decoding: Decoding, rules: _Rules
) -> Iterator[dict[str, Tensor]]:
    """Exact values of deterministic drafts, one per rule."""
    assert model.drafter is not None
    drafting = drafting_of(decoding, model.target)
    proposer = proposer_at(model.drafter, sample.contexts.forced, sample.positions, drafting.nodes, decoding)
    rows = torch.arange(len(sample.positions), device=sample.positions.device)
    root = sample.contexts.forced.tokens[rows, sample.positions - 1]
    limit = (model.target.image_tokens - 1 - sample.positions).clamp_max(drafting.depth)
    nothing = torch.empty(len(rows), 0, device=rows.device)  # dynamic drafting uses no noise
    tree = drafting.tree(drafting.draft(DraftInputs(root, nothing, limit, proposer)))
    children = tree.children[:, 0]
    tokens = tree.tokens.gather(1, children.clamp_min(0))
    p = decoding_probabilities(sample.logits, decoding)
    for rule in rules:
        emission = emitted(p, None, tokens, children >= 0, rule, sample.positions)
        yield {"emitted_tv": total_variation(p, emission.distribution), "moved_mass": emission.neighbour_mass}


# ---- drafts that come from earlier steps


class _Root(NamedTuple):
    """What a step finds at the root of B images: p, q [B, V], and how many tokens come before its children [B]."""

    p: Tensor
    q: Tensor
    position: Tensor
    active: Tensor


class _Watched:
    """A drafting of sampled drafts that notes in `seen` what each step finds at the root."""

    learns = True

    def __init__(self, decoding: Decoding, target: Any, batch: int, seen: list[_Root]) -> None:
        self._method: Any = drafting_of(decoding, target, batch)
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def start_images(self, p: Tensor) -> None:
        """New images start."""
        self._method.start_images(p)

    def after_step(self, step: LastStep) -> None:
        """Note the root, before its rows are overwritten."""
        assert step.tree.q is not None
        before = step.position - step.accepted - 1
        self._seen.append(_Root(step.p[:, 0].clone(), step.tree.q[:, 0].clone(), before, step.active.clone()))
        self._method.after_step(step)


def _strict(decoding: Decoding) -> Decoding:
    """Return the same drafting under the strict rule, which visits the contexts of autoregressive decoding."""
    sampling = {key: decoding.value(key) for key in SAMPLING}
    of_drafting = {key: decoding.value(key) for key in decoding.drafting_row.parameter_names}
    values = sampling | of_drafting | {"tree": decoding.paths or None}
    return Decoding("speculative", drafting=decoding.drafting, rule="strict", **values)


def _along_steps(
    model: LoadedModel,
    strict: Decoding,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    settings: CostSettings,
    on_progress: OnProgress,
) -> Iterator[Row]:
    """The rows of cells at starts of steps that `strict` makes, `per_image` in each image."""
    remaining, images = settings.positions, -(-settings.positions // settings.per_image)
    children, rules = drafting_of(strict, model.target).fanout, _rules(model, cells)
    every = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]
    for start in range(0, images, settings.batch):
        slots, seen = every[start : start + settings.batch], list[_Root]()
        seeds = [record_seed(settings.seed, prompt.id, repeat) for prompt, repeat in slots]
        condition = model.condition([prompt.text for prompt, _ in slots])
        watched: Any = _Watched(strict, model.target, len(slots), seen)
        decode(model, condition, strict, generators(model, seeds), engine=Engine(), drafting=watched)
        roots = _Root(*(torch.stack(column) for column in zip(*seen, strict=True)))  # [steps, B, ...]
        possible = roots.active & (roots.position <= model.target.image_tokens - _FREE)
        places = []
        for number, seed in enumerate(seeds):
            steps, generator = possible[:, number].nonzero().flatten(), torch.Generator().manual_seed(seed)
            drawn = torch.randperm(len(steps), generator=generator).repeat(settings.per_image)
            places.append(steps[drawn[: settings.per_image].to(steps.device)])
        images_here = torch.arange(len(slots), device=roots.position.device)
        for steps in torch.stack(places, dim=1):
            root = _Root(*(column[steps, images_here] for column in roots))
            if remaining > 0:
                estimates = _estimates(model, seeds, root.position, root.p, root.q, children, rules, settings.draws)
                yield from _rows(cells, slots[:remaining], root.position, estimates)
            remaining -= len(slots)
            on_progress(f"emitted TV of {len(cells)} modes", 1 - max(0, remaining) / settings.positions)
