"""Packed weights give the same products in the same memory, and programs the same tokens."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import Engine
from lantern_bench.models.networks import packed_linear
from lantern_bench.models.networks.packed_linear import (
    PackedLinear,
    build_kernels,
    can_pack,
    pack_for_decoding,
    weights_of,
)
from lantern_bench.models.networks.transformer import in_dtype
from tests.decoding.test_engine import CELLS, CONFIG, Small, decoded, same

CPU = torch.device("cpu")


def stored(weights: list[torch.Tensor]) -> tuple[int, int]:
    """Number and bytes of weights."""
    return sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights)


def features(model: Small, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2, 7, CONFIG.dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    tokens = torch.arange(7).expand(2, 7)
    mask = torch.zeros(1, 1, 7, 7, dtype=dtype)
    hidden = model.target.transformer(x, mask, tokens)
    guessed = model.drafter(tokens, hidden, mask, positions=tokens)
    return torch.cat(
        [model.target.transformer.output(hidden), model.drafter.head(guessed).float()], dim=1
    )


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_models_compute_the_same(
    *, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without kernels for packed weights."""
    if not kernels:
        monkeypatch.setattr(packed_linear, "can_pack", lambda _device, _dtype: False)
    plain = Small()
    for module in (plain.target, plain.drafter):
        in_dtype(module, dtype)
    packed = copy.deepcopy(plain)
    packed.drafter.use_head(packed.target.transformer.output)
    pack_for_decoding(packed.target, packed.drafter)
    close = 1e-4 if dtype == torch.float32 else 0.15
    assert (features(plain, dtype) - features(packed, dtype)).abs().max() < close
    for ours, theirs in ((packed.target, plain.target), (packed.drafter, plain.drafter)):
        assert stored(weights_of(ours)) == stored(weights_of(theirs))
    has_plain_layers = any(isinstance(module, nn.Linear) for module in packed.drafter.modules())
    assert has_plain_layers != (kernels and can_pack(CPU, dtype))


@torch.inference_mode()
def test_only_the_drafter_rounds_its_head() -> None:
    model = Small()
    in_dtype(model.target, torch.bfloat16)
    in_dtype(model.drafter, torch.bfloat16)
    pack_for_decoding(model.target, model.drafter)
    target = model.target.transformer.output
    drafter = model.drafter.head
    kinds = [
        module.dtype if isinstance(module, PackedLinear) else module.weight.dtype
        for module in (target, drafter)
    ]
    assert kinds == [torch.float32, torch.bfloat16]
    assert model.target.dtype == model.drafter.dtype == torch.bfloat16


def test_packing_twice_changes_nothing() -> None:
    model = Small()
    modules = []
    for _ in range(2):
        pack_for_decoding(model.target, model.drafter)
        modules.append([*model.target.modules(), *model.drafter.modules(), model.drafter.head])
    assert all(first is second for first, second in zip(*modules, strict=True))


# Rules have no packed product: the drafter runs under the one that compiles quickest.
DRAFTED = {"mode": "speculative", "tree": [[0], [1], [0, 0]], "temperature": 0.0, "cfg_scale": 1.5}


