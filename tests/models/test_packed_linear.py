"""Packed weights give the same products in the same memory, and compiled programs the same tokens.

The 8-bit weights of a drafter change its drafts, but neither the target nor the distribution of the tokens.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lantern_bench.certify.lossless import first_token_distribution, first_tokens_test, strict_without_residual
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.decoding.compile import Engine
from lantern_bench.models import packed_linear
from lantern_bench.models.packed_linear import (
    DraftLinear,
    PackedLinear,
    can_pack,
    lower_packed_products,
    pack_for_decoding,
    weight_bytes,
    weight_count,
)
from lantern_bench.models.transformer.conditioning import Condition
from tests.decoding.test_engine import CELLS, CONFIG, Small, decoded, same

CPU = torch.device("cpu")


def features(model: Small, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2, 7, CONFIG.dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    hidden = model.target.transformer(x, torch.zeros(1, 1, 7, 7, dtype=dtype))
    tokens = torch.arange(7).expand(2, 7)
    guessed = model.drafter(tokens, hidden, torch.zeros(1, 1, 7, 7, dtype=dtype))
    return torch.cat([model.target.transformer.output(hidden), model.drafter.head(guessed).float()], dim=1)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_models_compute_the_same(dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without kernels for packed weights."""
    if not kernels:
        monkeypatch.setattr(packed_linear, "can_pack", lambda _device, _dtype: False)
    plain = Small()
    for module in (plain.target, plain.drafter):
        module.to(dtype)
    packed = copy.deepcopy(plain)
    packed.drafter.draft_with(packed.target.transformer.output)
    pack_for_decoding(packed.target, packed.drafter)
    close = 1e-4 if dtype == torch.float32 else 0.15
    assert (features(plain, dtype) - features(packed, dtype)).abs().max() < close
    assert weight_bytes(packed.target) == weight_bytes(plain.target)
    assert weight_count(packed.drafter) == weight_count(plain.drafter)
    left = any(isinstance(part, nn.Linear) for part in packed.drafter.modules())
    assert left != (kernels and can_pack(CPU, dtype))


@torch.inference_mode()
def test_only_the_drafter_rounds_its_head() -> None:
    model = Small()
    model.target.bfloat16()
    model.drafter.bfloat16()
    pack_for_decoding(model.target, model.drafter)
    target, drafter = model.target.transformer.output, model.drafter.head_module
    kinds = [part.dtype if isinstance(part, PackedLinear) else part.weight.dtype for part in (target, drafter)]
    assert kinds == [torch.float32, torch.bfloat16]
    assert model.target.dtype == model.drafter.dtype == torch.bfloat16


def test_packing_twice_changes_nothing() -> None:
    model = Small()
    pack_for_decoding(model.target, model.drafter)
    before = [id(part) for part in (*model.target.modules(), *model.drafter.modules(), model.drafter.head_module)]
    pack_for_decoding(model.target, model.drafter)
    assert before == [
        id(part) for part in (*model.target.modules(), *model.drafter.modules(), model.drafter.head_module)
    ]


@pytest.mark.parametrize("cell", ["static", "ar"])
def test_compiled_packed_models_decode_the_same_image(cell: str) -> None:
    lower_packed_products()
    model, decoding = Small(), Decoding(**CELLS[cell])
    plain = decoded(model, decoding, 1)
    pack_for_decoding(model.target, model.drafter)
    same(plain, decoded(model, decoding, 1))
    same(plain, decoded(model, decoding, 1, Engine(compile=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_compiled_programs_call_the_kernel_directly(dtype: torch.dtype) -> None:
    """Through Python the call would take several times as long."""
    if not can_pack(CPU, dtype):
        dtype = torch.float32
    lower_packed_products()
    layer = PackedLinear(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).to(dtype))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    run = Engine(compile=True).program("product", lambda x: layer(x * 2) + 1, CPU)
    run(x)
    seen = {}
    for name, function in {"compiled": run, "plain": lambda x: layer(x * 2) + 1}.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            made = function(x)
        torch.testing.assert_close(made, layer(x * 2) + 1)
        seen[name] = {event.key for event in profiled.key_averages()}
    products = {"lantern_bench::packed_linear", "mkldnn::_linear_pointwise"}
    assert products & seen["plain"]
    assert not products & seen["compiled"]


@torch.inference_mode()
def test_few_drafter_rows_use_8_bit_weights() -> None:
    random = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(96, 64, generator=random), torch.randn(96, generator=random)
    weight[5] = 0.0  # of which nothing can be a multiple
    layer = DraftLinear(weight, bias)
    scale = layer._scale[:, None]
    assert ((layer._whole * scale - weight).abs() <= 0.5001 * scale).all()
    assert layer._whole.abs().amax(dim=1).tolist() == [0 if row == 5 else 127 for row in range(96)]
    x = torch.randn(2, 3, 64, generator=random)
    few = layer(x[:, :2])
    torch.testing.assert_close(few, x[:, :2] @ (layer._whole * scale).T + bias, atol=1e-4, rtol=1e-4)
    assert 1e-3 < (few - PackedLinear(weight, bias)(x[:, :2])).abs().max() < 0.5
    torch.testing.assert_close(layer(x)[:, :2], few, atol=1e-4, rtol=1e-4)  # six rows, the same numbers
    assert layer(x[:1, :1]).shape == (1, 1, 96)
    assert layer.nbytes == 96 * (64 * (4 + 1) + 4 + 4)


class Captioned(Small):
    """`Small` in bfloat16, packed, behind what a G-test asks of a model."""

    engine = Engine()

    def __init__(self) -> None:
        super().__init__()
        self.target.bfloat16()
        self.drafter.bfloat16()
        pack_for_decoding(self.target, self.drafter)

    def condition(self, texts: list[str]) -> Condition:
        values = torch.tensor([[0, 3, 4, 5]]).expand(len(texts), -1)
        return Condition(values, values > 0)


def test_8_bit_drafts_are_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is the target's, and verification uses the q of the drafts; the test rejects a broken rule."""
    monkeypatch.setattr(packed_linear, "_FEW_ROWS", 10_000)
    model, prompt = Captioned(), Prompt("a caption")
    decoding = Decoding(mode="speculative", tree="chain-3", top_k=4, cfg_scale=2.0)
    distributions = [first_token_distribution(model, prompt, decoding, 3)]  # type: ignore[arg-type]
    values = [
        first_tokens_test(model, [prompt], distributions, decoding, 2000, accept=accept, batch=500).p_value  # type: ignore[arg-type]
        for accept in (None, strict_without_residual)
    ]
    print(f"8-bit drafts: p = {values[0]:.3f}, residual left out {values[1]:.1e}")
    assert values[0] > 1e-3
    assert values[1] < 1e-6


@torch.inference_mode()
def test_targets_and_float32_drafters_are_not_rounded() -> None:
    model = Captioned()
    assert not any(isinstance(part, DraftLinear) for part in model.target.modules())
    assert all(isinstance(part, DraftLinear) for part in model.drafter.modules() if isinstance(part, PackedLinear))
    exact = Small()
    pack_for_decoding(exact.target, exact.drafter)
    assert not any(isinstance(part, DraftLinear) for part in exact.drafter.modules())
