"""The device and dtype of a run, its models, and their fields of the record key."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, get_args

import psutil
import torch

from lantern_bench.clock import now, usable_cores
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.parse_experiment import DEVICE, DEVICES, DType, Settings
from lantern_bench.decoding.engine import Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.files import cache_folder
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.packed_linear import has_bfloat16, pack_for_decoding
from lantern_bench.models.random_model import check_free
from lantern_bench.models.registry import model_of
from lantern_bench.models.transformer_config import TransformerConfig
from lantern_bench.runs.events import Note
from lantern_bench.schema import SCHEMA_VERSION

ENGINE_VERSION = "10"
"""Incremented when the tokens at a seed or the timing change; a run never mixes two versions."""


class Compute(NamedTuple):
    """The device of a process and the dtype of the models on it."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as the flag writes it: `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose_compute(device: str = "auto", dtype: str = "auto", fast: bool = False) -> Compute:
    """Resolve `auto`: CUDA if available; bfloat16 on CUDA and, if `fast`, on CPUs that have it; else float32.

    Raises `UserError` for another word, `RefusedError` for a device that this machine lacks.
    """
    if re.match(DEVICE, device) is None:
        raise UserError(f"--device {device}: {DEVICES}")
    if dtype not in get_args(DType):
        raise UserError(f"--dtype {dtype}: must be one of {', '.join(get_args(DType))}")
    chosen = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    )
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (chosen.index or 0) >= counts.get(chosen.type, 0):
        raise RefusedError(
            f"--device {device}: this machine has no such device",
            "Leave it out, or give --device cpu.",
        )
    if dtype == "auto":
        narrow = chosen.type == "cuda" or (fast and chosen.type == "cpu" and has_bfloat16(chosen))
        dtype = "bfloat16" if narrow else "float32"
    return Compute(chosen, getattr(torch, dtype))


def load_models(experiment: ResolvedExperiment, compute: Compute) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name; raises `RefusedError` where its cells need too much memory."""
    models = {}
    for name in experiment.settings.model:
        described = model_of(name)
        cells = [cell for cell in experiment.cells if cell.model == name]
        if (sizes := described.sizes) is not None:
            for cell in cells:
                check_memory(
                    decoding=cell.decoding, batch=cell.batch, config=sizes, compute=compute
                )
        model = models[name] = described.load(compute.device, compute.dtype)
        set_space(model, experiment.settings.neighbour_space)
        for cell in cells:
            check_loaded(model=model, decoding=cell.decoding, batch=cell.batch, compute=compute)
    return models


def check_loaded(model: LoadedModel, decoding: Decoding, batch: int, compute: Compute) -> None:
    """Raise `UserError` for a size that the model bounds, and as `check_memory`."""
    decoding.check_sizes(model.name, model.target.image_tokens, model.target.n_codes)
    if isinstance(config := getattr(model.target, "config", None), TransformerConfig):
        check_memory(decoding=decoding, batch=batch, config=config, compute=compute)


# float32 numbers of each node and token that a step holds at once: logits, p, q, noise, quotients
_DISTRIBUTIONS = 16


def check_memory(
    decoding: Decoding, batch: int, config: TransformerConfig, compute: Compute
) -> None:
    """Raise `RefusedError` where cache, mask and distributions of a step, without weights, need more than is free."""
    nodes = 1 + decoding.draft_nodes
    rows = batch * (1 + (decoding.cfg_scale != 1))
    columns = config.prefix + config.image_tokens + 2 * nodes
    heads = config.kv_heads or config.heads
    cache = 2 * config.layers * heads * config.head_dim * compute.dtype.itemsize
    # GSD compares each token with its cluster: p, q and the rows of the codebook.
    values = _DISTRIBUTIONS + 8 * (decoding.cluster or 0)
    neighbours = decoding.neighbours or 0
    needed = rows * columns * (cache + 4 * nodes) + 4 * config.vocab_size * (
        batch * nodes * values + neighbours
    )
    advice = "Give a smaller --batch, or a draft of fewer nodes."
    check_free(
        subject=f"{decoding.cell_id}, batch {batch}",
        needed=needed,
        device=compute.device,
        advice=advice,
    )


def set_space(model: LoadedModel, space: Space | None) -> None:
    """Set the space of neighbours (None: as published); raises `UserError` for a model with its own table."""
    if space is not None and model.given_table is not None:
        problem = f"--neighbour-space {space}: {model.name} has its own neighbour table"
        raise UserError(problem, "Leave one of them out.")
    model.neighbour_space = space or model.neighbour_space


def compile_models(models: Iterable[LoadedModel], compute: Compute) -> Note | None:
    """Have the models' decode steps compiled at their first use and pack their weights; else return why not."""
    on_cpu = compute.device.type == "cpu"
    folders = [
        (model, program_folder(model, compute) if on_cpu else None)
        for model in models
        if model.compiles
    ]
    # Where programs were saved, the compiler worked.
    saved = all(folder and any(folder.glob("*.program")) for _, folder in folders)
    if not saved and (problem := compiler_problem(compute.device)) is not None:
        advice = "Decoding is slower without. Install torch 2.10 or newer and a C++ compiler, or pass --no-compile."
        return Note(f"decoding is not compiled: {problem}", advice, "warning")
    for model, folder in folders:
        pack_for_decoding(model.target, model.drafter)
        model.engine = Engine(compile=True, folder=folder)
    return None


