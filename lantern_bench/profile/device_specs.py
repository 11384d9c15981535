"""Devices whose speed can be predicted: the ones that ship, and files of users."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Problems, problems_of, read_source

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="must be a number above 0")]
_Share = Annotated[float, Field(gt=0, le=1, description="must be above 0 and at most 1")]
_Time = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="must be a number of at least 0")
]


class Device(BaseModel):
    """Rates of a device, the fractions of them that are reached, and overheads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"\S", description="a name for tables")
    about: str = ""
    # On a cpu, reads and products follow each other, and attention reads the cache in use. On a gpu
    # they overlap, and compiled programs read the whole cache.
    kind: Literal["gpu", "cpu"] = Field(description="must be gpu or cpu")
    read_gb_s: _Rate
    read_share: _Share = 1.0
    multiply_tflops: _Rate
    multiply_share: _Share = 1.0
    kernel_us: _Time  # one kernel of a compiled program
    # The host's time to launch a kernel from Python; None if unknown.
    eager_kernel_us: _Time | None = None
    step_us: _Time = 0.0  # host work of a step outside its programs
    code: Literal["compiled", "eager"] = "compiled"  # code that a user's device was fitted to
    weight_bytes: Annotated[
        int, Field(ge=1, le=8, description="must be a whole number from 1 to 8")
    ] = 2
    # Measured over modelled seconds. For target forwards by number of nodes, with interpolation.
    draft_factor: _Rate = 1.0
    verify_factor: _Rate = 1.0
    target_factors: dict[Annotated[int, Field(ge=1)], _Rate] = Field(default_factory=dict)
    sources: tuple[str, ...] = ()  # where each figure is from, and which are fitted or assumed

    def target_factor(self, nodes: float) -> float:
        """Return measured over modelled seconds of a target forward over `nodes`."""
        if not self.target_factors:
            return 1.0
        measured = sorted(self.target_factors)
        factors = [self.target_factors[count] for count in measured]
        return float(np.interp(nodes, measured, factors))


@cache
def devices() -> dict[str, Device]:
    """Return the devices that ship, by name."""
    file = resources.files("lantern_bench.profile") / "device_specs.yaml"
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        name: Device.model_validate({**data["all"], "name": name, **fields})
        for name, fields in data["devices"].items()
    }


def find_device(name: str) -> Device:
    """Return a shipped device by its name, or read a device from a YAML file.

    Raises:
        UserError: The name is unknown, or the file is not a device.
    """
    if not name.lower().endswith((".yaml", ".yml")):
        if name in devices():
            return devices()[name]
        advice = "or give a file that `lantern-bench profile --save-device FILE.yaml` wrote."
        raise UserError(
            f"--device {name}: unknown device{did_you_mean(name, devices())}",
            f"The devices are {', '.join(devices())}; {advice}",
        )
    source = read_source(Path(name), "Start with: name, kind, read_gb_s.")
    try:
        return Device.model_validate(source.data)
    except ValidationError as error:
        problems = Problems(name)
        for problem in problems_of(error, source, Device):
            problems.add(*problem)
        problems.raise_all()
        raise
