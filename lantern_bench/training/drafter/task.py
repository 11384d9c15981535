"""Training an EAGLE drafter for a frozen target (arXiv 2401.15077, section 4.2): its loss, and how it is examined.

SmoothL1 between predicted and true feature, soft cross-entropy against the target's distribution, uniform noise on the
features that go in; in some recipes a share of them are the drafter's own guesses, as deeper in a tree (the idea of
HASS, arXiv 2408.15766). The token embedding is the target's input embedding, frozen; padding is masked. Numbers are
the recipe's, sequences the lessons'.
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
from lantern_bench.models.transformer.target import force_line_ends
from lantern_bench.training.drafter.features import Lesson, Lessons, Taught, positions_of, prefix_mask
from lantern_bench.training.drafter.recipe import DrafterRecipe
from lantern_bench.training.loop import TrainSettings

# ---- The levels of a draft followed over whole sequences at once, for training (HASS, arXiv 2408.15766, section 3.


def unroll(drafter: EagleDrafter, taught: Taught, features: Tensor, levels: int) -> list[Tensor]:
    """Predicted features of each level, [B, P + N - 1, dim]; position t sees feature t and the token that follows it.

    `features` [B, P + N - 1, dim] are what the first level sees. Level k is a draft's from position P + k - 2 on; what
    it predicts before is of no use.
    """
    tokens, words, valid = taught.tokens, taught.words, taught.valid
    length, first = features.shape[1], features.shape[1] - drafter.config.image_tokens
    if words is None:
        tokens = torch.cat([tokens.new_zeros(len(tokens), valid.shape[1] - 1), tokens], dim=1)
    causal = prefix_mask(valid if drafter.mask_padding else torch.ones_like(valid), length)
    before = None if words is None else words[:, 1:]
    positions = positions_of(valid, length, drafter.config)
    seen: list[tuple[Tensor, Tensor]] | None = [] if levels > 1 else None
    made, fed = list[Tensor](), features
    for level in range(levels):
        made.append(drafter(tokens, fed, level_mask(causal, level), before, positions, seen))
        fed = torch.cat([features[:, : first + 1], made[-1][:, first:-1].to(features.dtype)], dim=1)
    return made


def level_mask(causal: Tensor, level: int) -> Tensor:
    """The additive mask [B, 1, n, (level + 1) * n] of a level (0: the first) over its keys and those of all before.

    `causal` [B, 1, n, n] is the first level's. A position sees the true features that end `level` places before it,
    then the one guess of each level between, and itself.
    """
    n = causal.shape[-1]
    behind = torch.arange(n, device=causal.device)[:, None] - torch.arange(n, device=causal.device)[None, :]
    parts = [causal.masked_fill(behind < level, -torch.inf)]
    for between in range(1, level + 1):
        parts.append(torch.zeros_like(causal).masked_fill(behind != level - between, -torch.inf))
    return torch.cat(parts, dim=-1)


# ----


def loop_settings(recipe: DrafterRecipe, sequences: int | None = None) -> TrainSettings:
    """A recipe as the loop takes it, over that many sequences; None leaves the end to be set."""
    known = {"lr", "betas", "weight_decay", "clip", "clip_by", "schedule", "final_lr", "accumulate", "autocast"}
    values = {name: getattr(recipe, name) for name in known}
    steps = None if sequences is None else recipe.total_steps(sequences)
    return TrainSettings(steps=steps, warmup=recipe.warmup_steps(sequences or 0), **values)


def drafter_like(drafter: EagleDrafter, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """A copy that shares the head and nothing else, in another type: float32 to train, the target's to decode."""
    norms_input = not isinstance(drafter.layer.attention_norm, nn.Identity)
    config = replace(drafter.config, layers=1)
    with torch.device("meta"):
        copy = EagleDrafter(config, drafter.head_module, drafter.mask_padding, norms_input)
    state = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in drafter.state_dict().items()}
    copy.load_state_dict(state, strict=True, assign=True)
    copy.requires_grad_(True)
    copy.embed_tokens.weight.requires_grad_(False)
    compute_buffers(copy, device)
    return copy


