"""Checks of an installation and a machine: what `lantern-bench doctor` prints, and a user pastes into a bug report.

Every check is guarded: what it raises is its finding. Nothing is contacted unless asked for. torch is imported inside
the checks, because a broken torch is one of the things they look for.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import psutil

from lantern_bench.clock import now, usable_cores, usage
from lantern_bench.errors import LanternError, one_line
from lantern_bench.models.io.files import cache_folder
from lantern_bench.models.io.hub_files import SOURCES, find_part, weights_root
from lantern_bench.runs.store import results_root

if TYPE_CHECKING:
    import torch

    from lantern_bench.decoding.compile import Engine
    from lantern_bench.decoding.loop import Decoded
    from lantern_bench.models.loaded_model import LoadedModel

State: TypeAlias = Literal["ok", "warning", "fail"]
_GB = 1e9
# Less free memory and disk than this is a warning, a tenth of it a failure.
_LITTLE = {"memory": 2 * _GB, "disk": 1 * _GB}
# Of what other programs use of this process's cores.
_BUSY_SHARE = 0.15
# Bits of nvidia-smi's reasons for lower clocks: hardware slowdown, too hot (software, hardware), power brake.
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
_BUG = "Not expected: report it with this list."
_DRIVER = "Do not trust runs on this GPU: update the driver and torch, then repeat."
_WRONG = "Do not trust compiled runs on this machine: pass --no-compile, and report it with this list."
_FALLBACK = "Runs continue without it, more slowly: update the driver and torch, or report it with this list."
# Half precision: logits of eager and compiled steps may differ by so many roundings of the largest one.
_ROUNDINGS = 16


class Finding(NamedTuple):
    """One line: what was checked, how it is, what was found, and how to repair it."""

    check: str
    state: State
    found: str
    fix: str = ""


def examine(device: str = "auto") -> Iterator[Finding]:
    """Yield the findings, cheap checks first; `device` as the flag."""
    yield from _guarded("package", _package)
    yield from _guarded("load", _load)
    yield from _guarded("memory", _memory)
    yield from _guarded("disk", _disk)
    yield from _guarded("caches", _caches)
    yield from _guarded("weights", _weights)
    yield from _guarded("network", _network)
    # Without torch or without the device nothing below can run.
    for check, needed in (("torch", _torch), ("device", lambda: _device(device))):
        for finding in _guarded(check, needed):
            yield finding
            if finding.check == check and finding.state == "fail":
                return
    from lantern_bench.runs.devices import choose_compute

    where = choose_compute(device).device
    yield from _guarded("compiler", lambda: _compiler(where))
    yield from _guarded("bundled model", lambda: _bundled(where))
    if where.type == "cuda":
        yield from _guarded("side stream", lambda: _side_stream(where))
        yield from _guarded("graph capture", lambda: _graph(where))
    for name in _dtypes(where):
        yield from _guarded(f"decode {name}", partial(_decode, where, name))


def _guarded(check: str, findings: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from findings()
    except LanternError as error:
        yield Finding(check, "fail", error.message, error.advice or "")
    except Exception as error:  # whatever a broken installation raises is what the user asked for
        yield Finding(check, "fail", one_line(error), _BUG)


# ---- Without torch


def _package() -> Iterator[Finding]:
    from lantern_bench import __version__

    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("package", "ok", f"lantern-bench {__version__}, {system}")


def _load() -> Iterator[Finding]:
    before, began = usage(), now()
    Event().wait(0.5)
    spent, cores = usage().since(before), len(usable_cores())
    others = min(1.0, max(0.0, spent.busy_seconds - spent.cpu_seconds) / (now() - began) / cores)
    found = f"{others:.0%} of {cores} cores busy with other programs, load average {psutil.getloadavg()[0]:.2f}"
    if spent.steal_seconds:
        found += f", {spent.steal_seconds / (now() - began) / cores:.0%} taken by the hypervisor"
    busy = others > _BUSY_SHARE
    fix = "Timings are too long and marked disturbed: stop other programs, or measure later." if busy else ""
    yield Finding("load", "warning" if busy else "ok", found, fix)


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    free, found = memory.available, f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free"
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text.isdigit() and int(text) < memory.total:
        left = int(text) - int((limit.parent / "memory.current").read_text())
        free, found = min(free, left), f"{found}; {left / _GB:.1f} GB left to this container"
    yield Finding("memory", _by_size(free, "memory"), found, _unless_plenty(free, "memory", "Stop other programs."))


def _by_size(free: float, kind: str) -> State:
    return "ok" if free >= _LITTLE[kind] else "warning" if free >= _LITTLE[kind] / 10 else "fail"


def _unless_plenty(free: float, kind: str, fix: str) -> str:
    return "" if free >= _LITTLE[kind] else fix


def _disk() -> Iterator[Finding]:
    for name, folder, variable in (
        ("runs", results_root(), "LANTERN_BENCH_RESULTS, or --out"),
        ("cache", cache_folder(), "XDG_CACHE_HOME"),
        ("temp files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        check, there = f"disk for {name}", _existing(folder)
        free, found = shutil.disk_usage(there).free, f"{_shown(folder)}: "
        try:
            with tempfile.TemporaryFile(dir=there):
                found += f"writable, {free / _GB:.1f} GB free"
        except OSError as error:
            # Without a cache everything works, and is computed again.
            state: State = "warning" if name == "cache" else "fail"
            yield Finding(check, state, f"{found}cannot be written: {error.strerror}", f"Choose another: {variable}.")
            continue
        fix = f"Make room, or choose another: {variable}."
        yield Finding(check, _by_size(free, "disk"), found, _unless_plenty(free, "disk", fix))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _shown(path: Path) -> str:
    """A path without the name of the user."""
    path, home = path.absolute(), Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _caches() -> Iterator[Finding]:
    sizes = []
    for name, what in (("programs", "compiled programs"), ("inductor", "compiler"), ("tables", "neighbour tables")):
        files = [file for file in (cache_folder() / name).rglob("*") if file.is_file()]
        sizes.append(f"{what} {sum(map(_size, files)) / 1e6:.0f} MB")
    yield Finding("caches", "ok", f"{', '.join(sizes)} in {_shown(cache_folder())}; may be deleted")


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):  # another process removes it
        return file.stat().st_size
    return 0


def _weights() -> Iterator[Finding]:
    parts = {model: [find_part(model, part.name) is not None for part in found] for model, found in SOURCES.items()}
    whole = [model for model, found in parts.items() if all(found)]
    yield Finding("weights", "ok", f"published models here: {', '.join(whole) or 'none'}, in {_shown(weights_root())}")
    for model, found in parts.items():
        if any(found) and not all(found):
            missing = [part.name for part, there in zip(SOURCES[model], found, strict=True) if not there]
            fix = f"lantern-bench weights get {model}"
            yield Finding("weights", "warning", f"{model} lacks {', '.join(missing)}", fix)


def _network() -> Iterator[Finding]:
    names = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT") if os.environ.get(name)]
    proxies = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    yield Finding("network", "ok", f"set: {', '.join([*names, *proxies]) or 'no variable'}; nothing was contacted")


# ---- torch, compilers, devices


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("torch", "ok", f"torch {torch.__version__}, {cuda}")
    try:
        import torchvision

        # A torchvision that was built for another torch can be imported; its compiled part then fails.
        kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
        assert kept.tolist() == [0], f"torchvision.ops.nms gives {kept.tolist()}"
        yield Finding("torchvision", "ok", f"torchvision {torchvision.__version__}, its compiled part runs")
    except Exception as error:  # a wrong pair raises errors of all kinds
        fix = "Install the pair together, from one index: pip install --upgrade torch torchvision"
        yield Finding("torchvision", "fail", one_line(error), fix)


def _device(device: str) -> Iterator[Finding]:
    import torch

    from lantern_bench.runs.devices import choose_compute
    from lantern_bench.runs.machine import machine_block

    machine = machine_block()
    cpu = machine["cpu"]
    found = f"{cpu['model']}, {cpu['usable_cores']} of {cpu['logical_cores']} cores usable, {cpu['capability']}"
    yield Finding("CPU", "ok", f"{found}, torch uses {cpu['torch_threads']} threads")
    for number, gpu in enumerate(machine["gpus"]):
        yield _gpu(number, gpu)
    if not machine["gpus"] and shutil.which("nvidia-smi"):
        # It is on every machine that is made for a GPU, also where none is attached.
        text = "nvidia-smi is installed, and torch finds no GPU"
        built = "update the driver, or attach a GPU" if torch.version.cuda else "install a torch that is built for CUDA"
        yield Finding("GPU", "warning", text, f"To use a GPU: {built}.")
    compute = choose_compute(device)
    yield Finding("device", "ok", f"--device {device} is {compute.device}, with --dtype auto {compute.dtype_name}")


def _gpu(number: int, gpu: Mapping[str, Any]) -> Finding:
    import torch

    free, whole = torch.cuda.mem_get_info(number)
    found = f"{gpu['name']}, compute capability {gpu['compute_capability']}, driver {gpu['driver'] or 'unknown'}, "
    found += f"{free / _GB:.1f} of {whole / _GB:.1f} GB free, SM clock {gpu['clock_sm_mhz'] or '?'} MHz"
    reasons = gpu["throttle_reasons"] or ""
    if reasons.startswith("0x") and int(reasons, 16) & _SLOWED:
        return Finding(f"GPU {number}", "warning", f"{found}, slowed down ({reasons})", "Cool it, or check its power.")
    if free < whole / 2:
        return Finding(f"GPU {number}", "warning", found, "Another program holds its memory: `nvidia-smi` lists them.")
    return Finding(f"GPU {number}", "ok", found)


def _compiler(device: torch.device) -> Iterator[Finding]:
    import torch

    from lantern_bench.decoding.compile import compiler_problem
    from lantern_bench.models.packed_linear import build_kernels

    slower = "Decoding is slower without; or pass --no-compile."
    for kind in dict.fromkeys(("cpu", device.type)):
        here = torch.device(kind) if kind != device.type else device
        began, problem = now(), compiler_problem(here)
        if problem is None:
            yield Finding(f"compiler for {kind}", "ok", f"{_compiler_name(kind)}; a trial took {now() - began:.1f} s")
        else:
            install = (
                "a C++ compiler (Debian: apt install g++)"
                if kind == "cpu"
                else "the Triton of this torch with a C compiler (gcc)"
            )
            fix = f"Install torch 2.10 or newer and {install}. {slower}"
            yield Finding(f"compiler for {kind}", "warning", f"{_compiler_name(kind)}: {problem}", fix)
    if device.type == "cpu":
        built = build_kernels()
        found = "built" if built else "not built: they need a C++ compiler, AVX2 and torch 2.10"
        fix = "" if built else "Compiled decoding multiplies with oneDNN instead, which is slower."
        yield Finding("own kernels", "ok" if built else "warning", found, fix)


def _compiler_name(kind: str) -> str:
    """The compiler's name and version; what is missing where there is none."""
    try:
        if kind == "cuda":
            return f"Triton {metadata.version('triton')}"
        from torch._inductor.cpp_builder import get_cpp_compiler

        name = get_cpp_compiler()
        done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except Exception as error:  # torch's errors of a missing compiler are of several kinds
        return f"none found ({type(error).__name__})"
    return (done.stdout.splitlines() or [name])[0].strip()


