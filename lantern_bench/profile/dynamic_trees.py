"""Expected lengths of dynamic trees of every size, from one probe with a large tree.

Every candidate of a large draft is scored. A smaller draft is part of it, and its walk is the same one until it leaves
that part: children are tried in the same order with the same uniforms, and of siblings the first are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.methods import most_nodes
from lantern_bench.config.trees import Path
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.drafting.static import draft_probabilities
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.protocol import DrafterLogits
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.tree_search import Tree, with_tree

_DEPTH, _BEAM, _MOST_NODES = 6, 5, 32


def list_dynamic(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, say: Callable[[str], None]
) -> list[Tree]:
    """Return every dynamic tree up to 32 nodes, depth 6 and beam 5 with its expected length."""
    say(f"probing dynamic trees up to depth {_DEPTH} and beam {_BEAM}")
    walks = list(probe(model, decoding, prompts, seed))
    trees = []
    for depth in range(1, _DEPTH + 1):
        for beam in range(1, _BEAM + 1):
            needed = [nodes_needed(reach, walk, depth, beam) for reach, walk in walks]
            for nodes in range(depth, min(most_nodes(depth, beam), _MOST_NODES) + 1):
                accepted = sum(count <= nodes for counts in needed for count in counts)
                values = {"nodes": nodes, "depth": depth, "beam": beam}
                trees.append(Tree(values, nodes, depth, beam, 1 + accepted / len(walks)))
    return trees


def probe(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int
) -> Iterator[tuple[dict[Path, float], Path]]:
    """Decode with the largest tree and yield of each step the cumulative log q of every candidate, and the walk.

    A candidate is named by its path of child ranks; the walk is the path of the last accepted draft.
    """
    nodes = most_nodes(_DEPTH, _BEAM)
    largest = with_tree(decoding, {"nodes": nodes, "depth": _DEPTH, "beam": _BEAM})
    grown: list[Growth] = []
    watched = replace(model, drafter=_Watched(model.drafter, largest, grown), engine=Engine())
    for number, prompt in enumerate(prompts):
        grown.clear()
        noise = torch.Generator(model.target.device).manual_seed(seed + number)
        trace = decode(watched, model.condition([prompt]), largest, [noise])[0].trace
        for growth, ranks in zip(grown, trace.child_rank, strict=True):
            yield reach_of(growth), tuple(rank for rank in ranks if rank >= 0)


class _Watched:
    """A drafter, or its session, that keeps the growth of every draft for one image."""

    def __init__(self, watched: Any, decoding: Decoding, grown: list[Growth]) -> None:
        self._watched, self._decoding, self._grown = watched, decoding, grown

    def session(self, batch: int, guided: bool, nodes: int) -> _Watched:
        return _Watched(self._watched.session(batch, guided, nodes), self._decoding, self._grown)

    def prefill(self, condition: Any, features: Tensor) -> None:
        self._watched.prefill(condition, features)

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        drafts: DrafterLogits = self._watched.observe(tokens, features, counts)
        self._grown.append(Growth(draft_probabilities(drafts, self._decoding)[:, 0], _BEAM))
        return drafts

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        drafts: DrafterLogits = self._watched.extend(tokens, origin, seen)
        self._grown[-1].grow(draft_probabilities(drafts, self._decoding))
        return drafts


def reach_of(growth: Growth) -> dict[Path, float]:
    """Return the cumulative log q of every candidate of one image's growth, by its path of child ranks."""
    reach: dict[Path, float] = {}
    frontier: list[Path] = [()]
    for values in (made[0].tolist() for made in growth.log_q):
        made = dict(zip(_children(frontier, growth.beam), values, strict=True))
        reach |= made
        frontier = _best(made, made)[: growth.beam]
    return reach


def nodes_needed(reach: Mapping[Path, float], walk: Path, depth: int, beam: int) -> list[int]:
    """Return for each draft of `walk` the least nodes of a tree of this depth and beam that has it.

    Drafts that no such tree has are left out, and so are those below them.
    """
    candidates: list[Path] = []
    frontier: list[Path] = [()]
    for _ in range(depth):
        made = [path for path in _children(frontier, beam) if path in reach]
        candidates += made
        frontier = _best(made, reach)[:beam]
    place = {path: number for number, path in enumerate(_best(candidates, reach), 1)}
    on_walk = [walk[:length] for length in range(1, len(walk) + 1)]
    return [place[path] for path in on_walk if path in place]


def _children(frontier: Sequence[Path], beam: int) -> list[Path]:
    return [(*parent, rank) for parent in frontier for rank in range(beam)]


def _best(paths: Any, reach: Mapping[Path, float]) -> list[Path]:
    """Return the paths by descending cumulative log q; ties keep their order, as in `Growth`."""
    return sorted(paths, key=lambda path: -reach[path])
