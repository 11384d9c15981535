"""The contexts of all measurements: images that the model decodes autoregressively, with the target along their tokens.

A lossless decode visits the same contexts however it drafts, so these are the contexts of every lossless mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.teacher_forcing import Forced, teacher_forced
from lantern_bench.models.loaded_model import LoadedModel


class Contexts(NamedTuple):
    """A batch of autoregressive images: prompt, repeat and seed of each, and the target along their tokens."""

    prompts: list[Prompt]
    repeats: list[int]
    seeds: list[int]
    forced: Forced


def autoregressive(decoding: Decoding) -> Decoding:
    """Return the autoregressive decoding with the sampling settings of `decoding`."""
    sampling = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "cfg_default")
    return Decoding(mode="ar", **{key: getattr(decoding, key) for key in sampling})


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
    on_progress: OnProgress = unheard,
) -> Iterator[Contexts]:
    """Yield `images` images in batches, cycling through the prompts, with the sampling settings of `decoding`.

    Seeds are those that a sweep gives the same prompts and repeats.
    """
    slots = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]
    for start in range(0, images, batch):
        chosen, repeats = map(list, zip(*slots[start : start + batch], strict=True))
        seeds = [record_seed(seed, prompt.id, repeat) for prompt, repeat in zip(chosen, repeats, strict=True)]
        condition = model.condition([prompt.text for prompt in chosen])
        decoded = decode(model, condition, autoregressive(decoding), generators(model, seeds), engine=model.engine)
        tokens = torch.stack([image.tokens for image in decoded]).long().to(model.target.device)
        forced = teacher_forced(model.target, condition, tokens, decoding.cfg_scale != 1)
        yield Contexts(chosen, repeats, seeds, forced)
        on_progress("sampling images as contexts", min(start + batch, images) / images)
