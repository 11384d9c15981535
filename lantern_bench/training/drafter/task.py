"""The task of training an EAGLE drafter for a frozen target (arXiv 2401.15077, section 4.2).

The loss is SmoothL1 between predicted and true feature plus soft cross-entropy against the target's distribution, with
uniform noise on the input features; a recipe can replace a share of them by the drafter's own guesses, as deeper in a
tree (the idea of HASS, arXiv 2408.15766). The token embedding is the target's input embedding, frozen; padding is
masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.eagle import EagleDrafter
from lantern_bench.models.io.state_dict import compute_buffers
from lantern_bench.models.target import force_line_ends, positions_of, prefix_mask
from lantern_bench.training.drafter.features import (
    FeatureBatch,
    FeatureBatches,
    TargetFeatures,
)
from lantern_bench.training.drafter.recipe import DrafterRecipe
from lantern_bench.training.loop import Task, TrainSettings


def unroll(drafter: EagleDrafter, target: TargetFeatures, features: Tensor, levels: int) -> list[Tensor]:
    """Predicted features of each level, [B, P + N - 1, dim]; position t sees feature t and the token that follows it.

    `features` [B, P + N - 1, dim] are the input of the first level. The output of level k is a draft's from position
    P + k - 2 on; earlier positions are unused. Source: HASS, arXiv 2408.15766, section 3.
    """
    tokens, words, valid = target.tokens, target.words, target.valid
    length, first = features.shape[1], features.shape[1] - drafter.config.image_tokens
    if words is None:
        tokens = torch.cat([tokens.new_zeros(len(tokens), valid.shape[1] - 1), tokens], dim=1)
    causal = prefix_mask(valid if drafter.mask_padding else torch.ones_like(valid), length)
    before = None if words is None else words[:, 1:]
    positions = positions_of(valid, length, drafter.config)
    seen: list[tuple[Tensor, Tensor]] | None = [] if levels > 1 else None
    # A level sees the true features up to `level` places before it, then a guess of each level between, and itself.
    places = torch.arange(length, device=valid.device)
    behind = places[:, None] - places[None, :]
    made, fed = list[Tensor](), features
    for level in range(levels):
        masks = [causal.masked_fill(behind < level, -torch.inf)]
        masks += [torch.zeros_like(causal).masked_fill(behind != lag, -torch.inf) for lag in reversed(range(level))]
        made.append(drafter(tokens, fed, torch.cat(masks, dim=-1), before, positions, seen))
        fed = torch.cat([features[:, : first + 1], made[-1][:, first:-1].to(features.dtype)], dim=1)
    return made


def loop_settings(recipe: DrafterRecipe, sequences: int | None = None) -> TrainSettings:
    """The settings of the loop for a recipe over that many sequences; None leaves the end to be set."""
    known = {"lr", "betas", "weight_decay", "clip", "clip_by", "schedule", "final_lr", "accumulate", "autocast"}
    steps = None if sequences is None else recipe.total_steps(sequences)
    return TrainSettings(steps=steps, warmup=recipe.warmup_steps(sequences or 0), **recipe.model_dump(include=known))


def drafter_like(drafter: EagleDrafter, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """A copy in another dtype that shares only the head: float32 to train, the target's dtype to decode."""
    norms_input = not isinstance(drafter.layer.attention_norm, nn.Identity)
    config = replace(drafter.config, layers=1)
    with torch.device("meta"):
        bias = drafter.fc.bias is not None
        copy = EagleDrafter(config, drafter.head_module, drafter.mask_padding, norms_input, bias)
    state = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in drafter.state_dict().items()}
    copy.load_state_dict(state, strict=True, assign=True)
    copy.requires_grad_(True)
    copy.embed_tokens.weight.requires_grad_(False)
    compute_buffers(copy, device)
    return copy


