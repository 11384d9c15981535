"""Steps that draft nothing: their base class, and autoregressive decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import tensors_of, touch_while_tracing
from lantern_bench.decoding.image_state import FirstTokens
from lantern_bench.decoding.protocol import Target, TargetSession
from lantern_bench.decoding.sampling import draw_tokens, guide


class Steps:
    """Steps of B images that draft nothing. Nothing is copied to the host between them.

    A step is one program of fixed shapes. It scores tokens, commits them and draws others.

    Args:
        target: The target.
        decoding: The configuration.
        batch: How many images are decoded together.
    """

    # the target's session, whose prefill starts the images
    session: TargetSession
    # how many vectors of random bits over the vocabulary a step uses
    noises = 1

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        self._decoding = decoding
        self._inputs = tensors_of(target)
        # the tokens so far, [B, N], then a column for filler
        self.out = torch.zeros(
            batch, target.image_tokens + 1, dtype=torch.int64, device=target.device
        )
        # How many tokens there were when logits were first broken; 0 while all logits are finite,
        # -1 if the logits of the prefill were broken.
        self.broken = self.out.new_zeros(1)

    @staticmethod
    def check(target: Target, decoding: Decoding) -> None:
        """Check that a target can be decoded in this way. Raise `LanternError` if not."""

    def positions(self, tokens_wanted: int) -> list[list[int]]:
        """Return for each step the positions of the tokens that it draws, up to `tokens_wanted`."""
        raise NotImplementedError

    def start_images(self, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self.broken[0] = -first.broken.any().long()
        self.out[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Draw the next tokens of each image.

        Args:
            noise: Random bits [B, noises * V]; [B, 0] for greedy decoding.

        Returns:
            Guided logits [B, n, V]. The first ones are those that the tokens were drawn from, in
            the order of `positions`.
        """
        raise NotImplementedError

    def _note_broken(self, broken: Tensor, tokens: Tensor) -> None:
        """Store the number of tokens [1] if any of bool [B, ...] is the first broken one."""
        is_first_broken = (self.broken == 0) & broken.any()
        self.broken.copy_(torch.where(is_first_broken, tokens, self.broken))


class PlainSteps(Steps):
    """Autoregressive steps: each scores the last token and draws the next."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        super().__init__(target, decoding, batch)
        self.session = target.session(batch, guided=decoding.cfg_scale != 1, nodes=1)
        self._position = self.out.new_zeros(1)
        # The tree of one node that a step scores and commits.
        self._token = self.out.new_zeros(batch, 1)
        self._depth = self.out.new_zeros(batch, 1)
        self._count = self.out.new_ones(batch)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=target.device)

    def positions(self, tokens_wanted: int) -> list[list[int]]:
        """Return one position for each step."""
        return [[position] for position in range(1, tokens_wanted)]

    def start_images(self, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        super().start_images(first)
        self._position.fill_(1)
        self._token[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Append a token to each image and return the guided logits [B, 1, V] it was drawn from."""
        touch_while_tracing(self._inputs)
        scored = self.session.score(self._token, self._depth, self._itself)
        self.session.commit(self._depth, self._count)
        logits = guide(scored.cond, scored.uncond, self._decoding.cfg_scale)
        tokens, broken = draw_tokens(logits[:, 0], self._decoding, noise)
        self._note_broken(broken, self._position)
        self._token.copy_(tokens[:, None])
        self.out.index_copy_(1, self._position, tokens[:, None])
        self._position.add_(1)
        return logits
