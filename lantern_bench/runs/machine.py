"""The machine block of the manifest: what could explain a difference between two machines' figures.

CPU, memory, threads, load, GPU with clocks and throttling, versions, commit. It has no host name and no absolute path,
so a manifest can be published.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from lantern_bench.clock import now

PACKAGES = (
    "lantern-bench", "torch", "torchvision", "torch-fidelity", "open-clip-torch", "numpy", "scipy", "pandas", "pillow",
    "pydantic", "safetensors", "triton",
)  # fmt: skip
# Fields of nvidia-smi, by the names the manifest gives them.
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
    """Describe this machine and this process as JSON-ready values; None where something cannot be read."""
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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    model = named[1].strip() if named else _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return {
        "model": model or platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable,
        "torch_threads": torch.get_num_threads(),
        "openmp": {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")},
        "clock_mhz": round(frequency.current) if frequency else None,
        "clock_max_mhz": round(frequency.max) if frequency and frequency.max else None,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_1min": round(psutil.getloadavg()[0], 2),
    }


def gpu_blocks() -> list[dict[str, Any]]:
    """One block for each GPU that torch can use; nvidia-smi, if installed, gives clocks, driver and throttling."""
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
    answer = _output(["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    values = [value.strip() for value in answer.split(",")] if answer else []
    complete = len(values) == len(_GPU_FIELDS)
    return dict(zip(_GPU_FIELDS, values, strict=True)) if complete else dict.fromkeys(_GPU_FIELDS)


class _Reading(NamedTuple):
    """The columns of a device, and when they were read."""

    time: float
    columns: dict[str, Any]


_readings: dict[str, _Reading] = {}
_STATE_SECONDS = 10.0
"""Clocks are read again after so long: nvidia-smi takes a tenth of a second."""


def device_columns(device: torch.device) -> dict[str, Any]:
    """Return the columns of records that say which device made an image, its clocks and its driver.

    They are read between images, so the clock is that of just after decoding. `device_id` tells devices of one name
    apart and names no host.
    """
    reading = _readings.get(str(device))
    if reading is None or now() - reading.time > _STATE_SECONDS:
        reading = _Reading(now(), _cuda_columns(device) if device.type == "cuda" else _cpu_columns())
        _readings[str(device)] = reading
    return dict(reading.columns)


def _cuda_columns(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    state = _gpu_state(f"GPU-{properties.uuid}")
    columns = {"device": properties.name, "device_id": _short_hash(str(properties.uuid)), "driver": state["driver"]}
    clocks = {"clock_mhz": state["clock_sm_mhz"], "clock_max_mhz": state["clock_sm_max_mhz"]}
    return columns | {name: int(value) if value and value.isdigit() else None for name, value in clocks.items()}


def _cpu_columns() -> dict[str, Any]:
    cpu = _cpu_block()
    columns = {"device": cpu["model"], "device_id": _short_hash(f"{platform.node()} {uuid.getnode()}"), "driver": None}
    return columns | {name: cpu[name] for name in ("clock_mhz", "clock_max_mhz")}


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def package_versions() -> dict[str, str | None]:
    """The installed version of each of `PACKAGES`; None for one that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state() -> dict[str, Any]:
    """The commit of this code and whether tracked files differ from it; both None outside a git checkout of it."""
    folder = Path(__file__).resolve().parent
    tracked = _output(["git", "-C", str(folder), "ls-files", Path(__file__).name])
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"]) if tracked else None
    if not commit:
        return {"commit": None, "dirty": None}
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": bool(changed)}


def _output(command: list[str]) -> str | None:
    """The output of a command, stripped; None when it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
