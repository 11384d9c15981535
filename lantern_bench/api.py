"""The Python API: run sweeps, read runs as DataFrames, load models and decode prompts.

The names here are also attributes of `lantern_bench`, and docs/python-api.md explains them. Errors
name a parameter by its flag (`--delta 1.5`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lantern_bench.analysis.prompt_groups import tables_by
from lantern_bench.analysis.tables import tables_of, write_tables
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.settings import Overrides
from lantern_bench.models import registry
from lantern_bench.report.format_tables import readable
from lantern_bench.storage.run_directory import RunData, find_run, load_runs
from lantern_bench.storage.schema import without_unused
from lantern_bench.sweeps.decoded_image import DecodedImage as DecodedImage
from lantern_bench.sweeps.events import Event, shown_by
from lantern_bench.sweeps.request import prepare
from lantern_bench.sweeps.run import check_failed, run
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import Note, Progress, heard_by, ignore_events

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

    from lantern_bench.models.loaded_model import LoadedModel


class Run:
    """A run directory that was read once. `sweep` and `load_run` return it.

    Attributes:
        path: The run directory.
        manifest: The content of `manifest.json`: experiment, machine, sessions.
        records: One row per image, with lists in the columns of steps.
    """

    def __init__(self, data: RunData) -> None:
        self._data = data
        self.path = data.folder
        self.manifest = data.manifest
        self.records = data.records

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables of the CSV files, not rounded: speed, quality, acceptance and summary."""
        return {name: without_unused(table) for name, table in tables_of(self._data).items()}

    def tables_by(self, by: str) -> dict[str, pd.DataFrame]:
        """Build the tables by a column of the prompts, as `lantern-bench show --by` does.

        Args:
            by: The column, such as `category`.

        Returns:
            The tables `speed`, `quality`, `acceptance` and `summary`.

        Raises:
            UserError: The prompts have no such column.
            RefusedError: The run has no records.
        """
        tables = tables_by(self._data, by)
        return {name: without_unused(table) for name, table in tables.items()}

    @property
    def speed(self) -> pd.DataFrame:
        """The speed of each cell."""
        return self.tables["speed"]

    @property
    def quality(self) -> pd.DataFrame:
        """The quality of each cell, by scoring protocol."""
        return self.tables["quality"]

    @property
    def acceptance(self) -> pd.DataFrame:
        """The acceptance rate of each cell, by depth in the tree and by position in the image."""
        return self.tables["acceptance"]

    @property
    def summary(self) -> pd.DataFrame:
        """Speed and quality with one row per cell and scoring protocol, as tables of papers."""
        return self.tables["summary"]

    @property
    def cells(self) -> list[str]:
        """The ids of the cells, in the order of the tables."""
        return self.speed["cell_id"].astype(str).tolist()

    def pictures(self, cell: str) -> list[Image.Image]:
        """Open the pictures of a cell, in the order of its images.

        PIL reads a file when its pixels are first used.

        Args:
            cell: The id of the cell, one of `cells`.

        Returns:
            One picture for each image that did not fail.

        Raises:
            UserError: The run has no such cell.
            FileNotFoundError: A picture was removed.
        """
        from PIL import Image

        if cell not in self.cells:
            raise UserError(
                f"{cell}: no such cell in {self.path}", f"The cells are {', '.join(self.cells)}."
            )
        images = self.records.loc[self.records["cell_id"] == cell, "image"].dropna()
        return [Image.open(self.path / image) for image in sorted(images)]

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {len(self.cells)} cells, {self._data.images})"

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
    """Run an experiment: decode and score every missing image, then write the tables.

    The same call continues an interrupted run.

    Args:
        experiment: The name of a shipped experiment, a YAML file, or the content of one.
        out: The run directory, by default `results/<name>-<hash>`.
        resume: Continue the run of this directory. If False, make a new one beside it.
        modes: The modes of the cells, by default as in the experiment.
        model: The models, by name or by YAML file.
        prompts: The prompts: a file, or the name of a set of prompts.
        images: Images per cell.
        tree: The draft trees. A list makes a grid, as for all parameters of decoding.
        delta: The bound of LANTERN.
        lambda_: The bound of LANTERN++, `lambda` in an experiment.
        progress: A bar in terminals and notebooks (True), none (False), or a function that is
            called with every event of `lantern_bench.sweeps.events`.
        ray: The address of a Ray cluster, or "default" for the one of `RAY_ADDRESS`.
        **overrides: Other keys of an experiment.

    Returns:
        The run, with its records and tables.

    Raises:
        UserError: The experiment, an override or a prompt is wrong.
        RefusedError: Weights are missing, or the run directory is in use or has images of other
            settings.
        RecordsFailedError: Images failed. `load_run` returns the run with the other images.
    """
    folder = Path(out) if out is not None else None
    flags = {
        "model": model,
        "prompts": prompts,
        "images": images,
        "tree": tree,
        "delta": delta,
        "lambda": lambda_,
        **overrides,
    }
    request = prepare(
        experiment, Overrides.from_flags(flags, modes=modes), out=folder, resume=resume, ray=ray
    )
    with _emitting(progress=progress) as emit:
        run(request, emit)
    check_failed(request)
    return load_run(request.folder)


