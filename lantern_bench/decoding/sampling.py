"""Guidance, temperature, filters (docs/algorithms.md, section 1) and every random draw of decoding.

All is float32 whatever the weights are. A draw takes its noise as an argument; `Draws` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.methods.parameters import FilterOrder

_LARGEST = 2**31 - 1
_BELOW_ONE = 1.0 - 2.0**-24
_AHEAD = 8  # calls of `Draws.bits` that one draw serves


def guide(cond: Tensor, uncond: Tensor | None, cfg_scale: float) -> Tensor:
    """Return the guided logits [..., V] in float32; `cfg_scale` 1 means the conditional ones alone.

    -inf in both rows is an impossible token.
    """
    if cfg_scale == 1.0:
        return cond.float()
    if uncond is None:
        raise ValueError(f"cfg_scale {cfg_scale} needs unconditional logits")
    cond = cond.float()
    base = uncond.float()
    # A token that both rows call impossible stays so: the difference of the infinities counts as 0. That would hide a
    # NaN of `cond`, which `maximum` keeps. A mask takes twice as long on a CPU.
    difference = (cond - base).nan_to_num_(0.0, torch.inf, -torch.inf).maximum(cond - torch.inf)
    return base.add(difference, alpha=cfg_scale)


def probabilities(
    logits: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    filter_order: FilterOrder = "top_k_first",
) -> Tensor:
    """Return the filtered distribution [..., V] in float32 of (guided) logits [..., V], at temperatures above 0.

    `top_k = 0` and `top_p = 1` switch a filter off. Ties at the k-th logit are kept; top-p keeps the smallest set
    whose mass reaches `top_p`, the token that crosses included.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    if filter_order == "top_k_first":
        return torch.softmax(_keep_top_p(_keep_top_k(scaled, top_k), top_p), dim=-1)
    return torch.softmax(_keep_top_k(_keep_top_p(scaled, top_p), top_k), dim=-1)


def decoding_probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """Return p [..., V] of guided logits [..., V] in a configuration; greedy: `greedy_probabilities`."""
    if decoding.greedy:
        return greedy_probabilities(logits)
    return probabilities(
        logits=logits,
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        filter_order=decoding.filter_order,
    )


def greedy_probabilities(logits: Tensor) -> Tensor:
    """Return the unfiltered softmax [..., V], float32, at temperature 1: what greedy decoding drafts with."""
    return torch.softmax(logits.float(), dim=-1)


def broken_distributions(probs: Tensor) -> Tensor:
    """Return bool [...]: which distributions [..., V] come of logits with a NaN, with +inf, or with -inf alone.

    Softmax and both filters make every probability of such a row NaN, so one of them tells. A -inf among finite logits
    is a token that is impossible.
    """
    return probs[..., 0].isnan()


def broken_logits(logits: Tensor) -> Tensor:
    """Return bool [...]: which logits [..., V] have a NaN, +inf, or -inf alone."""
    return ~logits.amax(dim=-1).isfinite()


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    if top_k <= 0 or top_k >= logits.shape[-1]:
        return logits
    kth = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    if top_p >= 1.0:
        return logits
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    reached = torch.softmax(ordered, dim=-1).cumsum(dim=-1) >= top_p
    # A token goes when the ones before it reach the mass without it; the first has none before it and stays.
    surplus = torch.zeros_like(reached)
    surplus[..., 1:] = reached[..., :-1]
    return logits.masked_fill(torch.zeros_like(surplus).scatter(-1, order, surplus), -torch.inf)


def sample(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row: int64 [...] from `probs` [..., V] (any scale) and Exp(1) `noise` of the same shape.

    The token whose exponential clock with rate p rings first is distributed as p; a token of probability 0 is never
    drawn while another one has mass.
    """
    return (probs / noise).argmax(dim=-1)


def draw_without_replacement(probs: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw `count` distinct tokens per row in order: (tokens int64 [..., count], valid bool [..., count]).

    The order in which exponential clocks ring is that of sampling without replacement, each draw from what is left,
    renormalised. Tokens of probability 0 are never drawn: where a row has fewer than `count` others the rest is
    token 0 with valid False. `probs` [..., V] need not be normalised; `noise` [..., V] ~ Exp(1).
    """
    drawn = min(count, probs.shape[-1])
    # The compiler finds one token where it makes the quotients, and calls a kernel for more.
    tokens = (
        sample(probs, noise)[..., None]
        if drawn == 1
        else (probs / noise).topk(drawn, dim=-1).indices
    )
    return _padded(tokens, probs.gather(-1, tokens) > 0, count)


def most_probable(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens per row: (tokens int64 [..., count], valid bool [..., count]).

    In descending order, ties by index; otherwise as in `draw_without_replacement`.
    """
    vocabulary = probs.shape[-1]
    # Bits of non-negative floats order like the floats: one integer key holds value and index, so ties are settled.
    rank = torch.arange(vocabulary - 1, -1, -1, device=probs.device)
    key = (probs.float().contiguous().view(torch.int32).long() << 32) | rank
    tokens = key.topk(min(count, vocabulary), dim=-1).indices
    return _padded(tokens, probs.gather(-1, tokens) > 0, count)


def _padded(tokens: Tensor, valid: Tensor, count: int) -> tuple[Tensor, Tensor]:
    missing = (0, count - tokens.shape[-1])
    tokens = tokens.masked_fill(~valid, 0)
    return torch.nn.functional.pad(tokens, missing), torch.nn.functional.pad(valid, missing)


def uniform(bits: Tensor) -> Tensor:
    """Return uniform numbers float32 in [0, 1) of random `bits` int32 [...], of which the lowest 31 count."""
    return ((bits & _LARGEST).float() * (1.0 / (_LARGEST + 1))).clamp_max(_BELOW_ONE)


def exponential(bits: Tensor) -> Tensor:
    """Return Exp(1) noise float32 of random `bits` int32 [...], as `uniform`; never 0.

    The smallest clock decides, so the grid is finest there: steps of 5e-10 near 0, where torch's own are 6e-8.
    """
    halfway = ((bits & _LARGEST).float() + 0.5) * (1.0 / (_LARGEST + 1))
    return -torch.log1p(-halfway.clamp_max(_BELOW_ONE))


class Draws:
    """Random bits for a batch of images, each image's from a generator of its own on `device`.

    An image's random numbers do not depend on its batch: every call draws the same amount from each generator.
    """

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device | str) -> None:
        self.generators = list(generators)
        self.device = torch.device(device)
        self._stock: dict[int, list[Tensor]] = {}

    def bits(self, *shape: int) -> Tensor:
        """Return random bits int32 [B, *shape], the lowest 31 of each; drawn for the next calls as well."""
        count = math.prod(shape)
        stock = self._stock.setdefault(count, [])
        if not stock:
            # Between two programs a call costs more than its work, so one draw serves several.
            # One random number of 63 bits serves two; drawing is what costs.
            pairs = torch.empty(
                len(self.generators), _AHEAD // 2 * count, dtype=torch.int64, device=self.device
            )
            for row, generator in zip(pairs, self.generators, strict=True):
                row.random_(generator=generator)
            stock += (
                pairs.view(torch.int32).view(len(self.generators), _AHEAD, count).unbind(1)[::-1]
            )
        return stock.pop().view(len(self.generators), *shape)

    def exponential(self, *shape: int) -> Tensor:
        """Return Exp(1) noise [B, *shape]."""
        return exponential(self.bits(*shape))
