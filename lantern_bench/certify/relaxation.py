"""Emitted TV of relaxed cells where steps of lossless decoding start (docs/algorithms.md, section 4).

Lossless decoding visits the same contexts however it drafts. Drafts that depend on the image alone are measured at
positions of autoregressive images, others along the steps of the strict rule with the same drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.emitted_tv import emitted, emitted_tv_sampled, total_variation
from lantern_bench.decoding.loop import decode, drafter_and_rule
from lantern_bench.decoding.sampling import Draws, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import Forced, proposer_at, teacher_forced
from lantern_bench.errors import RefusedError
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.models.loaded_model import LoadedModel

# The first position where a step starts, and the tokens that a step needs after its start: a draft and the bonus token.
_FIRST, _FREE = 1, 2


def generators(model: LoadedModel, seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one seeded generator per image, on the model's device."""
    return [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]


class _Root(NamedTuple):
    """What a step finds at the root in each of B images."""

    position: Tensor  # int64 [B], tokens of the image before the root's children
    p: Tensor  # [B, V]
    q: Tensor | None  # [B, V]; None where the drafts are deterministic
    children: tuple[Tensor, Tensor] | None = None  # of deterministic drafts: tokens int64 and valid bool [B, C]


@torch.inference_mode()
def emitted_tv_rows(
    model: LoadedModel,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    *,
    positions: int,
    draws: int,
    seed: int = 0,
    per_image: int = 4,
    batch: int = 16,
    on_progress: OnProgress = no_progress,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `emitted_tv_places` (`schema.py`): of each cell `positions`, `per_image` of them in one image.

    Sampled children are drawn `draws` times at each position, with the same noise for all rules. Images have the seeds
    of a sweep. Raises `RefusedError` for a missing drafter, and for images too short for `per_image` positions.
    """
    if model.target.image_tokens < _FIRST + _FREE + per_image - 1:
        raise RefusedError(f"the images of {model.name} are too short for {per_image} positions each")
    images = -(-positions // per_image)
    slots = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]

    tokens_of: dict[tuple[Decoding, int], Tensor] = {}  # of autoregressive images, which draftings share
    cells_of: dict[Decoding, list[Cell]] = {}
    for cell in cells:
        cells_of.setdefault(_strict(cell.decoding), []).append(cell)
    for strict, members in cells_of.items():
        rules = [drafter_and_rule(model, cell.decoding)[1] for cell in members]
        remaining = positions
        for start in range(0, images, batch):
            chosen = slots[start : start + batch]
            seeds = [record_seed(seed, prompt.id, repeat) for prompt, repeat in chosen]
            condition = model.condition([prompt.text for prompt, _ in chosen])
            # Drafts of a static tree, and deterministic ones, do not depend on earlier steps.
            if strict.drafting_row.needs_drafter and (strict.paths or not strict.drafting_row.sampled):
                sampling = strict.autoregressive()
                if (sampling, start) not in tokens_of:
                    decoded = decode(model, condition, sampling, generators(model, seeds), engine=model.engine)
                    tokens_of[sampling, start] = torch.stack([image.tokens for image in decoded]).long()
                tokens = tokens_of[sampling, start].to(model.target.device)
                forced = teacher_forced(model.target, condition, tokens, strict.cfg_scale != 1)
                roots = _roots_of_images(model, strict, forced, seeds, per_image)
            else:
                roots = _roots_of_steps(model, strict, condition, seeds, per_image)
            for root in roots:
                measured = _measured(model, strict, root, rules, seeds, draws)
                for cell, figures in zip(members, measured, strict=True):
                    for image, (prompt, repeat) in enumerate(chosen[:remaining]):
                        place = {"prompt_id": prompt.id, "repeat": repeat, "position": int(root.position[image])}
                        yield cell.columns() | place | {name: float(tv[image]) for name, tv in figures.items()}
                remaining -= len(chosen)
                on_progress(f"emitted TV of {len(members)} modes", 1 - max(0, remaining) / positions)
                if remaining <= 0:
                    break


def _strict(decoding: Decoding) -> Decoding:
    """Return the same drafting under the strict rule."""
    settings = {key: decoding.value(key) for key in (*SAMPLING, *decoding.drafting_row.parameter_names)}
    return Decoding(
        "speculative", drafting=decoding.drafting, rule="strict", **settings | {"tree": decoding.paths or None}
    )


def _roots_of_images(
    model: LoadedModel, strict: Decoding, forced: Forced, seeds: Sequence[int], per_image: int
) -> Iterator[_Root]:
    """Roots at positions of each image, drawn without replacement from those where a step can start."""
    assert model.drafter is not None
    tokens, scores = forced.tokens, forced.logits
    drawn = []
    for seed in seeds:
        noise = torch.Generator().manual_seed(record_seed(seed, "places", 0))
        possible = torch.randperm(tokens.shape[1] - _FIRST - _FREE + 1, generator=noise)
        drawn.append(possible[:per_image].sort().values + _FIRST)
    images = torch.arange(len(tokens), device=tokens.device)
    drafting = drafting_of(strict, model.target)
    for position in torch.stack(drawn, dim=1).to(tokens.device):
        uncond = None if scores.uncond is None else scores.uncond[images, position]
        p = decoding_probabilities(guide(scores.cond[images, position], uncond, strict.cfg_scale), strict)
        proposer = proposer_at(model.drafter, forced, position, drafting.nodes, strict)
        if strict.drafting_row.sampled:
            yield _Root(position, p, proposer.root_q[:, 0])
            continue
        limit = (model.target.image_tokens - 1 - position).clamp_max(drafting.depth)
        no_noise = torch.empty(len(images), 0, device=images.device)
        drafted = drafting.draft(DraftInputs(tokens[images, position - 1], no_noise, limit, proposer))
        tree = drafting.tree(drafted)
        children = tree.children[:, 0]
        yield _Root(position, p, None, (tree.tokens.gather(1, children.clamp_min(0)), children >= 0))


def _roots_of_steps(
    model: LoadedModel, strict: Decoding, condition: Any, seeds: Sequence[int], per_image: int
) -> Iterator[_Root]:
    """Roots of steps that `strict` makes, drawn in each image from those that have room for a draft."""
    drafting: Any = drafting_of(strict, model.target, len(seeds))
    after_step, seen = drafting.after_step, []

    def note_root(step: LastStep) -> None:
        assert step.tree.q is not None
        before = step.position - step.accepted - 1
        # Copies: both are overwritten in place.
        seen.append((before, step.p[:, 0].clone(), step.tree.q[:, 0].clone(), step.active.clone()))
        after_step(step)

    drafting.learns, drafting.after_step = True, note_root
    decode(model, condition, strict, generators(model, seeds), engine=Engine(), drafting=drafting)
    position, p, q, active = (torch.stack(column) for column in zip(*seen, strict=True))  # [steps, B, ...]
    possible = active & (position <= model.target.image_tokens - _FREE)
    drawn = []
    for image, seed in enumerate(seeds):
        steps = possible[:, image].nonzero().flatten()
        order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed)).repeat(per_image)
        drawn.append(steps[order[:per_image].to(steps.device)])
    images = torch.arange(len(seeds), device=position.device)
    for steps in torch.stack(drawn, dim=1):
        yield _Root(position[steps, images], p[steps, images], q[steps, images])


def _measured(
    model: LoadedModel, strict: Decoding, root: _Root, rules: Sequence[AcceptanceRule], seeds: Sequence[int], draws: int
) -> list[dict[str, Tensor]]:
    """The figures [B] of each rule: exact for deterministic drafts, else estimates from `draws` sampled ones."""
    if root.q is None:
        assert root.children is not None
        emissions = [emitted(root.p, None, *root.children, rule, root.position) for rule in rules]
        return [
            {"emitted_tv": total_variation(root.p, emission.distribution), "moved_mass": emission.neighbour_mass}
            for emission in emissions
        ]
    children = sum(len(path) == 1 for path in strict.paths) or drafting_of(strict, model.target).fanout
    places = zip(seeds, root.position.tolist(), strict=True)
    streams = generators(model, [record_seed(seed, str(position), 0) for seed, position in places])
    noise = partial(Draws(streams, root.p.device).exponential, root.p.shape[1])
    estimates = emitted_tv_sampled(root.p, root.q, children, draws, rules, noise, root.position)
    return [{"emitted_tv": estimate.tv, "emitted_tv_crossed": estimate.crossed} for estimate in estimates]
