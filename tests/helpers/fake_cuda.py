"""Lower programs of a step to Triton for an H100 that is not there, and count their kernels.

    python -m tests.helpers.fake_cuda

The tensors are fake, so nothing is computed and no GPU is needed. This process pretends to have
one, which cannot be undone: run it in a process of its own. It replaces private parts of torch.
Where one of them is missing it exits with code 77 and names the part.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.image_state import ImageState
from lantern_bench.decoding.orders.plain import PlainSteps
from lantern_bench.decoding.step import SpeculativeStep
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import ClassLabel, TransformerTarget
from lantern_bench.models.networks.transformer_config import TransformerConfig

DIFFERENT = 77  # exit code: torch's internals differ
VOCABULARY = 16_384
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="0",
)


class LoweredError(Exception):
    """Ends the compiler after it has written the code."""


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace a part of torch, which must be there."""
    getattr(owner, name)
    setattr(owner, name, value)


def always(value: Any) -> Callable[..., Any]:
    """Return a function that takes anything."""
    return lambda *_, **__: value


def pretend() -> list[str]:
    """Let torch believe in the GPU; return the list to which the compiler's code is appended."""
    import torch._inductor.config as inductor
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import graph
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "get_device_name": H100.name,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, value in answers.items():
        replace(torch.cuda, name, always(value))
    torch._C._ensureCUDADeviceGuardSet()
    replace(torch._C, "_cuda_getCurrentRawStream", always(0))
    # A torch that was built without CUDA does not have these two.
    torch._C._cuda_getDevice = always(0)  # type: ignore[attr-defined]
    torch.cuda._get_device_properties = always(H100)  # type: ignore[attr-defined]
    replace(CudaInterface, "get_compute_capability", staticmethod(always(90)))
    replace(triton, "triton_hash_with_backend", always("none"))
    replace(inductor, "joint_graph_constant_folding", False)
    # Their patterns are traced with tensors that need a real GPU.
    replace(fuse_attention, "_sfdp_init", always(None))
    replace(pad_mm, "_pad_mm_init", always(None))
    replace(misc_patterns, "_misc_patterns_init", always(None))

    written: list[str] = []

    def stop(self: Any, *_: Any, **__: Any) -> None:
        code = self.codegen()[0]
        written.append(getattr(code, "value", code))
        raise LoweredError

    replace(graph.GraphLowering, "compile_to_module", stop)
    return written


def moved(value: Any) -> Any:
    """Return an object whose tensors are on the GPU that is not there."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, tuple):
        parts = map(moved, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: moved(part) for name, part in fields.items()})
    return value


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, enable_gqa: bool = False
) -> Tensor:
    """Attend with the kernel that torch chooses on a GPU, which it does not for fake tensors."""
    mask = attn_mask.expand(-1, q.shape[1], -1, -1)
    if enable_gqa:  # no kernel takes both a mask and grouped heads
        attend = torch.ops.aten._scaled_dot_product_attention_math
        return attend(q, k, v, attn_mask=mask, enable_gqa=True)[0]
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, attn_bias=mask, compute_log_sumexp=False)[0]


def fake(model: nn.Module) -> None:
    """Move the parameters and tables of a model to the GPU that is not there, in bfloat16."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None:
                    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
                    made: Tensor = torch.empty(value.shape, dtype=dtype, device="cuda")
                    if tensors is module._parameters:
                        made = nn.Parameter(made, requires_grad=False)
                    tensors[name] = made


