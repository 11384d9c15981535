"""Images decoded without relaxation, token by token, as the contexts that measurements are made in.

A lossless decode visits the same contexts whatever its steps are, so the model's own autoregressive samples are the
real ones. What is measured in them stands in the modules beside this one.
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


class Made(NamedTuple):
    """A batch of lossless images: prompt, repeat and seed of each, and the target along their tokens."""

    prompts: list[Prompt]
    repeats: list[int]
    seeds: list[int]
    forced: Forced


def plain(decoding: Decoding) -> Decoding:
    """Return the autoregressive decoding with the sampling settings of `decoding`."""
    sampling = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "cfg_default")
    return Decoding(mode="ar", **{key: getattr(decoding, key) for key in sampling})


def generators(model: LoadedModel, seeds: Sequence[int]) -> list[torch.Generator]:
    """One generator an image, where the model computes."""
    return [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]


@torch.inference_mode()
def lossless_images(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    images: int,
    decoding: Decoding,
    *,
    seed: int = 0,
    batch: int = 32,
    on_progress: OnProgress = unheard,
) -> Iterator[Made]:
    """Yield `images` images in batches, prompts in order and then again, with the sampling settings of `decoding`.

    Seeds are those a sweep gives the same prompts and repeats.
    """
    slots = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]
    for start in range(0, images, batch):
        chosen = slots[start : start + batch]
        seeds = [record_seed(seed, prompt.id, repeat) for prompt, repeat in chosen]
        condition = model.condition([prompt.text for prompt, _ in chosen])
        decoded = decode(model, condition, plain(decoding), generators(model, seeds), engine=model.engine)
        tokens = torch.stack([image.tokens for image in decoded]).long().to(model.target.device)
        forced = teacher_forced(model.target, condition, tokens, decoding.cfg_scale != 1)
        yield Made([prompt for prompt, _ in chosen], [repeat for _, repeat in chosen], seeds, forced)
        on_progress("measuring in the model's own images", min(start + batch, images) / images)
