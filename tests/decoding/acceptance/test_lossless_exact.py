"""The lossless rules are lossless, by enumeration of every draft and every accept/reject outcome of
one step.

Checked for the first token and for the joint distribution of the committed sequence, against
autoregressive decoding, for each drafting, filter and guidance; and rules that are broken on
purpose are seen to fail.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.sampling import most_probable
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.helpers.mistakes import siblings_not_renormalised, strict_without_residual
from tests.helpers.rules import STRICT, broken, rule_named
from tests.helpers.tabular import (
    SHAPES,
    Outcomes,
    Setting,
    Tabular,
    accepted,
    step_errors,
    verify_step,
)

SETTINGS = {
    "plain": Setting(),
    "guided": Setting(cfg_scale=2.5),
    "top-k": Setting(temperature=0.8, top_k=3),
    "top-p": Setting(top_p=0.8, cfg_scale=1.5),
    "both": Setting(temperature=1.4, top_k=4, top_p=0.9, filter_order="top_p_first", cfg_scale=3.0),
}
RULES = {"strict": STRICT, "traversal": rule_named("traversal"), "block": rule_named("block")}
RULES |= {
    f"cool-sd {strength} {decay}": rule_named("cool-sd", 0, strength, decay=decay)
    for strength, decay in ((1.0, 0.0), (1.0, 0.7), (0.5, 0.1))
}
CASES = [case for case in product(RULES, SHAPES) if case[0] != "block"]
CASES.append(("block", "chain"))
CASES += [(rule, "dynamic") for rule in RULES if rule.startswith("cool-sd")]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_the_rules_are_lossless(setting: str, rule: str, shape: str) -> None:
    model = Tabular(4, SETTINGS[setting], seed=1)
    first, joint = step_errors(model, model.drafts(shape), partial(verify_step, rule=RULES[rule]))
    print(f"{rule} {shape} {setting}: first {first:.1e}, joint {joint:.1e}")
    assert max(first, joint) < 1e-7


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("nodes", "rounds", "beam"), [(6, 3, 2), (5, 2, 3), (3, 3, 1), (6, 1, 6)])
def test_dynamic_drafting_is_lossless(setting: str, nodes: int, rounds: int, beam: int) -> None:
    model = Tabular(6, SETTINGS[setting], seed=2)
    assert max(step_errors(model, model.dynamic_drafts(nodes, rounds, beam))) < 1e-5


@pytest.mark.parametrize("limit", [-1, 0, 1, 2])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [("strict", "small"), ("strict", "dynamic"), ("traversal", "small"), ("block", "chain")],
)
def test_a_depth_limit_is_lossless(limit: int, rule: str, shape: str) -> None:
    model = Tabular(5, SETTINGS["guided"], seed=3)
    step = partial(verify_step, rule=RULES[rule], depth_limit=limit)
    assert max(step_errors(model, model.drafts(shape), step)) < 1e-7


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["strict", "traversal"])
def test_float32_stays_within_the_tolerance(rule: str, setting: str) -> None:
    def in_float32(tree: DraftTree, p: Tensor) -> Outcomes:
        assert tree.q is not None
        half = DraftTree(**{**vars(tree), "q": tree.q.float()})
        weights, tokens, lengths, last = verify_step(half, p.float(), rule=RULES[rule])
        return weights.double(), tokens, lengths, last.double()

    model = Tabular(4, SETTINGS[setting], seed=1)
    assert max(step_errors(model, model.drafts("small"), in_float32)) < 1e-5


def plain_cool_sd() -> ConfiguredRule:
    """Cool-SD with a residual of p itself."""
    cool_sd = rule_named("cool-sd", 0, 1.0, residual="official")
    return replace(cool_sd, row=replace(cool_sd.row, official_removal=0.0))


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("wide", broken("residual left out", strict_without_residual)),
        ("dynamic", broken("residual left out", strict_without_residual)),
        (
            "wide",
            broken("q not renormalised after earlier draws", siblings_not_renormalised),
        ),
        *((shape, plain_cool_sd()) for shape in (*SHAPES, "dynamic")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_broken_rules_are_seen(shape: str, rule: ConfiguredRule) -> None:
    # Seed 6: an unnormalised q shows only where the residual of the first child rests on two tokens
    # or more.
    model = Tabular(5, Setting(), seed=6)
    first, joint = step_errors(model, model.drafts(shape), partial(verify_step, rule=rule))
    print(f"broken: {rule.name}, {shape}: first {first:.3f}, joint {joint:.4f}")
    assert first > 1e-2
    assert joint > 1e-3


def test_a_deterministic_draft_taken_for_a_sampled_one_is_seen() -> None:
    """The children are the top of q, yet are accepted as if they had been drawn from it."""
    model = Tabular(5, Setting(), seed=3)
    weights = torch.ones(1, dtype=torch.float64)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), most_probable(model.q(()), 3)[0]])[None]
    tree = StaticTree.of(SHAPES["wide"]).draft(tokens, model.q(()).expand(1, 4, 5))
    first, joint = step_errors(model, (weights, tree))
    print(
        f"broken: deterministic draft taken for a sampled one: first {first:.3f}, joint {joint:.4f}"
    )
    assert first > 1e-2
    assert joint > 1e-3
    assert max(step_errors(model, (weights, replace(tree, q=None)))) < 1e-5


def test_sampled_drafts_with_q_1_are_lossless_but_accepted_less() -> None:
    """q = 1 is right for any draft that does not depend on what the target then draws; it only
    wastes drafts.

    Given the children, accepting x with p(x) and else drawing from p without x emits p, whatever
    chose x. So this reading of section 3 cannot be told from the right one by the distribution of
    the tokens; acceptance tells it.
    """
    model = Tabular(4, Setting(), seed=1)
    weights, tree = model.drafts("small")
    deterministic = weights, replace(tree, q=None)
    assert max(step_errors(model, deterministic)) < 1e-9
    lengths = [
        accepted(drafts, model.target_at(tree)) for drafts in ((weights, tree), deterministic)
    ]
    print(f"accepted drafts a step with q and with q = 1: {lengths}")
    assert lengths[0] > 1.3 * lengths[1]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["strict", "traversal"])
def test_with_the_target_as_drafter_the_first_path_is_accepted(rule: str, setting: str) -> None:
    model = Tabular(4, SETTINGS[setting], seed=4, alike=True)
    weights, tree = model.drafts("small")
    assert accepted((weights, tree), model.target_at(tree), RULES[rule]) == pytest.approx(
        3.0, abs=1e-6
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_from_the_target_are_accepted_with_their_mass(setting: str) -> None:
    model = Tabular(6, SETTINGS[setting], seed=4, alike=True)
    _, tree = model.dynamic_drafts(nodes=3, rounds=1, beam=3)
    stops, _, _, _ = verify_step(tree, model.target_at(tree))
    offered = [int(tree.tokens[0, child]) for child in tree.children[0, 0].tolist() if child >= 0]
    assert len(offered) == min(3, int((model.p(()) > 0).sum()))
    assert 1.0 - float(stops[0, 0]) == pytest.approx(float(model.p(())[offered].sum()), abs=1e-6)
