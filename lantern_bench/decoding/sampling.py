"""Guidance, temperature, filters (docs/algorithms.md, section 1) and all random draws of decoding.

Everything is float32, whatever the weights are. A draw takes its noise as an argument, which
`Draws` makes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.methods.parameters import FilterOrder

# mask of the 31 bits that are used
_LARGEST = 2**31 - 1
# the largest float32 below 1
_BELOW_ONE = 1.0 - 2.0**-24
# how many calls of `Draws.bits` one draw serves
_AHEAD = 8


def guide(cond: Tensor, uncond: Tensor | None, cfg_scale: float) -> Tensor:
    """Return the guided logits [..., V] in float32: uncond + cfg_scale * (cond - uncond).

    Args:
        cond: The conditional logits [..., V].
        uncond: The unconditional logits [..., V]; may be None if `cfg_scale` is 1. A token that is
            -inf in both is impossible.
        cfg_scale: The guidance scale; 1 returns the conditional logits.
    """
    if cfg_scale == 1.0:
        return cond.float()
    if uncond is None:
        raise ValueError(f"cfg_scale {cfg_scale} needs unconditional logits")
    cond = cond.float()
    base = uncond.float()
    # A token that both rows call impossible stays so: the difference of the infinities counts as 0.
    # That would hide a NaN of `cond`, which `maximum` restores. A mask is twice as slow on a CPU.
    difference = (cond - base).nan_to_num_(0.0, torch.inf, -torch.inf).maximum(cond - torch.inf)
    return base.add(difference, alpha=cfg_scale)


def probabilities(
    logits: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    filter_order: FilterOrder = "top_k_first",
) -> Tensor:
    """Return the filtered distribution of logits, float32 [..., V].

    Args:
        logits: Guided logits [..., V].
        temperature: Above 0.
        top_k: Keep the k largest logits, and ties with the k-th; 0 is off.
        top_p: Keep the smallest set whose mass reaches `top_p`, the crossing token included; 1 is
            off.
        filter_order: Which filter comes first.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    if filter_order == "top_k_first":
        return torch.softmax(_keep_top_p(_keep_top_k(scaled, top_k), top_p), dim=-1)
    return torch.softmax(_keep_top_k(_keep_top_p(scaled, top_p), top_k), dim=-1)


def decoding_probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """Return the distributions [..., V] of guided logits [..., V] in a configuration."""
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
    """Return the softmax [..., V] that greedy decoding drafts with: temperature 1, no filters."""
    return torch.softmax(logits.float(), dim=-1)


def broken_distributions(probs: Tensor) -> Tensor:
    """Return bool [...]: which distributions [..., V] come from broken logits, as `broken_logits`.

    Softmax and both filters make every probability of such a row NaN, so looking at one is enough.
    """
    return probs[..., 0].isnan()


def broken_logits(logits: Tensor) -> Tensor:
    """Return bool [...]: which logits [..., V] have a NaN or +inf, or are all -inf.

    A -inf among finite logits is an impossible token.
    """
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
    # A token goes if the tokens before it reach the mass; nothing is before the first, which stays.
    surplus = torch.zeros_like(reached)
    surplus[..., 1:] = reached[..., :-1]
    return logits.masked_fill(torch.zeros_like(surplus).scatter(-1, order, surplus), -torch.inf)


