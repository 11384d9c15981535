"""Train an EAGLE drafter for a frozen target (arXiv 2401.15077, section 4.2): features and losses.

The target computes the features of a batch of sequences when the batch is drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import (
    CachedTarget,
    Condition,
    force_line_ends,
    positions_of,
    prefix_mask,
    prompt_rows,
    visible_rows,
)
from lantern_bench.models.networks.transformer import in_dtype
from lantern_bench.training.recipe import DrafterRecipe
from lantern_bench.training.trainer import SINGLE, Processes, Task

# ---- Features of sequences


class TargetFeatures(NamedTuple):
    """Features of B sequences of N tokens behind a prefix of P, on the target's device."""

    tokens: Tensor  # int64 [B, N]
    # Final-norm hidden states [B, P + N - 1, dim]; number P - 1 predicts the first token.
    hidden: Tensor
    valid: Tensor  # bool [B, P], False for padding
    prompts: Tensor | None  # int64 [B, P], in the model's own vocabulary; None for other conditions


def target_features(
    target: CachedTarget, condition: Condition, tokens: Tensor, dropped: Tensor
) -> TargetFeatures:
    """Compute the features of the target along token sequences.

    Args:
        target: The target.
        condition: The conditions of B sequences.
        tokens: Their tokens, int64 [B, N].
        dropped: Rows that get the null condition in place of their own, bool [B].
    """
    device = target.device
    tokens = tokens.to(device)
    # The chosen ones of 2 B rows: first come those with condition, then those without.
    chosen = torch.arange(len(tokens), device=device) + len(tokens) * dropped.to(device)
    prefix = target.prefix(condition, guided=True)[chosen]
    visible = visible_rows(condition.valid.to(device), 2)[chosen]
    prompts = None
    if target.config.text_vocab_size is not None:
        prompts = prompt_rows(condition.values.to(device), 2)[chosen]

    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    counted = positions_of(visible, length, target.config)
    positions = target.position_ids(counted, visible.sum(dim=1, keepdim=True))
    hidden = target.transformer(x, prefix_mask(visible, length), positions)
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

    def features_twice(self, rows: Sequence[int]) -> TargetFeatures:
        """Return the features of the sequences with their conditions, then without."""
        return self.features([*rows, *rows], torch.arange(2 * len(rows)) >= len(rows))


