"""The fastest lossless cell of a model: kept when `profile --search` finds it, added to sweeps with relaxed cells.

A relaxed cell is worth its loss only where it beats lossless decoding with drafts of the best length. What a search
found holds for one model with its weights, processor, device, dtype, sampling and versions; these are its key. A sweep
never searches: without a kept cell the run's own lossless cells count, or the model's default is added.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from lantern_bench.config.experiment import Cell, ResolvedExperiment, with_cells
from lantern_bench.config.parse_experiment import Settings
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.methods.tables import PARAMETERS
from lantern_bench.models.io.files import cache_folder, hash_of, write_atomically
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.runs.store import MANIFEST, done_images, read_manifest
from lantern_bench.runs.threads import prepare_environment

if TYPE_CHECKING:
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.runs.devices import Place

SEARCH, DEFAULT = "search", "default"
"""Where an added cell comes from: `profile --search` on this machine, or the model's defaults."""

# The seeds of the images do not change which cell is fastest.
_TUNED_FOR = tuple(key for key in SAMPLING if key != "seed_set")


class _Found(BaseModel):
    """The fastest cell that a search of a mode, drafting and rule measured; `cell` is as an experiment writes it."""

    cell: dict[str, Any]
    speedup: float


class _Kept(BaseModel):
    """A file of the cache: what it holds for, and the newest search of each mode, drafting and rule."""

    key: dict[str, Any]
    found: dict[str, _Found]


class Added(NamedTuple):
    """The cells that a sweep got (cell_id, from, cell), as its manifest keeps them, and lines of text about them."""

    cells: tuple[dict[str, Any], ...] = ()
    lines: tuple[str, ...] = ()


# ---- The cells kept in the user's cache


def keep(model: str, decoding: Decoding, speedup: float, place: Place, compile: bool) -> None:
    """Keep what a search found, in place of what it found before; raises `OSError` where that cannot be written."""
    key = _asked(model, decoding) | _here(model, place, compile)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = _folder() / f"{digest[:24]}.json"
    before = _read(path)
    cell = {name: value for name, value in decoding.settings().items() if name != "seed_set"}
    found = {f"{decoding.mode} {decoding.drafting} {decoding.rule}": _Found(cell=cell, speedup=speedup)}
    kept = _Kept(key=key, found=(before.found if before else {}) | found)
    write_atomically(path, kept.model_dump_json(indent=1).encode() + b"\n")


def find(model: str, decoding: Decoding, settings: Settings) -> list[dict[str, Any]]:
    """Return the cells that searches found for this sampling on this machine, fastest first; mostly none or one.

    Torch is imported only where a search was made for this model and sampling.
    """
    asked = _asked(model, decoding)
    kept = [one for one in map(_read, sorted(_folder().glob("*.json"))) if one and asked.items() <= one.key.items()]
    if not kept:
        return []
    prepare_environment()

    from lantern_bench.runs.devices import choose_place

    try:
        place = choose_place(settings.device, settings.dtype, fast=True)
    except RefusedError:  # the run says so; a plan is the same without the device
        return []
    key = asked | _here(model, place, settings.compile)
    found = [one for each in kept if each.key == key for one in each.found.values()]
    return [one.cell for one in sorted(found, key=lambda one: -one.speedup)]


def _folder() -> Path:
    return cache_folder() / "lossless"


def _read(path: Path) -> _Kept | None:
    try:
        return _Kept.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # not there or damaged: the next search writes it again
        return None


def _asked(model: str, decoding: Decoding) -> dict[str, Any]:
    """The part of a key that needs no torch; its values are plain, so that keys can be compared as sets of items."""
    return {"model": model_of(model).name, **{name: decoding.value(name) for name in _TUNED_FOR}}


def _here(model: str, place: Place, compile: bool) -> dict[str, Any]:
    import torch

    from lantern_bench.runs.devices import ENGINE_VERSION, processor

    cuda = place.device.type == "cuda"
    return {
        "weights": _weights(model),
        "device": torch.cuda.get_device_name(place.device) if cuda else place.device.type,
        "processor": hashlib.sha256(repr((processor(), os.cpu_count())).encode()).hexdigest()[:16],
        "dtype": place.dtype_name,
        "compile": compile,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
    }


def _weights(model: str) -> str:
    """One hash of the files of target and drafter; a model without files on this machine has that of none."""
    weights = model_of(model).files()
    paths = [weights[part] for part in ("target", "drafter") if part in weights]
    return hash_of([file for path in paths for file in sorted([path, *path.rglob("*")]) if file.is_file()])


# ---- The cells that a sweep gets


