"""The drafter against recordings of the published implementation (`golden_models`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting import static
from lantern_bench.decoding.drafting.draft_method import DraftInputs, Proposer
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.drafting.static import StaticDrafting
from lantern_bench.decoding.protocol import DrafterLogits
from lantern_bench.decoding.sampling import guide, probabilities
from lantern_bench.models.checkpoints.drafter_files import load_drafter
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import CaptionFeatures, Condition, TransformerTarget
from lantern_bench.models.networks.transformer_config import TransformerConfig
from tests.helpers.golden_models import GOLDEN, SIDES, TREES
from tests.helpers.rules import parents_of

INFO = json.loads((GOLDEN / "eagle_drafter" / "drafter_info.json").read_text())
SCALE = INFO["cfg_scale"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    with np.load(GOLDEN / "eagle_drafter" / "drafter_expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture
def drafter(recorded: dict[str, Tensor]) -> EagleDrafter:
    """The recorded drafter, for a target of which only the head was recorded."""
    folder = GOLDEN / "eagle_drafter"
    weight = recorded["lm_head.weight"]
    config = json.loads((folder / "config.json").read_text())
    side = SIDES[config["input_type"]]
    shape = TransformerConfig(
        vocab_size=weight.shape[0],
        dim=weight.shape[1],
        layers=0,
        heads=config["num_attention_heads"],
        ffn_dim=config["intermediate_size"],
        prefix=recorded["tree.hidden_0"].shape[1],
        grid=(side, side),
    )
    target = TransformerTarget(shape, CaptionFeatures(shape.prefix, 1, shape.dim))
    target.transformer.output.weight.data.copy_(weight)
    return load_drafter(folder, target)


@torch.no_grad()
def test_features_equal_the_recorded_ones(
    drafter: EagleDrafter, recorded: dict[str, Tensor]
) -> None:
    hidden = recorded["fwd.hidden_states"]
    ids = recorded["fwd.input_ids"].long()
    n = ids.shape[1]
    mask = torch.zeros(n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    predicted = drafter(ids, hidden, mask[None, None], positions=torch.arange(n)[None])
    assert (predicted - recorded["fwd.output"]).abs().max() < 2e-4


def states(
    drafter: EagleDrafter, recorded: dict[str, Tensor], number: int
) -> tuple[Any, DrafterLogits, Tensor]:
    """The session in a state of the recording, reached through those before it; its drafts for the
    root; the root [1].

    State 0 is behind the prefill, every other behind the tokens accepted since.
    """
    session = drafter.session(1, guided=True, nodes=64)
    prefix = recorded["tree.hidden_0"].shape[1]
    condition = Condition(torch.zeros(1, prefix), torch.ones(1, prefix, dtype=torch.bool))
    root = recorded["tree.input_ids_0"][:1, -1].long()
    session.prefill(condition, recorded["tree.hidden_0"])
    drafts = session.observe(root[:, None], recorded["tree.hidden_0"][:, -1:], torch.tensor([1]))
    for state in range(1, number + 1):
        hidden = recorded[f"tree.hidden_{state}"]
        n = hidden.shape[1]
        more = recorded[f"tree.input_ids_{state}"][:1, -n:].long()
        drafts = session.observe(more, hidden, torch.tensor([n]))
        root = more[:, -1]
    return session, drafts, root


def keys_of(kind: str) -> list[str]:
    """The recorded trees of a kind, such as `dynamic.greedy.state0.`."""
    return [key for key in INFO if key.startswith(f"{kind}.")]


def state_in(key: str) -> int:
    """The state that a recorded tree is of."""
    return int(key.rstrip(".").rpartition("state")[2])


@pytest.mark.parametrize("key", keys_of("dynamic"))
@torch.no_grad()
def test_dynamic_trees_equal_the_recorded_ones(
    key: str, drafter: EagleDrafter, recorded: dict[str, Tensor]
) -> None:
    info = INFO[key]
    session, drafts, root = states(drafter, recorded, state_in(key))
    processor = info["processor"] or {"temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def q(drafts: DrafterLogits) -> Tensor:
        return probabilities(guide(drafts.cond, drafts.uncond, SCALE), **processor)

    growth = Growth(q(drafts)[:, 0], info["params"]["k"])
    for _ in range(info["params"]["depth"]):
        tokens, origin, seen = growth.frontier
        growth.grow(q(session.extend(tokens, origin, seen)))
    nodes = info["params"]["total"] - 1
    selected, _ = growth.select(nodes)
    tree = growth.tree(root, nodes)
    assert tree.tokens[0].tolist() == recorded[key + "tokens"].flatten().tolist()
    assert parents_of(tree.attention)[0].tolist() == recorded[key + "parents"].flatten().tolist()
    assert tree.depths[0].tolist() == recorded[key + "depth"].flatten().tolist()
    assert tree.attention[0].equal(
        recorded[key + "tree_mask"].reshape(tree.attention[0].shape).bool()
    )
    log_q = torch.nn.functional.pad(torch.cat(growth.log_q, dim=1).gather(1, selected)[0], (1, 0))
    assert (log_q - recorded[key + "cum_logprob"].flatten()).abs().max() < 1e-3


def draft(
    decoding: Decoding, drafts: DrafterLogits, extend: Callable[..., DrafterLogits], root: Tensor
) -> None:
    """Draft a static tree by a session that has observed the root already."""
    session: Any = SimpleNamespace(observe=lambda *_: drafts, extend=extend)
    target: Any = SimpleNamespace(device=root.device, vocab_size=drafts.cond.shape[-1])
    drafting = StaticDrafting(decoding, target, 1)
    noise = torch.empty(1, drafting.noises)
    proposer = Proposer(session, decoding, tokens=root, features=root, counts=root)
    drafting.draft(
        DraftInputs(root=root, noise=noise, depth_limit=torch.tensor([64]), proposer=proposer)
    )


@pytest.mark.parametrize("key", [key for key in keys_of("static") if ".greedy." in key])
@torch.no_grad()
def test_static_levels_equal_the_recorded_ones(
    key: str, drafter: EagleDrafter, recorded: dict[str, Tensor]
) -> None:
    name = TREES[key.split(".")[1]]
    session, drafts, root = states(drafter, recorded, state_in(key))
    seen: list[Tensor] = [guide(drafts.cond, drafts.uncond, SCALE)]
    extend = session.extend

    def listen(tokens: Tensor, origin: Tensor, attention: Tensor) -> DrafterLogits:
        answer: DrafterLogits = extend(tokens, origin, attention)
        seen.append(guide(answer.cond, answer.uncond, SCALE))
        return answer

    draft(
        decoding=Decoding(mode="speculative", tree=name, temperature=0, cfg_scale=SCALE),
        drafts=drafts,
        extend=listen,
        root=root,
    )
    logits = torch.cat(seen, dim=1)[0]
    best = logits.topk(10, dim=-1)
    assert best.indices.tolist() == recorded[key + "group_tokens"].tolist()
    # Guidance multiplies what float32 rounds.
    assert (best.values - recorded[key + "group_logits"]).abs().max() < 2e-4 * (1 + 2 * SCALE)


@pytest.mark.parametrize("key", [key for key in keys_of("static") if ".sampled." in key])
@torch.no_grad()
def test_distributions_equal_the_recorded_ones(
    key: str, drafter: EagleDrafter, recorded: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing is random: the recorded draws are fed, level by level, and what they are drawn from
    is compared.
    """
    name = TREES[key.split(".")[1]]
    session, drafts, root = states(drafter, recorded, state_in(key))
    drawn = recorded[key + "group_tokens"].long()
    rows = []

    def feed(q: Tensor, fanout: int, _noise: Tensor) -> tuple[Tensor, Tensor]:
        rows.extend(q[0])
        fed = drawn[None, len(rows) - q.shape[1] : len(rows), :fanout]
        return fed, torch.ones_like(fed, dtype=torch.bool)

    monkeypatch.setattr(static, "draw_without_replacement", feed)
    decoding = Decoding(mode="speculative", tree=name, cfg_scale=SCALE, **INFO[key]["processor"])
    draft(decoding=decoding, drafts=drafts, extend=session.extend, root=root)
    assert len(rows) == len(drawn)
    # Guidance multiplies what float32 rounds.
    assert (torch.stack(rows) - recorded[key + "group_draft_dist"]).abs().max() < 1e-5 * (1 + SCALE)


def test_recordings_have_both_kinds_of_tree() -> None:
    assert keys_of("dynamic")
    assert keys_of("static")
