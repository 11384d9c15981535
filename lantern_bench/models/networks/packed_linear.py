"""Linear layers for decoding on a CPU: weights in the layout of the kernels, and wider products.

torch's product of a few rows reorders the weight at every call, which takes longer than the product
itself. `kernels.cpp` multiplies by packed weights. If it cannot be built, the layers stay torch's.
`pack_for_decoding` replaces the layers of a loaded model, which then cannot be trained.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.networks.transformer import FeedForward, linear_of

_library = torch.library.Library("lantern_bench", "DEF")
_library.define("panel_linear(Tensor x, Tensor weight) -> Tensor")
_library.define("node_attention(Tensor q, Tensor keys, Tensor values, Tensor mask) -> Tensor")
_PANEL = 64  # outputs of a panel in `kernels.cpp`
_BY_CAPABILITY = {
    # Without the flag the compiler uses all instructions of the processor, whatever
    # ATEN_CPU_CAPABILITY asks of torch.
    "AVX2": ("-mno-avx512f",),
    "AVX512": (),
}


@torch.library.register_fake("lantern_bench::panel_linear")  # type: ignore[untyped-decorator]
def _panel_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * _PANEL, dtype=torch.float32)


@torch.library.register_fake("lantern_bench::node_attention")  # type: ignore[untyped-decorator]
def _attention_shape(
    q: Tensor,
    keys: Tensor,  # noqa: ARG001
    values: Tensor,  # noqa: ARG001
    mask: Tensor,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@cache
def build_kernels() -> bool:
    """Build `kernels.cpp` with inductor's compiler into inductor's cache, and load it.

    The kernels need AVX2, and the headers of torch's stable interface.

    Returns:
        Whether the kernels can be used.
    """
    flags = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability())
    if flags is None:
        return False
    try:
        from torch._inductor.codecache import CppCodeCache

        CppCodeCache.load(
            (Path(__file__).parent / "kernels.cpp").read_text(encoding="utf-8"), extra_flags=flags
        )
    except (ImportError, AttributeError, TypeError, OSError, RuntimeError):
        return False  # an inductor without this interface, or no compiler
    return True


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has kernels for packed weights of this type."""
    is_fast = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
    if dtype == torch.bfloat16 and not is_fast():
        return False
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and build_kernels()


class PackedLinear(nn.Module):
    """A product with a packed weight [out, in]. It has no parameters."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach()
        self.dtype = weight.dtype
        if weight.dtype == torch.float32:
            weight = _narrowest(weight)
        self._outputs = len(weight)
        self._factors = torch.float32
        self._bias = None if bias is None else bias.detach()
        # Their sizes, for `weights_of`.
        self.weights = [tensor.to("meta") for tensor in (weight, bias) if tensor is not None]
        panels = functional.pad(weight, (0, 0, 0, -len(weight) % _PANEL)).unflatten(0, (-1, _PANEL))
        if self.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and _multiplies_pairs():
            self._factors = torch.bfloat16
            panels = panels.unflatten(2, (-1, 2))
        self._packed = panels.transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] of any type to [..., out] of the weight's type."""
        rows = x.to(self.dtype).to(self._factors).reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.lantern_bench.panel_linear(rows, self._packed)
        product = product[:, : self._outputs].view(*x.shape[:-1], -1)
        if self._bias is not None:
            product = product + self._bias
        return product.to(self.dtype)


def _multiplies_pairs() -> bool:
    """Whether `kernels.cpp` multiplies pairs of bfloat16 numbers here."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(supported())


def _narrowest(weight: Tensor) -> Tensor:
    """Return a float32 weight in a 16-bit type if that holds all its numbers, as checkpoints do."""
    for dtype in (torch.float16, torch.bfloat16):
        rounded = weight.to(dtype)
        if torch.equal(rounded.float(), weight):
            return rounded
    return weight


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return all weights of a module. Packed ones are on the meta device, for their sizes."""
    weights: list[Tensor] = list(module.parameters())
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            weights += layer.weights
    return weights


@torch.no_grad()
def pack_for_decoding(target: object, drafter: object) -> None:
    """Replace the linear layers of this package's targets and drafters in place.

    A second call changes nothing. Without kernels for packed weights it only merges products and
    rounds the drafter's head to the drafter's type, which changes drafts and never the target's
    distribution.
    """
    if isinstance(drafter, EagleDrafter):
        head = drafter.head
        if isinstance(head, nn.Linear) and head.weight.dtype != drafter.dtype:
            drafter.use_head(linear_of(*(weight.to(drafter.dtype) for weight in head.parameters())))
        _pack_below(drafter)
        drafter.use_head(_packed(drafter.head))
        drafter.attention_kernel = can_pack(drafter.device, drafter.dtype)
    if isinstance(target, TransformerTarget):
        _pack_below(target)
        target.transformer.attention_kernel = can_pack(target.device, target.dtype)


def _pack_below(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, FeedForward):
            child.join()
        _pack_below(child)
        setattr(module, name, _packed(child))


def _packed(layer: Any) -> Any:
    if isinstance(layer, nn.Linear) and can_pack(layer.weight.device, layer.weight.dtype):
        return PackedLinear(layer.weight, layer.bias)
    return layer
