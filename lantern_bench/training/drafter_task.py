"""Training an EAGLE drafter for a frozen target (arXiv 2401.15077, section 4.2): its sequences and its losses.

A sequence is a picture as tokens of the target's tokenizer, or a sample of the target, with a caption. Tokens are made
once; the target computes the features of a batch when it is drawn.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.loaded_model import LoadedModel, VQPixels
from lantern_bench.models.networks.conditions import Condition, prompt_rows, visible_rows
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import (
    CachedTarget,
    force_line_ends,
    positions_of,
    prefix_mask,
)
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.training.recipe import DrafterRecipe
from lantern_bench.training.trainer import SINGLE, Processes, Task
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent

_BATCH = 32

# ---- Tokens of pictures and samples


@dataclass(frozen=True)
class Data:
    """A caption for each sequence, and its picture; without pictures the target samples them."""

    captions: Sequence[str]
    # a file, and whether its mirror image is meant
    pictures: Sequence[tuple[Path, bool]] | None = None

    def sha256(self) -> str:
        """Return a hash of captions and of the pictures' names and sizes; reading all pictures would take too long."""
        pictures = [
            [path.name, path.stat().st_size, mirrored] for path, mirrored in self.pictures or ()
        ]
        return hashlib.sha256(json.dumps([list(self.captions), pictures]).encode()).hexdigest()


def make_tokens(
    data: Data,
    model: LoadedModel,
    decoding: Decoding,
    seed: int,
    work: Path,
    emit: Emit,
) -> Tensor:
    """Encode the pictures, or sample from the target with `decoding` (a mode `ar`): tokens int32 [n, N].

    Each batch is a file in `work`, and files are not made again.
    """
    key: dict[str, Any] = {"data": data.sha256(), "grid": list(model.grid)}
    reader: Any = model.pixels
    pictures = data.pictures
    total = len(data.captions)
    if pictures is None:
        name = "samples"
        label = "sampling from the target"
        captions = pd.Series(data.captions)
        slots = list(zip(data.captions, captions.groupby(captions).cumcount(), strict=True))
        key |= {"weights": dict(model.weights), "seed": seed}
        key |= {"decoding": decoding.settings(), "dtype": str(getattr(model.target, "dtype", ""))}
    elif isinstance(reader, VQPixels):
        name = "tokens"
        label = "encoding pictures"
        key |= {"size": list(reader.size), "tokenizer": model.weights.get("tokenizer")}
    else:
        raise UserError(
            f"--data: pictures need the tokenizer of {model.name}, and it has none",
            "Name the tokenizer in the model's file; or give captions alone, and the target samples from them.",
        )

    def make(rows: slice) -> Tensor:
        if pictures is None:
            return torch.stack(
                [
                    image.tokens
                    for image in decode_slots(
                        model=model, decoding=decoding, seed=seed, slots=slots[rows]
                    )
                ]
            )
        pixels = [_picture(path, mirrored, reader.size) for path, mirrored in pictures[rows]]
        return reader.tokens(torch.from_numpy(np.stack(pixels))).int()

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = work / f"{name}-{digest[:12]}"
    write_file(
        folder / "manifest.json",
        json.dumps({"key": key}, indent=1, sort_keys=True).encode() + b"\n",
    )
    tokens = []
    for number, start in enumerate(range(0, total, _BATCH)):
        path = folder / f"{number:05d}.safetensors"
        if not path.is_file():
            emit(ProgressEvent(label, start / total))
            write_file(
                path, save({"tokens": make(slice(start, start + _BATCH)).cpu().contiguous()})
            )
        try:
            tokens.append(load_file(path)["tokens"])
        except (OSError, KeyError, SafetensorError) as error:
            advice = f"Remove {folder}; the next training writes it again."
            raise RefusedError(f"{path}: damaged: {error}", advice) from error
    emit(ProgressEvent(label, 1.0))
    return torch.cat(tokens)


