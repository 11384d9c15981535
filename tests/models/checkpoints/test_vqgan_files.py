"""Chameleon's image tokenizer from vqgan.ckpt, against its decoder written out; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
from lantern_bench.models.networks.vq import VQConfig, VQModel
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_chameleon as tiny
from tests.helpers import tiny_lumina2


def load_vqgan(path: Path) -> VQModel:
    return load_vq(open_checkpoint(path), LAYOUTS["chameleon"], torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write_vqgan(tmp_path / "vq")


@torch.no_grad()
def test_decoder_equals_a_written_out_one(checkpoint: Path) -> None:
    model = load_vqgan(checkpoint)
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    codes = torch.randint(tiny.CODES, (4, 3), generator=torch.Generator().manual_seed(2))
    pixels = model.decode_tokens(codes.reshape(1, -1), (4, 3))
    assert pixels.shape == (1, 3, 8, 6)
    shape = tiny_lumina2.Shape(grid=(4, 3), mult=(2, 1))
    assert (pixels - tiny_lumina2.pixels(state, shape, codes.flatten())).abs().max() < 2e-4


@torch.no_grad()
def test_encoding_finds_the_nearest_stored_row(checkpoint: Path) -> None:
    model = load_vqgan(checkpoint)
    picture = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1
    latents = model.latents(picture).permute(0, 2, 3, 1)
    distance = (latents[..., None, :] - model.codebook()).pow(2).sum(-1)
    assert model.encode(picture).equal(distance.argmin(-1))
    assert model.quantize.rows().equal(model.codebook())


def test_other_channels_in_the_decoder_are_refused(tmp_path: Path) -> None:
    state = VQModel(
        VQConfig(
            codes=16, code_dim=8, z_channels=32, channels=32, channel_mult=(1, 2), res_blocks=1
        )
    ).state_dict()
    other = VQModel(
        VQConfig(
            codes=16, code_dim=8, z_channels=32, channels=32, channel_mult=(2, 1), res_blocks=1
        )
    ).state_dict()
    state |= {name: tensor for name, tensor in other.items() if name.startswith("decoder.")}
    torch.save({"model": state}, tmp_path / "vq.pt")
    with pytest.raises(UserError) as caught:
        load_vq(open_checkpoint(tmp_path / "vq.pt"), LAYOUTS["llamagen"], torch.device("cpu"))
    assert (
        "decoder.conv_blocks.0.res.0.conv1.weight is 32x32x3x3, not 64x64x3x3"
        in caught.value.message
    )


def test_foreign_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": {"encoder.conv_in.weight": torch.zeros(1)}}, checkpoint)
    with pytest.raises(UserError, match="is not a VQ tokenizer of this family: it has no"):
        load_vqgan(checkpoint)
    state = torch.load(tiny.write_vqgan(tmp_path / "other"), weights_only=True)["state_dict"]
    del state["decoder.up.0.block.0.conv1.weight"]
    torch.save(state | {"decoder.conv_out.bias": torch.zeros(4)}, checkpoint)
    with pytest.raises(UserError) as caught:
        load_vqgan(checkpoint)
    assert "1 missing: decoder.up.0.block.0.conv1.weight" in caught.value.message
    assert "decoder.conv_out.bias is 4, not 3" in caught.value.message