def _bundled(device: torch.device) -> Iterator[Finding]:
    import torch

    from lantern_bench.models.registry import model_of

    model = model_of("lanterns").load(device, torch.float32)
    images = model.pixels.pixels(torch.zeros(1, model.target.image_tokens, dtype=torch.int64))
    hashes = ", ".join(f"{part} {digest[:8]}" for part, digest in model.weights.items())
    yield Finding("bundled model", "ok", f"loads and draws {images.shape[1]} x {images.shape[2]} pixels: {hashes}")


# ---- CUDA alone, without a model


def _side_stream(device: torch.device) -> Iterator[Finding]:
    import torch

    x = torch.arange(1024.0, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        y = x * 2 + 1
    torch.cuda.current_stream(device).wait_stream(stream)
    right = bool((y == 2 * torch.arange(1024.0, device=device) + 1).all())
    found = "work on a second stream is ordered and right" if right else "work on a second stream gives wrong numbers"
    yield Finding("side stream", "ok" if right else "fail", found, "" if right else _DRIVER)


def _graph(device: torch.device) -> Iterator[Finding]:
    """Warm up, capture and replay a small program without the compiler, with inputs that change."""
    import torch

    from lantern_bench.decoding.compile import Engine, GraphedProgram

    weight, engine = torch.eye(64, device=device) * 2, Engine(compile=True)

    def double(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu()

    program = GraphedProgram(lambda x: double(x), double, device, engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it becomes a finding
        right = all(
            bool((program(torch.full((4, 64), float(value), device=device)) == 2.0 * value).all()) for value in range(5)
        )
    if not right:
        yield Finding("graph capture", "fail", "a replayed CUDA graph gives other numbers than its program", _DRIVER)
    elif engine.fallbacks:
        yield Finding("graph capture", "warning", f"fails: {engine.fallbacks['capture']}", _FALLBACK)
    else:
        yield Finding("graph capture", "ok", "captured and replayed with changing inputs")


# ---- A tiny decode


def _dtypes(device: torch.device) -> list[str]:
    """The types that runs on this device may use."""
    if device.type == "cuda":
        return ["float32", "bfloat16", "float16"]
    from lantern_bench.runs.devices import choose_compute

    return list(dict.fromkeys(("float32", choose_compute(str(device), fast=True).dtype_name)))


def _decode(device: torch.device, dtype: str) -> Iterator[Finding]:
    """Decode a small image of a random model eagerly, compiled, and on CUDA as graphs.

    In float32 all tokens are the same. In half precision compiled code rounds in other places: as far as tokens are the
    same, logits are close, and graphs give the tokens of the compiled programs that they were captured from.
    """
    import torch

    from lantern_bench.decoding.compile import Engine, compiler_problem
    from lantern_bench.models.packed_linear import pack_for_decoding

    check, model = f"decode {dtype}", _tiny_model(device, getattr(torch, dtype))
    if dtype != "float32":
        pack_for_decoding(model.target, model.drafter)  # it rounds the drafter's head
    made = {"eager": _tiny_decode(model, Engine())}
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
            # Sweeps decode many images: from the second on all programs are replayed.
            first, made[name] = (_tiny_decode(model, engine) for _ in range(2))
            fallbacks |= engine.fallbacks
            if not first.tokens.equal(made[name].tokens):
                yield Finding(check, "fail", f"{name}: a second decode gives other tokens than the first", _WRONG)
                return
    yield _compared(check, made, fallbacks, getattr(torch, dtype))


def _compared(check: str, made: Mapping[str, Decoded], fallbacks: Mapping[str, str], dtype: torch.dtype) -> Finding:
    """The finding of decodes of one image, the first of them eager."""
    import torch

    names, (eager, compiled, *graphs) = list(made), made.values()
    if any(not compiled.tokens.equal(one.tokens) for one in graphs):
        return Finding(check, "fail", f"{names[-1]} give other tokens than {names[1]}", _WRONG)
    same = int((eager.tokens == compiled.tokens).long().cumprod(0).sum())
    found, whole = " = ".join(names), len(eager.tokens)
    if same < whole:
        assert eager.logits is not None and compiled.logits is not None
        a, b = (one.logits[: same + 1].float() for one in (eager, compiled))  # type: ignore[index]
        apart = float((a - b).abs().max() / a.abs().max())
        found = f"{' = '.join(names[1:])} = eager to token {same} of {whole}, logits {apart:.1e} apart"
        if dtype == torch.float32 or not apart < _ROUNDINGS * torch.finfo(dtype).eps:
            return Finding(check, "fail", found, _WRONG)
        return Finding(check, "ok", f"{found}: rounding")
    if fallbacks:
        why = "; ".join(f"{what} fails: {reason}" for what, reason in fallbacks.items())
        return Finding(check, "warning", f"{found}, {whole} of {whole} tokens; {why}", _FALLBACK)
    return Finding(check, "ok", f"{found}, {whole} of {whole} tokens")


def _tiny_model(device: torch.device, dtype: torch.dtype) -> LoadedModel:
    import torch

    from lantern_bench.models.random_model import random_model_of_size, read_size

    return random_model_of_size(read_size("2x64x64x5"), device, dtype, torch.Generator(device).manual_seed(0))


def _tiny_decode(model: LoadedModel, engine: Engine) -> Decoded:
    """An image of 25 tokens with guidance: a relaxed rule on a drafted tree, so that every program of a step runs."""
    import torch

    from lantern_bench.config.decoding import Decoding
    from lantern_bench.decoding.loop import decode

    decoding = Decoding("lantern++", tree="small-7", neighbours=5, lambda_=3.0, cfg_scale=1.5)
    generator = torch.Generator(model.target.device).manual_seed(1)
    (image,) = decode(model, model.condition([""]), decoding, [generator], engine=engine, keep_logits=True)
    return image