def program_folder(model: LoadedModel, compute: Compute) -> Path:
    """Return where the programs of a model are saved; the name covers all that they depend on."""
    code = Path(__file__).parents[1]
    files = sorted(
        file
        for part in ("config", "decoding", "methods", "models")
        for file in (code / part).rglob("*.py")
    )
    outside = {name: row.fingerprint() for name, row in (OUTSIDE_RULES | OUTSIDE_DRAFTINGS).items()}
    # `model.weights` alone does not tell apart models of random weights.
    parts = (
        model.name,
        sorted(model.weights.items()),
        repr(model.target),
        repr(model.drafter),
        compute.dtype_name,
    )
    environment = (ENGINE_VERSION, str(torch.__version__), *processor(), sorted(outside.items()))
    digest = hashlib.sha256(repr((parts, environment)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return cache_folder() / "programs" / digest.hexdigest()[:24]


def processor() -> tuple[str, ...]:
    """What compiled code depends on in a CPU: its architecture, model and instructions."""
    lines = _cpu_listing().splitlines() or [platform.processor()]
    kinds = {
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(kinds)


def _cpu_listing() -> str:
    listing = Path("/proc/cpuinfo")
    return listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""


def key_fields(
    models: Mapping[str, LoadedModel],
    settings: Settings,
    compute: Compute,
    cells: Iterable[Cell] = (),
) -> dict[str, Any]:
    """Return the fields of the record key that hold for the whole run, such as hashes of weights."""
    parts = {
        f"{name}/{part}": digest
        for name, model in models.items()
        for part, digest in model.weights.items()
    }
    if settings.neighbour_space is not None:
        parts |= {f"{name}/neighbours": settings.neighbour_space for name in models}
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
        "dtype": compute.dtype_name,
        "device_type": compute.device.type,
        "compile": any(model.engine.compile for model in models.values()),
        "weights": parts,
    }
    decodings = [cell.decoding for cell in cells]
    rules = {decoding.rule for decoding in decodings} & OUTSIDE_RULES.keys()
    draftings = {decoding.drafting for decoding in decodings} & OUTSIDE_DRAFTINGS.keys()
    outside = {
        "rules": {name: OUTSIDE_RULES[name].fingerprint() for name in sorted(rules)},
        "draftings": {name: OUTSIDE_DRAFTINGS[name].fingerprint() for name in sorted(draftings)},
    }
    return fields | {name: codes for name, codes in outside.items() if codes}


# ---- The machine block of the manifest

PACKAGES = (
    "lantern-bench",
    "torch",
    "torchvision",
    "torch-fidelity",
    "open-clip-torch",
    "numpy",
    "scipy",
    "pandas",
    "pillow",
    "pydantic",
    "safetensors",
    "triton",
)
# By the manifest's names.
_GPU_FIELDS = {
    "driver": "driver_version",
    "clock_sm_mhz": "clocks.sm",
    "clock_memory_mhz": "clocks.mem",
    "clock_sm_max_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_throttle_reasons.active",
}


def machine_block() -> dict[str, Any]:
    """Describe this machine and process as JSON-ready values; None for what cannot be read."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpu": _cpu_block(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "gpus": gpu_blocks(),
        "versions": package_versions(),
        "cuda": torch.version.cuda,
        "git": git_state(),
    }


def _cpu_block() -> dict[str, Any]:
    frequency = psutil.cpu_freq()
    named = re.search(r"^model name\s*:\s*(.+)$", _cpu_listing(), flags=re.MULTILINE)
    model = named[1].strip() if named else _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return {
        "model": model or platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(usable_cores()),
        "torch_threads": torch.get_num_threads(),
        "openmp": {
            name: os.environ.get(name)
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
        },
        "clock_mhz": round(frequency.current) if frequency else None,
        "clock_max_mhz": round(frequency.max) if frequency and frequency.max else None,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_1min": round(psutil.getloadavg()[0], 2),
    }


def gpu_blocks() -> list[dict[str, Any]]:
    """One block for each GPU that torch can use."""
    blocks = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        block = {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "compute_capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
        }
        blocks.append(block | _gpu_state(f"GPU-{device.uuid}"))
    return blocks


def _gpu_state(uuid: str) -> dict[str, str | None]:
    """Driver, clocks and throttling of one GPU, as nvidia-smi prints them."""
    query = ",".join(_GPU_FIELDS.values())
    answer = _output(
        ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    )
    values = [value.strip() for value in answer.split(",")] if answer else []
    complete = len(values) == len(_GPU_FIELDS)
    return dict(zip(_GPU_FIELDS, values, strict=True)) if complete else dict.fromkeys(_GPU_FIELDS)


_STATE_SECONDS = 10.0  # clocks are read again after so long: nvidia-smi takes a tenth of a second


def device_columns(device: torch.device) -> dict[str, Any]:
    """Return the columns that say which device made an image; `device_id` names no host."""
    return _device_columns(device, int(now() / _STATE_SECONDS))


@functools.lru_cache(maxsize=1)
def _device_columns(device: torch.device, _period: int) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        identity = str(properties.uuid)
        state = _gpu_state(f"GPU-{properties.uuid}")
        clocks = {"clock_mhz": state["clock_sm_mhz"], "clock_max_mhz": state["clock_sm_max_mhz"]}
        driver = state["driver"]
        read = {key: int(mhz) if mhz and mhz.isdigit() else None for key, mhz in clocks.items()}
    else:
        cpu = _cpu_block()
        name = cpu["model"]
        identity = f"{platform.node()} {uuid.getnode()}"
        driver = None
        read = {key: cpu[key] for key in ("clock_mhz", "clock_max_mhz")}
    device_id = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return {"device": name, "device_id": device_id, "driver": driver, **read}


def package_versions() -> dict[str, str | None]:
    """The installed version of each of `PACKAGES`; None for one that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state() -> dict[str, Any]:
    """The commit of this code and whether tracked files differ; both None outside its checkout."""
    folder = Path(__file__).resolve().parent
    tracked = _output(["git", "-C", str(folder), "ls-files", Path(__file__).name])
    describe = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty",
    ]
    commit = _output(describe) if tracked else None
    return {
        "commit": commit and commit.removesuffix("-dirty"),
        "dirty": commit and commit.endswith("-dirty"),
    }


def _output(command: list[str]) -> str | None:
    """The output of a command, stripped; None when it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
