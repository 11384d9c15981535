"""The drafter and the whole greedy loop against recordings of the published implementation.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), sections 6 and 7 of its README.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lantern_bench.decode.growth import Growth
from lantern_bench.decode.interface import Drafts
from lantern_bench.decode.loop import decode
from lantern_bench.decode.sampling import guide, probabilities
from lantern_bench.models.conditioning import CaptionFeatures, Condition
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.eagle import from_published
from lantern_bench.models.llamagen import from_official
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.topologies import STATIC_TREES

GOLDEN = Path(os.environ.get("LANTERN_BENCH_GOLDEN", Path(__file__).parents[1] / "golden"))
SCALE = 7.5


def drafter_of(folder: Path, head: nn.Linear) -> EagleDrafter:
    config = json.loads((folder / "config.json").read_text())
    shape = TransformerConfig(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        layers=1,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        ffn_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        prefix=120,
        grid=(16, 16),
    )
    drafter = EagleDrafter(shape, head, mask_padding=False).eval()
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    drafter.load_state_dict(from_published(state))
    return drafter


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    with np.load(GOLDEN / "eagle_drafter" / "drafter_expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture
def drafter(recorded: dict[str, Tensor]) -> EagleDrafter:
    weight = recorded["lm_head.weight"]
    head = nn.Linear(*reversed(weight.shape), bias=False)
    head.weight.data.copy_(weight)
    return drafter_of(GOLDEN / "eagle_drafter", head)


@torch.no_grad()
def test_features_equal_the_recorded_ones(drafter: EagleDrafter, recorded: dict[str, Tensor]) -> None:
    hidden, ids = recorded["fwd.hidden_states"], recorded["fwd.input_ids"].long()
    n = ids.shape[1]
    mask = torch.zeros(n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    assert (drafter(ids, hidden, mask[None, None]) - recorded["fwd.output"]).abs().max() < 2e-4


def states(drafter: EagleDrafter, recorded: dict[str, Tensor], number: int) -> tuple[Any, Drafts, Tensor]:
    """The session in state 0 or 1 of the recording, its drafts for the root, and the root [1]."""
    session = drafter.session(1, guided=True, nodes=64)
    condition = Condition(torch.zeros(1, 120), torch.ones(1, 120, dtype=torch.bool))
    first = recorded["tree.input_ids_0"][:1, -1].long()
    session.prefill(condition, recorded["tree.hidden_0"])
    drafts = session.observe(first[:, None], recorded["tree.hidden_0"][:, -1:], torch.tensor([1]))
    if number == 0:
        return session, drafts, first
    more = recorded["tree.input_ids_1"][:1, -3:].long()
    drafts = session.observe(more, recorded["tree.hidden_1"], torch.tensor([3]))
    return session, drafts, more[:, -1]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["greedy", "greedy_k10", "topk"])
@torch.no_grad()
def test_dynamic_trees_equal_the_recorded_ones(
    name: str, number: int, drafter: EagleDrafter, recorded: dict[str, Tensor]
) -> None:
    key = f"dynamic.{name}.state{number}."
    info = json.loads((GOLDEN / "eagle_drafter" / "drafter_info.json").read_text())[key]
    session, drafts, root = states(drafter, recorded, number)
    processor = info["processor"] or {"temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def q(drafts: Drafts) -> Tensor:
        return probabilities(guide(drafts.cond, drafts.uncond, SCALE), **processor)

    growth = Growth(info["params"]["k"])
    frontier = growth.start(q(drafts)[:, 0])
    for _ in range(info["params"]["depth"]):
        frontier = growth.grow(q(session.extend(frontier.tokens, frontier.origin, frontier.seen)))
    nodes = info["params"]["total"] - 1
    kept = growth.select(root, nodes)
    tree = growth.tree(root, nodes)
    assert tree.tokens[0].tolist() == recorded[key + "tokens"].flatten().tolist()
    assert tree.parents[0].tolist() == recorded[key + "parents"].flatten().tolist()
    assert tree.depths[0].tolist() == recorded[key + "depth"].flatten().tolist()
    assert tree.attention[0].equal(recorded[key + "tree_mask"].reshape(tree.attention[0].shape).bool())
    assert (kept.log_q[0] - recorded[key + "cum_logprob"].flatten()).abs().max() < 1e-3


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("tree", ["mc_sim_7b_63", "naive_extend_57"])
@torch.no_grad()
def test_static_levels_equal_the_recorded_ones(
    tree: str, number: int, drafter: EagleDrafter, recorded: dict[str, Tensor]
) -> None:
    from lantern_bench.decode.drafting import StaticDrafting
    from lantern_bench.decode.tree import StaticTree

    name = {"mc_sim_7b_63": "eagle1-25", "naive_extend_57": "extended-57"}[tree]
    session, drafts, root = states(drafter, recorded, number)
    seen: list[Tensor] = [guide(drafts.cond, drafts.uncond, SCALE)]
    extend = session.extend

    def listen(*arguments: Tensor) -> Drafts:
        answer: Drafts = extend(*arguments)
        seen.append(guide(answer.cond, answer.uncond, SCALE))
        return answer

    session.extend = listen
    decoding = Decoding(mode="speculative", tree=name, temperature=0, cfg_scale=SCALE)
    drafting = StaticDrafting(StaticTree.of(STATIC_TREES[name]), decoding)
    drafting.draft(session, drafts, root, torch.empty(1, 0), torch.tensor([64]))
    logits = torch.cat(seen, dim=1)[0]
    best = logits.topk(10, dim=-1)
    key = f"static.{tree}.greedy.state{number}."
    assert best.indices.tolist() == recorded[key + "group_tokens"].tolist()
    # Guidance 7.5 multiplies what float32 rounds.
    assert (best.values - recorded[key + "group_logits"]).abs().max() < 2e-3


class Whole:
    """Target, drafter and table of the end-to-end recording."""

    def __init__(self, table: Tensor) -> None:
        config = TransformerConfig(vocab_size=128, dim=48, layers=3, heads=3, ffn_dim=128, prefix=120, grid=(16, 16))
        self.target = TransformerTarget(config, CaptionFeatures(120, 32, 48)).eval()
        official = torch.load(GOLDEN / "llamagen_gpt" / "t2i.pt", weights_only=True)["model"]
        self.target.load_state_dict(from_official(official))
        self.drafter = drafter_of(GOLDEN / "end_to_end", self.target.transformer.output)
        self._table = table

    def table(self, columns: int) -> Tensor:
        return self._table[:, :columns]


RUNS = ["off", "k8_d0.25", "k20_d1.5", "k20_d3.0"]


# The recorded relaxed runs of the padded prompt read pad rows in a way of their own (finding B4).
@pytest.mark.parametrize(("prompt", "run"), [*(("full", run) for run in RUNS), ("padded", "off")])
@pytest.mark.parametrize("drafting", ["dynamic", "static"])
def test_greedy_decoding_equals_the_recorded_one(run: str, drafting: str, prompt: str) -> None:
    expected = load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")
    key = f"{prompt}.{drafting}_{run}"
    model = Whole(expected["nearest"].int())
    condition = Condition(expected[f"{prompt}.caption_embs"], expected[f"{prompt}.emb_masks"].bool())
    shape: dict[str, Any] = {"drafting": "dynamic", "nodes": 29, "depth": 5, "beam": 10}
    if drafting == "static":
        shape = {"drafting": "static", "tree": "eagle1-25"}
    decoding = Decoding(mode="speculative", **shape, temperature=0, cfg_scale=3.0)
    if run != "off":
        k, bound = (float(part[1:]) for part in run.split("_"))
        rule = {"rule": "additive", "delta": bound} if bound <= 1 else {"rule": "multiplicative", "lambda": bound}
        decoding = Decoding(mode="speculative", **shape, **rule, neighbours=int(k), temperature=0, cfg_scale=3.0)
    made = decode(model, condition, decoding, [torch.Generator()], tokens=64)[0]
    assert made.tokens.tolist() == expected[f"{key}.tokens"].flatten().tolist()
    if run == "off":
        assert made.tokens.tolist() == expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    if prompt == "full":
        lengths = expected[f"{key}.accept_lengths"].flatten().tolist()
        ours = [count - 1 for count in made.trace.uncut]
        assert ours == lengths[: len(ours)]
        # The published loop goes on until it has more tokens than asked for (finding C6): one step at the most.
        assert len(lengths) - len(ours) == (sum(made.trace.uncut) <= 64)
