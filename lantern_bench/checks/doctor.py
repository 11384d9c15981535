"""The checks of `lantern-bench doctor`, each of which yields findings.

They import torch inside their functions, because they must be able to report a broken torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import psutil

from lantern_bench.models.checkpoints.hub import PARTS, local_path
from lantern_bench.storage.run_directory import results_root
from lantern_bench.utils.causes import PLUGIN_GROUPS, cause_in_machine
from lantern_bench.utils.clock import now, usage
from lantern_bench.utils.cores import cpu_quota, usable_cores
from lantern_bench.utils.errors import LanternError, RefusedError
from lantern_bench.utils.files import cache_folder, cache_problems
from lantern_bench.utils.text import one_line

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.engine import Engine
    from lantern_bench.decoding.loop import Decoded
    from lantern_bench.models.loaded_model import LoadedModel


State: TypeAlias = Literal["ok", "warning", "fail"]
_GB = 1e9  # bytes
_ENOUGH_MEMORY = 2 * _GB
_ENOUGH_DISK = 1 * _GB
_BUSY = 0.15  # fraction of this process's cores that other programs may use
_LOAD_SECONDS = 0.5  # that the load is measured
# nvidia-smi's bits for hardware slowdown, overheating (software, hardware) and power brake.
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
# In half precision, logits of eager and compiled steps may differ by this many roundings of the
# largest logit.
_ROUNDINGS = 16
# Environment variables that decide what is contacted.
_OF_NETWORK = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_ENDPOINT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
_WRONG = (
    "Do not trust compiled runs on this machine: pass --no-compile, and report it with this list."
)


class Finding(NamedTuple):
    """The result of one check, and what to do about it."""

    check: str
    state: State
    result: str
    fix: str = ""


def examine(device: str = "auto") -> Iterator[Finding]:
    """Yield the findings of every check, cheap ones first.

    The last finding is a failure of torch or of the device if nothing else can run without it.
    """
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "package": _package,
        "load": _load,
        "memory": _memory,
        "disk": _disk,
        "weights": _weights,
        "plug-ins": _plugins,
        "torch": _torch,
        "device": partial(_device, device),
    }
    for name, check in checks.items():
        for finding in _guarded(name, check):
            yield finding
            # Nothing else can run without these two.
            if finding.state == "fail" and finding.check in ("torch", "device"):
                return

    from lantern_bench.devices.compute import choose_compute

    target = choose_compute(device, fast=True)
    yield from _guarded("compiler", partial(_compiler, target.device))
    yield from _guarded("bundled model", partial(_bundled, target.device))
    dtypes = {"float32", target.dtype_name}
    if target.device.type == "cuda":
        dtypes |= {"bfloat16", "float16"}
    for dtype in sorted(dtypes, reverse=True):
        yield from _guarded(f"decode {dtype}", partial(_decode, target.device, dtype))


def _guarded(check: str, findings: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Turn an error of a check into a finding."""
    try:
        yield from findings()
    except LanternError as error:
        yield Finding(check, "fail", error.message, fix=error.advice or "")
    except Exception as error:  # a broken installation raises errors of all kinds
        cause = cause_in_machine(error)
        result = cause.message if cause else one_line(error)
        fix = (cause and cause.advice) or "Not expected: report it with this list."
        yield Finding(check, "fail", result, fix=fix)


def _warned(check: str, result: str, *, fix: str, is_fine: bool) -> Finding:
    """A finding that is ok, or a warning with its fix."""
    return Finding(check, "ok", result) if is_fine else Finding(check, "warning", result, fix=fix)


def _scarce(check: str, free: float, enough: float, *, result: str, fix: str) -> Finding:
    """A warning below `enough`, a failure below a tenth of it."""
    if free < enough / 10:
        return Finding(check, "fail", result, fix=fix)
    return _warned(check, result, fix=fix, is_fine=free >= enough)


def _package() -> Iterator[Finding]:
    from lantern_bench import __version__

    yield Finding(
        "package",
        "ok",
        f"lantern-bench {__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()} {platform.machine()}",
    )
    names = [name for name in sorted(os.environ) if name.upper() in _OF_NETWORK]
    listed = ", ".join(names) or "no variable"
    yield Finding("network", "ok", f"set: {listed}; nothing was contacted")


