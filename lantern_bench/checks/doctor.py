"""The checks of `lantern-bench doctor`; they import torch inside, because a broken torch is what they look for."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import psutil

from lantern_bench.models.checkpoints.hub import PARTS, local_path
from lantern_bench.storage.run_directory import results_root
from lantern_bench.utils.clock import now, usable_cores, usage
from lantern_bench.utils.errors import LanternError
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.text import one_line

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.engine import Engine
    from lantern_bench.decoding.loop import Decoded
    from lantern_bench.models.loaded_model import LoadedModel


State: TypeAlias = Literal["ok", "warning", "fail"]
_GB = 1e9
_BUSY_SHARE = 0.15  # of this process's cores, used by other programs
# nvidia-smi's bits for hardware slowdown, too hot (software, hardware), power brake
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
# half precision: logits of eager and compiled steps may differ by so many roundings of the largest
# one
_ROUNDINGS = 16
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
    """Yield the findings, cheap checks first; `device` as the flag."""
    for check in (_package, _load, _memory, _disk, _weights):
        yield from _guarded(check.__name__.strip("_"), check)
    # Without torch or without the device nothing below can run.
    for name, check in (("torch", _torch), ("device", partial(_device, device))):
        for finding in _guarded(name, check):
            yield finding
            if finding.check == name and finding.state == "fail":
                return
    from lantern_bench.devices.compute import choose_compute

    target = choose_compute(device, fast=True)
    yield from _guarded("compiler", partial(_compiler, target.device))
    yield from _guarded("bundled model", partial(_bundled, target.device))
    dtypes = (
        ["float32", "bfloat16", "float16"]
        if target.device.type == "cuda"
        else ["float32", target.dtype_name]
    )
    for dtype in dict.fromkeys(dtypes):
        yield from _guarded(f"decode {dtype}", partial(_decode, target.device, dtype))


def _guarded(check: str, findings: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from findings()
    except LanternError as error:
        yield Finding(check=check, state="fail", result=error.message, fix=error.advice or "")
    except Exception as error:  # a broken installation raises errors of all kinds
        yield Finding(
            check=check,
            state="fail",
            result=one_line(error),
            fix="Not expected: report it with this list.",
        )


def _package() -> Iterator[Finding]:
    from lantern_bench import __version__

    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("package", "ok", f"lantern-bench {__version__}, {system}")
    names = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
        if os.environ.get(name)
    ]
    names += sorted(
        name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")
    )
    yield Finding(
        "network", "ok", f"set: {', '.join(names) or 'no variable'}; nothing was contacted"
    )


def _load() -> Iterator[Finding]:
    before = usage()
    start = now()
    Event().wait(0.5)
    spent = usage().since(before)
    cores = len(usable_cores())
    others = min(1.0, max(0.0, spent.busy_seconds - spent.cpu_seconds) / (now() - start) / cores)
    result = f"{others:.0%} of {cores} cores busy with other programs, load average {psutil.getloadavg()[0]:.2f}"
    if spent.steal_seconds:
        result += f", {spent.steal_seconds / (now() - start) / cores:.0%} taken by the hypervisor"
    fix = "Timings are too long and marked disturbed: stop other programs, or measure later."
    busy = others > _BUSY_SHARE
    yield Finding(
        check="load", state="warning" if busy else "ok", result=result, fix=fix if busy else ""
    )


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    free = memory.available
    result = f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free"
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text.isdigit() and int(text) < memory.total:
        container_free = int(text) - int((limit.parent / "memory.current").read_text())
        free = min(free, container_free)
        result = f"{result}; {container_free / _GB:.1f} GB free in this container"
    yield _by_size(
        check="memory", free=free, enough=2 * _GB, result=result, fix="Stop other programs."
    )


def _disk() -> Iterator[Finding]:
    for name, folder, variable in (
        ("runs", results_root(), "LANTERN_BENCH_RESULTS, or --out"),
        ("cache", cache_folder(), "XDG_CACHE_HOME"),
        ("temp files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        check = f"disk for {name}"
        absolute = folder.absolute()
        existing = next(path for path in (absolute, *absolute.parents) if path.is_dir())
        free = shutil.disk_usage(existing).free
        try:
            with tempfile.TemporaryFile(dir=existing):
                result = f"{_without_user(folder)}: writable, {free / _GB:.1f} GB free"
        except OSError as error:
            # Without a cache everything works, and is computed again.
            state: State = "warning" if name == "cache" else "fail"
            result = f"{_without_user(folder)}: cannot be written: {error.strerror}"
            yield Finding(
                check=check, state=state, result=result, fix=f"Choose another: {variable}."
            )
            continue
        yield _by_size(
            check=check,
            free=free,
            enough=1 * _GB,
            result=result,
            fix=f"Make room, or choose another: {variable}.",
        )


def _by_size(check: str, free: float, enough: float, result: str, fix: str) -> Finding:
    """Less than enough is a warning, less than a tenth of it a failure."""
    if free >= enough:
        return Finding(check, "ok", result)
    return Finding(
        check=check, state="warning" if free >= enough / 10 else "fail", result=result, fix=fix
    )


def _without_user(path: Path) -> str:
    path = path.absolute()
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _weights() -> Iterator[Finding]:
    missing = {
        model: [name for name, part in parts.items() if not local_path(part)]
        for model, parts in PARTS.items()
    }
    complete = [model for model, names in missing.items() if not names]
    yield Finding("weights", "ok", f"published models here: {', '.join(complete) or 'none'}")
    for model, names in missing.items():
        if 0 < len(names) < len(PARTS[model]):
            result = f"{model} lacks {', '.join(names)}"
            yield Finding(
                check="weights",
                state="warning",
                result=result,
                fix=f"lantern-bench weights get {model}",
            )


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("torch", "ok", f"torch {torch.__version__}, {cuda}")
    try:
        import torchvision

        # A torchvision that was built for another torch can be imported; its compiled part then fails.
        boxes = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
        assert boxes.tolist() == [0], f"torchvision.ops.nms gives {boxes.tolist()}"
        yield Finding(
            "torchvision", "ok", f"torchvision {torchvision.__version__}, its compiled part runs"
        )
    except Exception as error:  # a wrong pair raises errors of all kinds
        fix = "Install the pair together, from one index: pip install --upgrade torch torchvision"
        yield Finding(check="torchvision", state="fail", result=one_line(error), fix=fix)


def _device(device: str) -> Iterator[Finding]:
    import torch

    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.devices.machine import machine_block

    machine = machine_block()
    cpu = machine["cpu"]
    result = f"{cpu['model']}, {cpu['usable_cores']} of {cpu['logical_cores']} cores usable, {cpu['capability']}"
    yield Finding("CPU", "ok", f"{result}, torch uses {cpu['torch_threads']} threads")
    for number, gpu in enumerate(machine["gpus"]):
        free, total = torch.cuda.mem_get_info(number)
        result = f"{gpu['name']}, compute capability {gpu['compute_capability']}, driver {gpu['driver'] or 'unknown'}, "
        result += f"{free / _GB:.1f} of {total / _GB:.1f} GB free, SM clock {gpu['clock_sm_mhz'] or '?'} MHz"
        reasons = gpu["throttle_reasons"] or ""
        fix = ""
        if reasons.startswith("0x") and int(reasons, 16) & _SLOWED:
            result = f"{result}, slowed down ({reasons})"
            fix = "Cool it, or check its power."
        elif free < total / 2:
            fix = "Another program uses its memory: `nvidia-smi` lists them."
        yield Finding(
            check=f"GPU {number}", state="warning" if fix else "ok", result=result, fix=fix
        )
    if not machine["gpus"] and shutil.which("nvidia-smi"):
        # nvidia-smi is on every machine that is made for a GPU, also where none is attached.
        built = (
            "update the driver, or attach a GPU"
            if torch.version.cuda
            else "install a torch that is built for CUDA"
        )
        yield Finding(
            check="GPU",
            state="warning",
            result="nvidia-smi is installed, and torch finds no GPU",
            fix=f"To use a GPU: {built}.",
        )
    compute = choose_compute(device)
    yield Finding(
        "device",
        "ok",
        f"--device {device} is {compute.device}, with --dtype auto {compute.dtype_name}",
    )


def _compiler(device: torch.device) -> Iterator[Finding]:
    from lantern_bench.decoding.engine import compiler_problem
    from lantern_bench.models.networks.packed_linear import build_kernels

    start = now()
    problem = compiler_problem(device)
    if problem is None:
        yield Finding("compiler", "ok", f"a trial for {device.type} took {now() - start:.1f} s")
    else:
        on_gpu = "the Triton of this torch with a C compiler (gcc)"
        needed = on_gpu if device.type == "cuda" else "a C++ compiler (Debian: apt install g++)"
        fix = f"Install torch 2.10 or newer and {needed}. Decoding is slower without; or pass --no-compile."
        yield Finding(check="compiler", state="warning", result=problem, fix=fix)
    if device.type == "cpu" and build_kernels():
        yield Finding("kernels", "ok", "built")
    elif device.type == "cpu":
        result = "not built: they need a C++ compiler, AVX2 and torch 2.10"
        yield Finding(
            check="kernels",
            state="warning",
            result=result,
            fix="Compiled decoding uses torch's instead, more slowly.",
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
    from lantern_bench.models.random_model import random_model_of_size, read_size

    size = read_size("2x64x64x5")
    generator = torch.Generator(device).manual_seed(0)
    check = f"decode {dtype}"
    model = random_model_of_size(
        config=size, device=device, dtype=getattr(torch, dtype), generator=generator
    )
    if dtype != "float32":
        pack_for_decoding(model.target, model.drafter)  # it rounds the drafter's head
    images = {"eager": _tiny_decode(model, Engine())}
    if compiler_problem(device) is not None:
        yield Finding(check, "ok", "eager only, see the compiler's line")
        return
    pack_for_decoding(model.target, model.drafter)
    engines = {"compiled": Engine(compile=True, graphs=False)}
    engines |= {"graphs": Engine(compile=True)} if device.type == "cuda" else {}
    fallbacks: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it becomes a finding
        for name, engine in engines.items():
            _tiny_decode(model, engine)
            # sweeps decode many images: now all programs are replayed
            images[name] = _tiny_decode(model, engine)
            fallbacks |= engine.fallbacks
    yield _compared(check=check, images=images, fallbacks=fallbacks, dtype=getattr(torch, dtype))


def _compared(
    check: str, images: Mapping[str, Decoded], fallbacks: Mapping[str, str], dtype: torch.dtype
) -> Finding:
    """The finding of decodes of one image, the first of them eager: in float32 all tokens must be the same."""
    import torch

    names = list(images)
    eager, compiled, *graphs = images.values()
    if any(not compiled.tokens.equal(image.tokens) for image in graphs):
        return Finding(
            check=check,
            state="fail",
            result=f"{names[-1]} give other tokens than {names[1]}",
            fix=_WRONG,
        )
    same = int((eager.tokens == compiled.tokens).long().cumprod(0).sum())
    total = len(eager.tokens)
    if same < total:
        assert eager.logits is not None
        assert compiled.logits is not None
        a = eager.logits[: same + 1].float()
        b = compiled.logits[: same + 1].float()
        apart = float((a - b).abs().max() / a.abs().max())
        result = (
            f"{' = '.join(names[1:])} = eager to token {same} of {total}, logits {apart:.1e} apart"
        )
        if dtype == torch.float32 or not apart < _ROUNDINGS * torch.finfo(dtype).eps:
            return Finding(check=check, state="fail", result=result, fix=_WRONG)
        return Finding(check, "ok", f"{result}: rounding")
    result = f"{' = '.join(names)}, {total} of {total} tokens"
    if fallbacks:
        why = "; ".join(f"{stage} fails: {reason}" for stage, reason in fallbacks.items())
        fix = "Runs continue without it, more slowly: update the driver and torch, or report it with this list."
        return Finding(check=check, state="warning", result=f"{result}; {why}", fix=fix)
    return Finding(check, "ok", result)


def _tiny_decode(model: LoadedModel, engine: Engine) -> Decoded:
    """An image of 25 tokens with guidance and a relaxed rule, so that every program of a step runs."""
    import torch

    from lantern_bench.config.decoding import Decoding
    from lantern_bench.decoding.loop import decode

    decoding = Decoding("lantern++", tree="small-7", neighbours=5, lambda_=3.0, cfg_scale=1.5)
    generator = torch.Generator(model.target.device).manual_seed(1)
    (image,) = decode(
        model=model,
        condition=model.condition([""]),
        decoding=decoding,
        generators=[generator],
        engine=engine,
        keep_logits=True,
    )
    return image
