"""The tokenizer against recordings of the official LlamaGen: encode, look up, decode; and its
sizes.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS, load_vq
from lantern_bench.models.networks.vq import VQConfig, VQModel
from tests.helpers.golden_models import GOLDEN

FOLDER = GOLDEN / "llamagen_vq"


@pytest.fixture(scope="module")
def model() -> VQModel:
    return load_vq(open_checkpoint(FOLDER / "vq.pt"), LAYOUTS["llamagen"], torch.device("cpu"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(FOLDER / "vq_expected.safetensors")


def test_tokens_decode_to_the_official_pixels(model: VQModel, expected: dict[str, Tensor]) -> None:
    grid = tuple(expected["decode_shape"][2:].tolist())
    pixels = model.decode_tokens(expected["codes"], grid)
    torch.testing.assert_close(pixels, expected["pixels"], atol=2e-4, rtol=0)


def test_looked_up_codes_are_the_normalised_rows(
    model: VQModel, expected: dict[str, Tensor]
) -> None:
    rows = model.quantize.rows()[expected["codes"]]
    looked_up = rows.reshape(expected["quant_from_codes"].permute(0, 2, 3, 1).shape).permute(
        0, 3, 1, 2
    )
    torch.testing.assert_close(looked_up, expected["quant_from_codes"], atol=2e-4, rtol=0)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(rows.shape[:-1]))


def test_pictures_encode_to_the_official_indices(
    model: VQModel, expected: dict[str, Tensor]
) -> None:
    torch.testing.assert_close(
        model.latents(expected["image"]), expected["pre_quant"], atol=2e-4, rtol=0
    )
    codes = model.encode(expected["image"])
    assert torch.equal(codes, expected["encode_indices"])
    quantised = model.quantize.rows()[codes].permute(0, 3, 1, 2)
    torch.testing.assert_close(quantised, expected["quant_from_image"], atol=2e-4, rtol=0)
    torch.testing.assert_close(
        model.decode(quantised), expected["reconstruction"], atol=2e-4, rtol=0
    )


def test_recordings_distinguish_normalised_rows(
    model: VQModel, expected: dict[str, Tensor]
) -> None:
    latents = expected["pre_quant"].permute(0, 2, 3, 1)
    raw = torch.cdist(latents.reshape(-1, latents.shape[-1]), model.codebook()).argmin(-1)
    assert int((raw != expected["encode_indices"].flatten()).sum()) > 0
    assert not torch.equal(model.codebook(), model.quantize.rows())


def test_downsampling_is_one_halving_between_levels() -> None:
    config = VQConfig(
        codes=32, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1
    )
    with torch.no_grad():
        codes = VQModel(config).encode(torch.zeros(2, 3, 16, 24))
    assert codes.shape == (2, 4, 6)