class Kernels:
    """Counts the kernels of programs."""

    def __init__(self) -> None:
        self.written = pretend()
        # Its lists of nodes would be copied to the GPU.
        on_cpu = StaticTree.of
        replace(StaticTree, "of", lambda paths, _device: moved(on_cpu(paths)))
        replace(functional, "scaled_dot_product_attention", attention)

    def of(self, function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> int:
        """Return how many kernels a function of fake tensors launches."""
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        def program(*inputs: Tensor) -> Any:
            return function(*inputs)

        traced = make_fx(program, decomposition_table=select_decomp_table())(*arguments)
        inputs = [*arguments, *constants_as_inputs(traced)]
        try:
            compile_fx(traced, inputs)
        except Exception:
            if not self.written:
                raise
        return launches(self.written.pop())


def constants_as_inputs(traced: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a function found outside its arguments into arguments."""
    graph = traced.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    made: dict[int, torch.fx.Node] = {}
    found: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(traced, node.target)
        if id(value) not in made:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(found)}")
            last.meta["val"] = value
            found.append(value)
            made[id(value)] = last
        node.replace_all_uses_with(made[id(value)])
        graph.erase_node(node)
    traced.recompile()
    return found


def launches(code: str) -> int:
    """Count kernels of Triton and of libraries in the code of a program."""
    body = code[code.index("def call(") :]
    triton = re.findall(r"^\s*triton_\w+\.run\(", body, re.MULTILINE)
    calls = r"^(?![^\n]*assert)[^#\n]*(?:extern_kernels\.\w+|torch\.ops\.\w+[\w.]*)\("
    library = re.findall(calls, body, re.MULTILINE)
    return len(triton) + len(library)


def target_of(layers: int, kv_heads: int | None = None) -> TransformerTarget:
    """Return a target at the sizes of LlamaGen-XL, with fewer layers."""
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        dim=1280,
        layers=layers,
        heads=20,
        ffn_dim=3456,
        prefix=120,
        grid=(24, 24),
        kv_heads=kv_heads,
    )
    target = TransformerTarget(config, ClassLabel(1000, config.dim))
    for layer in target.transformer.layers:
        layer.feed_forward.join()
    fake(target)
    return target


def plain_step(target: TransformerTarget) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return an autoregressive step and its arguments."""
    decoding = Decoding("ar", cfg_scale=7.5, temperature=1.0)
    steps = PlainSteps(target, decoding, batch=1)
    return steps.step, (torch.zeros(1, VOCABULARY, dtype=torch.int32, device="cuda"),)


def speculative_step(depth: int, fanout: int = 1) -> SpeculativeStep:
    """Return a step whose tree is a chain, with `fanout` children at its root."""
    target = target_of(2)
    drafter = EagleDrafter(target.config, target.transformer.output)
    fake(drafter)
    drafter.layer.feed_forward.join()
    chain = [[0] * length for length in range(1, depth + 1)]
    tree = [*chain, *([rank] for rank in range(1, fanout))]
    decoding = Decoding("speculative", cfg_scale=7.5, temperature=1.0, tree=tree)
    step = SpeculativeStep(
        target=target,
        drafter=drafter,
        decoding=decoding,
        rule=ConfiguredRule(decoding.rule_row),
        batch=1,
        engine=Engine(),
        keep_logits=False,
    )
    step.images = ImageState(
        batch=1,
        image_tokens=target.image_tokens,
        depth=depth,
        prefix_features=torch.zeros(2, 120, 1280, dtype=torch.bfloat16, device="cuda"),
    )
    return step


def draft_kernels(kernels: Kernels, depth: int) -> int:
    """Return the kernels of the program that drafts a chain."""
    step = speculative_step(depth)
    shape = (1, step.drafting.noises, VOCABULARY)
    return kernels.of(step._draft, (torch.zeros(shape, dtype=torch.int32, device="cuda"),))


def verify_kernels(kernels: Kernels, fanout: int) -> int:
    """Return the kernels of the program that verifies a chain of four drafts."""
    step = speculative_step(4, fanout)
    children = step.drafting.tree.children
    nodes = step.drafting.tree.tokens.shape[1]
    arguments = (
        torch.zeros(1, nodes, VOCABULARY, device="cuda"),
        torch.zeros(2, nodes, 1280, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(children.shape, dtype=torch.int32, device="cuda"),
        torch.zeros(1, VOCABULARY, dtype=torch.int32, device="cuda"),
    )
    return kernels.of(step._verify_and_commit, arguments)


def count(kernels: Kernels) -> dict[str, int]:
    """Count the kernels that `device_specs.yaml` states for compiled code."""
    one = kernels.of(*plain_step(target_of(1)))
    two = kernels.of(*plain_step(target_of(2)))
    grouped_one = kernels.of(*plain_step(target_of(1, kv_heads=5)))
    grouped_two = kernels.of(*plain_step(target_of(2, kv_heads=5)))
    layer = two - one
    return {
        "layer": layer,
        "forward": one - layer,
        "grouped layer": grouped_two - grouped_one,
        "draft 1": draft_kernels(kernels, depth=1),
        "draft 4": draft_kernels(kernels, depth=4),
        "verify 1": verify_kernels(kernels, fanout=1),
        "verify 3": verify_kernels(kernels, fanout=3),
    }


def main() -> int:
    """Print the counts as JSON."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        kernels = Kernels()
    except (AttributeError, ImportError) as error:
        sys.stderr.write(f"torch {torch.__version__} differs: {error}\n")
        return DIFFERENT
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        sys.stdout.write(f"{json.dumps(count(kernels))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
