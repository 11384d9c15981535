"""The command `train drafter`: flags and data are checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import PROMPTS_HELP, Command, command_group, option, with_flags
from lantern_bench.storage.run_directory import results_root
from lantern_bench.training.recipe import DrafterFlags, checked
from lantern_bench.utils.errors import CheckFailedError, UserError
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.text import duration

if TYPE_CHECKING:
    from lantern_bench.training.drafter_job import DrafterJob
    from lantern_bench.training.train_drafter import Evaluated

train = command_group(name="train", help="Train a drafter for any target.")


def _drafter_flags() -> Iterator[tuple[str, Any]]:
    for key, field in DrafterFlags.model_fields.items():
        if field.title is not None:
            kind: Any = str if get_origin(field.annotation) is Literal else field.annotation
            default = (
                "" if field.default is None or kind is bool else f"  [default: {field.default}]"
            )
            yield key, option(key, kind, field.title + default)


@train.command(cls=Command)
@with_flags(dict(_drafter_flags()))
def drafter(
    console: Console,
    target: Annotated[
        str,
        typer.Option(help="The model to train a drafter for, or the YAML file that describes it."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help=f"A folder of pictures with captions; or captions to sample from: {PROMPTS_HELP}"
        ),
    ],
    flags: dict[str, Any],
    min_mal: Annotated[
        float | None, typer.Option(help="Exit with 5 if the drafter's MAL ends below this.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be made, and make nothing.")
    ] = False,
) -> None:
    """Train a drafter and write it in the published layout. The same command resumes training."""
    typed = {key: value for key, value in flags.items() if value is not None}
    checked_flags = checked(DrafterFlags, {"target": target, "data": data, **typed})

    from lantern_bench.training.drafter_job import make_job, plan_rows

    job = make_job(checked_flags, results_root() / "drafters")
    if not dry_run:
        return _run(job=job, min_mal=min_mal, console=console)
    console.table(
        [{"what": what, "how much": amount} for what, amount in plan_rows(job)],
        title=f"drafter for {job.flags.target}",
    )
    console.say(f"would be written to {job.out}; nothing was made")
    return None


def _run(job: DrafterJob, min_mal: float | None, console: Console) -> None:
    from lantern_bench.decoding.engine import compiler_problem
    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.models.load import load_model
    from lantern_bench.models.registry import model_of
    from lantern_bench.training.train_drafter import train_drafter
    from lantern_bench.training.trainer import is_distributed, join_processes

    flags = job.flags
    if is_distributed() and flags.minutes is not None:
        raise UserError(
            "--minutes: clocks of several processes differ", "Give --steps or --epochs."
        )
    check_writable(job.out)
    check_writable(job.work, "--work")
    distributed = join_processes(cpu=flags.device == "cpu")
    compute = choose_compute(str(distributed.device or flags.device), flags.dtype)
    problem = compiler_problem(compute.device) if flags.compile else None
    if problem:
        raise UserError(f"--compile: {problem}", "Leave it out.")
    shown = console if distributed.first else Console(quiet=True)
    with shown.events():
        model = load_model(model_of(flags.target), compute, captions=True)
    for remark in model.remarks:
        shown.warn(remark)
    try:
        with shown.events() as emit:
            report, evaluated = train_drafter(
                job=job, model=model, emit=emit, processes=distributed
            )
    except KeyboardInterrupt:
        shown.say(f"stopped; the same command continues from what is in {job.work}")
        raise
    if not distributed.first:
        return
    console.table(
        _drafter_rows(evaluated, job.decoding.tree),
        title=f"drafter for {flags.target}",
    )
    console.say(f"{report.steps} steps in {duration(report.seconds)}; log: {job.out / 'log.csv'}")
    console.say(f"wrote {job.out}; use it: --model {job.out / 'model.yaml'}")
    accepted = evaluated[0].accepted
    if min_mal is not None and (accepted is None or accepted.value < min_mal):
        mal = "not measured" if accepted is None else f"{accepted.value:.3f}"
        raise CheckFailedError(
            f"--min-mal {min_mal:g}: the drafter's MAL is {mal}", "Train longer or on more data."
        )


def _drafter_rows(evaluated: Sequence[Evaluated], tree: str | None) -> list[dict[str, Any]]:
    """Return one row per drafter, compared with the model's own drafter by prompt."""
    from lantern_bench.analysis.statistics import ratio_of_sums

    rows: list[dict[str, Any]] = []
    model_length = evaluated[1].accepted if len(evaluated) > 1 else None
    for drafter in evaluated:
        accepted = drafter.accepted
        row = {
            "drafter": drafter.name,
            "one_minus_tv": drafter.one_minus_tv,
            "tree": tree,
            "images": 0,
        }
        if accepted is not None:
            mal = ratio_of_sums(accepted.numerator, accepted.denominator, accepted.prompts)
            row |= {"images": len(accepted.numerator), **mal.columns("mal")}
        if accepted is not None and model_length is not None:
            # Both commit the same tokens: the ratio of lengths is the ratio of steps.
            ratio = ratio_of_sums(model_length.denominator, accepted.denominator, accepted.prompts)
            row |= ratio.columns("over_own")
        rows.append(row)
    return rows
