"""Are two runs the same thing measured twice? What differs between them, and what of it forbids a comparison.

Other weights are another model, another protocol is another figure, another machine has other seconds: each is
refused unless it is allowed by name. What else can change a result (versions, dtype, batch, threads) is told. Only
what was recorded is compared; a commit is no difference in itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from lantern_bench.errors import RefusedError
from lantern_bench.report.cells import Row
from lantern_bench.runs.store import RunData

__all__ = ["ACROSS", "Difference", "check_likeness", "differences"]

ACROSS = ("weights", "protocol", "machine")
"""What a comparison may be allowed to reach across."""

_KEY_FIELDS = ("dtype", "device_type", "compile", "engine_version", "torch_version")
_JUDGES = ("clip_model", "extractor", "reference")
_MEANING = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}


class Difference(NamedTuple):
    """One thing that differs: of which kind (one of `ACROSS`, or `setting`), its name, and both values."""

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """`dtype: float32 in the first, bfloat16 in the second`."""
        return f"{self.name}: {self.a} in the first, {self.b} in the second"


def differences(a: RunData, b: RunData) -> list[Difference]:
    """Return what differs between two runs, what forbids a comparison first."""
    found = [*_weights(a, b), *_protocols(a, b), *_machine(a, b), *_settings(a, b)]
    return sorted(found, key=lambda one: ACROSS.index(one.kind) if one.kind in ACROSS else len(ACROSS))


def check_likeness(found: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` naming the first difference that forbids the comparison and is not in `across`."""
    for kind in ACROSS:
        against = [one for one in found if one.kind == kind]
        if against and kind not in across:
            listed = "\n  ".join(str(one) for one in against)
            raise RefusedError(
                f"the runs differ in {kind}: {_MEANING[kind]}\n  {listed}",
                f"If that is what you want to compare: --across {kind}",
            )


def _weights(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = ((run.manifest.get("key") or {}).get("weights") or {} for run in (a, b))
    # A model that only one run has takes no part in the comparison.
    shared = {name.split("/")[0] for name in first} & {name.split("/")[0] for name in second}
    for name in sorted({*first, *second}):
        if name.split("/")[0] in shared and first.get(name) != second.get(name):
            yield Difference("weights", f"weights of {name}", _short(first.get(name)), _short(second.get(name)))


def _protocols(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = (_judges(run.scores) for run in (a, b))
    if first and second and not set(first) & set(second):
        yield Difference("protocol", "protocol", ", ".join(sorted(first)), ", ".join(sorted(second)))
    for name in sorted(set(first) & set(second)):
        for judge in _JUDGES:
            ours, theirs = first[name].get(judge), second[name].get(judge)
            if ours and theirs and ours != theirs:
                yield Difference("protocol", f"{judge} of {name}", ", ".join(sorted(ours)), ", ".join(sorted(theirs)))


def _judges(scores: Collection[Row]) -> dict[str, dict[str, set[str]]]:
    """By protocol and column, what measured: the last word on each cell."""
    found: dict[str, dict[str, set[str]]] = {}
    last = {(row["protocol"], row["level"], row["cell_id"]): row for row in scores}
    for row in last.values():
        judges = found.setdefault(str(row["protocol"]), {})
        for name in _JUDGES:
            if row.get(name):
                judges.setdefault(name, set()).add(str(row[name]))
    return found


def _machine(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = (_machine_facts(run.manifest) for run in (a, b))
    for name in first:
        if first[name] != second[name]:
            yield Difference("machine", name, first[name], second[name])


def _machine_facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()]
    return {
        "processor": f"{cpu.get('model', 'not recorded')}, {cpu.get('cores', '?')} cores",
        "GPU": ", ".join(gpus) or "none",
        "device": str(manifest.get("device", "not recorded")),
        "threads": str(manifest.get("threads", "not recorded")),
    }


def _settings(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = ((run.manifest.get("key") or {}) for run in (a, b))
    for name in _KEY_FIELDS:
        if first.get(name) != second.get(name):
            yield Difference("setting", name, str(first.get(name)), str(second.get(name)))
    ours, theirs = ((run.manifest.get("experiment") or {}) for run in (a, b))
    for name in ("prompts", "seed", "batch"):
        if ours.get(name) != theirs.get(name):
            yield Difference("setting", name, str(ours.get(name)), str(theirs.get(name)))


def _short(digest: object) -> str:
    return str(digest)[:12] if digest else "none"