def sample(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row, int64 [...].

    The token whose exponential clock with rate p rings first is distributed as p. A token of
    probability 0 is never drawn while another one has mass.

    Args:
        probs: Distributions [..., V] of any scale.
        noise: Exp(1) noise [..., V].
    """
    return (probs / noise).argmax(dim=-1)


def draw_tokens(logits: Tensor, decoding: Decoding, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, at temperature 0 the most probable one.

    Args:
        logits: Guided logits [..., V].
        decoding: The configuration.
        bits: Random bits [..., V], as of `exponential`; not read at temperature 0.

    Returns:
        The tokens int64 [...], and which logits are NaN or infinite, bool [...].
    """
    if decoding.greedy:
        return logits.argmax(dim=-1), broken_logits(logits)
    p = decoding_probabilities(logits, decoding)
    return sample(p, exponential(bits)), broken_distributions(p)


def draw_without_replacement(probs: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw distinct tokens per row, in order, each from the rest, renormalised.

    Exponential clocks ring in the order of sampling without replacement.

    Args:
        probs: Distributions [..., V] of any scale.
        count: How many tokens to draw.
        noise: Exp(1) noise [..., V].

    Returns:
        The tokens int64 [..., count], and which of them are valid, bool [..., count]. Tokens of
        probability 0 are never drawn: if a row has fewer than `count` others, the rest is token 0
        and not valid.
    """
    drawn = min(count, probs.shape[-1])
    if drawn == 1:
        # The compiler finds one token while it computes the quotients, and calls a kernel for more.
        tokens = sample(probs, noise)[..., None]
    else:
        tokens = (probs / noise).topk(drawn, dim=-1).indices
    return _padded(tokens, probs.gather(-1, tokens) > 0, count)


def most_probable(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens per row in descending order, ties by index.

    Returns as `draw_without_replacement`.
    """
    vocabulary = probs.shape[-1]
    ranks = torch.arange(vocabulary - 1, -1, -1, device=probs.device)
    key = keys_of(probs.float().contiguous(), ranks)
    tokens = key.topk(min(count, vocabulary), dim=-1).indices
    return _padded(tokens, probs.gather(-1, tokens) > 0, count)


def keys_of(values: Tensor, ranks: Tensor) -> Tensor:
    """Return int64 keys that order non-negative float32 `values` [..., V], ties by `ranks` [V].

    Bits of non-negative floats order like the floats, so one integer holds value and rank.
    """
    return (values.view(torch.int32).long() << 32) | ranks


def _padded(tokens: Tensor, valid: Tensor, count: int) -> tuple[Tensor, Tensor]:
    missing = (0, count - tokens.shape[-1])
    tokens = tokens.masked_fill(~valid, 0)
    return torch.nn.functional.pad(tokens, missing), torch.nn.functional.pad(valid, missing)


def uniform(bits: Tensor) -> Tensor:
    """Return uniform numbers float32 in [0, 1), made of the lowest 31 `bits` int32 [...]."""
    return ((bits & _LARGEST).float() * (1.0 / (_LARGEST + 1))).clamp_max(_BELOW_ONE)


def exponential(bits: Tensor) -> Tensor:
    """Return Exp(1) noise float32, never 0, made of the lowest 31 `bits` int32 [...].

    The smallest clock decides, so the grid is finest near 0: its steps there are 5e-10. The steps
    of torch's own exponential numbers are 6e-8.
    """
    halfway = ((bits & _LARGEST).float() + 0.5) * (1.0 / (_LARGEST + 1))
    return -torch.log1p(-halfway.clamp_max(_BELOW_ONE))


class Draws:
    """Random bits for a batch of images, from one generator per image on `device`.

    An image's random numbers do not depend on its batch, because every call draws the same amount
    from each generator.
    """

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device | str) -> None:
        self.generators = list(generators)
        self.device = torch.device(device)
        self._stock: dict[int, list[Tensor]] = {}

    def bits(self, count: int) -> Tensor:
        """Return random bits int32 [B, count], of which the lowest 31 count.

        Bits for the next calls are drawn too, because starting a draw costs more than the draw.
        """
        batch = len(self.generators)
        stock = self._stock.setdefault(count, [])
        if not stock:
            # Drawing is expensive, so one number of 63 bits serves twice.
            numbers = _AHEAD // 2 * count
            pairs = torch.empty(batch, numbers, dtype=torch.int64, device=self.device)
            for row, generator in zip(pairs, self.generators, strict=True):
                row.random_(generator=generator)
            calls = pairs.view(torch.int32).view(batch, _AHEAD, count).unbind(1)
            stock.extend(reversed(calls))
        return stock.pop()
