"""Compiled steps give the tokens of steps as they stand: every drafting and rule, and bounds
without a new program.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import Condition, TransformerTarget, WordCaption
from lantern_bench.models.networks.transformer_config import TransformerConfig

PREFIX = 4
VOCABULARY = 40
CONFIG = TransformerConfig(
    vocab_size=VOCABULARY,
    dim=64,
    layers=2,
    heads=2,
    ffn_dim=96,
    prefix=PREFIX,
    grid=(4, 6),
    prefix_rotary="identity",
)
TREE = {"tree": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]}
CELLS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "static": {
        "mode": "lantern++",
        **TREE,
        "neighbours": 5,
        "lambda": 3.0,
        "top_k": 30,
        "cfg_scale": 1.5,
    },
    "dynamic": {
        "mode": "lantern",
        "nodes": 6,
        "depth": 3,
        "beam": 3,
        "neighbours": 5,
        "delta": 0.1,
        "cfg_scale": 1.5,
    },
    "greedy": {"mode": "speculative", **TREE, "temperature": 0.0, "cfg_scale": 1.5},
    "cool-sd": {"mode": "cool-sd", **TREE, "strength": 1.5, "cfg_scale": 1.5},
    "gsd": {"mode": "gsd", **TREE, "cluster": 6, "residual": "official", "cfg_scale": 1.5},
    "entropy": {"mode": "entropy", **TREE, "neighbours": 5, "entropy_scale": 0.5, "cfg_scale": 1.5},
    "typical": {
        "mode": "typical",
        "drafting": "dynamic",
        "nodes": 6,
        "depth": 3,
        "beam": 3,
        "epsilon": 0.09,
        "cfg_scale": 1.5,
    },
}
WINDOWS: dict[str, dict[str, Any]] = {
    "left, maximal": {
        "mode": "sjd",
        "window": 4,
        "initial": "left",
        "coupling": "maximal",
        "cfg_scale": 1.5,
        "top_k": 30,
    },
    "above, gumbel": {"mode": "sjd", "window": 9, "initial": "above", "coupling": "gumbel"},
    "block": {"mode": "block-scd", "window": 6, "initial": "row", "cfg_scale": 1.5, "top_k": 30},
    "threshold": {"mode": "sjd++", "window": 4, "cfg_scale": 1.5, "top_k": 30},
    "greedy": {"mode": "sjd", "window": 4, "initial": "row", "temperature": 0.0},
    "pac": {"mode": "sjd-pac", "window": 5, "cfg_scale": 1.5, "top_k": 30},
    "pac, gumbel, above": {
        "mode": "sjd-pac",
        "window": 6,
        "coupling": "gumbel",
        "initial": "above",
    },
    "pac, greedy": {"mode": "sjd-pac", "window": 5, "temperature": 0.0},
    "hybrid": {
        "mode": "hybrid",
        "window": 5,
        "drafted": 3,
        "initial": "above",
        "cfg_scale": 1.5,
        "top_k": 30,
    },
    "hybrid, block": {"mode": "hybrid", "window": 5, "rule": "block", "cfg_scale": 1.5},
    "pac, traversal": {"mode": "sjd-pac", "window": 5, "branching": 1, "rule": "traversal"},
    "hybrid, gumbel": {
        "mode": "hybrid",
        "window": 5,
        "drafted": 3,
        "coupling": "gumbel",
        "initial": "above",
    },
}
EVERY_TIME = [("ar", 1), ("dynamic", 3), ("greedy", 3), ("gsd", 3)]
EVERY_TIME += [(cell, 3) for cell in ("left, maximal", "block", "pac, gumbel, above", "hybrid")]
# each compiles for some seconds
CAPTURED = [("static", 1)]  # test_saved_programs.py compiles it every time
CAPTURED += [(cell, 3) for cell in WINDOWS if (cell, 3) not in EVERY_TIME]
PROGRAMS = CELLS | WINDOWS


class Small:
    """A transformer of two layers and a drafter, both of random weights, sharp enough to accept
    some drafts.
    """

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # fresh layers draw from torch's own stream
            self.target = (
                TransformerTarget(CONFIG, WordCaption(9, PREFIX, 64)).eval().requires_grad_(False)
            )
            self.drafter = (
                EagleDrafter(CONFIG, self.target.transformer.output).eval().requires_grad_(False)
            )
        self.target.to(device)
        self.drafter.to(device)
        order = torch.arange(VOCABULARY, device=device)
        self.codes = torch.randn(VOCABULARY, 2, generator=torch.Generator().manual_seed(1)).to(
            device
        )
        self._table = torch.stack([(order + 1 + x) % VOCABULARY for x in range(VOCABULARY)])[
            :, : VOCABULARY - 1
        ]

    def table(self, columns: int, metric: str = "l2") -> torch.Tensor:
        return self._table[:, :columns]


def decoded(
    model: Small, decoding: Decoding, images: int, engine: Engine | None = None
) -> list[Decoded]:
    values = torch.tensor([[0, 3, 4, 5], [1, 2, 3, 4], [0, 0, 8, 1]])[:images]
    noise = [torch.Generator(model.target.device).manual_seed(image) for image in range(images)]
    return decode(
        model=model,
        condition=Condition(values, values > 0),
        decoding=decoding,
        generators=noise,
        engine=engine,
        keep_logits=True,
    )


def same(first: list[Decoded], second: list[Decoded]) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.tokens.equal(b.tokens)
        assert a.trace.child_rank == b.trace.child_rank
        assert (a.logits - b.logits).abs().max() < 1e-4
        assert a.trace.neighbour_mass == pytest.approx(b.trace.neighbour_mass, abs=1e-4)


@pytest.mark.parametrize(
    ("cell", "images"),
    EVERY_TIME + [pytest.param(*row, marks=pytest.mark.long) for row in CAPTURED],
)
def test_captured_programs_give_the_same_tokens(cell: str, images: int) -> None:
    """Traced whole (no break, no read on the host) and functional, but run by torch's own kernels.

    Cells with a bound run three images in `test_a_bound_changes_no_program`.
    """
    model = Small()
    decoding = Decoding(**PROGRAMS[cell])
    engine = Engine(compile=True, backend="aot_eager")
    wanted = decoded(model, decoding, images)
    for _again in range(2):
        same(decoded(model=model, decoding=decoding, images=images, engine=engine), wanted)


@pytest.mark.long
@pytest.mark.parametrize("cell", ["static", "left, maximal", "block", "pac"])
def test_inductor_gives_the_same_tokens(cell: str) -> None:
    """`test_saved_programs.py` compiles the cell `static` with a smaller tree every time."""
    model = Small()
    decoding = Decoding(**PROGRAMS[cell])
    same(
        decoded(model=model, decoding=decoding, images=1, engine=Engine(compile=True)),
        decoded(model, decoding, 1),
    )


BOUNDS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "static": ({"lambda": 1.5}, {"lambda": 8.0}),
    "cool-sd": ({"strength": 1.1, "decay": 0.7}, {"strength": 4.0, "decay": 0.1}),
    "entropy": ({"entropy_scale": 0.1}, {"entropy_scale": 0.8}),
    "typical": ({"epsilon": 0.5, "alpha": 1.0}, {"epsilon": 0.01, "alpha": 0.1}),
}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in ("static", "typical") else pytest.mark.long)
        for cell in BOUNDS
    ],
)
def test_a_bound_changes_no_program(cell: str) -> None:
    model = Small()
    engine = Engine(compile=True, backend="aot_eager")
    moved = []
    for bound in BOUNDS[cell]:
        decoding = Decoding(**CELLS[cell] | bound)
        images = decoded(model=model, decoding=decoding, images=3, engine=engine)
        same(images, decoded(model, decoding, 3))
        moved.append(sum(image.trace.neighbour_mass for image in images))
        programs = sum(key[0] == "program" for key, _threads in engine._cache)
        assert programs == 3
    assert 0 < moved[0] < moved[1]


def test_programs_of_two_shapes_are_not_mixed() -> None:
    """Programs run without checking what they were made for: each must have a cache of its own."""
    model = Small()
    engine = Engine(compile=True, backend="eager")
    for cell in ("static", "dynamic", "static"):
        decoding = Decoding(**CELLS[cell])
        same(
            decoded(model=model, decoding=decoding, images=1, engine=engine),
            decoded(model, decoding, 1),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("cell", PROGRAMS)
def test_graphs_give_the_same_tokens(cell: str, images: int) -> None:
    """Run, captured, replayed; and once more, for another set of images."""
    model = Small(device="cuda")
    decoding = Decoding(**PROGRAMS[cell])
    engine = Engine(compile=True)
    wanted = decoded(model, decoding, images)
    for _again in range(2):
        same(decoded(model=model, decoding=decoding, images=images, engine=engine), wanted)
