"""How many tokens a step of Jacobi drafting commits, for every window that is worth a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.loop import decode
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.tree_search import Tree, with_tree

_WINDOWS = (4, 8, 12, 16, 24, 32, 48)


def list_windows(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, say: Callable[[str], None]
) -> list[Tree]:
    """Return every window with its length, measured by decoding: the drafts of a window depend on those before."""
    own = {key: decoding.value(key) for key in decoding.drafting_row.parameter_names}
    trees = []
    for window in _WINDOWS:
        say(f"decoding with a window of {window}")
        chosen, steps = with_tree(decoding, own | {"window": window}), list[int]()
        for number, prompt in enumerate(prompts):
            noise = torch.Generator(model.target.device).manual_seed(seed + number)
            steps += decode(model, model.condition([prompt]), chosen, [noise])[0].trace.uncut
        drafts, length = drafting_of(chosen, model.target), sum(steps) / max(1, len(steps))
        trees.append(Tree(own | {"window": window}, drafts.nodes - 1, window, drafts.fanout, length))
    return trees
