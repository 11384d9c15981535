"""`lantern-bench certify`: check that a model decodes losslessly, and measure what relaxation costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    DECODING,
    FormatOption,
    PromptsOption,
    SettingsOption,
    compile_steps,
    experiment_flags,
    resolve_cells,
)
from lantern_bench.errors import CheckFailedError, UserError
from lantern_bench.runs.request import check_writable
from lantern_bench.runs.store import results_root
from lantern_bench.runs.threads import set_threads

if TYPE_CHECKING:
    from lantern_bench.console import Console

# Default sample sizes of emitted TV: in a certificate, and with --emitted-tv.
_QUICK, _FULL = {"positions": 48, "draws": 128}, {"positions": 200, "draws": 512}
# Columns of the CSV file that are not shown on a screen; the notes warn about them.
_FILE_ONLY = ["prompts", "emitted_tv_crossed", "emitted_tv_median", "moved_mass"]
# Columns of an audit that are shown on a screen.
_AUDIT = ["mode", "form", "claim", "source", "table_images", "images", "p_holm", "power_p", "table_tv", "table_tv_low"]
_AUDIT += ["table_tv_high", "emitted_tv", "emitted_tv_low", "emitted_tv_high", "verdict"]


@experiment_flags(*DECODING)
def certify(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The model.")] = "lanterns",
    emitted_tv: Annotated[bool, typer.Option("--emitted-tv", help="Only measure what relaxation costs.")] = False,
    experiment: Annotated[
        str | None,
        typer.Option(help="Experiment with the relaxed cells. Default: certify, or relaxation-cost with --emitted-tv."),
    ] = None,
    modes: Annotated[
        list[str] | None,
        typer.Option("--modes", help="Keep only cells of these modes; all: audit the claims of every mode."),
    ] = None,
    prompts: PromptsOption = None,
    positions: Annotated[
        int | None,
        typer.Option(min=1, help="Positions of emitted TV. Default: 48; with --emitted-tv 200."),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=2, help="Sampled drafts per position. Default: 128; with --emitted-tv 512."),
    ] = None,
    samples: Annotated[int, typer.Option(min=8, help="Images of each lossless check.")] = 192,
    greedy: Annotated[int, typer.Option(min=1, help="Prompts of the greedy identity check.", hidden=True)] = 8,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the CSV files. Default: results/certify-MODEL, or results/audit-MODEL."),
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
    defaults = _FULL if emitted_tv else _QUICK
    sizes = Sizes(positions or defaults["positions"], draws or defaults["draws"], samples, greedy)
    flags |= {"model": [model], "prompts": prompts}
    if modes == ["all"]:
        for name, value in (("--emitted-tv", emitted_tv), ("--experiment", experiment)):
            if value:
                raise UserError(f"{name}: is not for the audit of all modes", f"Leave out {name}, or --modes all.")
        # An audit decodes a few images in each of many cells: compiling them would take longer.
        plan = plan_audit(resolve_cells("audit", flags, audited_cells(), settings or [], compile=False), sizes)
    else:
        source = experiment or ("relaxation-cost" if emitted_tv else "certify")
        plan = plan_certificate(source, flags, modes or None, settings or [], sizes)
    folder = out or results_root() / f"{'audit' if modes == ['all'] else 'certify'}-{Path(model).name}"
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

    as_data = (format or console.format) in ("csv", "json")
    if "audit" in tables:
        table = frame("audit", tables["audit"])
        table = table if as_data else table[_AUDIT].dropna(axis=1, how="all")
        console.table(table, title=f"audit of all modes with {plan.model}", format=format)
        console.say(f"a lossless claim that is true fails with a chance of at most {LEVEL:g} (all tests together)")
    if "certificate" in tables:
        table = frame("certificate", tables["certificate"])
        table = table if as_data else table.drop(columns="model")
        console.table(table, title=f"certificate of {plan.model}", format=format)
        console.say(f"a correct model fails this certificate with a chance of at most {LEVEL:g} (all tests together)")
    if emitted_tv:
        table = frame("emitted_tv", tables["emitted_tv"])
        table = table if as_data else table.drop(columns=_FILE_ONLY)
        title = f"what relaxation costs: {sizes.positions} positions of sampled images"
        console.table(table, "emitted_tv", title=title, format=format)
    console.say(f"tables: {folder}")
    checked = tables.get("certificate") or tables.get("audit", [])
    if weak := failures(checked, "weak"):
        message = f"{len(weak)} checks show too little: {'; '.join(weak)}"
        console.warn(message, "Give more --samples, or --dtype float32.")
    if failed := failures(checked):
        raise CheckFailedError(f"{len(failed)} checks do not hold: " + "; ".join(failed))