class DrafterTask(Task):
    """Train a drafter for a frozen target; `decoding` has the guidance and filters of the evaluation."""

    name = "drafter"

    def __init__(self, drafter: EagleDrafter, batches: FeatureBatches, recipe: DrafterRecipe, decoding: Decoding):
        self.drafter = self.module = drafter
        self._batches, self._recipe, self._decoding = batches, recipe, decoding

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Feature and distribution loss of the next batch."""
        batch, recipe = self._batches.draw(generator), self._recipe
        target = batch.target._replace(hidden=batch.target.hidden.to(self.drafter.fc.weight.dtype))
        true = self._true(target.hidden)
        p = self._distribution(true, batch).softmax(-1)
        total, parts = torch.zeros((), device=p.device), dict[str, Tensor]()
        levels = unroll(self.drafter, target, self._inputs(target, batch.seeds), recipe.levels)
        for level, predicted in enumerate(levels):
            drafted = self._drafted(predicted)
            feature = functional.smooth_l1_loss(drafted[:, level:].float(), true[:, level:].float())
            log_q = self._distribution(drafted, batch)[:, level:].log_softmax(-1)
            soft = -(p[:, level:] * log_q).sum(-1).mean()
            overlap = torch.minimum(p[:, level:], log_q.exp()).sum(-1).mean()
            part = recipe.feature_weight * feature + recipe.soft_weight * soft + recipe.overlap_weight * (1 - overlap)
            total = total + recipe.level_decay**level * part
            if level == 0:
                parts = {"feature": feature.detach(), "soft": soft.detach(), "one_minus_tv": overlap.detach()}
        return total / sum(recipe.level_decay**level for level in range(recipe.levels)), parts

    def memory(self) -> dict[str, Tensor]:
        """How many sequences were drawn from the order."""
        return {"drawn": torch.tensor(self._batches.order.drawn)}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Continue the order after the sequences that were drawn."""
        self._batches.order.drawn = int(memory["drawn"])

    def evaluate(self) -> dict[str, float]:
        """1 - TV(p, q) at depth 1 on held-out sequences: the probability that a first draft token is accepted."""
        return {"one_minus_tv": self.overlap(self.drafter)}

    @torch.no_grad()
    def overlap(self, drafter: EagleDrafter) -> float:
        """`evaluate` of any drafter of this target."""
        total, count = 0.0, 0
        dtype, scale = drafter.fc.weight.dtype, self._decoding.cfg_scale
        for pair in self._batches.held_out():
            logits = []
            for target in pair:
                true = target._replace(hidden=target.hidden.to(dtype))
                (predicted,) = unroll(drafter, true, true.hidden, 1)
                logits.append([self._logits(f) for f in (self._true(true.hidden), self._drafted(predicted))])
            guided = [guide(cond, null, scale) for cond, null in zip(*logits, strict=True)]
            p, q = (decoding_probabilities(one, self._decoding) for one in guided)
            total += float(torch.minimum(p, q).sum(-1).mean(-1).sum())
            count += len(p)
        return total / count

    def _true(self, hidden: Tensor) -> Tensor:
        """The true features that predict tokens 1 to N - 1 of the image."""
        return hidden[:, hidden.shape[1] - self.drafter.config.image_tokens + 1 :]

    def _drafted(self, predicted: Tensor) -> Tensor:
        """The drafter's features for the same tokens."""
        return predicted[:, predicted.shape[1] - self.drafter.config.image_tokens : -1]

    def _distribution(self, features: Tensor, batch: FeatureBatch) -> Tensor:
        """The logits [B, N - 1, V] that the loss compares: guided where the batch is."""
        if self._recipe.guided:
            # The head is linear: guiding its input guides its output at half the cost.
            cond, null = features.float().chunk(2)
            alone = batch.dropped.to(cond.device)[:, None, None]
            features = torch.where(alone, cond, guide(cond, null, self._decoding.cfg_scale)).to(features.dtype)
        return self._logits(features)

    def _logits(self, features: Tensor) -> Tensor:
        """Logits float32 [B, N - 1, V] of the tokens 1 to N - 1."""
        places = torch.arange(1, features.shape[1] + 1, device=features.device).expand(len(features), -1)
        return force_line_ends(self.drafter.head(features).float(), places, self.drafter.config)

    @torch.no_grad()
    def _inputs(self, target: TargetFeatures, seeds: list[int]) -> Tensor:
        """True features with noise, a share of the image's replaced by the drafter's predictions for them."""
        hidden, recipe = target.hidden, self._recipe
        draws = [torch.Generator().manual_seed(seed) for seed in seeds * (len(hidden) // len(seeds))]
        width = recipe.noise * (512 / hidden.shape[1] if recipe.noise_by_length else 1.0)
        noise = torch.stack([torch.rand(hidden.shape[1:], generator=draw) for draw in draws])
        noisy = hidden + (2 * noise.to(hidden) - 1) * width
        if recipe.guessed == 0:
            return noisy
        first = hidden.shape[1] - self.drafter.config.image_tokens
        (predicted,) = unroll(self.drafter, target, noisy, 1)
        guessed = torch.cat([noisy[:, : first + 1], predicted[:, first:-1]], dim=1)
        chances = torch.stack([torch.rand(hidden.shape[1], 1, generator=draw) for draw in draws])
        return torch.where((chances < recipe.guessed).to(hidden.device), guessed.to(noisy), noisy)
