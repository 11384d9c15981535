"""What the relaxed rules promise: bounds, limits in which they are the strict rule, and what
`official` breaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Neighbours
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.decoding.acceptance.verify import Verdict, relaxed_distribution, verify
from lantern_bench.decoding.loop import configured_rule
from lantern_bench.decoding.neighbours import nearest_codes
from tests.decoding.acceptance.test_emitted_tv import first_token, mean_distribution
from tests.helpers.random_trees import Draft, random_draft
from tests.helpers.rules import STRICT, neighbour_mass, rule_named, total_variation, view_of

RESIDUALS = ("exact", "official")
weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=3, max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, ConfiguredRule]:
    """A distribution with zeros among it, a token, a relaxed rule with its table of neighbours."""
    raw = draw(weights)
    assume(sum(raw) > 0)
    p = torch.tensor(raw, dtype=torch.float32)
    x = draw(st.integers(0, len(raw) - 1))
    codes = torch.tensor(
        draw(st.lists(st.integers(-4, 4), min_size=len(raw), max_size=len(raw))),
        dtype=torch.float32,
    )
    neighbours = draw(st.integers(1, len(raw) - 1))
    rule = draw(st.sampled_from(["additive", "multiplicative"]))
    bound = (
        draw(st.floats(1e-4, 0.999)) if rule == "additive" else 1.0 + draw(st.floats(1e-3, 20.0))
    )
    table = nearest_codes(codes[:, None], len(raw) - 1)
    return (
        p / p.sum(),
        x,
        rule_named(
            name=rule,
            neighbours=neighbours,
            bound=bound,
            residual=draw(st.sampled_from(RESIDUALS)),
            table=table,
        ),
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(cases())
def test_neighbour_mass_is_the_longest_prefix_within_the_bound(
    case: tuple[torch.Tensor, int, ConfiguredRule],
) -> None:
    p, x, rule = case
    drafts = view_of(p[None], torch.tensor([x]), rule)
    mass, taken = (values[0] for values in neighbour_mass(drafts, rule))
    (value,) = rule.values.values()
    bound = (
        torch.tensor(value, dtype=torch.float32) if rule.name == "additive" else p[x] * (value - 1)
    )
    assert mass <= bound
    count = int(taken.sum())
    assert taken.tolist() == [rank < count for rank in range(rule.codebook.neighbours)]
    neighbours = rule.codebook.nearest[x].long()
    is_official = isinstance(rule, OfficialRule)
    if count < rule.codebook.neighbours and (is_official or p[x] > 0):
        assert float(mass.double() + p[neighbours[count]].double()) > float(bound) * (1 - 1e-6)
    taken_from = Neighbours(drafts.neighbour_tokens, taken[None])
    relaxed = relaxed_distribution(drafts, replace(rule.decide(drafts), neighbours=taken_from))[0]
    assert float(total_variation(p, relaxed)) == pytest.approx(float(mass), abs=2e-6)
    assert float(relaxed.sum()) == pytest.approx(1.0, abs=2e-6)
    assert (relaxed[neighbours[:count]] == 0).all()
    if rule.name == "multiplicative":
        assert float(relaxed[x]) <= value * float(p[x]) * (1 + 1e-5)


def run(draft: Draft, rule: ConfiguredRule) -> Verdict:
    return verify(
        tree=draft.tree,
        target_probs=draft.probs,
        rule=rule,
        uniforms=draft.uniforms,
        noise=draft.noise,
        depth_limit=draft.depth_limit,
    )


LIMITS: list[dict[str, Any]] = [
    {"name": "additive", "bound": 0.3},
    {"name": "additive", "bound": 0.3, "residual": "official"},
    {"name": "multiplicative", "bound": 3.0},
    {"name": "multiplicative", "bound": 3.0, "residual": "official"},
    {"name": "additive", "neighbours": 12, "bound": 1e-30},
    {"name": "multiplicative", "neighbours": 12, "bound": 1.0 + 1e-12},
    {"name": "cool-sd", "bound": 1.0, "decay": 0.0},
]


@pytest.mark.parametrize("values", LIMITS, ids=str)
def test_limits_are_the_strict_rule_token_for_token(values: dict[str, Any]) -> None:
    for seed in range(150):
        draft = random_draft(seed, torch.float64 if values["name"] == "cool-sd" else torch.float32)
        vocabulary = draft.probs.shape[-1]
        table = torch.stack(
            [torch.arange(1, vocabulary).roll(token) for token in range(vocabulary)]
        )
        limit = run(draft, rule_named(**values, table=table))
        for field, value in vars(
            run(draft, rule_named("strict", residual=values.get("residual", "exact")))
        ).items():
            if field == "emitted_tv" and values["name"] == "cool-sd":
                continue  # another estimate of it, of the same mean (docs/algorithms.md, 6.3)
            torch.testing.assert_close(getattr(limit, field), value, atol=1e-6, rtol=0)
        assert torch.equal(limit.tokens, run(draft, STRICT).tokens)


def test_vanishing_bounds_are_not_the_strict_rule_under_official() -> None:
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2]])
    table = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]])
    child = torch.tensor([[0]])
    distributions = {
        residual: first_token(
            p,
            None,
            child,
            child == 0,
            rule_named(name="additive", neighbours=1, bound=1e-30, residual=residual, table=table),
        )[0]
        for residual in RESIDUALS
    }
    torch.testing.assert_close(distributions["exact"], p[0])
    torch.testing.assert_close(distributions["official"], torch.tensor([0.5, 0.0, 0.0, 0.5]))


def emitted(p: list[float], tokens: list[int], table: dict[int, list[int]], **rule) -> torch.Tensor:
    """The distribution of the first token for deterministic children; rows not given in `table` do
    not matter.
    """
    rows = [
        table.get(token, [other for other in range(len(p)) if other != token])
        for token in range(len(p))
    ]
    children = torch.tensor([tokens])
    relaxed = rule_named(**rule, table=torch.tensor(rows))
    return first_token(torch.tensor([p]), None, children, children >= 0, relaxed)[0]


A1 = {"p": [0.2, 0.05, 0.5, 0.2, 0.05], "tokens": [0], "table": {0: [1, 2, 3, 4]}}
A4 = {"p": [0.0, 0.0, 0.6, 0.3, 0.1], "tokens": [0], "table": {0: [1, 2, 3, 4]}}
# The (k + 1)-th codes, 5 and 6, have no mass: what is left of the excess is one budget for each
# tried child.
A6 = {
    "p": [0.3, 0.1, 0.3, 0.08, 0.22, 0, 0],
    "tokens": [0, 2],
    "table": {0: [1, 5, 4, 6, 2, 3], 2: [3, 6, 4, 5, 0, 1]},
}


@pytest.mark.parametrize(
    ("finding", "example", "rule", "official", "official_tv", "exact_tv"),
    [
        ("A1", A1, ("additive", 1, 0.1), [0.25, 0, 0, 0.6, 0.15], 0.55, 0.05),
        ("A1, lambda", A1, ("multiplicative", 1, 1.5), [0.25, 0, 0, 0.6, 0.15], 0.55, 0.05),
        ("A3", A1, ("additive", 3, 0.1), [0.4, 0.15, 0.15, 0.15, 0.15], 0.4, 0.05),
        ("A4", A4, ("additive", 2, 0.1), [0, 0, 0, 0, 1], 0.9, 0.0),
        ("A4, lambda", A4, ("multiplicative", 2, 1.5), [0, 0, 0, 0, 1], 0.9, 0.0),
        ("A6", A6, ("additive", 1, 0.15), [0.4, 0, 0.38, 0, 0.22, 0, 0], 0.18, 0.18),
    ],
)
def test_findings_on_deterministic_drafts(
    finding: str, example: dict, rule: tuple, official: list, official_tv: float, exact_tv: float
) -> None:
    p = torch.tensor(example["p"])
    values = dict(zip(("name", "neighbours", "bound"), rule, strict=True))
    exact = emitted(**example, **values, residual="exact")
    assert float(total_variation(p, exact)) == pytest.approx(exact_tv, abs=1e-6), finding
    distribution = emitted(**example, **values, residual="official")
    torch.testing.assert_close(
        distribution, torch.tensor(official, dtype=torch.float32), atol=1e-6, rtol=0
    )
    assert float(total_variation(p, distribution)) == pytest.approx(official_tv, abs=1e-6), finding


@pytest.mark.parametrize(
    ("residual", "distribution", "tv"),
    [("official", [0.4, 0.15, 0.3, 0.15], 0.15), ("exact", [0.4, 0.1, 0.325, 0.175], 0.1)],
)
def test_finding_a5_on_a_sampled_draft(residual: str, distribution: list[float], tv: float) -> None:
    p = torch.tensor([0.3, 0.1, 0.4, 0.2])
    q = torch.tensor([0.7, 0.1, 0.1, 0.1])
    table = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 0, 1], [2, 0, 1]])
    # After 0 is rejected `official` zeroes q at 1 and 2 (k + 1 codes): [0, .1, .4, .1] / .6, as the
    # finding records.
    mean = mean_distribution(
        p, q, rule_named(name="additive", neighbours=1, bound=0.1, residual=residual, table=table)
    )
    torch.testing.assert_close(mean, torch.tensor(distribution), atol=1e-6, rtol=0)
    assert float(total_variation(p, mean)) == pytest.approx(tv, abs=1e-6)


def test_a_table_that_is_missing_is_refused() -> None:
    p = torch.ones(1, 5) / 5
    x = torch.tensor([0])
    rule = rule_named("additive", 2, 0.5)
    with pytest.raises(ValueError, match="needs a table"):
        rule.decide(view_of(p, x, rule))


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({"mode": "lantern", "neighbours": 3, "delta": 0.2}, 3),
        ({"mode": "lantern", "neighbours": 3, "delta": 0.2, "residual": "official"}, 4),
        ({"mode": "lantern++", "neighbours": 0, "residual": "official", "lambda": 2.0}, 0),
        ({"mode": "cool-sd", "strength": 1.3}, 0),
        ({"mode": "gsd", "cluster": 4, "residual": "official"}, 0),
        ({"mode": "typical", "epsilon": 0.3, "residual": "official"}, 0),
        ({"mode": "csd", "drafting": "static", "tv_limit": 0.65}, 0),
        ({"mode": "entropy", "entropy_scale": 0.5, "neighbours": 2}, 2),
        ({"mode": "speculative", "rule": "traversal"}, 0),
    ],
)
def test_a_decoding_has_the_rule_of_its_row_and_values(values: dict, columns: int) -> None:
    tables: list[torch.Tensor] = []

    class Model:
        target = TabularModel(6, 2, seed=1)
        codes = torch.zeros(6, 2)

        def table(self, width: int, metric: str) -> torch.Tensor:
            assert metric == "l2"
            tables.append(torch.zeros(6, width, dtype=torch.int64))
            return tables[-1]

    decoding = Decoding(**values)
    rule = configured_rule(decoding, Model())
    row = decoding.rule_row
    expected = {key: decoding.value(key) for key in decoding.rule_row.value_names}
    wanted = rule_named(
        name=rule.name,
        bound=None,
        residual=decoding.residual,
        **expected,
    )
    assert type(rule) is type(wanted)
    assert (rule.row, rule.values) == (wanted.row, wanted.values)
    assert rule.codebook.neighbours == (decoding.neighbours or 0)
    assert [table.shape[1] for table in tables] == [columns] * (columns > 0)
    assert rule.codebook.embeddings is (Model.codes if row.codebook else None)
    assert rule.codebook.n_codes == (None if row.lossless else 6)
