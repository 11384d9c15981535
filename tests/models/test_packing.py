"""Packed weights multiply as the usual ones do, take their place and no more memory, and compile to the same tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lantern_bench.decode.engine import Engine
from lantern_bench.models import packing
from lantern_bench.models.packing import (
    PackedLinear,
    can_pack,
    lower_packed_products,
    pack_for_decoding,
    weight_bytes,
    weight_count,
)
from lantern_bench.spec.decoding import Decoding
from tests.decode.test_engine import CELLS, CONFIG, Small, decoded, same

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
def test_a_packed_model_computes_the_same(dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for packed weights where this machine has them, and as where there are none."""
    if not kernels:
        monkeypatch.setattr(packing, "can_pack", lambda _device, _dtype: False)
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
def test_only_the_drafter_gets_a_narrow_head() -> None:
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
def test_compiled_and_packed_decodes_the_same_image(cell: str) -> None:
    lower_packed_products()
    model, decoding = Small(), Decoding(**CELLS[cell])
    plain = decoded(model, decoding, 1)
    pack_for_decoding(model.target, model.drafter)
    same(plain, decoded(model, decoding, 1))
    same(plain, decoded(model, decoding, 1, Engine(compile=True)))
