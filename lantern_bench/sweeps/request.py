"""The request of a sweep, checked without torch before any image is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.config.experiment import Cell, ResolvedExperiment, load_experiment
from lantern_bench.config.plan import ImageTask, Plan, make_plan, parse_shard
from lantern_bench.config.settings import Overrides
from lantern_bench.methods.catalog import missing_drafter
from lantern_bench.metrics.protocols import Protocol, default_protocol, protocol_of
from lantern_bench.models.model import Model, no_picture
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import describe_prompts, load_prompts
from lantern_bench.storage.run_directory import done_images, finished_records, run_folder
from lantern_bench.storage.run_store import check_folder
from lantern_bench.sweeps.events import by_cell
from lantern_bench.utils.errors import LanternError, RefusedError, UserError, joined
from lantern_bench.utils.text import listed

if TYPE_CHECKING:
    import pandas as pd

# seconds of silence after which a worker is ended; it is silent while it loads and compiles
WORKER_TIMEOUT = 1800.0
DEFAULT_CLUSTER = "default"  # the Ray cluster of `RAY_ADDRESS`, else a new one on this machine


@dataclass(frozen=True)
class Request:
    """A sweep that has passed all checks that need no loaded model."""

    experiment: ResolvedExperiment
    plan: Plan
    folder: Path  # the run directory; it need not exist
    protocol: Protocol
    prompts: dict[str, Any]  # describes the prompts in the manifest
    # index, count and number of images, where the plan is one shard of a larger run
    shard: dict[str, int] | None = None
    # the address of a Ray cluster, or `DEFAULT_CLUSTER`; None: this machine alone
    ray: str | None = None
    worker_timeout: float = WORKER_TIMEOUT  # seconds after which a silent worker process is ended
    command: str | None = None  # the command line as typed; None: called from Python
    # what this machine lacks to decode and score, the models first
    lacking: Sequence[LanternError] = ()

    def missing(self) -> list[ImageTask]:
        """Return the images without a record of status `ok`."""
        done = done_images(self.folder)
        return [task for task in self.plan.tasks if task.key not in done]

    def remarks(self) -> list[str]:
        """Say what the plan does: the prompts that it uses, its batches, and its rules."""
        return [self._prompts_used(), *self._smaller_batches(), *self.experiment.remarks]

    def _smaller_batches(self) -> Iterator[str]:
        """Say for each size of batch how many images are decoded with fewer."""
        sizes: Counter[tuple[int, int]] = Counter()
        if max(self.experiment.settings.batch) > 1:
            sizes.update((batch[0].cell.batch, len(batch)) for batch in self.plan.batches())
        for (most, size), count in sorted(sizes.items()):
            if size < most:
                yield f"batch {most}: {count * size} images are decoded {size} at a time"

    def _prompts_used(self) -> str:
        """Say how many prompts there are, and how many of them this plan uses."""
        described = self.prompts
        used = len({task.prompt.source for task in self.plan.tasks})
        text = f"{described['prompts']:,} prompts from {described['set']}, {used:,} of them used"
        repeated = described["repeated_texts"]
        if repeated:
            text += f"; {repeated:,} texts occur more than once, each time with its own seed"
        kept = [f"{name} ({count:,} values)" for name, count in described["metadata"].items()]
        if kept:
            text += f"; kept with each: {', '.join(kept)}"
        return text


def prepare(  # noqa: PLR0913  # one keyword for each flag of a sweep
    source: str | Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    out: Path | None = None,
    resume: bool = True,
    shard: str | None = None,
    ray: str | None = None,
    both_residuals: bool = False,
    worker_timeout: float = WORKER_TIMEOUT,
    command: str | None = None,
) -> Request:
    """Check a sweep and return it as a request.

    Args:
        source: The experiment, as in `load_experiment`.
        overrides: Flags over the experiment.
        out: The run directory, by default `results/<run name>`.
        resume: Continue the run of this directory. Without it, a new one is made beside it.
        shard: `i/n` for part i of n of the prompts.
        ray: The address of a Ray cluster, or `DEFAULT_CLUSTER`.
        both_residuals: Run relaxed cells with both residuals unless the overrides name one.
        worker_timeout: Seconds without a sign of life after which a worker is ended.
        command: The command line, which the manifest of the run keeps.

    Raises:
        UserError: The experiment, a flag or a prompt is wrong.
        RefusedError: The grid is too large, a drafter is missing, or the run is in use or has
            images of other settings.
    """
    if not worker_timeout > 0:
        raise UserError(f"--worker-timeout {worker_timeout:g}: must be more than 0 seconds")

    # 1. The experiment, its models and its cells.
    resolved = load_experiment(source, defaults_of, overrides)
    is_relaxed = any(not cell.decoding.rule_row.lossless for cell in resolved.cells)
    if both_residuals and is_relaxed and "residual" not in overrides.values:
        residuals = {**overrides.values, "residual": ["official", "exact"]}
        resolved = load_experiment(source, defaults_of, replace(overrides, values=residuals))
    settings = resolved.settings
    models = {name: model_of(name) for name in settings.model}
    first = models[settings.model[0]]
    if "prompts" not in settings.model_fields_set:
        settings = settings.model_copy(update={"prompts": next(iter(first.prompt_sets))})
        resolved = replace(resolved, settings=settings)
    check_cells(resolved.cells, models)
    resolved = _without_quality_of_maps(resolved, models)
    settings = resolved.settings
    if ray is not None and settings.device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"--device {settings.device}: with --ray, Ray gives each worker its device",
            "Give --device cuda, --device cpu, or leave it out.",
        )
    protocol = protocol_of(settings.protocol or default_protocol(settings.model))

    # 2. The prompts: each model checks them, and all models get the same.
    lacking = _lacking(resolved, models, protocol, with_models=ray is None)
    flag = overrides.location("prompts").text if "prompts" in overrides.values else "prompts"
    try:
        of_models = [
            load_prompts(settings.prompts, model, flag=flag, column=settings.prompt_column)
            for model in models.values()
        ]
    except UserError as error:
        raise joined([*lacking, error]) from error
    prompts = of_models[0]
    plan = make_plan(resolved, prompts)

    # 3. The run directory.
    folder = run_folder(resolved, out, resume=resume)
    described = None
    if shard is not None:
        part = parse_shard(shard)
        plan = plan.shard(part)
        # The number of images tells `merge` whether the shard is complete.
        described = asdict(part) | {"images": len(plan.tasks)}
        if out is None:
            # Shards run at the same time, and a run directory has one writer.
            folder = folder.with_name(f"{folder.name}-shard{part.index}of{part.count}")
    check_folder(folder, resolved)
    return Request(
        experiment=resolved,
        plan=plan,
        folder=folder,
        protocol=protocol,
        prompts=describe_prompts(settings.prompts, first, prompts),
        shard=described,
        ray=ray,
        worker_timeout=worker_timeout,
        command=command,
        lacking=lacking,
    )


def _without_quality_of_maps(
    experiment: ResolvedExperiment, models: Mapping[str, Model]
) -> ResolvedExperiment:
    """Leave quality out by default if pictures are maps of codes. Raise if it was asked for."""
    maps = [name for name, model in models.items() if model.draws_maps]
    settings = experiment.settings
    if not maps or "quality" not in settings.metrics:
        return experiment
    problem = f"{listed(maps)}: no decoder here makes pixels of its tokens"
    if "metrics" in settings.model_fields_set:
        raise UserError(f"--metrics quality: {problem}", "Give --metrics speed,distance.")
    metrics = tuple(metric for metric in settings.metrics if metric != "quality")
    remark = f"{problem}: quality is measured as the distance, and pictures are maps of codes"
    return replace(
        experiment,
        settings=settings.model_copy(update={"metrics": metrics}),
        remarks=(*experiment.remarks, remark),
    )


def _lacking(
    experiment: ResolvedExperiment,
    models: Mapping[str, Model],
    protocol: Protocol,
    *,
    with_models: bool,
) -> list[LanternError]:
    """Return the errors for files of models and of scorers that are not on this machine."""
    errors: list[LanternError] = []
    for name, model in models.items() if with_models else ():
        cells = [cell for cell in experiment.cells if cell.model == name]
        needs_drafter = any(cell.decoding.drafting_row.needs_drafter for cell in cells)
        errors += model.missing(drafter=needs_drafter)
        if model.why_no_pixels:
            errors.append(no_picture(name, model.why_no_pixels))
    if "quality" in experiment.settings.metrics:
        try:
            protocol.find_networks()
        except RefusedError as error:
            errors.append(or_without_quality(error))
    return errors


def or_without_quality(error: RefusedError) -> RefusedError:
    """Return the error of a scorer with the advice to leave quality out."""
    advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
    return RefusedError(error.message, f"{advice}Or leave quality out: --metrics speed.")


def check_cells(
    cells: Iterable[Cell], models: Mapping[str, Model], *, with_drafters: bool = True
) -> None:
    """Check cells against the known sizes of models, before the models are loaded.

    Args:
        cells: The cells.
        models: Their models by name.
        with_drafters: Whether a missing drafter is an error.

    Raises:
        UserError: A size exceeds the image tokens or codes of its model, or the model was
            trained without guidance and the cell has it.
        RefusedError: A model lacks the drafter that its cell needs.
    """
    for cell in cells:
        model = models[cell.model]
        cell.decoding.check_sizes(cell.model, model.tokens, model.codes)
        if cell.decoding.cfg_scale != 1 and not model.guided:
            raise UserError(
                f"--cfg-scale {cell.decoding.cfg_scale:g}: {cell.model} was trained without "
                "guidance",
                "Leave it out, or give 1.",
            )
        needs_drafter = with_drafters and cell.decoding.drafting_row.needs_drafter
        if needs_drafter and model.lacks_drafter:
            raise missing_drafter(cell.decoding.mode)


def plan_table(request: Request) -> tuple[pd.DataFrame, float]:
    """Return the plan by cell and the seconds left.

    The columns are `cell`, `images`, `done`, `to_do` and `s_per_image`. The seconds are NaN where
    a cell has no finished image yet.
    """
    import pandas as pd

    table = pd.DataFrame({"cell": [cell.cell_id for cell in request.plan.cells]})
    table["images"] = table["cell"].map(by_cell(request.plan.tasks))
    table["to_do"] = table["cell"].map(by_cell(request.missing()))
    table.insert(2, "done", table["images"] - table["to_do"])

    records = finished_records(request.folder)
    seconds = records["seconds"] + records["pixel_seconds"].fillna(0.0)
    table["s_per_image"] = table["cell"].map(seconds.groupby(records["cell_id"]).mean())
    missing = table[table["to_do"] > 0]
    left = missing["to_do"] * missing["s_per_image"].astype(float)
    return table, float(left.sum(skipna=False))