def decode_slots(
    model: LoadedModel, decoding: Decoding, seed: int, slots: Sequence[tuple[str, int]]
) -> list[Decoded]:
    """Decode an image for each pair of a prompt and a repeat, with the seed that a sweep gives it."""
    seeds = [record_seed(seed, Prompt(text).id, repeat) for text, repeat in slots]
    generators = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
    return decode(
        model=model,
        condition=model.condition([text for text, _ in slots]),
        decoding=decoding,
        generators=generators,
    )


def _picture(path: Path, mirrored: bool, size: tuple[int, int]) -> np.ndarray:
    """Read a picture as uint8 RGB [H, W, 3]: the short side scaled to `size`, the centre cropped."""
    try:
        with Image.open(path) as opened:
            picture = ImageOps.fit(opened.convert("RGB"), size[::-1], Image.Resampling.BICUBIC)
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        advice = "Remove it, or save it again."
        raise UserError(f"--data: {path}: cannot be read as a picture: {error}", advice) from error
    return np.asarray(ImageOps.mirror(picture) if mirrored else picture)


# ---- Features of sequences


class TargetFeatures(NamedTuple):
    """Features of B sequences of N tokens behind a prefix of P, on the target's device."""

    tokens: Tensor  # int64 [B, N]
    # [B, P + N - 1, dim], final-norm hidden states; number P - 1 predicts the first token
    hidden: Tensor
    valid: Tensor  # bool [B, P], False for padding
    prompts: Tensor | None  # int64 [B, P], in the model's own vocabulary; None for other conditions


def target_features(
    target: CachedTarget, condition: Condition, tokens: Tensor, dropped: Tensor
) -> TargetFeatures:
    """Return features along tokens int64 [B, N]; the rows `dropped` bool [B] have the null condition."""
    tokens = tokens.to(target.device)
    dropped = dropped.to(target.device)[:, None]
    conditional, null = target.prefix(condition, guided=True).chunk(2)
    visible = visible_rows(condition.valid.to(target.device), 2)
    prompts = None
    if target.config.text_vocab_size is not None:
        with_caption, without = prompt_rows(condition.values.to(target.device), 2).chunk(2)
        prompts = torch.where(dropped, without, with_caption)
    if len(visible) > len(tokens):
        with_caption, without = visible.chunk(2)
        visible = torch.where(dropped, without, with_caption)
    prefix = torch.where(dropped[:, :, None], null, conditional)
    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    hidden = target.transformer(
        x, prefix_mask(visible, length), positions_of(visible, length, target.config)
    )
    return TargetFeatures(tokens=tokens, hidden=hidden, valid=visible, prompts=prompts)


@dataclass(frozen=True)
class Sequences:
    """Token sequences of a target with their conditions."""

    target: CachedTarget
    tokens: Tensor  # int [n, N]
    condition: Callable[[Sequence[int]], Condition]  # of the rows with these numbers

    @torch.no_grad()
    def features(self, rows: Sequence[int], dropped: Tensor) -> TargetFeatures:
        """Return the `target_features` of the sequences with these numbers."""
        return target_features(
            target=self.target,
            condition=self.condition(rows),
            tokens=self.tokens[list(rows)].long(),
            dropped=dropped,
        )


