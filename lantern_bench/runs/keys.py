"""What can change an image's tokens, hashed into the key of its record, and what to do when it changed.

A run that is continued must not mix images made in different ways, so the fields that hold for the whole run are
compared with those in the manifest, and a difference is refused. What a seed is made of is `config/plan.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from lantern_bench.errors import RefusedError


class KeyFields(TypedDict):
    """The fields of a key that hold for the whole run; `weights` maps `model/part` to the SHA-256 of its file.

    `rules` maps the rules from outside that the run uses to the fingerprint of their code; left out without any.
    """

    schema_version: int
    engine_version: str
    torch_version: str
    dtype: str
    device_type: str
    compile: bool
    weights: dict[str, str]
    rules: NotRequired[dict[str, str]]


# What to type to go on with the recorded value; other fields are not a matter of flags.
_FLAGS = {
    "dtype": "--dtype {}",
    "device_type": "--device {}",
    "compile": "--set compile={}",
    "batch": "--batch {}",
    "seed": "--seed {}",
    "prompts": "--prompts {}",
}
_COMPARED = ("model", "prompts", "seed", "batch", "model_defaults", "cells")


def record_key(fields: KeyFields, cell: Mapping[str, Any], prompt_id: str, repeat: int, seed: int) -> str:
    """Return the key of one record, 16 hex digits; `cell` is `Cell.settings()`."""
    covered = {"run": fields, "cell": dict(cell), "prompt_id": prompt_id, "repeat": repeat, "seed": seed}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:16]


def check_same_key(folder: str, recorded: Mapping[str, Any], now: KeyFields, finished: int) -> None:
    """Raise `RefusedError` naming the first field in which a run's key differs from what would run now."""
    _check_same(folder, _flat(recorded), _flat(now), finished)


def check_same_experiment(folder: str, recorded: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> None:
    """Raise `RefusedError` when a folder holds another experiment; more images or other metrics are no difference."""
    _check_same(
        folder, {key: recorded.get(key) for key in _COMPARED}, {key: now.get(key) for key in _COMPARED}, finished
    )


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = {"weights": "weights of {}", "rules": "code of the rule {}"}
    flat = {key: value for key, value in fields.items() if key not in named}
    for key, text in named.items():
        flat |= {text.format(part): value for part, value in dict(fields.get(key) or {}).items()}
    return flat


def _check_same(folder: str, recorded: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> None:
    for key in dict.fromkeys([*recorded, *now]):
        before, after = recorded.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = _difference(before, after), _difference(after, before)
        raise RefusedError(
            f"cannot continue {folder}: {key} changed\n  recorded  {_show(before)}\n  now       {_show(after)}\n"
            f"{finished} finished images were made with the recorded one and would be mixed with others.",
            _advice(key, before),
        )


def _advice(key: str, before: object) -> str:
    fresh = "Start afresh beside it with --no-resume, or elsewhere with --out FOLDER."
    return f"{fresh} Or continue with {_FLAGS[key].format(_show(before))}" if key in _FLAGS else fresh


def _difference(these: list[Any], others: list[Any]) -> list[Any]:
    return [item for item in these if item not in others]


def _show(value: object) -> str:
    if value is None or value == []:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."
