"""What a relaxed rule may look at."""

from __future__ import annotations

from typing import Any, Protocol


class DraftView(Protocol):
    """What a relaxed rule may look at when it decides on drafts x: tensors [...] for many at once.

    `limit` sees the drafts that were made, [n]; `chance` sees every token that they could have been, [n, V]. A shape
    may be one that broadcasts to that. p and q are the current ones: after a rejection p is the residual, and q has
    lost the rejected draft. What a rule does not ask for is not computed.
    """

    @property
    def token(self) -> Any:
        """Number of x, int64 [...]."""
        ...

    @property
    def p_x(self) -> Any:
        """Probability p(x) [...]."""
        ...

    @property
    def q_x(self) -> Any:
        """Probability [...] of x under the distribution that it was drawn from; None for a deterministic draft (1)."""
        ...

    @property
    def strict_ratio(self) -> Any:
        """p(x) / q(x) [...], p(x) for a deterministic draft: what the strict rule accepts with."""
        ...

    @property
    def p(self) -> Any:
        """The distribution p [..., V], or one that broadcasts to it."""
        ...

    @property
    def neighbour_tokens(self) -> Any:
        """Numbers of the k nearest codes of x, int64 [..., k], nearest first."""
        ...

    @property
    def neighbour_p(self) -> Any:
        """Probability p of the k nearest codes of x [..., k]."""
        ...

    @property
    def distances(self) -> Any:
        """Euclidean distances of the k nearest codes from x [..., k], between rows of `codebook`."""
        ...

    @property
    def codebook(self) -> Any:
        """Embeddings of the codes [V, d], in the space that neighbours are measured in; zeros for forced tokens."""
        ...

    @property
    def depth(self) -> Any:
        """Depth of x in the draft tree, int64 [...]; 1 for children of the root."""
        ...

    @property
    def position(self) -> Any:
        """Place of x in the image, int64 [...]: how many tokens come before it."""
        ...