def _load() -> Iterator[Finding]:
    cores = len(usable_cores())
    before = usage()
    start = now()
    Event().wait(_LOAD_SECONDS)
    core_seconds = (now() - start) * cores
    spent = usage().since(before)
    others = min(1.0, max(0.0, spent.busy_seconds - spent.cpu_seconds) / core_seconds)
    result = f"{others:.0%} of {cores} cores busy with other programs"
    if spent.steal_seconds:
        result += f", {spent.steal_seconds / core_seconds:.0%} taken by the hypervisor"
    quota = cpu_quota()
    if quota is not None:
        result += f", CPU quota of this container {quota:.3g} of {cores} cores"
    yield _warned(
        "load",
        result,
        fix="Timings are too long and marked disturbed: stop other programs, or measure later.",
        is_fine=others <= _BUSY,
    )


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    free = memory.available
    result = f"{free / _GB:.1f} of {memory.total / _GB:.1f} GB free"
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text.isdigit() and int(text) < memory.total:
        container_free = int(text) - int((limit.parent / "memory.current").read_text())
        free = min(free, container_free)
        result += f"; {container_free / _GB:.1f} GB free in this container"
    yield _scarce("memory", free, _ENOUGH_MEMORY, result=result, fix="Stop other programs.")


def _disk() -> Iterator[Finding]:
    for name, folder, variable in (
        ("runs", results_root(), "LANTERN_BENCH_RESULTS, or --out"),
        ("cache", cache_folder(), "LANTERN_BENCH_CACHE"),
        ("temp files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        check = f"disk for {name}"
        absolute = folder.absolute()
        existing = next(path for path in (absolute, *absolute.parents) if path.is_dir())
        free = shutil.disk_usage(existing).free
        home = os.path.expanduser("~")  # without a home folder it stays "~"
        shown = str(absolute).replace(home, "~", 1)
        if name == "cache" and cache_problems:
            result = f"{cache_problems[-1]}; {shown} is used until the command ends"
            yield Finding(check, "warning", result, fix=f"Choose another: {variable}.")
            continue
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            # Without a cache everything works, and is computed again.
            yield Finding(
                check,
                "warning" if name == "cache" else "fail",
                f"{shown}: cannot be written: {error.strerror}",
                fix=f"Choose another: {variable}.",
            )
            continue
        yield _scarce(
            check,
            free,
            _ENOUGH_DISK,
            result=f"{shown}: writable, {free / _GB:.1f} GB free",
            fix=f"Make room, or choose another: {variable}.",
        )


def _weights() -> Iterator[Finding]:
    complete = []
    incomplete = []
    for model, parts in PARTS.items():
        try:
            missing = [name for name, part in parts.items() if not local_path(part)]
        except RefusedError as error:
            message = f"{model} is unreadable: {error.message}"
            incomplete.append(Finding("weights", "warning", message, fix=error.advice or ""))
            continue
        if not missing:
            complete.append(model)
        elif len(missing) < len(parts):
            incomplete.append(
                Finding(
                    "weights",
                    "warning",
                    f"{model} lacks {', '.join(missing)}",
                    fix=f"lantern-bench weights get {model}",
                )
            )
    yield Finding("weights", "ok", f"published models here: {', '.join(complete) or 'none'}")
    yield from incomplete


def _plugins() -> Iterator[Finding]:
    from lantern_bench.methods.catalog import REFUSALS
    from lantern_bench.models.registry import find_models

    refusals = (*REFUSALS, *find_models()[1].values())
    refused = {error.message: error.advice or "" for error in refusals}
    usable = []
    misplaced = []
    installed = metadata.entry_points()
    for group in sorted(installed.groups):
        package, _, kind = group.partition(".")
        if package.replace("-", "_") != "lantern_bench":
            continue
        for entry_point in installed.select(group=group):
            distribution = entry_point.dist.name if entry_point.dist else "unknown"
            name = f"{kind.removesuffix('s')} {entry_point.name} of the package {distribution}"
            if kind not in PLUGIN_GROUPS or package != "lantern_bench":
                misplaced.append(f"the {name} is not found: its group {group} is unknown")
            elif not any(message.startswith(f"the {name} ") for message in refused):
                usable.append(name)
    yield Finding("plug-ins", "ok", f"installed and usable: {', '.join(usable) or 'none'}")
    groups = ", ".join(f"lantern_bench.{kind}" for kind in PLUGIN_GROUPS)
    refused |= dict.fromkeys(misplaced, f"The groups are {groups}.")
    for message, fix in refused.items():
        yield Finding("plug-ins", "warning", message, fix=fix)


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("torch", "ok", f"torch {torch.__version__}, {cuda}")
    try:
        import torchvision

        # A torchvision built for another torch can be imported, but its compiled part fails.
        boxes = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
        assert boxes.tolist() == [0], f"torchvision.ops.nms gives {boxes.tolist()}"
        yield Finding(
            "torchvision", "ok", f"torchvision {torchvision.__version__}, its compiled part runs"
        )
    except Exception as error:  # a wrong pair raises errors of all kinds
        yield Finding(
            "torchvision",
            "fail",
            one_line(error),
            fix="Install both from one index: pip install --upgrade torch torchvision",
        )


def _device(device: str) -> Iterator[Finding]:
    import torch

    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.devices.machine import machine_block

    machine = machine_block()
    cpu = machine["cpu"]
    yield Finding(
        "CPU",
        "ok",
        f"{cpu['model']}, {cpu['usable_cores']} of {cpu['logical_cores']} cores usable, "
        f"{cpu['capability']}, torch uses {cpu['torch_threads']} threads",
    )
    for number, gpu in enumerate(machine["gpus"]):
        yield _gpu_finding(number, gpu)
    if not machine["gpus"] and shutil.which("nvidia-smi"):
        # Machines built for GPUs have nvidia-smi even while no GPU is attached.
        fix = "install a torch that is built for CUDA."
        if torch.version.cuda:
            fix = "update the driver, or attach a GPU."
        yield Finding(
            "GPU",
            "warning",
            "nvidia-smi is installed, and torch finds no GPU",
            fix=f"To use a GPU: {fix}",
        )
    compute = choose_compute(device)
    yield Finding(
        "device",
        "ok",
        f"--device {device} is {compute.device}, with --dtype auto {compute.dtype_name}",
    )


def _gpu_finding(number: int, gpu: Mapping[str, Any]) -> Finding:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    parts = [
        gpu["name"],
        f"compute capability {gpu['compute_capability']}",
        f"driver {gpu['driver'] or 'unknown'}",
        f"{free / _GB:.1f} of {total / _GB:.1f} GB free",
        f"SM clock {gpu['clock_sm_mhz'] or '?'} MHz",
    ]
    fix = "Another program uses its memory: `nvidia-smi` lists them."
    is_fine = free >= total / 2
    reasons = gpu["throttle_reasons"] or ""
    if reasons.startswith("0x") and int(reasons, 16) & _SLOWED:
        parts.append(f"slowed down ({reasons})")
        fix = "Cool it, or check its power."
        is_fine = False
    return _warned(f"GPU {number}", ", ".join(parts), fix=fix, is_fine=is_fine)


def _compiler(device: torch.device) -> Iterator[Finding]:
    from lantern_bench.decoding.engine import compiler_problem
    from lantern_bench.models.networks.packed_linear import build_kernels

    start = now()
    problem = compiler_problem(device)
    trial = f"a trial for {device.type} took {now() - start:.1f} s"
    needed = "a C++ compiler (Debian: apt install g++)"
    if device.type == "cuda":
        needed = "the Triton of this torch with a C compiler (gcc)"
    fix = f"Install {needed}. Decoding is slower without; or pass --no-compile."
    yield _warned("compiler", problem or trial, fix=fix, is_fine=problem is None)
    if device.type == "cpu":
        is_built = build_kernels()
        yield _warned(
            "kernels",
            "built" if is_built else "not built: they need a C++ compiler and AVX2",
            fix="Compiled decoding uses torch's instead, more slowly.",
            is_fine=is_built,
        )


def _bundled(device: torch.device) -> Iterator[Finding]:
    import torch

    from lantern_bench.models.registry import model_of

    model = model_of("lanterns").load(device, torch.float32)
    images = model.draw(torch.zeros(1, model.target.image_tokens, dtype=torch.int64))
    hashes = ", ".join(f"{part} {digest[:8]}" for part, digest in model.weights.items())
    yield Finding(
        "bundled model",
        "ok",
        f"loads and draws {images.shape[1]} x {images.shape[2]} pixels: {hashes}",
    )


def _decode(device: torch.device, dtype: str) -> Iterator[Finding]:
    """Decode a small image of a random model eagerly, compiled, and on CUDA as graphs."""
    import torch

    from lantern_bench.decoding.engine import Engine, compiler_problem
    from lantern_bench.models.networks.packed_linear import pack_for_decoding
    from lantern_bench.models.random_weights import random_model_of_size, read_size

    check = f"decode {dtype}"
    model = random_model_of_size(
        config=read_size("2x64x64x5"),
        device=device,
        dtype=getattr(torch, dtype),
        generator=torch.Generator(device).manual_seed(0),
    )
    if dtype != "float32":
        pack_for_decoding(model.target, model.drafter)  # it rounds the drafter's head
    images = {"eager": _tiny_decode(model, Engine())}
    if compiler_problem(device) is not None:
        yield Finding(check, "ok", "eager only, see the compiler's line")
        return
    pack_for_decoding(model.target, model.drafter)
    engines = {"compiled": Engine(compile=True, graphs=False)}
    if device.type == "cuda":
        engines["graphs"] = Engine(compile=True)
    fallbacks: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it becomes a finding
        for name, engine in engines.items():
            _tiny_decode(model, engine)
            # In the second image all programs are replayed, as in most images of a sweep.
            images[name] = _tiny_decode(model, engine)
            fallbacks |= engine.fallbacks.reasons
    yield _compared(check, images, fallbacks, dtype=getattr(torch, dtype))


def _compared(
    check: str,
    images: Mapping[str, Any],
    fallbacks: Mapping[str, str],
    *,
    dtype: torch.dtype,
) -> Finding:
    """Compare several decodes (`Decoded`) of one image. The first is eager.

    In float32 all tokens must be equal. In half precision rounding may change them.
    """
    import torch

    eager, compiled, *graphs = images.values()
    if any(not compiled.tokens.equal(image.tokens) for image in graphs):
        return Finding(check, "fail", "graphs give other tokens than compiled", fix=_WRONG)
    same = int((eager.tokens == compiled.tokens).long().cumprod(0).sum())
    total = len(eager.tokens)
    if same < total:
        first = eager.logits[: same + 1].float()
        second = compiled.logits[: same + 1].float()
        apart = float((first - second).abs().max() / first.abs().max())
        result = f"compiled = eager to token {same} of {total}, logits {apart:.1e} apart"
        if dtype != torch.float32 and apart < _ROUNDINGS * torch.finfo(dtype).eps:
            return Finding(check, "ok", f"{result}: rounding")
        return Finding(check, "fail", result, fix=_WRONG)
    parts = [
        f"{' = '.join(images)}, {total} of {total} tokens",
        *(f"{stage} fails: {reason}" for stage, reason in fallbacks.items()),
    ]
    return _warned(
        check,
        "; ".join(parts),
        fix="Runs continue without it, more slowly: update the driver and torch, "
        "or report it with this list.",
        is_fine=not fallbacks,
    )


def _tiny_decode(model: LoadedModel, engine: Engine) -> Decoded:
    """Decode an image of 25 tokens with guidance and a relaxed rule, so that every program runs."""
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.decoding.loop import decode, image_generators

    decoding = Decoding("lantern++", tree="small-7", neighbours=5, lambda_=3.0, cfg_scale=1.5)
    (image,) = decode(
        model=model,
        condition=model.condition([""]),
        decoding=decoding,
        generators=image_generators(model, [1]),
        engine=engine,
        keep_logits=True,
    )
    return image
