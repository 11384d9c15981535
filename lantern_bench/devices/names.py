"""Names of devices and dtypes, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

DEVICE = r"^(auto|cpu|mps|cuda(:\d{1,2})?)$"  # pattern of `--device`
DEVICES = "must be auto, cpu, mps, cuda or cuda:N"  # the pattern in words
DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


def device_in_words(manifest: Mapping[str, Any]) -> str:
    """Return the device of a run: `cuda`, or a CPU's name and the threads."""
    cpu = (manifest.get("machine") or {}).get("cpu") or {}
    device = manifest.get("device")
    if device not in (None, "cpu"):
        return str(device)
    name = cpu.get("model") if isinstance(cpu, Mapping) else cpu
    return f"{name or 'a CPU'}, {manifest.get('threads', '?')} threads"