@pytest.mark.parametrize(
    "cell", [pytest.param(DRAFTED, marks=pytest.mark.long), CELLS["ar"]], ids=["drafted", "ar"]
)
def test_compiled_packed_models_decode_the_same_image(cell: dict[str, Any]) -> None:
    model = Small()
    decoding = Decoding(**cell)
    plain = decoded(model, decoding, 1)
    pack_for_decoding(model.target, model.drafter)
    same(plain, decoded(model, decoding, 1))
    same(plain, decoded(model=model, decoding=decoding, images=1, engine=Engine(compile=True)))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_order(layer: PackedLinear, x: torch.Tensor, product: torch.Tensor) -> None:
    """The sums of a row depend neither on how many rows there are nor on threads."""
    for rows in (*range(1, 15), len(x) // 2 + 5):
        assert torch.equal(layer(x[:rows]), product[:rows]), rows
    with threads(3):
        assert torch.equal(layer(x), product)


needs_panels = pytest.mark.skipif(not build_kernels(), reason="needs a compiler and AVX2")


@needs_panels
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 256), (192, 300), (70, 33), (5, 1), (128, 700)]
)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_panel_products_are_exact(outputs: int, inputs: int, stored: torch.dtype) -> None:
    """Weights of 16-bit numbers stay 16 bits wide; errors are those of a float32 sum."""
    random = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=random).to(stored).float()
    bias = torch.randn(outputs, generator=random)
    # Numbers that only this type and wider ones hold; the first is the smallest of float16.
    weight[0, 0] = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-40, torch.float32: 1 / 3}[stored]
    layer = PackedLinear(weight, bias)
    assert layer._packed.dtype == stored
    sizes = [weight.nbytes for weight in layer.weights]
    assert sizes == [outputs * inputs * stored.itemsize, outputs * 4]
    x = torch.randn(118, inputs, generator=random)
    product = layer(x)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert (product - exact).abs().max() < 2e-6 * inputs + 1e-6
    check_order(layer, x, product)
    assert torch.equal(layer(x[:6].reshape(2, 3, -1)), product[:6].view(2, 3, -1))
    assert torch.equal(layer(x[:32].T.contiguous().T), product[:32])


@needs_panels
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 256), (192, 300), (70, 33), (5, 2), (128, 700)]
)
@pytest.mark.parametrize("pairs", [True, False])
@torch.inference_mode()
def test_bfloat16_panel_products_are_rounded_once(
    *, outputs: int, inputs: int, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without instructions for pairs of bfloat16 numbers; the sum is float32."""
    pairs = pairs and packed_linear._multiplies_pairs()
    monkeypatch.setattr(packed_linear, "_multiplies_pairs", lambda: pairs)
    random = torch.Generator().manual_seed(outputs)
    sizes = ((outputs, inputs), (outputs,), (40, inputs))
    weight, bias, x = (torch.randn(*size, generator=random).bfloat16() for size in sizes)
    layer = PackedLinear(weight, bias)
    assert layer._factors == (torch.bfloat16 if pairs and inputs % 2 == 0 else torch.float32)
    assert sum(weight.nbytes for weight in layer.weights) == 2 * outputs * (inputs + 1)
    product = layer(x)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert product.dtype == torch.bfloat16
    assert ((product - exact).abs() <= exact.abs() * 2**-8 + 2e-6 * inputs).all()
    check_order(layer, x, product)


@needs_panels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_compiled_programs_call_panel_products_without_python(dtype: torch.dtype) -> None:
    from torch._inductor.utils import run_and_get_cpp_code

    layer = PackedLinear(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).to(dtype))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    run = Engine(compile=True).program("panels", lambda x: layer(x * 2) + 1, CPU)
    product, code = run_and_get_cpp_code(run, x)
    torch.testing.assert_close(product, layer(x * 2) + 1)
    assert 'aoti_torch_call_dispatcher("lantern_bench::panel_linear"' in code


def check_attention(
    kv_heads: int,
    nodes: int,
    *,
    heads: int = 4,
    width: int = 48,
    columns: int = 137,
    stored: torch.dtype = torch.float32,
) -> None:
    """Against torch's attention in float64 on the same keys and values."""
    random = torch.Generator().manual_seed(nodes)
    q = torch.randn(2, nodes, heads, width, generator=random)
    keys, values = (
        torch.randn(2, kv_heads, 160, width, generator=random).to(stored)[:, :, :columns]
        for _ in range(2)
    )
    mask = torch.where(torch.rand(2, 1, nodes, columns, generator=random) < 0.4, -torch.inf, 0.0)
    mask[:, :, :, 3] = 0.0
    mask[:, :, 0, 4:] = -torch.inf
    turned = mask[:, 0].mT.contiguous()
    attention = torch.ops.lantern_bench.node_attention(q, keys, values, turned)
    wide = (module.double() for module in (q.transpose(1, 2), keys, values))
    exact = nn.functional.scaled_dot_product_attention(
        *wide, attn_mask=mask.double(), enable_gqa=True
    ).transpose(1, 2)
    assert (attention - exact).abs().max() < 3e-6
    with threads(3):
        assert torch.equal(
            attention, torch.ops.lantern_bench.node_attention(q, keys, values, turned)
        )


@needs_panels
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 17, 33, 64])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_attention_of_nodes_is_exact(kv_heads: int, nodes: int, stored: torch.dtype) -> None:
    assert build_kernels()
    check_attention(kv_heads, nodes, stored=stored)


