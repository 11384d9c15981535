"""The task of training an EAGLE drafter for a frozen target (arXiv 2401.15077, section 4.2).

The loss is SmoothL1 between predicted and true feature plus soft cross-entropy against the target's distribution, with
uniform noise on the input features; a recipe can train several levels of a draft at once (HASS, arXiv 2408.15766). The
token embedding is the target's input embedding, frozen; padding is masked. The target computes the features of a batch
when it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.models.eagle import EagleDrafter
from lantern_bench.models.io.state_dict import compute_buffers
from lantern_bench.models.target import (
    Condition,
    TransformerTarget,
    force_line_ends,
    positions_of,
    prefix_mask,
    prompt_rows,
    visible_rows,
)
from lantern_bench.training.loop import SINGLE, Processes, Task
from lantern_bench.training.recipe import DrafterRecipe


class TargetFeatures(NamedTuple):
    """Features of B sequences of N tokens behind a prefix of P, on the target's device."""

    tokens: Tensor  # int64 [B, N]
    hidden: Tensor  # [B, P + N - 1, dim], final-norm hidden states; number P - 1 predicts the first token
    valid: Tensor  # bool [B, P], False for padding
    prompts: Tensor | None  # int64 [B, P], in the model's own vocabulary; None for other conditions


def target_features(target: TransformerTarget, condition: Condition, tokens: Tensor, dropped: Tensor) -> TargetFeatures:
    """Return features under teacher forcing of tokens int64 [B, N]; `dropped` bool [B] rows have the null condition."""
    tokens, dropped = tokens.to(target.device), dropped.to(target.device)[:, None]
    conditional, null = target.prefix(condition, guided=True).chunk(2)
    visible, prompts = visible_rows(condition.valid.to(target.device), 2), None
    if target.config.text_vocab_size is not None:
        with_caption, without = prompt_rows(condition.values.to(target.device), 2).chunk(2)
        prompts = torch.where(dropped, without, with_caption)
    if len(visible) > len(tokens):
        with_caption, without = visible.chunk(2)
        visible = torch.where(dropped, without, with_caption)
    prefix = torch.where(dropped[:, :, None], null, conditional)
    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    hidden = target.transformer(x, prefix_mask(visible, length), positions_of(visible, length, target.config))
    return TargetFeatures(tokens, hidden, visible, prompts)


@dataclass(frozen=True)
class Sequences:
    """Token sequences of a target with their conditions: the numbers `rows` of `tokens`."""

    target: TransformerTarget
    tokens: Tensor  # int [n, N]
    condition: Callable[[Sequence[int]], Condition]  # of the rows with these numbers
    rows: Sequence[int]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.rows)

    @torch.no_grad()
    def features(self, numbers: Sequence[int], dropped: Tensor) -> TargetFeatures:
        """Return features of the sequences with these numbers; those of `dropped` bool [B] have no condition."""
        rows = [self.rows[number] for number in numbers]
        return target_features(self.target, self.condition(rows), self.tokens[torch.tensor(rows)].long(), dropped)


class Order:
    """The numbers 0 to n - 1 in seeded orders, one after the other without an end; `drawn` of them were taken."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self.drawn = count, seed, 0
        self._epoch, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[int]:
        """Return the next numbers."""
        numbers = []
        for number in range(self.drawn, self.drawn + count):
            epoch, index = divmod(number, self._count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(((self._seed << 20) + epoch) % 2**63)
                self._epoch, self._order = epoch, torch.randperm(self._count, generator=generator)
            numbers.append(int(self._order[index]))
        self.drawn += count
        return numbers


def unroll(drafter: EagleDrafter, target: TargetFeatures, features: Tensor, levels: int) -> list[Tensor]:
    """Return predicted features of each level, [B, P + N - 1, dim]; position t sees feature t and the token after it.

    `features` [B, P + N - 1, dim] are the input of the first level. The output of level k is a draft's from position
    P + k - 2 on; earlier positions are unused. Source: HASS, arXiv 2408.15766, section 3.
    """
    tokens, prompts, valid = target.tokens, target.prompts, target.valid
    length, first = features.shape[1], features.shape[1] - drafter.config.image_tokens
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
    outputs, inputs = list[Tensor](), features
    for level in range(levels):
        masks = [causal.masked_fill(distance < level, -torch.inf)]
        masks += [torch.zeros_like(causal).masked_fill(distance != lag, -torch.inf) for lag in reversed(range(level))]
        outputs.append(drafter(tokens, inputs, torch.cat(masks, dim=-1), prompts, positions, earlier))
        inputs = torch.cat([features[:, : first + 1], outputs[-1][:, first:-1].to(features.dtype)], dim=1)
    return outputs


def drafter_like(drafter: EagleDrafter, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """Return a copy in another dtype that shares only the head: float32 to train, the target's dtype to decode."""
    input_norm = not isinstance(drafter.layer.attention_norm, nn.Identity)
    config = replace(drafter.config, layers=1)
    with torch.device("meta"):
        bias = drafter.fc.bias is not None
        copy = EagleDrafter(config, drafter.head_module, drafter.mask_padding, input_norm, bias)
    state = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in drafter.state_dict().items()}
    copy.load_state_dict(state, strict=True, assign=True)
    copy.requires_grad_(True)
    copy.embed_tokens.weight.requires_grad_(False)
    compute_buffers(copy, device)
    return copy


