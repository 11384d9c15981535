"""What a relaxed rule sees of the drafts that it decides on, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.tree import index_along


@dataclass(frozen=True)
class ScaledDistributions:
    """n distributions, each multiplied by a number, with their sums.

    Renormalising is then one division where a probability is read, and no pass over the vocabulary.
    """

    values: Tensor  # [n, V]
    total: Tensor  # sums of the rows, [n, 1]

    @property
    def probabilities(self) -> Tensor:
        """The distributions [n, V]."""
        return self.values / self.total

    def at(self, tokens: Tensor) -> Tensor:
        """Return the probabilities [n, k] of `tokens` int64 [n, k]."""
        return self.values.gather(1, tokens) / self.total


@dataclass(frozen=True, eq=False)
class Codebook:
    """What a rule knows of a model's codes."""

    # Tokens 0 to n_codes - 1 are image codes; later tokens are forced. None: all are codes.
    n_codes: int | None = None
    # k: how many nearest codes a rule looks at
    neighbours: int = 0
    # int [V, >= k], nearest first
    nearest: Tensor | None = None
    # [V, d], in the space in which neighbours are measured; zeros for forced tokens
    embeddings: Tensor | None = None

    def nearest_to(self, tokens: Tensor, extra: int = 0) -> Tensor:
        """Return the `neighbours + extra` nearest codes int64 [n, k] of `tokens` [n]."""
        if self.nearest is None:
            raise ValueError("the rule needs a table of nearest codes")
        columns = min(self.neighbours + extra, len(self.nearest) - 1)
        return self.nearest[tokens, :columns].long()


@dataclass(frozen=True)
class DraftView:
    """The draft tokens x of n nodes, one each, as a rule sees them.

    p and q are the current distributions: after a rejection p is the residual, and q has lost the
    rejected draft. A property is computed when the rule reads it.
    """

    # the tokens x, int64 [n]
    token: Tensor
    # depth of x in the draft tree, from 1, int64 [n]
    depth: Tensor
    # how many tokens of the image come before x, int64 [n]
    position: Tensor
    # p
    target: ScaledDistributions
    # q; None: deterministic drafts, whose q(x) is 1
    proposal: ScaledDistributions | None
    codebook: Codebook

    @property
    def p(self) -> Tensor:
        """The target's distributions p [n, V]."""
        return self.target.probabilities

    @property
    def q(self) -> Tensor | None:
        """The distributions q [n, V] that the drafts were drawn from; None: deterministic."""
        return None if self.proposal is None else self.proposal.probabilities

    @property
    def p_x(self) -> Tensor:
        """p(x) [n]."""
        return self.target.at(self.token[:, None]).squeeze(1)

    @property
    def q_x(self) -> Tensor | None:
        """q(x) [n]; None for deterministic drafts, whose q(x) is 1."""
        if self.proposal is None:
            return None
        return self.proposal.at(self.token[:, None]).squeeze(1)

    @property
    def ratio(self) -> Tensor:
        """The ratio p / q [n, V], unclamped; the strict rule accepts with min(1, p(x) / q(x))."""
        q = self.q
        return self.p if q is None else self.p / q

    @property
    def entropy(self) -> Tensor:
        """The entropy H(p) [n] in nats."""
        p = self.p
        # The p of a row may add up to a little more than 1, so the sum may be below 0.
        return (-(p * p.clamp_min(1e-30).log()).sum(dim=1)).clamp_min(0.0)

    @property
    def total_variation(self) -> Tensor:
        """The total variation TV(p, q) [n] of the whole distributions; q is 1 at a certain x."""
        q = self.q
        if q is None:
            return 1.0 - self.p_x
        return 0.5 * (self.p - q).abs().sum(dim=1)

    @property
    def neighbour_tokens(self) -> Tensor:
        """The k nearest codes of x, int64 [n, k], nearest first."""
        return self.codebook.nearest_to(self.token)

    @property
    def neighbour_p(self) -> Tensor:
        """The probabilities under p of `neighbour_tokens` [n, k]."""
        return self.target.at(self.neighbour_tokens)

    @property
    def nearest_codes(self) -> Tensor:
        """The k nearest codes of every token, int64 [V, k], for rules by probability."""
        return self.codebook.nearest_to(index_along(self.target.values, 1))

    @property
    def distances(self) -> Tensor:
        """The Euclidean distances [n, k] from x to the embeddings of `neighbour_tokens`."""
        x = self.embeddings[self.token]
        difference = self.embeddings[self.neighbour_tokens] - x[:, None, :]
        return difference.square().sum(dim=-1).sqrt()

    @property
    def embeddings(self) -> Tensor:
        """Embeddings of the codes [V, d]; zeros for forced tokens."""
        if self.codebook.embeddings is None:
            raise ValueError("the rule reads embeddings, so its row needs codebook=True")
        return self.codebook.embeddings

    def accept_probability(self, mass: Tensor) -> Tensor:
        """Return min(1, (p(x) + m(x)) / q(x)) [n] for m(x) = `mass` [n]."""
        boosted = self.p_x + mass
        ratio = boosted if self.q_x is None else boosted / self.q_x
        return ratio.clamp(max=1.0)

    def number(self, value: Any) -> Tensor:
        """Return a parameter's value as a tensor of the type and on the device of p."""
        values = self.target.values
        if isinstance(value, Tensor):
            return value.to(values.dtype)
        return torch.as_tensor(value, dtype=values.dtype, device=values.device)


@dataclass(frozen=True)
class Neighbours:
    """The codes nearest to the drafts of n nodes, and which of them a draft takes mass from."""

    tokens: Tensor  # int64 [n, k], nearest first
    taken: Tensor  # bool [n, k]


@dataclass(frozen=True)
class Decision:
    """How a rule decides on the drafts x of n nodes, and what the residual after them needs."""

    probability: Tensor  # of accepting x, [n]
    neighbour_mass: Tensor  # m(x), the mass that x takes from other tokens, [n]
    neighbours: Neighbours | None = None  # the tokens that x takes it from; None: no rule for them
    # the part of each token's q that acceptance uses up: [n, V], or one number for all
    removal: Tensor | float = 1.0

    @property
    def is_by_probability(self) -> bool:
        """Whether the removal is f of each token: `emitted_tv` then sums (q f - p)+."""
        return isinstance(self.removal, Tensor)