class DrafterTask:
    """Train a drafter for a frozen target; `decoding` says with which guidance and filters it is examined."""

    name = "drafter"

    def __init__(self, drafter: EagleDrafter, lessons: Lessons, recipe: DrafterRecipe, decoding: Decoding) -> None:
        self.drafter = drafter
        self.module: nn.Module = drafter
        self._lessons, self._recipe, self._decoding = lessons, recipe, decoding

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Feature and distribution loss of the next batch."""
        lesson, recipe = self._lessons.draw(generator), self._recipe
        taught = lesson.taught._replace(hidden=lesson.taught.hidden.to(self.drafter.fc.weight.dtype))
        p = self._distribution(self._behind(taught.hidden), lesson).softmax(-1)
        seen = self._seen(taught, lesson.seeds)
        total, shown = torch.zeros((), device=p.device), dict[str, Tensor]()
        for level, predicted in enumerate(unroll(self.drafter, taught, seen, recipe.levels)):
            wanted, guess = self._behind(taught.hidden), self._drafted(predicted)
            feature = functional.smooth_l1_loss(guess[:, level:].float(), wanted[:, level:].float())
            log_q = self._distribution(guess, lesson)[:, level:].log_softmax(-1)
            soft = -(p[:, level:] * log_q).sum(-1).mean()
            overlap = torch.minimum(p[:, level:], log_q.exp()).sum(-1).mean()
            part = recipe.feature_weight * feature + recipe.soft_weight * soft + recipe.overlap_weight * (1 - overlap)
            total = total + recipe.level_decay**level * part
            if level == 0:
                shown = {"feature": feature.detach(), "soft": soft.detach(), "one_minus_tv": overlap.detach()}
        return total / sum(recipe.level_decay**level for level in range(recipe.levels)), shown

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Nothing to do between steps."""

    def memory(self) -> dict[str, Tensor]:
        """How much of the order of the sequences was drawn."""
        return {"drawn": torch.tensor(self._lessons.order.drawn)}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Go on where it was left."""
        self._lessons.order.drawn = int(memory["drawn"])

    def evaluate(self) -> dict[str, float]:
        """1 - TV(p, q) at depth 1 on held-out sequences: how often a first draft is accepted."""
        return {"one_minus_tv": self.overlap(self.drafter)}

    @torch.no_grad()
    def overlap(self, drafter: EagleDrafter) -> float:
        """`evaluate` of any drafter of this target."""
        total, count = 0.0, 0
        dtype, scale = drafter.fc.weight.dtype, self._decoding.cfg_scale
        for pair in self._lessons.held_out():
            logits = []
            for taught in pair:
                true = taught._replace(hidden=taught.hidden.to(dtype))
                (predicted,) = unroll(drafter, true, true.hidden, 1)
                features = self._behind(true.hidden), self._drafted(predicted)
                logits.append([self._logits(feature) for feature in features])
            (p_cond, q_cond), (p_null, q_null) = logits
            p = decoding_probabilities(guide(p_cond, p_null, scale), self._decoding)
            q = decoding_probabilities(guide(q_cond, q_null, scale), self._decoding)
            total += float(torch.minimum(p, q).sum(-1).mean(-1).sum())
            count += len(p)
        return total / count

    def _behind(self, hidden: Tensor) -> Tensor:
        """The true features that predict tokens 1 to N - 1 of the image."""
        return hidden[:, hidden.shape[1] - self.drafter.config.image_tokens + 1 :]

    def _drafted(self, predicted: Tensor) -> Tensor:
        """The drafter's for the same tokens."""
        return predicted[:, predicted.shape[1] - self.drafter.config.image_tokens : -1]

    def _distribution(self, features: Tensor, lesson: Lesson) -> Tensor:
        """Logits [B, N - 1, V] that are compared: guided where the lesson is."""
        if self._recipe.guided:
            # The head is linear: guiding what goes in guides what comes out, and half of it is to be computed.
            cond, null = features.float().chunk(2)
            alone = lesson.dropped.to(cond.device)[:, None, None]
            features = torch.where(alone, cond, guide(cond, null, self._decoding.cfg_scale)).to(features.dtype)
        return self._logits(features)

    def _logits(self, features: Tensor) -> Tensor:
        """Logits float32 [B, N - 1, V] of the tokens 1 to N - 1."""
        places = torch.arange(1, features.shape[1] + 1, device=features.device).expand(len(features), -1)
        return force_line_ends(self.drafter.head(features).float(), places, self.drafter.config)

    @torch.no_grad()
    def _seen(self, taught: Taught, seeds: list[int]) -> Tensor:
        """True features with noise, some of the image's replaced by what the drafter predicts for them."""
        hidden, recipe = taught.hidden, self._recipe
        draws = [torch.Generator().manual_seed(seed) for seed in seeds * (len(hidden) // len(seeds))]
        width = recipe.noise * (512 / hidden.shape[1] if recipe.noise_by_length else 1.0)
        noise = torch.stack([torch.rand(hidden.shape[1:], generator=draw) for draw in draws])
        noisy = hidden + (2 * noise.to(hidden) - 1) * width
        if recipe.guessed == 0:
            return noisy
        first = hidden.shape[1] - self.drafter.config.image_tokens
        (predicted,) = unroll(self.drafter, taught, noisy, 1)
        guessed = torch.cat([noisy[:, : first + 1], predicted[:, first:-1]], dim=1)
        chances = torch.stack([torch.rand(hidden.shape[1], 1, generator=draw) for draw in draws])
        return torch.where((chances < recipe.guessed).to(hidden.device), guessed.to(noisy), noisy)
