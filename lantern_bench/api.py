"""The Python API: run sweeps, read runs as DataFrames, load models and decode prompts (docs/python-api.md).

The names here are also attributes of `lantern_bench`. Errors name a parameter by its flag (`--delta 1.5`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lantern_bench.analysis.tables import tables_of, write_tables
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.settings import Overrides
from lantern_bench.models import registry
from lantern_bench.report.format_tables import readable
from lantern_bench.storage.run_directory import RunData, find_run, load_runs
from lantern_bench.sweeps.events import DecodedImage as DecodedImage  # a name of this API
from lantern_bench.sweeps.events import Event, ImageDone, Started
from lantern_bench.sweeps.request import prepare
from lantern_bench.sweeps.run import check_failed, run
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import ProgressEvent

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

    from lantern_bench.models.loaded_model import LoadedModel


class Run:
    """A run directory, read once: records, tables and pictures. Make one with `sweep` or `load_run`."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self.path = data.folder
        self.manifest = data.manifest
        self.records = data.records  # one row an image, the last of each record key; lists in cells

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables `speed`, `quality`, `acceptance` and `summary` of the CSV files, not rounded."""
        return tables_of(self._data)

    @property
    def speed(self) -> pd.DataFrame:
        """Speed by cell."""
        return self.tables["speed"]

    @property
    def quality(self) -> pd.DataFrame:
        """Quality by cell and protocol."""
        return self.tables["quality"]

    @property
    def acceptance(self) -> pd.DataFrame:
        """Acceptance by cell, and by depth or position in the image."""
        return self.tables["acceptance"]

    @property
    def summary(self) -> pd.DataFrame:
        """One row a cell and scoring protocol, as the papers' tables."""
        return self.tables["summary"]

    @property
    def cells(self) -> list[str]:
        """The ids of the cells, in the order of the tables."""
        return self.speed["cell_id"].astype(str).tolist()

    def pictures(self, cell: str) -> list[Image.Image]:
        """Open the pictures of a cell in the order of its images; PIL reads each file when its pixels are first used.

        Raises `UserError` for an unknown cell, `FileNotFoundError` for a picture that was removed.
        """
        from PIL import Image

        if cell not in self.cells:
            raise UserError(
                f"{cell}: no such cell in {self.path}", f"The cells are {', '.join(self.cells)}."
            )
        images = self.records.loc[self.records["cell_id"] == cell, "image"].dropna()
        return [Image.open(self.path / image) for image in sorted(images)]

    def __repr__(self) -> str:
        failed = int((self.records["status"] != "ok").sum())
        counts = f"{len(self.cells)} cells, {len(self.records) - failed} images"
        return f"Run({str(self.path)!r}: {counts}{f', {failed} failed' if failed else ''})"

    def _repr_html_(self) -> str:
        from html import escape

        shown, notes = readable(self.summary, "summary")
        below = "".join(f"<p>{escape(note)}</p>" for note in notes)
        return f"<p><b>{escape(repr(self))}</b></p>{shown.to_html(index=False)}{below}"


def sweep(
    experiment: str | Path | Mapping[str, Any] = "lanterns",
    *,
    out: str | Path | None = None,
    resume: bool = True,
    modes: str | Sequence[str] | None = None,
    model: str | Sequence[str] | None = None,
    prompts: str | None = None,
    images: int | None = None,
    tree: str | Sequence[str] | None = None,
    delta: float | Sequence[float] | None = None,
    lambda_: float | Sequence[float] | None = None,
    progress: bool | Callable[[Event], None] = True,
    ray: str | None = None,
    **overrides: Any,
) -> Run:
    """Run an experiment and return the run: decode and score every missing image, write the tables.

    `experiment` is the name of a shipped experiment, a YAML file, or the content of one; `overrides` are keys of one,
    where a list makes a grid and `lambda_` stands for `lambda`. `out`, `resume`, `modes` and `ray` are the flags of
    `lantern-bench sweep`, `ray` "default" without an address. `progress`: a bar in terminals and notebooks, none, or
    what is called with every event (`sweeps/events.py`).

    Raises `UserError` for what is wrong with experiment, overrides or prompts, `RefusedError` for missing weights and
    for a run directory in use or of other settings, and `RecordsFailedError` when images failed; `load_run` returns the
    others.
    """
    folder = Path(out) if out is not None else None
    typed = {
        "model": model,
        "prompts": prompts,
        "images": images,
        "tree": tree,
        "delta": delta,
        "lambda": lambda_,
    }
    request = prepare(
        experiment, _overrides(typed | overrides, modes), out=folder, resume=resume, ray=ray
    )
    with _emitting(progress) as emit:
        result = run(request, emit)
    check_failed(request, result.failed)
    return load_run(request.folder)


