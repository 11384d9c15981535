"""Commands that check an installation, a model of the user's own, or a run: `doctor`, `check-model`, `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import DeviceOption, FormatOption, RunArgument, locate
from lantern_bench.errors import CheckFailedError, UserError

if TYPE_CHECKING:
    from lantern_bench.console import Console
    from lantern_bench.runs.verify import Checked


def doctor(ctx: typer.Context, device: DeviceOption = "auto", format: FormatOption = None) -> None:
    """Check installation, machine and decoding; paste the output into a bug report. It contacts nothing."""
    from lantern_bench.runs.doctor import examine

    console: Console = ctx.obj
    # Piped lines are written at once: a check that crashes the process leaves those before it.
    as_lines, findings = format is None and console.format != "table", []
    with console.progress() as progress:
        for finding in examine(device):
            findings.append(finding)
            if as_lines:
                fix = f"\n{'':8}{'':22}fix: {finding.fix}" if finding.fix else ""
                console.data(f"{finding.state:8}{finding.check:22}{finding.result}{fix}")
            else:
                progress.share(f"checked {finding.check}", 1.0)
    if not as_lines:
        import pandas as pd

        console.table(pd.DataFrame(findings), format=format)
    failed = [finding.check for finding in findings if finding.state == "fail"]
    if failed:
        raise CheckFailedError(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")


def check_model(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, or a model's YAML file.")],
    reference: Annotated[
        Path | None, typer.Option(help="Logits from elsewhere: .npz with tokens, cond, uncond and prompts.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Two prompts, one a flag. Default: the model's first two.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of an image to check. Default: two rows.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the tokens.")] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; rounding hides small mistakes.")
    ] = "float32",
    format: FormatOption = None,
) -> None:
    """Check that a model keeps the protocol of decoding: cache, trees, forced tokens, guidance, codebook, logits.

    Random tokens are scored in several ways that must agree. Mistakes that all ways share show only against a reference
    (--reference, or the model's own). Exit code 5 if a check fails.
    """
    import pandas as pd
    import torch

    from lantern_bench.certify import conformance
    from lantern_bench.models.registry import model_of
    from lantern_bench.runs.devices import choose_compute

    console: Console = ctx.obj
    described, compute = model_of(model), choose_compute(device, dtype)
    prompts = list(prompt or next(iter(described.prompt_sets.values())))
    if prompt is not None and len(prompt) != 2:
        raise UserError(f"--prompt: {len(prompt)} given", "Give the flag twice, or leave it out.")
    for text in prompts[:2]:
        described.check_prompt(text)
    loaded = described.load(compute.device, compute.dtype)
    results = conformance.check_model(
        loaded,
        prompts[:2],
        tolerance=conformance.TOLERANCE[compute.dtype_name],
        generator=torch.Generator().manual_seed(seed),
        tokens=tokens,
        reference=None if reference is None else conformance.read_reference(reference, loaded),
    )
    table = pd.DataFrame(results).rename(columns={"limit": "at most"})
    console.table(table, title=f"{model}, {compute.dtype_name}", format=format)
    if failed := [row.check for row in results if row.result == "fail"]:
        raise CheckFailedError(f"{model}: {len(failed)} of {len(results)} checks failed: {', '.join(failed)}")


def verify(
    ctx: typer.Context,
    run: RunArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged, to be made again.")] = False,
    format: FormatOption = None,
) -> None:
    """Check the lines, hashes and counts of a run, and name what is missing or damaged."""
    from lantern_bench.report.tables import write_tables
    from lantern_bench.runs import verify as runs_verify

    console: Console = ctx.obj
    folder = locate(run)
    checked = _check_run(folder)
    if not checked.problems:
        console.say(f"{checked.records} records, {checked.pictures} pictures and {checked.scores} scores are undamaged")
        return
    _show_problems(checked, console, format)
    again = sum(problem.again for problem in checked.problems)
    if repair and again:
        dropped = runs_verify.repair(folder, checked)
        if _check_run(folder).records:
            write_tables(folder)
        console.say(f"{dropped} lines dropped, tables written; the command that started the run makes the rest again")
    if not repair or again < len(checked.problems):
        advice = f"`lantern-bench verify {folder} --repair` and the same sweep make {again} of them again."
        message = f"{folder}: {len(checked.problems)} problems"
        raise CheckFailedError(message, None if repair or not again else advice)


def _check_run(folder: Path) -> Checked:
    """Check lines, pictures and counts, and the tables if no line is damaged."""
    from lantern_bench.report.tables import stale_tables
    from lantern_bench.runs import verify as runs_verify

    checked = runs_verify.verify(folder)
    if checked.lines_are_undamaged and checked.records:
        for name in stale_tables(folder):
            checked.problems.append(runs_verify.Problem(name, "not what the records give"))
    return checked


def _show_problems(checked: Checked, console: Console, format: str | None) -> None:
    import pandas as pd

    rows = [(problem.file, problem.problem, "yes" if problem.again else "no") for problem in checked.problems]
    console.table(pd.DataFrame(rows, columns=["file", "problem", "made_again_by_repair"]), format=format)