def load_run(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: The run directory, or the name (or the start of the name) of one under `results/`.

    Returns:
        The run. Without records, it has the tables of its CSV files.

    Raises:
        UserError: There is no such run, or a file of it is damaged.
        RefusedError: The run has neither records nor tables.
    """
    runs = load_runs([find_run(path)], tables_suffice=True, empty_shards=True)
    (data,) = runs.values()
    return Run(data)


@contextmanager
def _emitting(*, progress: bool | Callable[[Event], None]) -> Iterator[Callable[[Event], None]]:
    """Yield the function that receives events: by default a bar per long task, and warnings."""
    draws = "ipykernel" in sys.modules or sys.stderr.isatty()
    with closing(Progress(ignore_events, sys.stderr if draws else None)) as bars:
        emit = shown_by(bars, _warn) if progress else ignore_events
        if not isinstance(progress, bool):
            emit = progress
        with heard_by(emit):
            yield emit


def _warn(note: Note) -> None:
    if note.level == "warning":
        warnings.warn(note.text, stacklevel=2)


def _folder(run: str | Path | Run) -> Path:
    return run.path if isinstance(run, Run) else find_run(run)


def _folders(runs: str | Path | Run | Sequence[str | Path | Run]) -> list[Path]:
    if isinstance(runs, str | Path | Run):
        return [_folder(runs)]
    return list(map(_folder, runs))


def curves(
    runs: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    by: str = "mode",
    cells: Sequence[str] = (),
    width: str = "two",
) -> list[Path]:
    """Draw the curves of runs, as `lantern-bench curves` does.

    Args:
        runs: One run or several: `Run`, run directory or name.
        out: The folder of the figures, by default `figures` in the first run.
        by: What gives a curve its colour: `mode`, a parameter, or a column of the prompts such as
            `category`, for curves of acceptance by category.
        cells: The cells or modes to draw, by default all.
        width: The width of a figure in columns of a paper: `one` or `two`.

    Returns:
        The written files.

    Raises:
        UserError: A run or cell is unknown, or a file cannot be written.
        RefusedError: A run has neither records nor tables.
    """
    from lantern_bench.report.draw import draw_curves

    folders = _folders(runs)
    return draw_curves(
        runs=folders, folder=Path(out or folders[0] / "figures"), by=by, cells=cells, width=width
    )


def write_report(
    runs: str | Path | Run | Sequence[str | Path | Run], out: str | Path | None = None
) -> Path:
    """Write one page with the tables, curves and pictures of runs.

    Args:
        runs: One run or several: `Run`, run directory or name.
        out: The HTML file, by default `report.html` in the first run.

    Returns:
        The path of the page.

    Raises:
        UserError: A run is unknown, or the page cannot be written.
        RefusedError: A run has no records.
    """
    from lantern_bench.report import page

    folders = _folders(runs)
    path = Path(out or folders[0] / "report.html")
    page.write_report(folders, path)
    return path


def compare(
    run_a: str | Path | Run, run_b: str | Path | Run, across: Sequence[str] = ()
) -> pd.DataFrame:
    """Compare two runs cell by cell, as `lantern-bench compare` does.

    Args:
        run_a: The first run.
        run_b: The second run; ratios above 1 mean that it is better.
        across: The facts that may differ, such as `device`.

    Returns:
        One row per cell and quantity, with interval, p-value and verdict.

    Raises:
        UserError: A run is unknown, or both are the same run.
        RefusedError: A run has no records, or the runs differ in another fact.
    """
    from lantern_bench.analysis.compare import check_comparability, compare_runs, differences

    folders = [_folder(run_a), _folder(run_b)]
    if folders[0].resolve() == folders[1].resolve():
        raise UserError(f"{folders[1]}: is the same run as {folders[0]}", "Give two runs.")
    a, b = load_runs(folders).values()
    check_comparability(differences(a, b), across)
    return compare_runs(a, b).table


def predict(
    run: str | Path | Run, device: str, *, model: str | None = None, stack: str = "compiled"
) -> pd.DataFrame:
    """Predict the speed of a run on another device, as `lantern-bench predict` does.

    Args:
        run: The run, whose acceptance the prediction takes.
        device: The name of a device, or a YAML file that describes one.
        model: The model to predict, by default the run's own.
        stack: `compiled` (this package) or `eager` (code as papers publish it).

    Returns:
        One row per cell, as in the table `prediction`.

    Raises:
        UserError: The run, device or model is unknown.
        RefusedError: The run has no records.
    """
    from lantern_bench.profile.cost_model import find_device
    from lantern_bench.profile.prediction import predict_run

    (data,) = load_runs([_folder(run)]).values()
    return predict_run(run=data, device=find_device(device), stack=stack, model=model)


def explore(
    experiment: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    modes: str | Sequence[str] | None = None,
    predict_device: str | None = None,
    progress: bool | Callable[[Event], None] = True,
    **overrides: Any,
) -> pd.DataFrame:
    """Predict speed and distance of every cell from walks, as `lantern-bench explore` does.

    The same call continues an interrupted walk.

    Args:
        experiment: The name of a shipped experiment, a YAML file, or the content of one.
        out: The folder, by default `results/explore-<name>-<hash>`.
        modes: The modes of the cells, by default as in the experiment.
        predict_device: Predict speedups on this device, by name or YAML file, in place of here.
        progress: As in `sweep`.
        **overrides: Keys of the experiment, such as `images`, which is 16 here.

    Returns:
        One row per setting, as in the table `surface`.

    Raises:
        UserError: The experiment, an override or a prompt is wrong, or a cell cannot be predicted.
        RefusedError: Weights are missing.
    """
    from lantern_bench.profile import exploration
    from lantern_bench.profile.cost_model import find_device

    device = None
    if predict_device is not None:
        device = find_device(predict_device, flag="--predict-device")
    request = exploration.explore_request(
        experiment,
        Overrides.from_flags(overrides, modes=modes),
        out=Path(out) if out is not None else None,
    )
    with _emitting(progress=progress) as emit:
        return without_unused(exploration.explore(request, emit, device))


def recommend(
    run: str | Path | Run,
    quality_run: str | Path | Run | None = None,
    *,
    max_distance: float | None = None,
    max_emitted_tv: float | None = None,
    within: tuple[str, float] | None = None,
    across: Collection[str] = (),
) -> pd.DataFrame:
    """Find the fastest cell that keeps a quality, as `lantern-bench recommend` does.

    Args:
        run: The run that measured the speed.
        quality_run: The run that measured the quality, by default the same.
        max_distance: The largest acceptable distance from the target, by default 0.01.
        max_emitted_tv: Instead of a distance: the largest acceptable emitted TV.
        within: Instead of a distance: the name of a score, and how much worse than ar it may be.
        across: What may differ between the two runs: weights, protocol.

    Returns:
        Cells with a verdict on the condition. The fastest one that keeps it comes first.

    Raises:
        UserError: Several conditions are given, the score or a run is unknown.
        RefusedError: A run has neither records nor tables, or the runs are of different models.
    """
    from lantern_bench.analysis.recommend import condition_of, joined_notes, recommendation

    condition = condition_of(
        max_distance=max_distance, max_emitted_tv=max_emitted_tv, within=within
    )
    timed = load_run(_folder(run))
    scored = timed
    notes: list[str] = []
    if quality_run is not None:
        scored = load_run(_folder(quality_run))
        notes = joined_notes(timed._data, scored._data, across)
    return recommendation(timed.tables, scored.tables, condition, notes=notes)


def score(
    run: str | Path | Run,
    *,
    protocol: str | None = None,
    reference: str | None = None,
    device: str = "auto",
    rescore: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Score the pictures of a run, as `lantern-bench score` does.

    Args:
        run: The run.
        protocol: The name of a scoring protocol, by default the run's own.
        reference: The reference of FID: `embedded`, a folder, a COCO file or a `.npz` file.
        device: The device of the scorers: auto, cpu, mps, cuda or cuda:N.
        rescore: Score again what these scorers have scored.
        progress: Whether a bar is shown in terminals and notebooks.

    Returns:
        The table `quality` of the run.

    Raises:
        UserError: The run, protocol or reference is unknown.
        RefusedError: Weights of scorers are missing, or the run is in use or has no images.
    """
    from lantern_bench.metrics.score_run import score_run_directory

    folder = _folder(run)
    with _emitting(progress=progress) as emit:
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
    """Load a model.

    Args:
        name: The name of a model, or the YAML file that describes one.
        device: auto, cpu, mps, cuda or cuda:N.
        dtype: auto, float32, bfloat16 or float16.
        neighbour_space: Whether nearest codes are found among raw or normalised codes, by default
            as the model's authors do.

    Returns:
        The target, its drafter and its tokenizer.

    Raises:
        UserError: The model is unknown, or its file is malformed.
        RefusedError: Weights are missing, or this machine lacks the device.
    """
    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.models import load

    compute = choose_compute(device, dtype)
    with _emitting(progress=True):
        model = load.load_model(registry.model_of(name), compute)
    for remark in model.remarks:
        warnings.warn(remark, stacklevel=2)
    load.set_space(model, neighbour_space)
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
    """Decode prompts one at a time.

    An uncompiled sweep with the same seed and parameters gives the same tokens.

    Args:
        model: The model, from `load_model`.
        prompts: One prompt or several.
        mode: The mode. Relaxed modes need their bound, such as `delta`.
        seed: The seed of the run, from which each image gets its seed.
        logits: Whether the images carry their guided logits.
        conditions: For each prompt, a value as `model.condition([prompt])` returns it. The
            prompts are then only names, which must differ.
        tree: The draft tree, such as "chain-7".
        delta: The bound of LANTERN.
        lambda_: The bound of LANTERN++.
        **parameters: Other parameters of decoding. Each has one value, by default the model's.

    Returns:
        One image per prompt.

    Raises:
        UserError: A parameter or prompt is wrong.
        RefusedError: The model lacks a drafter or a text encoder.
        RecordsFailedError: An image cannot be decoded.
    """
    import torch

    from lantern_bench.devices.compute import Compute
    from lantern_bench.sweeps.decoder import decode_tasks, tasks_of

    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    flags = {
        "model": [model.name],
        "seed": seed,
        "tree": tree,
        "delta": delta,
        "lambda": lambda_,
        **parameters,
    }
    source = {"name": "decode", "model": model.name, "baseline": False, "cells": [{"mode": mode}]}
    resolved = load_experiment(source, registry.defaults_of, Overrides.from_flags(flags))
    if len(resolved.cells) != 1:
        raise UserError(
            f"decode takes one value per parameter; these make {len(resolved.cells)} cells",
            "Use sweep.",
        )
    if conditions is None:
        described = registry.model_of(model.name)
        for text in texts:
            described.check_prompt(text)
        list(model.prepare(list(dict.fromkeys(texts))))  # encodes the captions
    else:
        by_text = dict(zip(texts, conditions, strict=True))
        if len(by_text) != len(texts):
            raise UserError("prompts with conditions must differ", "Give each prompt another name.")
        model = replace(model, condition=lambda names: by_text[names[0]])
    compute = Compute(model.target.device, torch.get_default_dtype())
    tasks = tasks_of(resolved.cells, seed, texts, images=1)
    return list(decode_tasks(model, compute, tasks, logits=logits))
