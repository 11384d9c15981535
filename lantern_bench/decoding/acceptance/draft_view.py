"""What a relaxed rule sees of the drafts that it decides on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lantern_bench.decoding.acceptance.rule import AcceptanceRule


@dataclass(frozen=True)
class Weights:
    """Distributions over V tokens, each as weights of any scale with their sum.

    Renormalising them is then one division where a probability is read, and not a pass over the vocabulary.
    """

    values: Tensor  # [..., V]
    total: Tensor  # [..., 1]

    @property
    def probabilities(self) -> Tensor:
        """The distributions [..., V]."""
        return self.values / self.total

    def at(self, tokens: Tensor) -> Tensor:
        """Return the probabilities [..., k] of `tokens` int64 [..., k]."""
        values = self.values.expand(*tokens.shape[:-1], -1)
        return values.gather(-1, tokens) / self.total

    def of_each_token(self) -> Weights:
        """Return the weights [..., 1, V], which broadcast to every token."""
        return Weights(values=self.values[..., None, :], total=self.total[..., None, :])


@dataclass(frozen=True)
class DraftView:
    """Draft tokens x as a relaxed rule sees them; a property is computed when the rule asks for it.

    A neighbour rule sees the drafts of n nodes, one each: shapes [n]. A probability rule sees every token that these
    drafts could have been: shapes that broadcast to [n, V].

    p and q are the current distributions: after a rejection p is the residual, and q has lost the rejected draft.
    """

    rule: AcceptanceRule
    token: Tensor  # x, int64
    p_x: Tensor  # p(x)
    q_x: Tensor | None  # q(x); None: a deterministic draft, whose q is 1
    target: Weights  # p
    proposal: Weights | None  # q; None: deterministic drafts
    depth: Tensor  # of x in the draft tree, from 1
    position: Tensor  # how many tokens of the image come before x, int64

    @property
    def p(self) -> Tensor:
        """The target's distribution p [..., V]."""
        return self.target.probabilities

    @property
    def strict_ratio(self) -> Tensor:
        """p(x) / q(x): what the strict rule accepts with."""
        return self.p_x if self.q_x is None else self.p_x / self.q_x

    @property
    def entropy(self) -> Tensor:
        """The entropy H(p) [...] in nats."""
        p = self.p
        return -(p * p.clamp_min(1e-30).log()).sum(dim=-1)

    @property
    def neighbour_tokens(self) -> Tensor:
        """The k nearest codes of x, int64 [..., k], nearest first."""
        return self.rule.nearest(self.token)

    @property
    def neighbour_p(self) -> Tensor:
        """The probabilities under p of `neighbour_tokens` [..., k]."""
        return self.target.at(self.neighbour_tokens.expand(*self.p_x.shape, -1))

    @property
    def distances(self) -> Tensor:
        """The Euclidean distances from x of `neighbour_tokens` [..., k], between rows of `codebook`."""
        difference = self.codebook[self.neighbour_tokens] - self.codebook[self.token][..., None, :]
        return difference.square().sum(dim=-1).sqrt()

    @property
    def codebook(self) -> Tensor:
        """Embeddings of the codes [V, d], in the space that neighbours are measured in; zeros for forced tokens."""
        if self.rule.codebook is None:
            raise ValueError(
                f"the row of the rule {self.rule.name} does not say that it reads the codebook"
            )
        return self.rule.codebook

    def number(self, value: Any) -> Tensor:
        """Return a parameter's value as a tensor of the type and on the device of p."""
        if isinstance(value, Tensor):
            return value.to(self.p_x.dtype)
        return torch.as_tensor(value, dtype=self.p_x.dtype, device=self.p_x.device)

    def every_token(self) -> DraftView:
        """Return the view of every token that these drafts could have been."""
        vocabulary = self.target.values.shape[-1]
        return replace(
            self,
            token=torch.arange(vocabulary, device=self.token.device),
            p_x=self.p,
            q_x=None if self.proposal is None else self.proposal.probabilities,
            target=self.target.of_each_token(),
            depth=self.depth[:, None],
            position=self.position[:, None],
        )
