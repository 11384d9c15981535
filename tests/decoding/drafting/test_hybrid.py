"""Windows that ask a drafter for their first places: lossless by enumeration, which sees mistakes.

The harness is that of test_jacobi.py: whole images, step after step, through the package's own
`draft`, `verify` and `learn`; the drafter is a table that knows every token before a draft
(docs/algorithms.md, sections 8.6 and 8.7).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.drafting.jacobi import HybridDrafting
from tests.decoding.drafting.test_jacobi import (
    BLOCK,
    BLOCK_SIZES,
    FILTERS,
    SIZES,
    Exact,
    Particles,
    _double,  # noqa: F401  # a fixture
)
from tests.helpers.mistakes import SHOWN, DrafterQ, drafting_mistakes
from tests.helpers.tabular import Setting, Tabular


def hybrid_decoding(**values: Any) -> Decoding:
    return Decoding(**{"mode": "hybrid", **values})


# ---- exact


class TableProposer:
    """The drafter of a `Tabular`, below the tokens of each image."""

    def __init__(self, model: Tabular, images: list[list[int]]) -> None:
        self.model = model
        self.images = images
        self.root_q = self.q()

    def q(self) -> Tensor:
        return torch.stack([self.model.q(tuple(image)) for image in self.images])[:, None]

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Tensor:
        assert origin.eq(0).all()
        assert seen.all()
        self.images = [
            [*image, int(token)] for image, token in zip(self.images, tokens[:, 0], strict=True)
        ]
        return self.q()


class WithTable(HybridDrafting):
    """Remembers the image's tokens [B, N + W + 1], and asks `TableProposer` for them.

    A test sets `model`.
    """

    model: Tabular

    def __init__(self, decoding: Decoding, target: Any, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._image = torch.zeros(batch, target.image_tokens + self.depth + 1, dtype=torch.int64)

    def after_step(self, step: LastStep) -> None:
        columns = (step.position - step.accepted - 1)[:, None] + torch.arange(self.depth)
        self._image = self._image.scatter(1, columns, step.tokens[:, : self.depth])
        super().after_step(step)

    def draft(self, inputs: DraftInputs) -> None:
        (position,) = self._position.unique().tolist()
        self._image[:, position - 1] = inputs.root
        proposer: Any = TableProposer(self.model, self._image[:, :position].tolist())
        super().draft(inputs._replace(proposer=proposer))


class CoupledToNew(WithTable):
    """The last draft stays as if it had been drawn from the new row."""

    def after_step(self, step: LastStep) -> None:
        super().after_step(step)
        self._last_q.copy_(self._q)


class BelievedDrafter(WithTable, DrafterQ):
    """Drafts of a mixture are verified as if the drafter alone had made them."""


class ExactHybrid(Exact):
    def __init__(
        self,
        size: tuple[int, int, int],
        values: dict[str, Any],
        seed: int,
        kind: Any = WithTable,
        rule: ConfiguredRule | None = None,
        setting: Setting | None = None,
    ) -> None:
        model = Tabular(size[0], setting or Setting(), seed)
        self.table_kind: Any = type(kind.__name__, (kind,), {"model": model})
        super().__init__(size, {"mode": "hybrid", **values}, seed, self.table_kind, rule)
        self.model = model

    def trimmed(self, particles: Particles) -> Particles:
        particles.state["_image"][:, particles.tokens.shape[1] - 1 :] = 0
        return super().trimmed(particles)


CASES = [
    ("v2", {"coupling": "none", "initial": "uniform"}),
    ("v2", {"coupling": "maximal"}),
    ("v2", {"coupling": "threshold"}),
    ("v2", {"coupling": "gumbel"}),
    ("v2", {"coupling": "maximal", "initial": "left", "drafted": 1, "drafter_weight": 0.25}),
    ("v3", {"coupling": "maximal"}),
    ("v3", {"coupling": "none", "drafted": 1, "drafter_weight": 1}),
]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize(("size", "values"), CASES, ids=str)
def test_enumerated_images_follow_the_target(size: str, values: dict[str, Any]) -> None:
    for seed in (1, 2):
        error = ExactHybrid(SIZES[size], values, seed).error()
        print(f"{size} {values}: TV {error:.1e}")
        assert error < 1e-12


BLOCK_CASES = [
    ("v2", {}),
    ("v2", {"initial": "uniform"}),
    ("v2", {"initial": "left", "drafted": 1, "drafter_weight": 0.25}),
    ("v3", {}),
]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize(("size", "values"), BLOCK_CASES, ids=str)
def test_enumerated_block_walks_follow_the_target(size: str, values: dict[str, Any]) -> None:
    for seed in (1, 2):
        error = ExactHybrid(BLOCK_SIZES[size], values, seed, rule=BLOCK).error()
        print(f"block {size} {values}: TV {error:.1e}")
        assert error < 1e-12


@pytest.mark.usefixtures("_double")
def test_enumerated_block_walks_with_filters_follow_the_target() -> None:
    error = ExactHybrid(size=(3, 4, 3), values={}, seed=1, rule=BLOCK, setting=FILTERS).error()
    print(f"block, filtered: TV {error:.1e}")
    assert error < 1e-12


BROKEN_BLOCK: dict[str, Any] = {
    mistake.name: mistake.make
    for mistake in drafting_mistakes(hybrid_decoding(rule="block"))
    if mistake.name in SHOWN
}


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("mistake", BROKEN_BLOCK)
def test_enumeration_sees_mistakes_of_block_walks(mistake: str) -> None:
    kind = type("Broken", (BROKEN_BLOCK[mistake], WithTable), {})
    errors = [
        ExactHybrid(BLOCK_SIZES["v2"], {}, seed, kind=kind, rule=BLOCK).error()
        for seed in (1, 2, 3)
    ]
    print(f"block, {mistake}: TV {errors}")
    assert min(errors) > 0.002


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("kind", [BelievedDrafter, CoupledToNew])
def test_enumeration_sees_what_is_broken(kind: Any) -> None:
    errors = [
        ExactHybrid(size=SIZES["v2"], values={}, seed=seed, kind=kind).error() for seed in (1, 2)
    ]
    print(f"broken, {kind.__name__}: TV {errors}")
    assert min(errors) > 0.005


def test_ids_say_how_far_the_drafter_is_asked() -> None:
    assert hybrid_decoding().cell_id == "hybrid-hybrid-w16d2-row-maximal-t1"
    assert (
        hybrid_decoding(drafted=1, coupling="none", drafter_weight=1).cell_id
        == "hybrid-hybrid-w16d1-drafter1-row-t1"
    )
