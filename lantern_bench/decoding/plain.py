"""Autoregressive steps. Each is one program that scores the last token and draws the next."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import tensors_of, touch_while_tracing
from lantern_bench.decoding.image_state import FirstTokens
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_tokens, guide


class PlainSteps:
    """Autoregressive steps of B images. Nothing is copied to the host between them."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=target.device)

        self._decoding = decoding
        self._inputs = tensors_of(target)
        self.session = target.session(batch, guided=decoding.cfg_scale != 1, nodes=1)
        # the tokens so far, [B, N]
        self.out = numbers(batch, target.image_tokens)
        self._position = numbers(1)
        # How many tokens there were when logits were first broken; 0 while all logits are finite,
        # -1 if the logits of the prefill were broken.
        self.broken = numbers(1)
        # The tree of one node that a step scores and commits.
        self._token = numbers(batch, 1)
        self._depth = numbers(batch, 1)
        self._count = torch.ones(batch, dtype=torch.int64, device=target.device)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=target.device)

    def start_images(self, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self._position.fill_(1)
        self.broken[0] = -first.broken.any().long()
        self._token[:, 0] = first.tokens
        self.out[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Append a token to each image and return the guided logits [B, V] it was drawn from."""
        touch_while_tracing(self._inputs)
        scored = self.session.score(self._token, self._depth, self._itself)
        self.session.commit(self._depth, self._count)
        logits = guide(scored.cond, scored.uncond, self._decoding.cfg_scale)[:, 0]
        tokens, broken = draw_tokens(logits, self._decoding, noise)
        is_first_broken = (self.broken == 0) & broken.any()
        self.broken.copy_(torch.where(is_first_broken, self._position, self.broken))
        self._token.copy_(tokens[:, None])
        self.out.index_copy_(1, self._position, tokens[:, None])
        self._position.add_(1)
        return logits