class DrafterTask(Task):
    """Train a drafter for a frozen target; `decoding` has the guidance and filters of the evaluation.

    Every sequence is drawn once before any is drawn again, in an order that the seed decides. Process r of n takes rows
    r, r + n, ... of the same batch; each row has a seed of its own, so its random draws are the same in any process.
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
        self._training, self._held_out = training, held_out
        self._recipe, self._decoding, self._processes = recipe, decoding, processes
        self._order = Order(len(training), seed)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return feature and distribution loss of the next batch."""
        recipe = self._recipe
        target, seeds, dropped = self._draw(generator)
        true = self._true(target.hidden)
        p = self._distribution(true, dropped).softmax(-1)
        total, figures = torch.zeros((), device=p.device), dict[str, Tensor]()
        levels = unroll(self.drafter, target, self._inputs(target.hidden, seeds), recipe.levels)
        for level, predicted in enumerate(levels):
            drafted = self._drafted(predicted)
            feature = functional.smooth_l1_loss(drafted[:, level:].float(), true[:, level:].float())
            log_q = self._distribution(drafted, dropped)[:, level:].log_softmax(-1)
            soft = -(p[:, level:] * log_q).sum(-1).mean()
            overlap = torch.minimum(p[:, level:], log_q.exp()).sum(-1).mean()
            loss = recipe.feature_weight * feature + recipe.soft_weight * soft + recipe.overlap_weight * (1 - overlap)
            total = total + recipe.level_decay**level * loss
            if level == 0:
                figures = {"feature": feature.detach(), "soft": soft.detach(), "one_minus_tv": overlap.detach()}
        return total / sum(recipe.level_decay**level for level in range(recipe.levels)), figures

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many sequences were drawn from the order."""
        return {"drawn": torch.tensor(self._order.drawn)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the order after the sequences that were drawn."""
        self._order.drawn = int(state["drawn"])

    def evaluate(self) -> dict[str, float]:
        """Return 1 - TV(p, q) at depth 1 on held-out sequences: the probability that a first draft is accepted."""
        return {"one_minus_tv": self.overlap(self.drafter)}

    @torch.no_grad()
    def overlap(self, drafter: EagleDrafter) -> float:
        """`evaluate` of any drafter of this target."""
        total, count, numbers = 0.0, 0, range(len(self._held_out))
        dtype, scale = drafter.fc.weight.dtype, self._decoding.cfg_scale
        for batch in (numbers[start : start + 8] for start in range(0, len(numbers), 8)):
            logits = []
            for dropped in (False, True):
                target = self._held_out.features(batch, torch.full((len(batch),), dropped))
                target = target._replace(hidden=target.hidden.to(dtype))
                (predicted,) = unroll(drafter, target, target.hidden, 1)
                logits.append([self._logits(f) for f in (self._true(target.hidden), self._drafted(predicted))])
            guided = [guide(cond, null, scale) for cond, null in zip(*logits, strict=True)]
            p, q = (decoding_probabilities(values, self._decoding) for values in guided)
            total += float(torch.minimum(p, q).sum(-1).mean(-1).sum())
            count += len(p)
        return total / count

    def _draw(self, generator: torch.Generator) -> tuple[TargetFeatures, list[int], Tensor]:
        """Return this process's rows of the next batch, a seed for each, and which have no condition, bool [B].

        Where the recipe is guided the features have 2 B rows, those without condition after the others, and `dropped`
        says which sequences are compared without guidance.
        """
        recipe = self._recipe
        numbers = self._order.take(recipe.batch)
        dropped = torch.rand(recipe.batch, generator=generator) < recipe.dropped
        seeds = torch.randint(2**62, (recipe.batch,), generator=generator).tolist()
        rows = slice(self._processes.rank, None, self._processes.count)
        numbers, seeds, dropped = numbers[rows], seeds[rows], dropped[rows]
        if recipe.guided:
            twice = torch.arange(2 * len(numbers)) >= len(numbers)
            target = self._training.features([*numbers, *numbers], twice)
        else:
            target = self._training.features(numbers, dropped)
        return target._replace(hidden=target.hidden.to(self.drafter.fc.weight.dtype)), seeds, dropped

    def _true(self, hidden: Tensor) -> Tensor:
        """Return the true features that predict tokens 1 to N - 1 of the image."""
        return hidden[:, hidden.shape[1] - self.drafter.config.image_tokens + 1 :]

    def _drafted(self, predicted: Tensor) -> Tensor:
        """Return the drafter's features for the same tokens."""
        return predicted[:, predicted.shape[1] - self.drafter.config.image_tokens : -1]

    def _distribution(self, features: Tensor, dropped: Tensor) -> Tensor:
        """Return the logits [B, N - 1, V] that the loss compares: guided where the recipe is."""
        if self._recipe.guided:
            # The head is linear: guiding its input guides its output at half the cost.
            cond, null = features.float().chunk(2)
            alone = dropped.to(cond.device)[:, None, None]
            features = torch.where(alone, cond, guide(cond, null, self._decoding.cfg_scale)).to(features.dtype)
        return self._logits(features)

    def _logits(self, features: Tensor) -> Tensor:
        """Return logits float32 [B, N - 1, V] of the tokens 1 to N - 1."""
        positions = torch.arange(1, features.shape[1] + 1, device=features.device).expand(len(features), -1)
        return force_line_ends(self.drafter.head(features).float(), positions, self.drafter.config)

    @torch.no_grad()
    def _inputs(self, hidden: Tensor, seeds: list[int]) -> Tensor:
        """Return true features with noise."""
        draws = [torch.Generator().manual_seed(seed) for seed in seeds * (len(hidden) // len(seeds))]
        noise = torch.stack([torch.rand(hidden.shape[1:], generator=draw) for draw in draws])
        width = self._recipe.noise * (512 / hidden.shape[1])
        return hidden + (2 * noise.to(hidden) - 1) * width