def load_run(path: str | Path) -> Run:
    """Read a run by the path of its run directory, or by its name (or the start of it) under `results/`.

    A run without records has the tables of its CSV files. Raises `UserError` for a path that is not a run directory or
    is damaged, `RefusedError` for a run with neither.
    """
    (data,) = load_runs([find_run(path)], tables_suffice=True).values()
    return Run(data)


@contextmanager
def _emitting(progress: bool | Callable[[Event], None]) -> Iterator[Callable[[Event], None]]:
    """Yield what shows events: a bar for each long task, in a notebook or a terminal, and warnings."""
    from tqdm.auto import tqdm

    bar = tqdm(disable=True)
    shown = ""

    def show(event: Event) -> None:
        nonlocal bar, shown
        if isinstance(event, ImageDone):
            bar.update()
        elif isinstance(event, ProgressEvent | Started):
            label, done, total = (
                event
                if isinstance(event, ProgressEvent)
                else ("images", 0, sum(event.to_do.values()))
            )
            if label != shown:
                bar.close()
                bar = tqdm(
                    desc=label,
                    total=total,
                    disable=False if "ipykernel" in sys.modules else None,
                )
                shown = label
            bar.update(done - bar.n)
        elif event.level == "warning":
            warnings.warn(event.text, stacklevel=2)

    try:
        yield progress if callable(progress) else show if progress else lambda _event: None
    finally:
        bar.close()


def _folders(runs: str | Path | Run | Sequence[str | Path | Run]) -> list[Path]:
    several = [runs] if isinstance(runs, str | Path | Run) else runs
    return [item.path if isinstance(item, Run) else find_run(item) for item in several]


def curves(
    runs: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    by: str = "mode",
    cells: Sequence[str] = (),
    width: str = "two",
) -> list[Path]:
    """Draw the curves of runs as `lantern-bench curves`, by default into `figures` of the first; return the files."""
    from lantern_bench.report.draw import draw_curves

    folders = _folders(runs)
    return draw_curves(
        runs=folders, folder=Path(out or folders[0] / "figures"), by=by, cells=cells, width=width
    )


def write_report(
    runs: str | Path | Run | Sequence[str | Path | Run], out: str | Path | None = None
) -> Path:
    """Write the report page of runs, by default the first run's `report.html`; return its path."""
    from lantern_bench.report import page

    folders = _folders(runs)
    path = Path(out or folders[0] / "report.html")
    page.write_report(folders, path)
    return path


