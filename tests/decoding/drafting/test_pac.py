"""Jacobi drafts with siblings: lossless by enumeration; the published samplers are seen not to be.

The harness is that of test_jacobi.py: whole images, step after step, through the package's own
`draft`, `verify` and `learn` (docs/algorithms.md, sections 8.2, 8.3 and 8.6).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import accept_drafts, verify
from lantern_bench.decoding.drafting import pac
from lantern_bench.decoding.drafting.draft_method import (
    DraftInputs,
    LastStep,
    drafting_of,
)
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.drafting.pac import PacDrafting
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.catalog import RULES
from tests.decoding.drafting.test_jacobi import (
    WITHOUT_RESIDUAL,
    Exact,
    Particles,
    _double,  # noqa: F401  # a fixture
    load,
)
from tests.helpers.rules import STRICT

TRAVERSAL = ConfiguredRule(RULES["traversal"])


def pac_decoding(**values: Any) -> Decoding:
    return Decoding(**{"mode": "sjd-pac", **values})


class ExactPac(Exact):
    """As `Exact`, with the other candidates of each depth enumerated as well."""

    def drafts(self, limit: int) -> Tensor:
        """All first candidates [n, W], then the others, of which those of `limit` depths differ."""
        width = self.decoding.value("candidates") - 1
        branching = min(self.decoding.value("branching"), self.window)
        beside = min(branching, limit) * width
        drawn = list(itertools.product(range(self.vocabulary), repeat=limit + beside))
        wanted = torch.tensor(drawn, dtype=torch.int64).reshape(len(drawn), limit + beside)
        if width == 1:  # no candidate is drafted twice
            wanted = wanted[(wanted[:, :beside] != wanted[:, limit:]).all(dim=1)]
        first = torch.nn.functional.pad(wanted[:, :limit], (0, self.window - limit))
        return torch.cat(
            [first, torch.nn.functional.pad(wanted[:, limit:], (0, branching * width - beside))],
            dim=1,
        )

    def drafted(
        self, particles: Particles, wanted: Tensor, limit: int
    ) -> tuple[Tensor, DraftTree, JacobiDrafting, Particles]:
        first = wanted[:, : self.window]
        others = wanted[:, self.window :]
        seen: list[Tensor] = []

        def siblings(laws: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
            drawn = others.view(*laws.shape[:2], count)
            seen.append(laws)
            return drawn, laws.gather(2, drawn) > 0

        drafting = load(self.drafting(len(wanted)), particles)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pac, "draw_without_replacement", siblings)
            law = self.draw(drafting, particles.tokens[:, -1], first)
        chance = (law.gather(2, first[:, :, None]).squeeze(2) / law.sum(dim=2))[:, :limit].prod(
            dim=1
        )
        (laws,) = seen
        for depth in range(min(limit, laws.shape[1])):
            left = laws[:, depth].clone()
            for token in others.view(*laws.shape[:2], -1)[:, depth].unbind(1):
                share = left.gather(1, token[:, None]).squeeze(1) / left.sum(dim=1)
                # Where nothing is left there is no candidate: one of all that are asked for counts.
                counts = token == (first[:, depth] == 0).long()
                chance = chance * torch.where(left.sum(dim=1) > 0, share.nan_to_num(), counts * 1.0)
                left = left.scatter(1, token[:, None], 0.0)
        return chance, drafting.tree, drafting, particles

    def outcomes(
        self, drafting: JacobiDrafting, tree: DraftTree, p: Tensor, limit: int
    ) -> Iterator[tuple[Tensor, ...]]:
        published = type(drafting).verify is not PacDrafting.verify
        return (
            published_outcomes(drafting=drafting, tree=tree, p=p, limit=limit)
            if published
            else super().outcomes(drafting=drafting, tree=tree, p=p, limit=limit)
        )


def published_outcomes(
    drafting: JacobiDrafting, tree: DraftTree, p: Tensor, limit: int
) -> Iterator[tuple[Tensor, ...]]:
    """As `Exact.outcomes`, of a walk in which every candidate counts: all of them accepted or not
    in every way.
    """
    batch, _, vocabulary = p.shape
    limits = torch.full((batch,), limit)
    layout = tree.layout
    _, acceptance = accept_drafts(tree=tree, target_probs=p, rule=STRICT, depth_limit=limits)
    accept = tree.by_node(acceptance.accept)
    drafts = list(product(layout.nodes.tolist(), range(accept.shape[2])))
    drafts = [(node, rank) for node, rank in drafts if accept[:, node, rank].any()]
    for pattern in itertools.product((False, True), repeat=len(drafts)):
        uniforms = torch.ones_like(accept)
        chance = p.new_ones(batch)
        for (node, rank), hit in zip(drafts, pattern, strict=True):
            uniforms[:, node, rank] = 0.0 if hit else 1.0
            chance = chance * (accept[:, node, rank] if hit else 1.0 - accept[:, node, rank])
        verdict = drafting.verify(
            tree,
            p,
            STRICT,
            uniforms=uniforms,
            noise=p.new_ones(batch, vocabulary),
            depth_limit=limits,
        )
        yield chance, verdict.path, verdict.tokens[:, :-1], verdict.accepted, verdict.next_probs


VALUES: dict[str, Any] = {"mode": "sjd-pac", "candidates": 2, "branching": 2}
WAYS: list[dict[str, Any]] = [
    {"coupling": "none"},
    {"coupling": "maximal"},
    {"coupling": "maximal", "initial": "left"},
    {"coupling": "threshold"},
    {"coupling": "maximal", "initial": "row", "branching": 1},
]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: "-".join(map(str, ways.values())))
@pytest.mark.parametrize("size", [(2, 5, 3), (3, 4, 2)], ids=["v2", "v3"])
def test_enumerated_images_follow_the_target(
    size: tuple[int, int, int], ways: dict[str, Any]
) -> None:
    for seed in (1, 2):
        error = ExactPac(size=size, values=VALUES | ways, seed=seed, drafting=PacDrafting).error()
        print(f"{size} {ways}: TV {error:.1e}")
        assert error < 1e-12


BLOCK_WAYS: list[dict[str, Any]] = [
    {"initial": "uniform"},
    {"initial": "row"},
    {"initial": "left"},
    {"initial": "uniform", "coupling": "none"},
]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("ways", BLOCK_WAYS, ids=lambda ways: "-".join(map(str, ways.values())))
@pytest.mark.parametrize("size", [(2, 5, 3), (3, 4, 3)], ids=["v2", "v3"])
def test_enumerated_traversal_with_siblings_at_the_root_follows_the_target(
    size: tuple[int, int, int], ways: dict[str, Any]
) -> None:
    values = VALUES | {"coupling": "maximal", "branching": 1} | ways
    for seed in (1, 2):
        error = ExactPac(size, values, seed, PacDrafting, TRAVERSAL).error()
        print(f"traversal {size} {ways}: TV {error:.1e}")
        assert error < 1e-12


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("coupling", ["none", "maximal"])
def test_enumeration_rejects_traversal_with_deeper_siblings(coupling: str) -> None:
    """Which is refused: the siblings of a depth are the same below all nodes."""
    values = VALUES | {"coupling": coupling}
    errors = [ExactPac((2, 5, 3), values, seed, PacDrafting, TRAVERSAL).error() for seed in (1, 2)]
    print(f"traversal, deeper siblings, coupling {coupling}: TV {errors}")
    assert min(errors) > 0.002


class CoupledToRows(PacDrafting):
    """Drafts behind a traversal are coupled as if it had not read them."""

    def after_step(self, step: LastStep) -> None:
        super().after_step(step._replace(visit_probability=None))


@pytest.mark.usefixtures("_double")
def test_enumeration_rejects_traversal_that_is_coupled_with_the_rows() -> None:
    values = VALUES | {"initial": "uniform", "coupling": "maximal", "branching": 1}
    errors = [
        ExactPac((2, 5, 4), values, seed, CoupledToRows, TRAVERSAL).error() for seed in (1, 2)
    ]
    print(f"traversal, coupled with the rows: TV {errors}")
    assert min(errors) > 0.002


@pytest.mark.usefixtures("_double")
def test_enumeration_sees_a_missing_residual() -> None:
    error = ExactPac(
        size=(3, 4, 2), values=VALUES, seed=1, drafting=PacDrafting, rule=WITHOUT_RESIDUAL
    ).error()
    print(f"broken, residual left out: TV {error:.3f}")
    assert error > 0.03


# ---- the published samplers


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("values", [{}, {"window": 1}])
def test_enumeration_rejects_the_published_pac(
    values: dict[str, Any], published_forms: Any
) -> None:
    size = (3, 4, values.get("window", 2))
    theirs = VALUES | {"drafting": "sjd-pac-published"}
    errors = [
        ExactPac(
            size=size, values=theirs, seed=seed, drafting=published_forms.PublishedSjdPac
        ).error()
        for seed in (1, 2, 3)
    ]
    print(f"published SJD-PAC, window {size[2]}: TV {errors}")
    assert min(errors) > 0.01


# ---- the smallest examples of section 8.3


def published(**values: Any) -> Decoding:
    return pac_decoding(drafting="sjd-pac-published", candidates=2, **values)


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize(
    ("drafting", "wanted"), [("pac", [0.6, 0.4]), ("sjd-pac-published", [1.0, 0.0])]
)
def test_the_longest_path_is_no_lossless_choice(drafting: str, wanted: list[float]) -> None:
    """Two tokens, two candidates: a candidate wins by the candidate below it, which only one of
    them can have.
    """
    decoding = pac_decoding(drafting=drafting, candidates=2, window=2)
    method = drafting_of(decoding, TabularModel(2, 4, 0))
    method._q.copy_(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    distribution = torch.zeros(2)
    for first in (0, 1):
        tokens = torch.tensor([[0, first, 1 - first, 0, 0, 0, 0]])
        method._fill(tokens, torch.tensor([[True, True, True, True, False, True, False]]))
        tree = method.tree
        p = torch.cat([torch.tensor([[0.6, 0.4]]), torch.eye(2)[tokens[0, 1:]]])[None]
        outcomes = ExactPac((2, 4, 2), VALUES).outcomes(drafting=method, tree=tree, p=p, limit=2)
        for chance, _, path, accepted, after in outcomes:
            token = torch.eye(2)[path[0, 0]] if int(accepted) else after[0]
            distribution += 0.5 * chance * token
    assert distribution.tolist() == pytest.approx(wanted, abs=1e-6)


R = torch.tensor([0.4, 0.3, 0.2, 0.1])
P = torch.tensor([0.1, 0.1, 0.4, 0.4])


def redrafted(decoding: Decoding, images: int = 200_000) -> PacDrafting:
    """Draft where r is `R` at the first depth.

    The step before accepted nothing and had q uniform over 4 tokens there.
    """
    noise = torch.Generator().manual_seed(1)
    model = TabularModel(4, 6, 0)
    drafting = drafting_of(decoding, model, images)
    assert isinstance(drafting, PacDrafting)
    drafting.start_images(torch.full((images, 4), 0.25))
    noises = torch.empty(images, drafting.noises, 4)
    root = torch.zeros(images, dtype=torch.int64)
    drafting.draft(DraftInputs(root, noises.exponential_(generator=noise), R))
    p = torch.full((images, drafting.tree.tokens.shape[1], 4), 0.25)
    p[:, 1] = R
    path = torch.full((images, drafting.depth + 1), -1)
    path[:, 0] = 0
    none = torch.zeros(images, dtype=torch.int64)
    drafting.after_step(
        LastStep(
            p=p,
            path=path,
            accepted=none,
            tokens=path.clamp_min(0),
            position=none + 2,
        )
    )
    drafting.draft(DraftInputs(root, noises.exponential_(generator=noise), R))
    return drafting


def shares_of(tokens: Tensor) -> list[float]:
    return (torch.bincount(tokens, minlength=4) / len(tokens)).tolist()


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize(
    ("drafting", "wanted"), [("pac", P.tolist()), ("sjd-pac-published", [0.1, 0.1, 0.28, 0.52])]
)
def test_siblings_of_the_published_form_are_no_draws_from_r(
    drafting: str, wanted: list[float]
) -> None:
    method = redrafted(pac_decoding(drafting=drafting, window=2, candidates=2, branching=1))
    tree = method.tree
    noise = torch.Generator().manual_seed(2)
    assert shares_of(tree.tokens[:, 1]) == pytest.approx(R.tolist(), abs=0.005)
    p = P.expand(*tree.tokens.shape, 4)
    uniforms = torch.rand(tree.children.shape, generator=noise)
    ends = torch.empty(len(p), 4).exponential_(generator=noise)
    verdict = method.verify(
        tree, p, STRICT, uniforms=uniforms, noise=ends, depth_limit=torch.ones(len(p))
    )
    assert shares_of(verdict.tokens[:, 0]) == pytest.approx(wanted, abs=0.005)


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize(
    ("drafting", "wanted"), [("pac", R.tolist()), ("sjd-pac-published", [0.45, 0.25, 0.2, 0.1])]
)
def test_first_candidates_of_the_published_form_are_no_draws_from_r(
    drafting: str, wanted: list[float]
) -> None:
    """Where siblings stood beside a rejected one, it is redrawn from what all of them leave."""
    method = redrafted(pac_decoding(drafting=drafting, window=2, candidates=2, branching=2))
    assert shares_of(method.tree.tokens[:, 1]) == pytest.approx(wanted, abs=0.005)


def test_the_published_form_ends_a_whole_window_with_a_uniform_token(published_forms: Any) -> None:
    drafting = published_forms.PublishedSjdPac(published(window=2), TabularModel(4, 8, 0), 1)
    drafting.start_images(torch.full((1, 4), 0.25))
    drafting.draft(
        DraftInputs(torch.zeros(1, dtype=torch.int64), torch.rand(1, drafting.noises, 4), P)
    )
    tree = drafting.tree
    p = torch.cat([drafting._q, P.expand(1, drafting.tree.tokens.shape[1], 4)], dim=1)[
        :, tree.depths[0]
    ]
    verdict = drafting.verify(
        tree, p, STRICT, uniforms=torch.zeros(tree.children.shape), noise=torch.ones(1, 4)
    )
    assert int(verdict.accepted) == 2
    assert verdict.next_probs.tolist() == [[0.25] * 4]
    plain = verify(
        tree=tree,
        target_probs=p,
        rule=STRICT,
        uniforms=torch.zeros(tree.children.shape),
        noise=torch.ones(1, 4),
    )
    assert plain.next_probs.tolist() == [pytest.approx(P.tolist())]


# ---- values


@pytest.mark.usefixtures("published_forms")
def test_ids_name_what_is_not_the_default() -> None:
    assert pac_decoding().cell_id == "sjd-pac-pac-w16x3x2-row-maximal-t1"
    published = pac_decoding(drafting="sjd-pac-published", window=45, candidates=4)
    assert published.cell_id == "sjd-pac-sjd-pac-published-w45x4x2-maximal-t1"
    assert Decoding("scd", drafting="scd-published").cell_id == "scd-scd-published-w16-maximal-t1"


@pytest.mark.usefixtures("published_forms")
def test_rules_that_look_ahead_and_forms_without_a_difference_are_refused() -> None:
    refused = "pac w16x3x2.* does not give. Use coupling: maximal and branching: 1, or rule: strict"
    for coupling in ("none", "maximal"):
        with pytest.raises(ParameterError, match=refused):
            pac_decoding(rule="traversal", coupling=coupling)
    with pytest.raises(ParameterError, match="pac w16x3x1-row-gumbel does not give"):
        pac_decoding(rule="traversal", coupling="gumbel", branching=1)
    for coupling in ("none", "maximal"):
        decoding = pac_decoding(rule="traversal", coupling=coupling, branching=1)
        assert decoding.rule == "traversal"
    with pytest.raises(ParameterError, match="needs a chain of sampled drafts"):
        pac_decoding(rule="block")
    with pytest.raises(
        ParameterError, match="the published code differs only with coupling maximal"
    ):
        pac_decoding(drafting="sjd-pac-published", coupling="gumbel")
    with pytest.raises(
        ParameterError, match="the published code differs only with initial uniform"
    ):
        Decoding("sjd", drafting="scd-published", initial="row")
