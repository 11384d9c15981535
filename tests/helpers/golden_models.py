"""Model files over the recordings, as a user would write them; sizes are read from what lies beside
the recordings.

The folder is the one LANTERN_BENCH_GOLDEN names (default tests/golden).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of

GOLDEN = Path(
    os.environ.get("LANTERN_BENCH_GOLDEN", Path(__file__).parents[1] / "golden")
).absolute()

SIDES = {"t2i": 16, "t2i2": 32}
TREES = {
    "chain": "chain-5",
    "mc_sim_7b_63": "eagle1-25",
    "mc_sim_7b_63_balanced": "balanced-25",
    "reverse_balanced_25": "deep-25",
    "naive_extend_57": "extended-57",
    "medusa_2_7b_63": "medusa-63",
}
"""The names of the published trees -> ours."""


def gpt_config(kind: str) -> dict[str, Any]:
    """The official arguments of a recorded target."""
    args: dict[str, Any] = json.loads((GOLDEN / "llamagen_gpt" / "gpt_info.json").read_text())[
        f"{kind}_args"
    ]
    return args


def write_model(folder: Path, **parts: Any) -> Path:
    """Write a model file; paths in `parts` become relative to it."""
    folder.mkdir(parents=True, exist_ok=True)

    def relative(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: relative(item) for key, item in value.items()}
        return os.path.relpath(value, folder) if isinstance(value, Path) else value

    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(relative(parts)))
    return path


def recorded_target(folder: Path, kind: str, **parts: Any) -> Path:
    """The model file of a recorded target alone."""
    config = gpt_config(kind)
    side = int(config["block_size"] ** 0.5)
    target = {
        "checkpoint": GOLDEN / "llamagen_gpt" / f"{kind}.pt",
        "layout": "official",
        "config": config,
    }
    return write_model(
        folder, **({"family": f"llamagen-{kind}", "target": target, "grid": [side, side]} | parts)
    )


def end_to_end(folder: Path, **parts: Any) -> Path:
    """The model file of the end-to-end recording: the target on the drafter's grid, with the
    recorded table.
    """
    recording = GOLDEN / "end_to_end"
    side = SIDES[json.loads((recording / "config.json").read_text())["input_type"]]
    # Such as "../llamagen_gpt/t2i.pt with block_size 256".
    base = recording / json.loads((recording / "e2e_info.json").read_text())["base"].split()[0]
    config = gpt_config("t2i") | {"block_size": side * side}
    given: dict[str, Any] = {
        "family": "llamagen",
        "target": {"checkpoint": base, "config": config},
        "drafter": {"dir": recording},
        "neighbours": {"table": recording / "e2e_expected.safetensors"},
        "grid": [side, side],
    }
    return write_model(folder, **(given | parts))


def steps_to(tokens: int, accepted: Sequence[int]) -> int:
    """The steps of a recorded run until it has so many tokens, of which the first comes before any
    step.

    The published loop goes on until it has more tokens than that, which may take two more steps
    (docs/algorithms.md, section 9, C6).
    """
    ends = itertools.accumulate((count + 1 for count in accepted), initial=1)
    return next(step for step, end in enumerate(ends) if end >= tokens)


def load(path: Path) -> LoadedModel:
    """Load a model file as a command would, in float32 on the CPU."""
    return model_of(str(path)).load(torch.device("cpu"), torch.float32)
