"""Linear layers for decoding: weights laid out once as the processor's kernels read them, and fewer, wider products.

torch's product of a few rows with a weight in its usual layout turns the weight over at every call, which takes longer
than the product. `pack_for_decoding` replaces the linear layers of a loaded model; nothing can be trained afterwards.
The drafter gets a head of its own: what is drafted must be known exactly, but need not be exactly the target's q.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import FeedForward, linear_of

__all__ = [
    "PackedLinear",
    "can_pack",
    "lower_packed_products",
    "pack_for_decoding",
    "weight_bytes",
    "weight_count",
]

_ROWS = 16  # of the product that the layout is chosen for; it serves every number of rows
_library = torch.library.Library("lantern_bench", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


_library.impl("packed_linear", _multiply, "MkldnnCPU")


@torch.library.register_fake("lantern_bench::packed_linear")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001  # the signature is the op's
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def lower_packed_products() -> None:
    """Have compiled programs call the kernel of a packed product directly: 5 microseconds less for each."""
    if not can_pack(torch.device("cpu"), torch.float32):
        return
    try:
        from torch._inductor import lowering
    except ImportError:
        return  # without it the op is called as any other of Python's, and gives the same

    packed, kernel = torch.ops.lantern_bench.packed_linear.default, torch.ops.mkldnn._linear_pointwise.default
    if packed in lowering.lowerings:
        return
    call = lowering.fallback_handler(kernel)

    @lowering.register_lowering(packed, type_promotion_kind=None)
    def lower(x: Any, weight: Any, bias: Any) -> Any:
        return call(x, weight, bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for packed weights of this type here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """A product with a packed weight [out, in] of the type that goes in; its parameters are gone."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.dtype = weight.dtype
        self.numel = weight.numel() + (0 if bias is None else bias.numel())
        self._bias = None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] of any type -> [..., out] of the weight's."""
        made: Tensor = torch.ops.lantern_bench.packed_linear(x.to(self.dtype), self._packed, self._bias)
        return made


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a module; `parameters` does not know packed ones."""
    packed = sum(part.numel * part.dtype.itemsize for part in _packed_parts(module))
    return packed + sum(parameter.nbytes for parameter in module.parameters())


def weight_count(module: nn.Module) -> int:
    """How many numbers the weights of a module are, as `weight_bytes`."""
    return sum(part.numel for part in _packed_parts(module)) + sum(one.numel() for one in module.parameters())


def _packed_parts(module: nn.Module) -> Iterator[PackedLinear]:
    return (part for part in module.modules() if isinstance(part, PackedLinear))


@torch.no_grad()
def pack_for_decoding(target: object, drafter: object) -> None:
    """Replace the linear layers of a target and its drafter, in place, where they are what this package makes.

    Without packed kernels only products are joined and the drafter's head narrowed. Doing it again changes nothing.
    """
    if isinstance(drafter, EagleDrafter):
        drafter.draft_with(_narrow_head(drafter.head_module, drafter.dtype))
        _pack_below(drafter)
        drafter.draft_with(_packed(drafter.head_module))
    if isinstance(target, TransformerTarget):
        _pack_below(target)


def _narrow_head(head: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The head in the drafter's type: a copy, where it differs."""
    if not isinstance(head, nn.Linear) or head.weight.dtype == dtype:
        return head
    return linear_of(head.weight.to(dtype))


def _pack_below(module: nn.Module) -> None:
    for child in module.children():
        if isinstance(child, FeedForward):
            child.join()
        _pack_below(child)
    for name, child in list(module.named_children()):
        setattr(module, name, _packed(child))


def _packed(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.Linear) or not can_pack(layer.weight.device, layer.weight.dtype):
        return layer
    return PackedLinear(layer.weight, layer.bias)
