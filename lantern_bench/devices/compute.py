"""Choose the device and the dtype of a run."""

from __future__ import annotations

import re
from typing import NamedTuple, get_args

import torch

from lantern_bench.devices.environment import DEVICE, DEVICES, DType
from lantern_bench.utils.errors import RefusedError, UserError


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for bfloat16.

    On a CPU without them, a convolution takes 10 to 200 times as long as in float32.
    """
    if device.type != "cpu":
        return True
    # Older versions of torch lack these functions.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def set_threads(threads: int | None) -> None:
    """Set the number of threads of torch. None changes nothing."""
    if threads is not None:
        torch.set_num_threads(threads)


class Compute(NamedTuple):
    """The device of a process and the dtype of the models on it."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as the flag writes it: `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose_compute(device: str = "auto", dtype: str = "auto", *, fast: bool = False) -> Compute:
    """Resolve the values of `--device` and `--dtype`.

    Args:
        device: `auto` is CUDA if available, and the CPU otherwise.
        dtype: `auto` is bfloat16 on CUDA and float32 elsewhere.
        fast: Let `auto` be bfloat16 on CPUs with instructions for it, too.

    Raises:
        UserError: A value is unknown.
        RefusedError: This machine lacks the device.
    """
    if re.match(DEVICE, device) is None:
        raise UserError(f"--device {device}: {DEVICES}")
    if dtype not in get_args(DType):
        raise UserError(f"--dtype {dtype}: must be one of {', '.join(get_args(DType))}")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(default if device == "auto" else device)
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (chosen.index or 0) >= counts[chosen.type]:
        raise RefusedError(
            f"--device {device}: this machine has no such device",
            "Leave it out, or give --device cpu.",
        )
    if dtype == "auto":
        is_narrow = chosen.type == "cpu" and fast and has_bfloat16(chosen)
        dtype = "bfloat16" if chosen.type == "cuda" or is_narrow else "float32"
    return Compute(chosen, getattr(torch, dtype))