def compare(
    run_a: str | Path | Run, run_b: str | Path | Run, across: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the table of `lantern-bench compare`; `across` is what may differ."""
    from lantern_bench.analysis.compare import check_comparability, compare_runs, differences

    a, b = load_runs(_folders([run_a, run_b])).values()
    check_comparability(differences(a, b), across)
    return compare_runs(a, b).table


def predict(
    run: str | Path | Run, device: str, *, model: str | None = None, stack: str = "compiled"
) -> pd.DataFrame:
    """Return the table of `lantern-bench predict`."""
    from lantern_bench.profile.device_specs import find_device
    from lantern_bench.profile.prediction import predict_run

    (data,) = load_runs(_folders(run)).values()
    return predict_run(run=data, device=find_device(device), stack=stack, model=model)


def recommend(
    run: str | Path | Run,
    quality_run: str | Path | Run | None = None,
    *,
    max_distance: float | None = None,
    within: tuple[str, float] | None = None,
) -> pd.DataFrame:
    """Return the table of `lantern-bench recommend`; `within` is the name of a score and its margin."""
    from lantern_bench.analysis.recommend import condition_of, recommendation

    condition = condition_of(max_distance, within)
    speed, quality = (load_run(folder).tables for folder in _folders([run, quality_run or run]))
    return recommendation(speed, quality, condition)


def score(
    run: str | Path | Run,
    *,
    protocol: str | None = None,
    reference: str | None = None,
    device: str = "auto",
    rescore: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Score a run as `lantern-bench score` and return its quality."""
    from lantern_bench.metrics.score_run import score_run_directory

    (folder,) = _folders(run)
    with _emitting(progress) as emit:
        score_run_directory(
            folder, emit, protocol=protocol, reference=reference, device=device, rescore=rescore
        )
    return write_tables(folder)["quality"]


def load_model(
    name: str = "lanterns",
    *,
    device: str = "auto",
    dtype: str = "auto",
    neighbour_space: Literal["raw", "normalised"] | None = None,
) -> LoadedModel:
    """Load a model by name, or by the YAML file that describes it.

    `device` is auto, cpu, mps, cuda or cuda:N; `dtype` is auto, float32, bfloat16 or float16. Raises `UserError` for an
    unknown model or a malformed file, `RefusedError` for missing weights or devices.
    """
    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.models.load import set_space

    compute = choose_compute(device, dtype)
    model = registry.model_of(name).load(compute.device, compute.dtype)
    set_space(model, neighbour_space)
    return model


def decode(
    model: LoadedModel,
    prompts: str | Sequence[str],
    *,
    mode: str = "speculative",
    seed: int = 0,
    logits: bool = False,
    conditions: Sequence[Any] | None = None,
    tree: str | None = None,
    delta: float | None = None,
    lambda_: float | None = None,
    **parameters: Any,
) -> list[DecodedImage]:
    """Decode prompts one at a time, with the tokens of an uncompiled sweep of this seed and these parameters.

    Parameters have one value each, such as `tree="chain-7"` or `lambda_=5`; the others are the model's defaults, and
    relaxed modes need their bound. With `logits` the images carry the guided logits. `conditions` are for each prompt
    what `model.condition([prompt])` would return; the prompts are then only names, which must differ.

    Raises `UserError` for a wrong parameter or prompt, `RefusedError` for a missing drafter or text encoder.
    """
    import torch

    from lantern_bench.devices.compute import Compute
    from lantern_bench.sweeps.decoder import decode_tasks, tasks_of

    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    typed = {"model": [model.name], "seed": seed, "tree": tree, "delta": delta, "lambda": lambda_}
    overrides = _overrides(typed | parameters, None)
    source = {"name": "decode", "model": model.name, "baseline": False, "cells": [{"mode": mode}]}
    resolved = load_experiment(source, registry.defaults_of, overrides)
    if len(resolved.cells) != 1:
        raise UserError(
            f"decode takes one value per parameter; these make {len(resolved.cells)} cells",
            "Use sweep.",
        )
    if conditions is None:
        described = registry.model_of(model.name)
        for text in texts:
            described.check_prompt(text)
        for _ in model.prepare(list(dict.fromkeys(texts))):
            pass
    else:
        by_text = dict(zip(texts, conditions, strict=True))
        if len(by_text) != len(texts):
            raise UserError(
                "prompts with conditions must differ", "Give each of them a name of its own."
            )
        model = replace(model, condition=lambda names: by_text[names[0]])
    compute = Compute(model.target.device, torch.get_default_dtype())
    return list(
        decode_tasks(
            model,
            compute,
            tasks_of(cells=resolved.cells, seed=seed, prompts=texts, images=1),
            logits=logits,
        )
    )


def _overrides(values: Mapping[str, Any], modes: str | Sequence[str] | None) -> Overrides:
    return Overrides.from_flags(
        {key.rstrip("_"): value for key, value in values.items()}, modes=modes
    )
