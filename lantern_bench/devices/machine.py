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
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lantern_bench.devices.compute import Compute
from lantern_bench.utils.clock import now, usable_cores
from lantern_bench.utils.errors import RefusedError

if TYPE_CHECKING:
    import torch


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


def check_free(subject: str, needed: int, device: torch.device, advice: str | None = None) -> None:
    """Raise `RefusedError` where less than `needed` bytes are free on a device."""
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    if needed > free:
        raise RefusedError(
            f"{subject}: needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free", advice
        )


def compute_block(compute: Compute, compiled: bool) -> dict[str, Any]:
    """Return what the manifest says of how this process decodes."""
    device = (
        torch.cuda.get_device_name(compute.device)
        if compute.device.type == "cuda"
        else compute.device.type
    )
    return {
        "device": device,
        "dtype": compute.dtype_name,
        "threads": torch.get_num_threads(),
        "compile": compiled,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Start a new window for `peak_memory_bytes`."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most device memory in use since the last reset; None on a CPU, where it would be that of the process."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))
