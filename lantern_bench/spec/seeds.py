"""The only seed arithmetic: what one image's generator starts from.

A seed depends on the run's seed, the prompt and the repeat, and on nothing else, so that order, sharding and resume
cannot change a result, and so that every cell starts each image from the same randomness (paired comparisons).
Generators themselves are made where they are used; nothing here touches global state.
"""

from __future__ import annotations

import hashlib

__all__ = ["order_key", "record_seed"]


def record_seed(run_seed: int, prompt_id: str, repeat: int) -> int:
    """Return the 63-bit generator seed of one image, the same for all cells."""
    return _hash63(f"record:{run_seed}:{prompt_id}:{repeat}")


def order_key(run_seed: int, prompt_id: str, repeat: int, cell_id: str) -> int:
    """Return a cell's sort key among the cells of one prompt: sorting by it is a seeded random order.

    It needs no generator, so the order of two cells does not depend on which others run beside them.
    """
    return _hash63(f"order:{run_seed}:{prompt_id}:{repeat}:{cell_id}")


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
