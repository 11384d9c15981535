"""The recorded cases of the published verification replay exactly in `official`, filters top-p
first.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.testing import assert_allclose

from lantern_bench.decoding.acceptance.verify import Verdict, verify, verify_greedy
from tests.helpers.golden_cases import Case, acceptance_cases
from tests.helpers.random_trees import rules_of
from tests.helpers.reference_walk import walk, walk_greedy


def replay(case: Case) -> tuple[Verdict, int]:
    """Hand the recorded uniforms to the children the walk looks at, depth by depth; also return how
    many it used.
    """
    tree = case.tree
    uniforms = torch.ones(tree.children.shape)
    recorded = torch.from_numpy(case.arrays["uniforms"]).float()
    noise = torch.ones(1, case.info["vocab"])
    used = 0
    for depth in range(tree.max_depth + 1):
        verdict = verify(
            tree=tree, target_probs=case.probs, rule=case.rule, uniforms=uniforms, noise=noise
        )
        node = int(verdict.path[0, depth]) if depth <= int(verdict.accepted) else -1
        ranks = (tree.children[0, node] >= 0).nonzero().flatten() if node >= 0 else []
        if not len(ranks):
            break
        numbers = recorded[used : used + len(ranks)]
        uniforms[0, node, ranks[: len(numbers)]] = numbers
        verdict = verify(
            tree=tree, target_probs=case.probs, rule=case.rule, uniforms=uniforms, noise=noise
        )
        rank = int(verdict.child_rank[0, depth])
        used += len(ranks) if rank < 0 else rank + 1
    return verdict, used


def wrong_in(case: Case) -> list[str]:
    """What differs from the recording."""
    info = case.info
    if case.greedy:
        verdict = verify_greedy(case.tree, case.logits, case.rule)
        same = {"next": int(verdict.tokens[0, verdict.accepted[0]]) == info["next_token_greedy"]}
    else:
        verdict, used = replay(case)
        difference = np.abs(verdict.next_probs[0].numpy() - case.arrays["out"]).max()
        same = {"out": bool(difference < 1e-5), "uniforms": used == len(case.arrays["uniforms"])}
    length = int(verdict.accepted)
    same["length"] = length == info["accept_length"]
    same["nodes"] = verdict.path[0, : length + 1].tolist() == info["accepted_nodes"]
    same["tokens"] = verdict.tokens[0, :length].tolist() == info["accepted_tokens"][1:]
    return [name for name, equal in same.items() if not equal]


def test_every_recorded_case_replays() -> None:
    cases = acceptance_cases()
    wrong = {case.info["id"]: differences for case in cases if (differences := wrong_in(case))}
    print(f"golden acceptance: {len(cases) - len(wrong)} of {len(cases)}")
    assert not wrong
    assert len(cases) > 0


def test_recorded_draft_probabilities_are_the_conditional_ones() -> None:
    checked = 0
    for case in acceptance_cases():
        if case.tree.q is None:
            continue
        for node, children in enumerate(case.tree.children[0].tolist()):
            q = case.tree.q[0, node].double()
            for child in (child for child in children if child >= 0):
                token = int(case.tree.tokens[0, child])
                left = float(q.sum())
                expected = float(q[token]) / left if left > 0 else 0.0
                # The recording divides by 1 - (what was drawn) in float32: its rounding grows as
                # little is left.
                assert_allclose(
                    case.arrays["node_q"][child], expected, atol=1e-5, rtol=1e-6 / max(left, 1e-6)
                )
                q[token] = 0
                checked += 1
    assert checked > 0


def test_the_oracle_replays_them_too_with_the_recorded_trace() -> None:
    for case in acceptance_cases():
        tree = case.tree
        info = case.info
        tokens = tree.tokens[0].tolist()
        if case.greedy:
            paths = [
                [node for node in path if node >= 0]
                for path in case.arrays["retrieve_indices"].tolist()
            ]
            probs = list(torch.softmax(case.logits[0], dim=-1).numpy())
            path, token = walk_greedy(
                parents=case.arrays["parents"].tolist(),
                paths=paths,
                tokens=tokens,
                p_of=probs,
                rules=rules_of(case.rule),
            )
            assert (path, token) == (info["accepted_nodes"], info["next_token_greedy"]), info["id"]
            continue
        numbers = iter(case.arrays["uniforms"].tolist())
        q = None if tree.q is None else list(tree.q[0].numpy())
        done = walk(
            children=tree.children[0].tolist(),
            tokens=tokens,
            p_of=list(case.probs[0].numpy()),
            q_of=q,
            rules=rules_of(case.rule),
            uniform=lambda node, rank, numbers=numbers: next(numbers),
            depth_limit=tree.max_depth,
        )
        assert done.path == info["accepted_nodes"], info["id"]
        assert_allclose(done.next_probs, case.arrays["out"], atol=1e-5, err_msg=info["id"])
        recorded = [(row["level"], row["token"], row["r"], row["p"]) for row in info["trace"]]
        assert_allclose(done.looks, recorded, atol=1e-5, err_msg=info["id"])
