"""Describe the machine and its packages, and measure its memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import subprocess
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from lantern_bench.devices.compute import Compute
from lantern_bench.utils.clock import now
from lantern_bench.utils.cores import usable_cores
from lantern_bench.utils.errors import RefusedError


def processor() -> tuple[str, ...]:
    """Return the CPU facts that compiled code depends on: architecture, model, instructions."""
    names = ("model name", "flags", "Features", "CPU part")
    kinds = {line for line in _cpu_listing().splitlines() if line.startswith(names)}
    return platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(kinds)


def _cpu_listing() -> str:
    listing = Path("/proc/cpuinfo")
    return listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""


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
# Queries to nvidia-smi, by the name in the manifest.
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
    """Describe this machine and process in values for JSON. Values that cannot be read are None."""
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
    """Describe each GPU that torch can use."""
    blocks = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        blocks.append(
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "compute_capability": f"{device.major}.{device.minor}",
                "multiprocessors": device.multi_processor_count,
                **_gpu_state(f"GPU-{device.uuid}"),
            }
        )
    return blocks


def _gpu_state(uuid: str) -> dict[str, str | None]:
    """Return driver, clocks and throttling of one GPU, as nvidia-smi prints them."""
    answer = _output(
        [
            "nvidia-smi",
            f"--id={uuid}",
            f"--query-gpu={','.join(_GPU_FIELDS.values())}",
            "--format=csv,noheader,nounits",
        ]
    )
    values = [value.strip() for value in (answer or "").split(",")]
    if len(values) != len(_GPU_FIELDS):
        return dict.fromkeys(_GPU_FIELDS)
    return dict(zip(_GPU_FIELDS, values, strict=True))


_STATE_SECONDS = 10.0  # between two readings of clocks, since nvidia-smi takes 0.1 s


def device_columns(device: torch.device) -> dict[str, Any]:
    """Return the columns about the device of an image. `device_id` reveals no host."""
    return _device_columns(device, int(now() / _STATE_SECONDS))


@functools.lru_cache(maxsize=1)
def _device_columns(device: torch.device, _period: int) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        identity = str(properties.uuid)
        state = _gpu_state(f"GPU-{properties.uuid}")
        columns = {
            "device": properties.name,
            "driver": state["driver"],
            "clock_mhz": _whole_number(state["clock_sm_mhz"]),
            "clock_max_mhz": _whole_number(state["clock_sm_max_mhz"]),
        }
    else:
        identity = f"{platform.node()} {uuid.getnode()}"
        cpu = _cpu_block()
        columns = {
            "device": cpu["model"],
            "driver": None,
            "clock_mhz": cpu["clock_mhz"],
            "clock_max_mhz": cpu["clock_max_mhz"],
        }
    return columns | {"device_id": hashlib.sha256(identity.encode()).hexdigest()[:8]}


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def package_versions() -> dict[str, str | None]:
    """Return the version of each of `PACKAGES`, None if it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state() -> dict[str, Any]:
    """Return the commit of this code and whether tracked files differ.

    Both are None outside a checkout of this code.
    """
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit = None
    if _output([*git, "ls-files", Path(__file__).name]):
        commit = _output([*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"])
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def _output(command: list[str]) -> str | None:
    """Return the stripped output of a command. None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_free(subject: str, needed: int, device: torch.device, advice: str | None = None) -> None:
    """Check that enough memory is free on a device.

    Args:
        subject: What needs the memory, for the error.
        needed: Bytes.
        device: The device.
        advice: What the user can do, for the error.

    Raises:
        RefusedError: Less than `needed` is free.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise RefusedError(
            f"{subject}: needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free", advice
        )


def compute_block(compute: Compute, *, compiled: bool) -> dict[str, Any]:
    """Return the entries of the manifest about how this process decodes."""
    name = compute.device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(compute.device)
    return {
        "device": name,
        "dtype": compute.dtype_name,
        "threads": torch.get_num_threads(),
        "compile": compiled,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Start a new window for `peak_memory_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak device memory since the last reset. None on a CPU, which has no counter."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None
