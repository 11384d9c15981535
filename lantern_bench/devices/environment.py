"""Names of devices and dtypes, and the environment variables that torch reads when it is loaded.

This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from lantern_bench.utils.cores import cpu_quota, usable_cores
from lantern_bench.utils.files import cache_folder

DEVICE = r"^(auto|cpu|mps|cuda(:\d{1,2})?)$"  # pattern of `--device`
DEVICES = "must be auto, cpu, mps, cuda or cuda:N"  # the pattern in words
DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]

# Spins of a waiting thread of GNU OpenMP before it sleeps, about 1 us each. docs/log.md has the
# measurement.
_SPINS = "1000"


def prepare_environment() -> None:
    """Set what torch reads when it is loaded: threads, their spinning, and the programs' folder."""
    quota = cpu_quota()
    if quota is not None and quota < len(usable_cores()):
        # More threads would use up the quota early and then all stand still.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def device_in_words(manifest: Mapping[str, Any]) -> str:
    """Return the device of a run: `cuda`, or a CPU's name and the threads."""
    device = manifest.get("device")
    if device not in (None, "cpu"):
        return str(device)
    cpu = (manifest.get("machine") or {}).get("cpu") or {}
    return f"{cpu.get('model') or 'a CPU'}, {manifest.get('threads', '?')} threads"
