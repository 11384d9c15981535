"""Reads the recorded cases of the published implementation (tests/golden, or the folder
LANTERN_BENCH_GOLDEN names).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.sampling import probabilities
from lantern_bench.decoding.tree import DraftTree, StaticTree, link_nodes
from tests.helpers.rules import rule_named


def golden_path(*parts: str) -> Path:
    folder = os.environ.get("LANTERN_BENCH_GOLDEN") or Path(__file__).parents[1] / "golden"
    return Path(folder).joinpath(*parts)


@dataclass
class Case:
    """One recorded verification: `info` its row of cases.json, `arrays` its arrays, and what we
    make of them.
    """

    info: dict[str, Any]
    arrays: dict[str, np.ndarray]
    tree: DraftTree
    rule: ConfiguredRule

    @property
    def greedy(self) -> bool:
        return self.info["mode"] == "greedy"

    @property
    def logits(self) -> Tensor:
        """[1, M, V]."""
        return torch.from_numpy(self.arrays["node_logits"])[None]

    @property
    def probs(self) -> Tensor:
        """[1, M, V], filtered as the recording says."""
        return probabilities(self.logits, **self.info["processor"], filter_order="top_p_first")


@functools.cache
def acceptance_cases() -> list[Case]:
    infos = json.loads(golden_path("acceptance", "cases.json").read_text())["cases"]
    with np.load(golden_path("acceptance", "cases.npz")) as file:
        arrays = dict(file)
    return [_case(info, arrays) for info in infos]


def _case(info: dict[str, Any], arrays: dict[str, np.ndarray]) -> Case:
    prefix = info["id"] + "."
    recorded = {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
    rule = rule_named("strict", residual="official")
    if info["lantern"]:
        nearest = torch.from_numpy(arrays[info["nearest"]])
        rule = rule_named(
            name=info["rule"],
            neighbours=info["k"],
            bound=info["delta"],
            residual="official",
            table=nearest,
        )
    return Case(info=info, arrays=recorded, tree=_tree(info, recorded), rule=rule)


def _tree(info: dict[str, Any], arrays: dict[str, np.ndarray]) -> DraftTree:
    parents = arrays["parents"].tolist()
    tokens = torch.from_numpy(arrays["node_tokens"]).long()[None]
    children = children_in_path_order(arrays["retrieve_indices"], len(parents))
    if info["fn"] == "dynamic":
        ranks = [
            0 if parent < 0 else children[parent].index(node) for node, parent in enumerate(parents)
        ]
        depths = [len(path_to(node, parents)) for node in range(len(parents))]
        return link_nodes(
            tokens=tokens,
            parents=torch.tensor([parents]),
            depths=torch.tensor([depths]),
            ranks=torch.tensor([ranks]),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            fanout=max(map(len, children)),
            max_depth=max(depths),
        )
    paths = [path_to(node, parents) for node in range(1, len(parents))]
    shape = StaticTree.of(
        [[children[parents[node]].index(node) for node in path] for path in paths]
    )
    assert shape.parents.tolist() == parents
    q = None
    if "group_draft_dist" in arrays:
        q = torch.zeros(1, len(parents), info["vocab"])
        q[0, torch.from_numpy(arrays["groups"]).long()] = torch.from_numpy(
            arrays["group_draft_dist"]
        )
    return shape.draft(tokens, q)


def children_in_path_order(paths: np.ndarray, nodes: int) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(nodes)]
    for path in paths.tolist():
        for parent, child in itertools.pairwise(path):
            if child >= 0 and child not in children[parent]:
                children[parent].append(child)
    return children


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from below the root to `node`."""
    return [] if parents[node] < 0 else [*path_to(parents[node], parents), node]
