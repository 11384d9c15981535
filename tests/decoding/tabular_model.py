"""A model without a network: next-token tables for target and drafter, behind the protocols of `decoding.interface`.

The distribution after a prefix depends on the tokens since the image began, so tests can enumerate joint distributions,
and the whole loop (drafting, cache bookkeeping, verification, commit) is exercised as with a real model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.interface import Drafts, Scores


class TabularModel:
    """V tokens, `length` positions; guidance is real: cond and uncond tables differ."""

    def __init__(self, vocab: int, length: int, seed: int, drafter_noise: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(seed)
        states = (vocab + 1) ** length
        self.vocab_size, self.image_tokens, self.device = vocab, length, torch.device("cpu")
        self.p = torch.randn(2, states, vocab, generator=generator) * 1.3
        self.q = self.p + torch.randn(2, states, vocab, generator=generator) * drafter_noise
        self.target = self
        self.drafter: Any = _DrafterFactory(self)

    def table(self, columns: int, metric: str = "l2") -> Tensor:
        order = torch.arange(self.vocab_size)
        return torch.stack([(order + 1 + x) % self.vocab_size for x in range(self.vocab_size)])[:, :columns]

    def session(self, batch: int, guided: bool, nodes: int) -> _TargetSession:
        return _TargetSession(self, batch, guided)

    def state_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Append tokens to prefixes written in base V + 1; beyond the image everything is one state."""
        after = state * (self.vocab_size + 1) + tokens + 1
        return torch.where(after < self.p.shape[1], after, 0)

    def distribution(self, probabilities: Any) -> Tensor:
        """The joint distribution [V ** length] of AR sampling, `probabilities` turning (cond, uncond) logits into p."""
        joint, states = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        for _ in range(self.image_tokens):
            p = probabilities(self.p[0, states], self.p[1, states]).double()
            joint = (joint[:, None] * p).flatten()
            grid = torch.arange(self.vocab_size).expand(len(states), -1)
            states = self.state_after(states[:, None].expand(-1, self.vocab_size), grid).flatten()
        return joint


class _TargetSession:
    def __init__(self, model: TabularModel, batch: int, guided: bool) -> None:
        self.model, self.batch, self.guided = model, batch, guided
        self.state = torch.zeros(batch, dtype=torch.int64)

    def prefill(self, condition: Any) -> Scores:
        self.state = torch.zeros(self.batch, dtype=torch.int64)
        return self._scores(self.state[:, None])

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Scores:
        states = torch.zeros_like(tokens)
        for node in range(tokens.shape[1]):
            # The path of a node is read off the attention mask, as a transformer would.
            for row in range(len(tokens)):
                seen = attention[row, node].nonzero().flatten()
                state = self.state[row]
                for at in seen[depths[row, seen].argsort()]:
                    state = self.model.state_after(state, tokens[row, at])
                states[row, node] = state
        self.nodes = states
        return self._scores(states)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        last = path.clamp_min(0).gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        kept = self.nodes.gather(1, last[:, None]).squeeze(1)
        self.state = torch.where(counts > 0, kept, self.state)

    def _scores(self, states: Tensor) -> Scores:
        features = states[..., None].float()
        return Scores(self.model.p[0, states], self.model.p[1, states] if self.guided else None, features)


class _DrafterFactory:
    def __init__(self, model: TabularModel) -> None:
        self.model = model

    def session(self, batch: int, guided: bool, nodes: int) -> _DrafterSession:
        return _DrafterSession(self.model, batch, guided)


class _DrafterSession:
    def __init__(self, model: TabularModel, batch: int, guided: bool) -> None:
        self.model, self.guided = model, guided
        self.state = torch.zeros(batch, dtype=torch.int64)
        self.last = torch.zeros(batch, 1, dtype=torch.int64)

    def prefill(self, condition: Any, features: Tensor) -> None:
        self.state = torch.zeros_like(self.state)

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> Drafts:
        for column in range(tokens.shape[1]):
            after = self.model.state_after(self.state, tokens[:, column])
            self.state = torch.where(column < counts, after, self.state)
        return self._drafts(self.state[:, None])

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Drafts:
        return self._drafts(self.model.state_after(self.last.gather(1, origin), tokens))

    def _drafts(self, states: Tensor) -> Drafts:
        self.last = states
        return Drafts(self.model.q[0, states], self.model.q[1, states] if self.guided else None)
