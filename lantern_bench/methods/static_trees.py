"""The named static draft trees (docs/algorithms.md, section 2), and the check of a user's tree.

A topology is a set of root-to-node paths of child ranks. `(0, 1)` is the second child of the first
child of the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lantern_bench.utils.errors import UserError

MOST_NODES = 2048
"""The most nodes of a draft, which the target scores in one forward; published trees have 63."""

Path: TypeAlias = tuple[int, ...]
Topology: TypeAlias = tuple[Path, ...]


def _paths(text: str) -> Topology:
    """Read paths written as words of one digit a level: `00 01` is (0, 0) and (0, 1)."""
    paths = [tuple(int(digit) for digit in word) for word in text.split()]
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


STATIC_TREES: dict[str, Topology] = {
    **{
        f"chain-{depth}": tuple((0,) * level for level in range(1, depth + 1))
        for depth in range(3, 8)
    },
    "small-7": _paths("0 1 00 01 10 000 0000"),
    "eagle1-25": _paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    "balanced-25": _paths(
        "0 1 2 00 01 02 10 11 12 20 21 000 001 002 010 011 100 101 110 111 "
        "0000 0001 0002 00000 00001"
    ),
    "deep-25": _paths(
        "0 1 2 00 01 10 20 000 001 002 010 011 100 0000 0001 0002 0010 0011 "
        "00000 00001 00002 00003 00010 00011 00012"
    ),
    "extended-57": _paths(
        "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 "
        "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
        "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
        "00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
    "medusa-63": _paths(
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 "
        "000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 "
        "100 101 102 110 200 "
        "0000 0001 0002 0003 0010 0020 0100"
    ),
}


def check_topology(paths: Iterable[Sequence[int]]) -> Topology:
    """Return the paths sorted by (depth, path).

    Raises `UserError` for a tree that cannot be drafted losslessly.
    """
    listed = [tuple(path) for path in paths]
    if not listed:
        raise UserError(
            "the tree is empty", "Give at least one path of child ranks, for example [[0], [0, 0]]."
        )
    if len(listed) > MOST_NODES:
        raise UserError(f"the tree has {len(listed)} paths, and at most {MOST_NODES} are possible")
    for path in listed:
        # Before the set: what a YAML file nests in a path may not be hashable.
        if any(type(rank) is not int or rank < 0 for rank in path):
            raise UserError(
                f"the path {list(path)} has a child rank that is not a whole number of at least 0"
            )
    unique = set(listed)
    for path in listed:
        if not path:
            raise UserError(
                "the tree has an empty path",
                "The root is there by itself; write only paths below it.",
            )
        *parent, rank = path
        if parent and tuple(parent) not in unique:
            raise UserError(f"the path {list(path)} has no parent", f"Add {parent}.")
        if rank > 0 and (*parent, rank - 1) not in unique:
            raise UserError(
                f"the path {list(path)} leaves a gap: its sibling {[*parent, rank - 1]} is missing",
                "Number the children of a node 0, 1, 2, ... without gaps.",
            )
    if len(unique) != len(listed):
        twice = next(path for path in listed if listed.count(path) > 1)
        raise UserError(f"the path {list(twice)} is written twice", "Write every path once.")
    return tuple(sorted(unique, key=lambda path: (len(path), path)))


def is_chain(topology: Topology) -> bool:
    """Whether every node of a checked topology has at most one child."""
    return not any(any(path) for path in topology)


def topology_name(topology: Topology) -> str:
    """Return the name of a checked topology, or `own-<nodes>-<6 hex digits>`."""
    for name, named in STATIC_TREES.items():
        if named == topology:
            return name
    digest = hashlib.blake2b(repr(topology).encode(), digest_size=3).hexdigest()
    return f"own-{len(topology)}-{digest}"
