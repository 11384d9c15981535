"""Commands that check: `doctor`, `check-model`, `verify`, `certify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    DECODING_FLAGS,
    MOST_SEED,
    DeviceOption,
    FormatOption,
    PromptsOption,
    RunArgument,
    SettingsOption,
    compile_steps,
    resolve_cells,
    with_flags,
)
from lantern_bench.errors import CheckFailedError, UserError
from lantern_bench.runs.store import check_writable, results_root
from lantern_bench.runs.threads import set_threads

if TYPE_CHECKING:
    from lantern_bench.console import Console
    from lantern_bench.runs.verify import Checked


def doctor(ctx: typer.Context, device: DeviceOption = "auto", format: FormatOption = None) -> None:
    """Check installation, machine and decoding; paste the output into a bug report. It contacts nothing."""
    from lantern_bench.runs.doctor import examine

    console: Console = ctx.obj
    findings = []
    for finding in examine(device):
        findings.append(finding)
        # Lines are written at once: a check that crashes the process leaves those before it.
        if format is None:
            fix = f"\n{'':8}{'':22}fix: {finding.fix}" if finding.fix else ""
            console.data(f"{finding.state:8}{finding.check:22}{finding.result}{fix}")
    if format is not None:
        import pandas as pd

        console.table(pd.DataFrame(findings), format=format)
    failed = [finding.check for finding in findings if finding.state == "fail"]
    if failed:
        raise CheckFailedError(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")


def check_model(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, or a model's YAML file.")],
    reference: Annotated[Path | None, typer.Option(help="Logits: .npz of tokens, cond, uncond, prompts.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Two prompts. Default: the model's first two.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of an image to check. Default: two rows.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed of the tokens.")] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; rounding hides mistakes.")] = "float32",
    format: FormatOption = None,
) -> None:
    """Check that a model keeps the protocol of decoding: cache, trees, forced tokens, guidance, codebook, logits.

    Random tokens are scored in several ways that must agree; what all ways do wrong shows only against a reference.
    Exit code 5 if a check fails.
    """
    import pandas as pd
    import torch

    from lantern_bench.certify import conformance
    from lantern_bench.models.registry import model_of
    from lantern_bench.runs.devices import choose_compute

    console: Console = ctx.obj
    described, compute = model_of(model), choose_compute(device, dtype)
    prompts = prompt or next(iter(described.prompt_sets.values()))[:2]
    if len(prompts) != 2:
        raise UserError(f"--prompt: {len(prompts)} given", "Give the flag twice, or leave it out.")
    for text in prompts:
        described.check_prompt(text)
    loaded = described.load(compute.device, compute.dtype)
    results = conformance.check_model(
        loaded,
        prompts,
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
    import pandas as pd

    from lantern_bench.report.tables import write_tables
    from lantern_bench.runs import verify as runs_verify

    console: Console = ctx.obj
    checked = _check_run(run)
    if not checked.problems:
        pictures = "no pictures (left out when the run was copied)"
        pictures = pictures if checked.pictures is None else f"{checked.pictures} pictures"
        console.say(f"{checked.records} records, {pictures} and {checked.scores} scores are undamaged")
        return
    rows = [(problem.file, problem.problem, "yes" if problem.repairable else "no") for problem in checked.problems]
    console.table(pd.DataFrame(rows, columns=["file", "problem", "made_again_by_repair"]), format=format)
    repairable = sum(problem.repairable for problem in checked.problems)
    if repair and repairable:
        dropped = runs_verify.repair(run, checked)
        if _check_run(run).records:
            write_tables(run)
        console.say(f"{dropped} lines dropped, tables written; the command that started the run makes the rest again")
    if not repair or repairable < len(checked.problems):
        advice = f"`lantern-bench verify {run} --repair` and the same sweep make {repairable} of them again."
        message = f"{run}: {len(checked.problems)} problems"
        raise CheckFailedError(message, None if repair or not repairable else advice)


def _check_run(folder: Path) -> Checked:
    """Check lines, pictures and counts, and the tables if no line is damaged."""
    from lantern_bench.report.tables import stale_tables
    from lantern_bench.runs import verify as runs_verify

    checked = runs_verify.verify(folder)
    if checked.lines_are_undamaged and checked.records:
        stale = stale_tables(folder)
        checked.problems.extend(runs_verify.Problem(name, "not what the records give") for name in stale)
    return checked


# ---- certify

# Columns of an audit on a screen, and those of other tables that are only in files.
_AUDIT = ["mode", "form", "claim", "source", "table_images", "images", "p_holm", "power_p", "table_tv", "table_tv_low"]
_AUDIT += ["table_tv_high", "emitted_tv", "emitted_tv_low", "emitted_tv_high", "verdict"]
_MOST = 100_000  # of what `certify` draws: more takes days
_FILE_ONLY = ["model", "prompts", "emitted_tv_crossed", "emitted_tv_median", "moved_mass"]


@with_flags(DECODING_FLAGS)
def certify(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The model.")] = "lanterns",
    emitted_tv: Annotated[bool, typer.Option("--emitted-tv", help="Only measure what relaxation costs.")] = False,
    experiment: Annotated[
        str | None, typer.Option(help="With the relaxed cells. Default: certify; with --emitted-tv relaxation-cost.")
    ] = None,
    modes: Annotated[
        list[str] | None, typer.Option(help="Keep only cells of these modes; all: audit the claims of every mode.")
    ] = None,
    prompts: PromptsOption = None,
    positions: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Positions of emitted TV. Default: 48; with --emitted-tv 200.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=2, max=_MOST, help="Sampled drafts a position. Default: 128; with --emitted-tv 512."),
    ] = None,
    samples: Annotated[int, typer.Option(min=8, max=_MOST, help="Images of each lossless check.")] = 192,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the CSV files. Default: results/certify-MODEL or audit-MODEL.")
    ] = None,
    settings: SettingsOption = None,
    format: FormatOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Check that lossless modes are lossless, and measure what relaxed modes cost. Exit code 5 if a check fails.

    Tests of whole images with their power, greedy identity, emitted TV of relaxed modes beside their bounds. With
    --modes all, the audit: for every mode its authors' claim, and what the tokens say of it (docs/audit.md).
    """
    from lantern_bench.certify.plan import Sizes, audited_cells, plan_audit, plan_certificate

    console: Console = ctx.obj
    least = (200, 512) if emitted_tv else (48, 128)
    sizes = Sizes(positions or least[0], draws or least[1], samples, greedy=8)
    flags |= {"model": [model], "prompts": prompts}
    is_audit = modes == ["all"]
    if is_audit and (emitted_tv or experiment):
        flag = "--emitted-tv" if emitted_tv else "--experiment"
        raise UserError(f"{flag}: is not for the audit of all modes", f"Leave out {flag}, or --modes all.")
    if is_audit:
        # An audit decodes a few images in each of many cells: compiling them would take longer.
        plan = plan_audit(resolve_cells("audit", flags, audited_cells(), settings or [], compile=False), sizes)
    else:
        source = experiment or ("relaxation-cost" if emitted_tv else "certify")
        plan = plan_certificate(source, flags, modes or None, settings or [], sizes)
    folder = out or results_root() / f"{'audit' if is_audit else 'certify'}-{Path(model).name}"
    check_writable(folder)
    set_threads(plan.resolved.settings.threads)

    from lantern_bench.certify.run import Certification
    from lantern_bench.certify.tables import LEVEL, failures
    from lantern_bench.report.tables import frame

    certification = Certification(plan)
    if plan.resolved.settings.compile:
        compile_steps([certification.loaded], certification.compute, console)
    with console.progress() as progress:
        tables = certification.measure(emitted_tv, progress.share)
    certification.write(folder, tables)

    titles = {
        "audit": f"audit of all modes with {plan.model}",
        "certificate": f"certificate of {plan.model}",
        "emitted_tv": f"what relaxation costs {plan.model}, at {sizes.positions} positions of sampled images",
    }
    name = next(name for name in titles if name in tables)
    table = frame(name, tables[name])
    if (format or console.format) not in ("csv", "json"):
        table = table[_AUDIT] if is_audit else table.drop(columns=_FILE_ONLY, errors="ignore")
        table = table.dropna(axis=1, how="all")
    console.table(table, "emitted_tv" if emitted_tv else None, title=titles[name], format=format)
    if not emitted_tv:
        console.say(f"a correct model fails with a chance of at most {LEVEL:g} (all tests together)")
    console.say(f"tables: {folder}")
    checked = [] if emitted_tv else tables[name]
    if weak := failures(checked, "weak"):
        message = f"{len(weak)} checks show too little: {'; '.join(weak)}"
        console.warn(message, "Give more --samples, or --dtype float32.")
    if failed := failures(checked):
        raise CheckFailedError(f"{len(failed)} checks do not hold: " + "; ".join(failed))
