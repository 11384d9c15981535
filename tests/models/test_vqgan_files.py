"""Chameleon's image tokenizer from vqgan.ckpt and vqgan.yaml, against its decoder written out; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from lantern_bench.errors import UserError
from lantern_bench.models.chameleon.checkpoint import PUBLISHED_VQGAN, load_vqgan, read_vqgan_config
from tests.models import tiny_chameleon as tiny

CPU = torch.device("cpu")
PUBLISHED_YAML = {
    "model": {
        "base_learning_rate": 4.5e-06,
        "target": "taming.models.vqgan.VQModel",
        "params": {
            "embed_dim": 256,
            "n_embed": 8192,
            "ddconfig": {
                "double_z": False, "z_channels": 256, "resolution": 512, "in_channels": 3, "out_ch": 3, "ch": 128,
                "ch_mult": [1, 1, 2, 2, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
            },
        },
    }
}  # fmt: skip


def wrong(key: str, text: str) -> UserError:
    return UserError(f"{key}: {text}")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write_vqgan(tmp_path / "vq")


def decoded(state: dict[str, Tensor], codes: Tensor) -> Tensor:
    """The published decoder on one picture's codes [h, w], by the names in the file."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.weight"]
        return functional.conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    def swish(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    def block(x: Tensor, name: str) -> Tensor:
        h = conv(swish(norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = conv(swish(norm(h, f"{name}.norm2")), f"{name}.conv2")
        return h + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in state else x)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (conv(norm(x, f"{name}.norm"), f"{name}.{part}").flatten(2)[0] for part in "qkv")
        mixed = v @ ((q.T @ k) / len(q) ** 0.5).softmax(-1).T
        return x + conv(mixed.reshape(x.shape), f"{name}.proj_out")

    # The row of a code goes into the decoder as it is stored.
    x = conv(state["quantize.embedding.weight"][codes].permute(2, 0, 1)[None], "post_quant_conv")
    x = block(conv(x, "decoder.conv_in"), "decoder.mid.block_1")
    x = block(attention(x, "decoder.mid.attn_1"), "decoder.mid.block_2")
    for level in (1, 0):
        for number in (0, 1):
            x = block(x, f"decoder.up.{level}.block.{number}")
        if level:
            x = conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"), "decoder.up.1.upsample.conv")
    return conv(swish(norm(x, "decoder.norm_out")), "decoder.conv_out")


@torch.no_grad()
def test_decoder_equals_a_written_out_one(checkpoint: Path) -> None:
    model = load_vqgan(checkpoint, CPU)
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    codes = torch.randint(tiny.CODES, (4, 3), generator=torch.Generator().manual_seed(2))
    pixels = model.decode_tokens(codes.reshape(1, -1), (4, 3))
    assert pixels.shape == (1, 3, 8, 6)
    assert (pixels - decoded(state, codes)).abs().max() < 2e-4


@torch.no_grad()
def test_encoding_finds_the_nearest_stored_row(checkpoint: Path) -> None:
    model = load_vqgan(checkpoint, CPU)
    picture = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1
    encoded = model.encode(picture)
    latents = encoded.latents.permute(0, 2, 3, 1)
    distance = (latents[..., None, :] - model.codebook()).pow(2).sum(-1)
    assert encoded.indices.equal(distance.argmin(-1))
    assert model.codebook(normalised=True).equal(model.codebook())


def test_published_yaml_is_read() -> None:
    assert read_vqgan_config(PUBLISHED_YAML, wrong) == PUBLISHED_VQGAN


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        ("embed_dim", None, "embed_dim: missing"),
        ("n_embed", -3, "n_embed: -3: must be a whole number above 0"),
        ("ddconfig", None, "ddconfig: missing"),
        ("ddconfig.ch_mult", [1, "2"], "ch_mult: 2: must be"),
        ("ddconfig.double_z", True, "double_z: true"),
        ("ddconfig.attn_resolutions", [16], "attn_resolutions: [16]: only the lowest resolution (32) can attend"),
    ],
)
def test_impossible_yamls_are_refused(where: str, value: object, told: str) -> None:
    stated = yaml.safe_load(yaml.safe_dump(PUBLISHED_YAML))
    *path, last = where.split(".")
    at = stated["model"]["params"]
    for key in path:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    with pytest.raises(UserError) as caught:
        read_vqgan_config(stated, wrong)
    assert told in caught.value.message


def test_missing_yaml_is_refused(checkpoint: Path) -> None:
    checkpoint.with_suffix(".yaml").unlink()
    with pytest.raises(UserError, match=r"vqgan\.yaml: no such file"):
        load_vqgan(checkpoint, CPU)


def test_truncated_and_foreign_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="truncated"):
        load_vqgan(checkpoint, CPU)
    torch.save({"state_dict": {"encoder.conv_in.weight": torch.zeros(1)}}, checkpoint)
    with pytest.raises(UserError) as caught:
        load_vqgan(checkpoint, CPU)
    assert "missing" in caught.value.message and "decoder.up.0.block.0.conv1.weight" in caught.value.message
    assert "encoder.conv_in.weight is 1, not 32x3x3x3" in caught.value.message