def in_order(count: int, seed: int, *, drawn: int, wanted: int) -> list[int]:
    """Return the next numbers of an endless series of shuffled epochs over 0 to count - 1.

    Args:
        count: Numbers of an epoch.
        seed: Seed of the shuffles.
        drawn: How many numbers were drawn before.
        wanted: How many are drawn now.
    """
    numbers: list[int] = []
    last = (drawn + wanted - 1) // count
    for epoch in range(drawn // count, last + 1):
        generator = torch.Generator().manual_seed(((seed << 20) + epoch) % 2**63)
        numbers += torch.randperm(count, generator=generator).tolist()
    first = drawn % count
    return numbers[first : first + wanted]


def unroll(
    drafter: EagleDrafter, target: TargetFeatures, features: Tensor, levels: int
) -> list[Tensor]:
    """Predict the features of each level of a draft (HASS, arXiv 2408.15766, section 3).

    Args:
        drafter: The drafter.
        target: Features of the target.
        features: Input of the first level, [B, P + N - 1, dim]: the target's features with noise.
        levels: Number of levels.

    Returns:
        Predicted features of each level, as `features`. The output of level k is a draft's from
        position P + k - 2 on.
    """
    length = features.shape[1]
    count = drafter.config.image_tokens
    tokens = target.tokens
    valid = target.valid
    prompts = None
    if target.prompts is None:
        padding = tokens.new_zeros(len(tokens), valid.shape[1] - 1)
        tokens = torch.cat([padding, tokens], dim=1)
    else:
        prompts = target.prompts[:, 1:]
    causal = prefix_mask(valid if drafter.mask_padding else torch.ones_like(valid), length)
    positions = positions_of(valid, length, drafter.config)
    earlier: list[tuple[Tensor, Tensor]] = []

    # A level sees the true features up to `level` positions before it, then one guess of each level
    # between, and itself.
    order = torch.arange(length, device=valid.device)
    distance = order[:, None] - order[None, :]
    outputs = list[Tensor]()
    inputs = features
    for level in range(levels):
        masks = [causal.masked_fill(distance < level, -torch.inf)]
        for lag in reversed(range(level)):
            masks.append(torch.zeros_like(causal).masked_fill(distance != lag, -torch.inf))
        predicted = drafter(
            tokens,
            inputs,
            mask=torch.cat(masks, dim=-1),
            prompts=prompts,
            positions=positions,
            earlier=earlier,
        )
        outputs.append(predicted)
        guesses = predicted[:, -count:-1].to(features.dtype)
        inputs = torch.cat([features[:, : 1 - count], guesses], dim=1)
    return outputs


def drafter_like(drafter: EagleDrafter, dtype: torch.dtype) -> EagleDrafter:
    """Return a copy of a drafter that shares only the head; float32 is for training."""
    head = drafter.head
    copied = in_dtype(copy.deepcopy(drafter, {id(head): head}), dtype)
    copied.requires_grad_(requires_grad=True)
    copied.embed_tokens.requires_grad_(requires_grad=False)
    return copied


# ---- The task


@dataclass(eq=False, kw_only=True)
class DrafterTask(Task):
    """Train a drafter for a frozen target.

    Process r of n takes rows r, r + n, ... of the same batch. Each row has its own seed, so its
    random draws are the same in any process.
    """

    name = "drafter"
    drafter: EagleDrafter
    training: Sequences
    held_out: Sequences
    recipe: DrafterRecipe
    decoding: Decoding
    seed: int = 0
    processes: Processes = SINGLE
    drawn: int = 0  # sequences so far

    def __post_init__(self) -> None:
        self.module = self.drafter

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return feature and distribution loss of the next batch."""
        recipe = self.recipe
        target, seeds, dropped = self._draw(generator)
        count = self.drafter.config.image_tokens
        # The features that predict tokens 1 to N - 1 of the image.
        true = target.hidden[:, 1 - count :]
        p = self._distribution(true, dropped).softmax(-1)
        levels = unroll(
            drafter=self.drafter,
            target=target,
            features=self._noisy(target.hidden, seeds),
            levels=recipe.levels,
        )

        total = torch.zeros(())
        weights = 0.0
        figures = dict[str, Tensor]()
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
            weight = recipe.level_decay**level
            total = total + weight * loss
            weights += weight
            if level == 0:
                # Named as in the log.
                figures = {
                    "feature_loss": feature,
                    "soft_loss": soft,
                    "train_one_minus_tv": overlap,
                }
        return total / weights, figures

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many sequences were drawn."""
        return {"drawn": torch.tensor(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue after the sequences that were drawn."""
        self.drawn = int(state["drawn"])

    @torch.no_grad()
    def overlap(self, drafter: EagleDrafter) -> float:
        """Return 1 - TV(p, q) at depth 1 on held-out sequences.

        It is the probability that the first draft token is accepted.
        """
        count = drafter.config.image_tokens
        dtype = drafter.fc.weight.dtype
        overlaps = list[Tensor]()
        for batch in torch.arange(len(self.held_out.tokens)).split(8):
            target = self.held_out.features_twice(batch.tolist())
            features = target.hidden.to(dtype)
            (predicted,) = unroll(drafter, target, features, levels=1)
            p = self._probabilities(features[:, 1 - count :])
            q = self._probabilities(predicted[:, -count:-1])
            overlaps.append(torch.minimum(p, q).sum(-1).mean(-1))
        return float(torch.cat(overlaps).mean())

    def _probabilities(self, features: Tensor) -> Tensor:
        """Return the distributions of decoding, given features with and without condition."""
        cond, uncond = self._logits(features).chunk(2)
        guided = guide(cond, uncond, self.decoding.cfg_scale)
        return decoding_probabilities(guided, self.decoding)

    def _draw(self, generator: torch.Generator) -> tuple[TargetFeatures, list[int], Tensor]:
        """Return this process's rows of the next batch.

        These are the features, a seed for each row, and `dropped` bool [B], the rows without a
        condition. If the recipe is guided, the features have 2 B rows: first with condition, then
        without. The `dropped` rows are then not guided.
        """
        recipe = self.recipe
        own = slice(self.processes.rank, None, self.processes.count)
        numbers = in_order(
            len(self.training.tokens), self.seed, drawn=self.drawn, wanted=recipe.batch
        )[own]
        self.drawn += recipe.batch
        dropped = (torch.rand(recipe.batch, generator=generator) < recipe.dropped)[own]
        seeds = torch.randint(2**62, (recipe.batch,), generator=generator)[own]
        if recipe.guided:
            target = self.training.features_twice(numbers)
        else:
            target = self.training.features(numbers, dropped)
        hidden = target.hidden.to(self.drafter.fc.weight.dtype)
        return target._replace(hidden=hidden), seeds.tolist(), dropped

    def _distribution(self, features: Tensor, dropped: Tensor) -> Tensor:
        """Return the logits [B, N - 1, V] that the loss compares, guided if the recipe is."""
        if not self.recipe.guided:
            return self._logits(features)
        # If the head is linear, guiding its input guides its output at half the cost.
        linear = self.training.target.linear_head
        cond, uncond = (features.float() if linear else self._logits(features)).chunk(2)
        alone = dropped.to(cond.device)[:, None, None]
        guided = torch.where(alone, cond, guide(cond, uncond, self.decoding.cfg_scale))
        return self._logits(guided.to(features.dtype)) if linear else guided

    def _logits(self, features: Tensor) -> Tensor:
        """Return logits float32 [B, N - 1, V] of the tokens 1 to N - 1."""
        positions = torch.arange(1, features.shape[1] + 1, device=features.device)[None]
        return force_line_ends(self.drafter.head(features).float(), positions, self.drafter.config)

    def _noisy(self, hidden: Tensor, seeds: list[int]) -> Tensor:
        """Add uniform noise to features; a row with and without condition gets the same noise."""
        draws = [
            torch.rand(hidden.shape[1:], generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
        noise = torch.stack(draws * (len(hidden) // len(seeds))).to(hidden)
        width = self.recipe.noise * (512 / hidden.shape[1])
        return hidden + (2 * noise - 1) * width