def add_lossless(asked: ResolvedExperiment, folder: Path) -> tuple[ResolvedExperiment, Added]:
    """Return the experiment with a lossless cell for each model and sampling of its relaxed cells, and what was added.

    A run directory with finished images keeps the cells that it began with. Raises as `read_manifest`.
    """
    if not asked.settings.lossless:
        return asked, Added()
    experiment, fresh = _choose(asked)
    if not (folder / MANIFEST).exists() or not done_images(folder):
        return experiment, fresh
    recorded = tuple(read_manifest(folder).get("lossless", ()))
    since = [one["cell_id"] for one in fresh.cells if one["from"] == SEARCH and one not in recorded]
    advice = "the run keeps the lossless cells that it began with; --no-resume starts another with this one"
    lines = (f"found by `profile --search` since: {', '.join(since)}; {advice}",) if since else ()
    return _extend(asked, [one["cell"] for one in recorded]), Added(recorded, lines)


def _choose(asked: ResolvedExperiment) -> tuple[ResolvedExperiment, Added]:
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in asked.cells if "speed" in asked.settings.metrics else ():
        if not cell.decoding.lossless:
            groups[_group(cell)].append(cell)
    experiment: ResolvedExperiment = asked
    cells: list[dict[str, Any]] = []
    lines: list[str] = []
    untuned: dict[str, list[Decoding]] = defaultdict(list)
    for relaxed in groups.values():
        extended, origin = _add_one(experiment, relaxed)
        if origin != SEARCH:
            untuned[relaxed[0].model].append(relaxed[0].decoding)
        for cell in (one for one in extended.cells if one not in experiment.cells):
            of_cell = {"model": cell.model, **cell.decoding.settings()}
            cells.append({"cell_id": cell.cell_id, "from": origin, "cell": json.loads(json.dumps(of_cell))})
            words = "found by `profile --search` here" if origin == SEARCH else f"the default of {cell.model}"
            lines.append(f"lossless cell added: {cell.cell_id}, {words}")
        experiment = extended
    lines += [
        f"relaxed cells of {model} are compared with lossless cells that were not tuned here; "
        f"to tune one: {_command(model, decodings, asked.settings)}"
        for model, decodings in untuned.items()
    ]
    return experiment, Added(tuple(cells), tuple(lines))


def _add_one(experiment: ResolvedExperiment, relaxed: Sequence[Cell]) -> tuple[ResolvedExperiment, str | None]:
    """Add the lossless cell of one model and sampling; also return where it comes from, None for the run's own."""
    model, decoding = relaxed[0].model, relaxed[0].decoding
    seeds = {"seed_set": decoding.seed_set}
    for cell in find(model, decoding, experiment.settings):
        try:
            return _extend(experiment, [{"model": model} | cell | seeds]), SEARCH
        except UserError:  # of a package that is gone, or of an older version
            continue
    rivals = (one for one in experiment.cells if _group(one) == _group(relaxed[0]))
    if any(one.decoding.drafts and one.decoding.lossless for one in rivals):
        return experiment, None
    plain = {"model": model, "mode": "speculative"} | {name: decoding.value(name) for name in SAMPLING}
    if not any(one.decoding.drafting_row.needs_drafter for one in relaxed):
        plain["drafting"] = decoding.drafting  # there may be no drafter
    return _extend(experiment, [plain]), DEFAULT


def _extend(experiment: ResolvedExperiment, cells: Sequence[Mapping[str, Any]]) -> ResolvedExperiment:
    return with_cells(experiment, cells, defaults_of(experiment.settings.model)) if cells else experiment


def _group(cell: Cell) -> tuple[Any, ...]:
    return cell.model, *(cell.decoding.value(name) for name in SAMPLING)


def _command(model: str, decodings: Sequence[Decoding], settings: Settings) -> str:
    """The command that searches for what `find` did not find."""

    def flags() -> Iterator[str]:
        usual = {name: PARAMETERS[name].default for name in _TUNED_FOR} | dict(model_of(model).defaults)
        for name in _TUNED_FOR:
            which = [one for one in decodings if not (one.greedy and PARAMETERS[name].sampled_only)]
            values = list(dict.fromkeys(one.value(name) for one in which))
            if any(value != usual[name] for value in values):
                texts = [value if isinstance(value, str) else f"{value:g}" for value in values]
                yield f"--{name.replace('_', '-')} {','.join(texts)}"
        for name in ("device", "dtype"):
            if getattr(settings, name) != "auto":
                yield f"--{name} {getattr(settings, name)}"
        if not settings.compile:
            yield "--no-compile"

    return " ".join(["lantern-bench profile --search --model", model, *flags()])
