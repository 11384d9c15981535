"""The device, the dtype and the settings that a run computes with."""

from __future__ import annotations

import re
from typing import NamedTuple, get_args

import torch

from lantern_bench.devices.names import DEVICE, DEVICES, DType
from lantern_bench.utils.errors import RefusedError, UserError


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; a convolution on a CPU without takes 10 to 200 times as long."""
    # Older versions of torch cannot tell.
    checks = (
        getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile")
    )
    return device.type != "cpu" or any(check() for check in checks)


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
