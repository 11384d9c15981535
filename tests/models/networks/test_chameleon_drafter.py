"""Chameleon's drafter against its layer written out, and its session against whole sequences
without a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern_bench.models.checkpoints.drafter_files import drafter_key_map, load_drafter
from lantern_bench.models.checkpoints.key_map import export
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import TransformerTarget, prompt_condition
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_chameleon as tiny
from tests.helpers import tiny_lumina2

PROMPTS = [[0, 80, 81, 82, 70, 68], [0, 83, 70, 68]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chameleon")
    tiny.write_target(folder / "target")
    tiny.write_drafter(folder / "drafter")
    return folder


def loaded(folder: Path) -> tuple[TransformerTarget, EagleDrafter]:
    target, _ = tiny.anole(folder / "target").load_target(CPU, torch.float32)
    return target, load_drafter(folder / "drafter", target)


def written_out(state: dict[str, Tensor], words: Tensor, features: Tensor) -> Tensor:
    """The published drafter, step by step, on one sequence: words int64 [n], features [n, dim] ->
    [n, dim].
    """
    x = (
        torch.cat([state["embed_tokens.weight"][words], features], dim=-1) @ state["fc.weight"].T
        + state["fc.bias"]
    )
    return tiny_lumina2.layer(state=state, at="layers.0.", shape=tiny.SHAPE, x=x)


@torch.no_grad()
def test_drafts_equal_the_layer_written_out(folder: Path) -> None:
    """Prompts of two lengths in one batch, guidance, then committed tokens, then a level of the
    tree.
    """
    target, drafter = loaded(folder)
    state = torch.load(folder / "drafter" / "pytorch_model.bin", weights_only=True)
    ids = torch.tensor(target.config.token_ids)
    condition = prompt_condition([(prompt, [prompt[0], prompt[-1]]) for prompt in PROMPTS])
    tokens = torch.randint(tiny.CODES, (2, 4), generator=torch.Generator().manual_seed(5))

    scores = target.session(2, guided=True, nodes=8).prefill(condition)
    session = drafter.session(2, guided=True, nodes=8)
    more = torch.randn(4, 2, tiny.DIM, generator=torch.Generator().manual_seed(6))
    session.prefill(condition, scores.features)
    got = [session.observe(tokens[:, :1], scores.features[:, -1:], torch.tensor([1, 1]))]
    got.append(session.observe(tokens[:, 1:3], more, torch.tensor([2, 2])))
    seen = torch.ones(2, 1, 1, dtype=torch.bool)
    got.append(session.extend(tokens[:, 3:], torch.zeros(2, 1, dtype=torch.int64), seen))

    for row in range(4):
        image = row % 2
        kind = row // 2
        prompt = condition.values[image, kind][condition.valid[image, kind]]
        features = torch.cat([scores.features[row, -len(prompt) :], more[row]])
        words = torch.cat([prompt[1:], ids[tokens[image, :3]]])
        out = written_out(state, words, features)
        # A level below the root is fed the feature that the drafter itself predicted.
        deeper = written_out(
            state, torch.cat([words, ids[tokens[image, 3:]]]), torch.cat([features, out[-1:]])
        )
        for drafts, feature in zip(got, (out[-3], out[-1], deeper[-1]), strict=True):
            logits = drafts.cond if kind == 0 else drafts.uncond
            assert logits is not None
            assert (logits[image, 0] - target.transformer.output(feature)).abs().max() < 2e-4


def test_export_inverts_loading(folder: Path) -> None:
    drafter = loaded(folder)[1]
    state = torch.load(folder / "drafter" / "pytorch_model.bin", weights_only=True)
    out = export(drafter, drafter_key_map(drafter))
    assert out.keys() == state.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in state.items())


def test_safetensors_drafters_load_the_same(folder: Path, tmp_path: Path) -> None:
    target, drafter = loaded(folder)
    state = torch.load(folder / "drafter" / "pytorch_model.bin", weights_only=True)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "drafter" / "config.json").read_text())
    other = load_drafter(tmp_path, target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_llamagen_drafters_are_refused(folder: Path, tmp_path: Path) -> None:
    target = loaded(folder)[0]
    state = torch.load(folder / "drafter" / "pytorch_model.bin", weights_only=True)
    save_file(
        {name: part for name, part in state.items() if "_norm." not in name},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((folder / "drafter" / "config.json").read_text())
    with pytest.raises(UserError, match="is not an EAGLE drafter of Chameleon: it"):
        load_drafter(tmp_path, target)
