"""How the drafter is trained: on the target's true features, after EAGLE (arXiv 2401.15077, section 4.2).

SmoothL1 between predicted and true feature, soft cross-entropy against the target's distribution, uniform noise on the
features that go in, the null condition one time in ten (algorithms.md, section 5). Deeper in a tree the drafter sees
its own guesses instead of true features, so a share of the features that go in are guesses here too (the idea of HASS,
arXiv 2408.15766). The token embedding is the target's input embedding, frozen; padding is masked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.decode.sampling import guide
from lantern_bench.lanterns.defaults import GUIDANCE
from lantern_bench.lanterns.recipe_target import Sequences, TargetTask, prefix_mask
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.target import TransformerTarget

__all__ = ["DrafterTask", "build_drafter"]

_BATCH = 16
_DROPPED = 0.1
_NOISE = 0.1
_GUESSED = 0.3
_EVALUATED = 32


def build_drafter(target: TransformerTarget) -> EagleDrafter:
    """A drafter of the target's width with fresh weights (drawn from torch's current stream) and its embedding."""
    drafter = EagleDrafter(target.config, target.transformer.output, mask_padding=True)
    for parameter in drafter.parameters():
        if parameter.dim() >= 2 and parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        # The fusion starts as the feature itself: a fair first guess of the next one.
        drafter.fc.weight[:, target.config.dim :] += torch.eye(target.config.dim)
        drafter.fc.bias.zero_()
        drafter.embed_tokens.weight.copy_(target.transformer.tok_embeddings.weight)
    return drafter


class DrafterTask:
    """Train a drafter for a frozen target.

    The weights of the two losses: `feature_weight` for SmoothL1, `soft_weight` for cross-entropy (EAGLE: 1 and 0.1).
    """

    name = "drafter"

    def __init__(
        self,
        drafter: EagleDrafter,
        target: TransformerTarget,
        sequences: Sequences,
        held_out: Sequences,
        feature_weight: float = 1.0,
        soft_weight: float = 0.1,
    ) -> None:
        self.drafter = drafter
        self.module: nn.Module = drafter
        self._target = TargetTask(target.eval().requires_grad_(False), sequences, held_out)
        self._sequences, self._held_out = sequences, held_out
        self._weights = (feature_weight, soft_weight)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Feature and distribution loss of a random batch."""
        rows = torch.randint(len(self._sequences.tokens), (_BATCH,), generator=generator)
        drop = torch.rand(_BATCH, generator=generator) < _DROPPED
        batch = Sequences(self._sequences.tokens[rows], self._sequences.attributes[rows])
        with torch.no_grad():
            hidden, valid = self._target.features(batch, drop)
        predicted = self._predict(batch.tokens, self._seen(batch.tokens, hidden, valid, generator), valid)
        start = self.drafter.config.prefix - 1
        wanted, guess = hidden[:, start + 1 :], predicted[:, start:-1]
        feature_loss = functional.smooth_l1_loss(guess.float(), wanted.float())
        p = self.drafter.head(wanted).float().softmax(-1)
        log_q = self.drafter.head(guess).float().log_softmax(-1)
        soft_loss = -(p * log_q).sum(-1).mean()
        overlap = torch.minimum(p, log_q.detach().exp()).sum(-1).mean()
        feature_weight, soft_weight = self._weights
        total = feature_weight * feature_loss + soft_weight * soft_loss
        return total, {"feature": feature_loss.detach(), "soft": soft_loss.detach(), "one_minus_tv": overlap}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Nothing to do between steps."""

    def evaluate(self) -> dict[str, float]:
        """1 - TV(p, q) at depth 1 on held-out sequences, the default guidance: how often a first draft is accepted."""
        part = Sequences(*(tensor[:_EVALUATED] for tensor in self._held_out))
        start = self.drafter.config.prefix - 1
        logits = []
        for dropped in (False, True):
            hidden, valid = self._target.features(part, torch.full((len(part.tokens),), dropped))
            guess = self._predict(part.tokens, hidden, valid)
            logits.append((self.drafter.head(hidden[:, start + 1 :]), self.drafter.head(guess[:, start:-1])))
        (p_cond, q_cond), (p_null, q_null) = logits
        p, q = guide(p_cond, p_null, GUIDANCE).softmax(-1), guide(q_cond, q_null, GUIDANCE).softmax(-1)
        return {"one_minus_tv": float(torch.minimum(p, q).sum(-1).mean())}

    @torch.no_grad()
    def _seen(self, tokens: Tensor, hidden: Tensor, valid: Tensor, generator: torch.Generator) -> Tensor:
        """True features with noise, some of the image's replaced by what the drafter predicts for them."""
        noise = (torch.rand(hidden.shape, generator=generator) - 0.5).to(hidden) * (2 * _NOISE)
        noisy = hidden + noise
        start = self.drafter.config.prefix - 1
        guessed = torch.cat([noisy[:, : start + 1], self._predict(tokens, noisy, valid)[:, start:-1]], dim=1)
        taken = (torch.rand(*hidden.shape[:2], 1, generator=generator) < _GUESSED).to(hidden.device)
        return torch.where(taken, guessed.to(noisy), noisy)

    def _predict(self, tokens: Tensor, hidden: Tensor, valid: Tensor) -> Tensor:
        """Predicted features [B, P + 255, dim]; position t sees feature t and the token that follows it."""
        fillers = torch.zeros(len(tokens), self.drafter.config.prefix - 1, dtype=torch.int64)
        shifted = torch.cat([fillers, tokens.long()], dim=1).to(hidden.device)
        mask = prefix_mask(valid, hidden.shape[1])
        out: Tensor = self.drafter(shifted, hidden, mask)
        return out
