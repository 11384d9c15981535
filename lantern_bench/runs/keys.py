"""The record key: a hash of everything that can change an image's tokens.

A resumed run must not mix images made in different ways. So the fields that hold for the whole run are compared with
those in the manifest, and a difference is refused. Seeds are in `config/plan.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from lantern_bench.config.plan import ImageTask
from lantern_bench.errors import RefusedError


class KeyFields(TypedDict):
    """The fields of a key that hold for the whole run; `weights` maps `model/part` to the SHA-256 of its file.

    `rules` and `draftings` map those of other packages that the run uses to the fingerprint of their code; absent
    without any.
    """

    schema_version: int
    engine_version: str
    torch_version: str
    dtype: str
    device_type: str
    compile: bool
    weights: dict[str, str]
    rules: NotRequired[dict[str, str]]
    draftings: NotRequired[dict[str, str]]


# The flag that restores the recorded value; other fields have no flag.
_FLAGS = {name: f"--{name} {{}}" for name in ("dtype", "batch", "seed", "prompts", "threads")}
_FLAGS |= {"device_type": "--device {}", "compile": "--set compile={}"}


class RecordKeys:
    """Computes the record keys of a run; what many keys share is written as JSON once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._run, self._cells = json.dumps(fields, sort_keys=True), dict[str, Any]()

    def key_of(self, task: ImageTask) -> str:
        """Return the record key of an image, 16 hex digits of a SHA-256.

        It covers the JSON object of the cell's settings, the prompt's id, the repeat, the fields of the run and the
        seed, with sorted keys.
        """
        cell = task.cell
        if (begun := self._cells.get(cell.cell_id)) is None:
            settings = json.dumps(cell.settings(), sort_keys=True)
            begun = self._cells[cell.cell_id] = hashlib.sha256(f'{{"cell": {settings}, '.encode())
        digest = begun.copy()
        image = f'"prompt_id": {json.dumps(task.prompt.id)}, "repeat": {task.repeat}'
        digest.update(f'{image}, "run": {self._run}, "seed": {task.seed}}}'.encode())
        key: str = digest.hexdigest()[:16]
        return key


def check_same_key(folder: str, recorded: Mapping[str, Any], now: KeyFields, finished: int) -> None:
    """Raise `RefusedError` naming the first field in which a run's key differs from the current one."""
    _check_same(folder, _flat(recorded), _flat(now), finished)


def check_same_experiment(folder: str, recorded: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> None:
    """Raise `RefusedError` when a run directory has another experiment; images and metrics may differ."""
    compared = ("model", "prompts", "seed", "batch", "model_defaults", "cells")
    before, after = ({key: values.get(key) for key in compared} for values in (recorded, now))
    _check_same(folder, before, after, finished)


def check_same_threads(folder: str, recorded: int | None, asked: int | None, finished: int) -> None:
    """Raise `RefusedError` when a run is to be continued on another number of threads: sums would round differently."""
    if recorded is not None and asked is not None:
        _check_same(folder, {"threads": recorded}, {"threads": asked}, finished)


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = {"weights": "weights of {}", "rules": "code of the rule {}", "draftings": "code of the drafting {}"}
    flat = {key: value for key, value in fields.items() if key not in named}
    for key, text in named.items():
        flat |= {text.format(name): value for name, value in dict(fields.get(key) or {}).items()}
    return flat


def _check_same(folder: str, recorded: Mapping[str, Any], now: Mapping[str, Any], finished: int) -> None:
    for key in dict.fromkeys([*recorded, *now]):
        before, after = recorded.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = (
                [cell for cell in before if cell not in after],
                [cell for cell in after if cell not in before],
            )
        advice = "Start a new run beside it with --no-resume, or elsewhere with --out FOLDER."
        if key in _FLAGS:
            advice += f" Or resume with {_FLAGS[key].format(_show(before))}"
        raise RefusedError(
            f"cannot resume {folder}: {key} changed\n  recorded  {_show(before)}\n  now       {_show(after)}\n"
            f"{finished} finished images were made with the recorded value; new images would not be comparable.",
            advice,
        )


def _show(value: object) -> str:
    if value is None or value == []:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."