@needs_panels
@pytest.mark.parametrize("nodes", [1, 2, 3, 17])
@torch.inference_mode()
def test_columns_that_no_node_sees_are_not_read(nodes: int) -> None:
    assert build_kernels()
    random = torch.Generator().manual_seed(nodes)
    q, keys, values = (
        torch.randn(*shape, 32, generator=random)
        for shape in ((2, nodes, 4), (2, 4, 96), (2, 4, 96))
    )
    mask = torch.zeros(2, 96, nodes)
    wanted = []
    for row, seen in enumerate((67, 96)):
        mask[row, seen:] = -torch.inf
        mask[row, 40 : seen - 1, 0] = -torch.inf  # the others see them
        one = slice(row, row + 1)
        columns = (part[one, :, :seen] for part in (keys, values))
        attend = torch.ops.lantern_bench.node_attention
        wanted.append(attend(q[one], *columns, mask[one, :seen].contiguous()))
        values[row, :, seen:] = torch.nan
    mixed = torch.ops.lantern_bench.node_attention(q, keys, values, mask)
    assert mixed.equal(torch.cat(wanted))


@needs_panels
@torch.inference_mode()
def test_only_packed_models_use_the_attention_kernel() -> None:
    model = Small()
    decoders = (model.target.transformer, model.drafter)
    assert not any(module.attention_kernel for module in decoders)
    pack_for_decoding(model.target, model.drafter)
    assert all(module.attention_kernel for module in decoders)


@needs_panels
@pytest.mark.long
def test_kernels_with_avx2_only() -> None:
    """Sums are in the same order, so the bits are those of wider instructions."""
    program = """if True:
        import torch
        from lantern_bench.models.networks.packed_linear import PackedLinear, build_kernels
        from tests.models.networks.test_packed_linear import check_attention
        assert build_kernels()
        random = torch.Generator().manual_seed(0)
        check_attention(2, 59)
        check_attention(2, 59, stored=torch.bfloat16)
        for stored in (torch.float32, torch.float16, torch.bfloat16):
            layer = PackedLinear(torch.randn(70, 300, generator=random).to(stored).float())
            for rows in (1, 2, 3, 7, 40):
                x = torch.randn(rows, 300, generator=random)
                print(layer(x).double().square().sum().item())
    """
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    here, narrow = (
        [float(line) for line in text.split()] for text in (printed.getvalue(), done.stdout)
    )
    assert len(here) == 15
    assert here == pytest.approx(narrow, rel=1e-12)


@pytest.mark.parametrize(
    ("capability", "error"),
    [
        ("DEFAULT", None),
        ("AVX2", RuntimeError("C++ compile error")),
        ("AVX2", TypeError("load() got an unexpected keyword argument 'extra_flags'")),
        ("AVX2", AttributeError("type object 'CppCodeCache' has no attribute 'load'")),
        ("AVX2", None),
    ],
)
def test_layers_stay_without_kernels(
    capability: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without AVX2, a compiler that fails, and a torch with other private names."""
    from torch._inductor import codecache

    def fail(*_: object, **__: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if error is None:
        monkeypatch.delattr(codecache, "CppCodeCache")
    else:
        monkeypatch.setattr(codecache.CppCodeCache, "load", fail)
    monkeypatch.setattr(packed_linear, "build_kernels", build_kernels.__wrapped__)
    model = Small()
    pack_for_decoding(model.target, model.drafter)
    assert not any(isinstance(module, PackedLinear) for module in model.target.modules())


def test_bfloat16_is_not_packed_where_torch_does_not_tell_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not can_pack(CPU, torch.bfloat16)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    assert not packed_linear._multiplies_pairs()
