"""The request of a sweep, checked without torch before any image is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.config.experiment import Cell, ResolvedExperiment, load_experiment
from lantern_bench.config.plan import Plan, Shard, make_plan, parse_shard
from lantern_bench.config.settings import Overrides
from lantern_bench.methods.catalog import missing_drafter
from lantern_bench.metrics.protocols import Protocol, protocol_of
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import describe_prompts, load_prompts
from lantern_bench.storage.run_directory import done_images, finished_records, run_folder
from lantern_bench.storage.run_store import check_folder
from lantern_bench.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
from lantern_bench.metrics.protocols import default_protocol

# seconds of silence after which a worker is ended; it is silent while it loads and compiles
WORKER_TIMEOUT = 1800.0
DEFAULT_CLUSTER = "default"  # the Ray cluster of `RAY_ADDRESS`, else a new one on this machine


@dataclass(frozen=True)
class Request:
    """A sweep that passed every check that needs no model."""

    experiment: ResolvedExperiment
    plan: Plan
    folder: Path  # the run directory; it need not exist
    protocol: Protocol
    prompts: dict[str, Any]  # describes the prompts in the manifest
    shard: Shard | None = None  # set where the plan is one shard of a larger run
    # the address of a Ray cluster, or `DEFAULT_CLUSTER`; None: this machine alone
    ray: str | None = None
    worker_timeout: float = WORKER_TIMEOUT  # seconds after which a silent worker process is ended

    def manifest_entries(self) -> dict[str, Any]:
        """Return what the manifest of a run says of its request, beside the experiment."""
        # The number of images tells `merge` whether the shard is complete.
        shard = (
            None if self.shard is None else asdict(self.shard) | {"images": len(self.plan.tasks)}
        )
        return {
            "prompts": self.prompts,
            "shard": shard,
            "engine": "local" if self.ray is None else "ray",
        }


def prepare(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    out: Path | None = None,
    resume: bool = True,
    shard: str | None = None,
    ray: str | None = None,
    both_residuals: bool = False,
    worker_timeout: float = WORKER_TIMEOUT,
) -> Request:
    """Check a sweep and return it as a request; `source` is as in `load_experiment`.

    With `both_residuals`, a relaxed experiment runs with both unless the overrides name one. Raises `UserError` for
    a wrong experiment, flag or prompt, `RefusedError` for a grid that is too large and a run of other settings.
    """
    if not worker_timeout > 0:
        raise UserError(f"--worker-timeout {worker_timeout:g}: must be more than 0 seconds")
    chosen_shard = parse_shard(shard) if shard is not None else None
    resolved = load_experiment(source, defaults_of, overrides)
    is_relaxed = any(not cell.decoding.rule_row.lossless for cell in resolved.cells)
    if both_residuals and "residual" not in overrides.values and is_relaxed:
        residuals = {**overrides.values, "residual": ["official", "exact"]}
        resolved = load_experiment(source, defaults_of, replace(overrides, values=residuals))
    if "prompts" not in resolved.settings.model_fields_set:
        prompt_set = next(iter(model_of(resolved.settings.model[0]).prompt_sets))
        resolved = replace(
            resolved, settings=resolved.settings.model_copy(update={"prompts": prompt_set})
        )
    check_sizes(resolved)
    check_drafters(resolved.cells)
    settings = resolved.settings
    if ray is not None and settings.device not in ("auto", "cpu", "cuda"):
        message = f"--device {settings.device}: with --ray, Ray gives each worker its device"
        raise UserError(message, "Give --device cuda, --device cpu, or leave it out.")
    protocol = protocol_of(settings.protocol or default_protocol(settings.model))
    models = [model_of(name) for name in settings.model]
    # Every prompt is checked for every model; the prompts themselves are the same for all.
    prompts, *_ = [load_prompts(settings.prompts, model) for model in models]
    folder = run_folder(resolved, out, resume=resume)
    plan = make_plan(resolved, prompts)
    if chosen_shard is not None:
        plan = plan.shard(chosen_shard)
        if out is None:
            # Shards run at the same time, and a run directory has one writer.
            folder = folder.with_name(
                f"{folder.name}-shard{chosen_shard.index}of{chosen_shard.count}"
            )
    check_folder(folder, resolved)
    description = describe_prompts(settings.prompts, models[0], prompts)
    return Request(
        experiment=resolved,
        plan=plan,
        folder=folder,
        protocol=protocol,
        prompts=description,
        shard=chosen_shard,
        ray=ray,
        worker_timeout=worker_timeout,
    )


def check_sizes(experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a cell with a size that its model bounds, where that is known before loading."""
    for cell in experiment.cells:
        model = model_of(cell.model)
        cell.decoding.check_sizes(cell.model, model.tokens, model.codes)


def check_drafters(cells: Iterable[Cell]) -> None:
    """Raise `RefusedError` for a cell with a drafter that its model lacks."""
    for cell in cells:
        if cell.decoding.drafting_row.needs_drafter and model_of(cell.model).lacks_drafter:
            raise missing_drafter(cell.decoding.mode)


def plan_table(request: Request) -> tuple[pd.DataFrame, float]:
    """Return the plan by cell (images, done, to_do, s_per_image) and the seconds left; nan: they are unknown."""
    import pandas as pd

    records = finished_records(request.folder)
    done = done_images(request.folder)
    pace = (
        (records["seconds"] + records["pixel_seconds"].fillna(0.0))
        .groupby(records["cell_id"])
        .mean()
    )
    images = Counter(task.cell.cell_id for task in request.plan.tasks)
    finished = Counter(task.cell.cell_id for task in request.plan.tasks if task.key in done)
    cells = [cell.cell_id for cell in request.plan.cells]
    rows = [
        (cell, images[cell], finished[cell], images[cell] - finished[cell], pace.get(cell))
        for cell in cells
    ]
    table = pd.DataFrame(rows, columns=["cell", "images", "done", "to_do", "s_per_image"])
    remaining = table[table["to_do"] > 0]
    return table, float(
        (remaining["to_do"] * remaining["s_per_image"].astype(float)).sum(skipna=False)
    )