def in_order(count: int, seed: int, drawn: int, wanted: int) -> list[int]:
    """Return `wanted` numbers of 0 to count - 1, in seeded orders one after the other, behind the `drawn` ones."""
    numbers: list[int] = []
    for epoch in range(drawn // count, (drawn + wanted - 1) // count + 1):
        generator = torch.Generator().manual_seed(((seed << 20) + epoch) % 2**63)
        numbers += torch.randperm(count, generator=generator).tolist()
    first = drawn % count
    return numbers[first : first + wanted]


def unroll(
    drafter: EagleDrafter, target: TargetFeatures, features: Tensor, levels: int
) -> list[Tensor]:
    """Return predicted features of each level, [B, P + N - 1, dim], as `features`, the input of the first level.

    The output of level k is a draft's from position P + k - 2 on (HASS, arXiv 2408.15766, section 3).
    """
    tokens = target.tokens
    prompts = target.prompts
    valid = target.valid
    length = features.shape[1]
    first = features.shape[1] - drafter.config.image_tokens
    if prompts is None:
        tokens = torch.cat([tokens.new_zeros(len(tokens), valid.shape[1] - 1), tokens], dim=1)
    else:
        prompts = prompts[:, 1:]
    causal = prefix_mask(valid if drafter.mask_padding else torch.ones_like(valid), length)
    positions = positions_of(valid, length, drafter.config)
    earlier: list[tuple[Tensor, Tensor]] | None = [] if levels > 1 else None
    # A level sees the true features up to `level` positions before it, then a guess of each level between, and itself.
    order = torch.arange(length, device=valid.device)
    distance = order[:, None] - order[None, :]
    outputs = list[Tensor]()
    inputs = features
    for level in range(levels):
        masks = [causal.masked_fill(distance < level, -torch.inf)]
        masks += [
            torch.zeros_like(causal).masked_fill(distance != lag, -torch.inf)
            for lag in reversed(range(level))
        ]
        outputs.append(
            drafter(
                tokens,
                inputs,
                torch.cat(masks, dim=-1),
                prompts=prompts,
                positions=positions,
                earlier=earlier,
            )
        )
        inputs = torch.cat(
            [features[:, : first + 1], outputs[-1][:, first:-1].to(features.dtype)], dim=1
        )
    return outputs


def drafter_like(drafter: EagleDrafter, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """Return a copy in another dtype that shares only the head: float32 to train, the target's dtype to decode."""
    head = drafter.head
    copied = copy.deepcopy(drafter, {id(head): head}).to(device, dtype)
    copied.requires_grad_(True)
    copied.embed_tokens.weight.requires_grad_(False)
    return copied


# ---- The task


class DrafterTask(Task):
    """Train a drafter for a frozen target.

    Process r of n takes rows r, r + n, ... of the same batch; each row has a seed of its own, so its random draws are
    the same in any process.
    """

    name = "drafter"

    def __init__(
        self,
        drafter: EagleDrafter,
        training: Sequences,
        held_out: Sequences,
        recipe: DrafterRecipe,
        decoding: Decoding,
        seed: int = 0,
        processes: Processes = SINGLE,
    ) -> None:
        self.drafter = self.module = drafter
        self._training = training
        self._held_out = held_out
        self._recipe = recipe
        self._decoding = decoding
        self._processes = processes
        self._seed = seed
        self._drawn = 0

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return feature and distribution loss of the next batch."""
        recipe = self._recipe
        target, seeds, dropped = self._draw(generator)
        # Features behind which tokens 1 to N - 1 of the image come.
        count = self.drafter.config.image_tokens
        true = target.hidden[:, 1 - count :]
        p = self._distribution(true, dropped).softmax(-1)
        total = torch.zeros((), device=p.device)
        figures = dict[str, Tensor]()
        levels = unroll(
            drafter=self.drafter,
            target=target,
            features=self._inputs(target.hidden, seeds),
            levels=recipe.levels,
        )
        for level, predicted in enumerate(levels):
            drafted = predicted[:, -count:-1]
            feature = functional.smooth_l1_loss(drafted[:, level:].float(), true[:, level:].float())
            log_q = self._distribution(drafted, dropped)[:, level:].log_softmax(-1)
            soft = -(p[:, level:] * log_q).sum(-1).mean()
            overlap = torch.minimum(p[:, level:], log_q.exp()).sum(-1).mean()
            loss = (
                recipe.feature_weight * feature
                + recipe.soft_weight * soft
                + recipe.overlap_weight * (1 - overlap)
            )
            total = total + recipe.level_decay**level * loss
            if level == 0:
                figures = {
                    "feature": feature.detach(),
                    "soft": soft.detach(),
                    "one_minus_tv": overlap.detach(),
                }
        return total / sum(recipe.level_decay**level for level in range(recipe.levels)), figures

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many sequences were drawn."""
        return {"drawn": torch.tensor(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue after the sequences that were drawn."""
        self._drawn = int(state["drawn"])

    @torch.no_grad()
    def overlap(self, drafter: EagleDrafter) -> float:
        """Return 1 - TV(p, q) at depth 1 on held-out sequences: the probability that a first draft is accepted."""
        overlaps = list[Tensor]()
        numbers = range(len(self._held_out.tokens))
        count = drafter.config.image_tokens
        dtype = drafter.fc.weight.dtype
        scale = self._decoding.cfg_scale
        for start in range(0, len(numbers), 8):
            batch = numbers[start : start + 8]
            logits = []
            for dropped in (False, True):
                target = self._held_out.features(batch, torch.full((len(batch),), dropped))
                target = target._replace(hidden=target.hidden.to(dtype))
                (predicted,) = unroll(
                    drafter=drafter, target=target, features=target.hidden, levels=1
                )
                logits.append(
                    [
                        self._logits(target.hidden[:, 1 - count :]),
                        self._logits(predicted[:, -count:-1]),
                    ]
                )
            guided = [guide(cond, null, scale) for cond, null in zip(*logits, strict=True)]
            p, q = (decoding_probabilities(values, self._decoding) for values in guided)
            overlaps.append(torch.minimum(p, q).sum(-1).mean(-1))
        return float(torch.cat(overlaps).mean())

    def _draw(self, generator: torch.Generator) -> tuple[TargetFeatures, list[int], Tensor]:
        """Return this process's rows of the next batch, a seed for each, and which have no condition, bool [B].

        Where the recipe is guided the features have 2 B rows, those without condition last; `dropped` are not guided.
        """
        recipe = self._recipe
        numbers = in_order(
            count=len(self._training.tokens),
            seed=self._seed,
            drawn=self._drawn,
            wanted=recipe.batch,
        )
        self._drawn += recipe.batch
        dropped = torch.rand(recipe.batch, generator=generator) < recipe.dropped
        seeds = torch.randint(2**62, (recipe.batch,), generator=generator).tolist()
        rows = slice(self._processes.rank, None, self._processes.count)
        numbers = numbers[rows]
        seeds = seeds[rows]
        dropped = dropped[rows]
        if recipe.guided:
            twice = torch.arange(2 * len(numbers)) >= len(numbers)
            target = self._training.features([*numbers, *numbers], twice)
        else:
            target = self._training.features(numbers, dropped)
        return (
            target._replace(hidden=target.hidden.to(self.drafter.fc.weight.dtype)),
            seeds,
            dropped,
        )

    def _distribution(self, features: Tensor, dropped: Tensor) -> Tensor:
        """Return the logits [B, N - 1, V] that the loss compares: guided where the recipe is."""
        if not self._recipe.guided:
            return self._logits(features)
        # Where the head is linear, guiding its input guides its output at half the cost.
        linear = self._training.target.linear_head
        cond, null = (features.float() if linear else self._logits(features)).chunk(2)
        alone = dropped.to(cond.device)[:, None, None]
        guided = torch.where(alone, cond, guide(cond, null, self._decoding.cfg_scale))
        return self._logits(guided.to(features.dtype)) if linear else guided

    def _logits(self, features: Tensor) -> Tensor:
        """Return logits float32 [B, N - 1, V] of the tokens 1 to N - 1."""
        positions = torch.arange(1, features.shape[1] + 1, device=features.device).expand(
            len(features), -1
        )
        return force_line_ends(self.drafter.head(features).float(), positions, self.drafter.config)

    @torch.no_grad()
    def _inputs(self, hidden: Tensor, seeds: list[int]) -> Tensor:
        draws = [
            torch.Generator().manual_seed(seed) for seed in seeds * (len(hidden) // len(seeds))
        ]
        noise = torch.stack([torch.rand(hidden.shape[1:], generator=draw) for draw in draws])
        width = self._recipe.noise * (512 / hidden.shape[1])
        return hidden + (2 * noise.to(hidden) - 1) * width
