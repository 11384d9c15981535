"""Commands that check: `doctor`, `check-model`, `check-run`, `certify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import (
    DECODING_FLAGS,
    MOST_SEED,
    PROMPTS_HELP,
    DeviceOption,
    RunArgument,
    SettingsOption,
    resolve_cells,
    with_flags,
    with_format,
)
from lantern_bench.storage.run_directory import results_root
from lantern_bench.utils.errors import CheckFailedError, UserError
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.text import split_words


@with_format
def doctor(ctx: typer.Context, console: Console, device: DeviceOption = "auto") -> None:
    """Check the installation, the machine and decoding, for a bug report. Contacts nothing."""
    from lantern_bench.checks.doctor import examine

    is_table = ctx.params["format"] is not None
    findings = []
    for finding in examine(device):
        findings.append(finding)
        # Write each line at once: if a check crashes the process, the earlier lines remain.
        if not is_table:
            fix = f"\n{'':30}fix: {finding.fix}" if finding.fix else ""
            console.data(f"{finding.state:8}{finding.check:22}{finding.result}{fix}")
    if is_table:
        console.table(findings)
    _raise_if_failed(findings)


def _raise_if_failed(results: Sequence[Sequence[Any]], of_model: str = "") -> None:
    """Raise `CheckFailedError` if a check failed. Results begin with its name and its result."""
    failed = [check for check, result, *_ in results if result == "fail"]
    if failed:
        raise CheckFailedError(
            f"{of_model}{len(failed)} of {len(results)} checks failed: {', '.join(failed)}"
        )


@with_format
def check_model(
    console: Console,
    model: Annotated[str, typer.Argument(help="A model, or a model's YAML file.")],
    reference: Annotated[
        Path | None, typer.Option(help="Logits: .npz of tokens, cond, uncond, prompts.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Two prompts. Default: the model's first two.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of an image to check. Default: two rows.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed of the tokens.")] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; rounding hides mistakes.")
    ] = "float32",
) -> None:
    """Check that a model keeps the protocol of decoding.

    Random tokens are scored in several ways that must agree: cache, trees, forced tokens, guidance,
    codebook, logits. Only a reference shows a mistake that all ways share. Exit code 5 if a check
    fails.
    """
    import pandas as pd
    import torch

    from lantern_bench.checks import check_model as check_model_module
    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.models.load import load_model
    from lantern_bench.models.registry import model_of

    described = model_of(model)
    compute = choose_compute(device, dtype)
    prompts = prompt or next(iter(described.prompt_sets.values()))[:2]
    if len(prompts) != 2:
        raise UserError(f"--prompt: {len(prompts)} given", "Give the flag twice, or leave it out.")
    for text in prompts:
        described.check_prompt(text)
    with console.events():
        loaded = load_model(described, compute)
    for remark in loaded.remarks:
        console.warn(remark)
    if loaded.stand_in is not None and reference is None:
        console.say(f"{model}: its text encoder is missing; random features replace the prompts")
        loaded.condition = loaded.stand_in
        loaded.prepare = lambda _prompts: iter(())
    results = check_model_module.check_model(
        loaded,
        prompts,
        tolerance=check_model_module.TOLERANCE[compute.dtype_name],
        generator=torch.Generator().manual_seed(seed),
        tokens=tokens,
        reference=None
        if reference is None
        else check_model_module.read_reference(reference, loaded),
    )
    table = pd.DataFrame(results).rename(columns={"limit": "at most"})
    console.table(table, title=f"{model}, {compute.dtype_name}")
    _raise_if_failed(results, f"{model}: ")


@with_format
def check_run(
    console: Console,
    run: RunArgument,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Drop damaged parts, so that the sweep makes them again."),
    ] = False,
) -> None:
    """Check the lines, hashes, counts and tables of a run, and name what is missing or damaged.

    The exit code is 5 if there is a problem.
    """
    import pandas as pd

    from lantern_bench.checks import check_run as run_checks

    checked = run_checks.check_run(run)
    problems = checked.problems
    if not problems:
        pictures = f"{checked.pictures} pictures"
        if checked.pictures is None:
            pictures = "no pictures (left out when the run was copied)"
        console.say(
            f"{checked.records} records, {pictures} and {checked.scores} scores are undamaged"
        )
        return

    table = pd.DataFrame(problems)
    table["made_again_by_repair"] = table.pop("repairable").map({True: "yes", False: "no"})
    console.table(table)
    repairable = sum(problem.repairable for problem in problems)
    if repair and repairable:
        dropped = run_checks.repair_run(run, checked)
        console.say(
            f"{dropped} lines dropped, tables written; "
            "the command that started the run makes the rest again"
        )
    if repair and repairable == len(problems):
        return
    advice = f"`lantern-bench check-run {run} --repair` and the same sweep make {repairable} again."
    raise CheckFailedError(
        f"{run}: {len(problems)} problems", advice if repairable and not repair else None
    )


# ---- certify

# Columns of an audit on a screen.
_AUDIT = [
    "mode",
    "form",
    "claim",
    "source",
    "table_images",
    "images",
    "p_holm",
    "power_p",
    "table_tv",
    "table_tv_low",
    "table_tv_high",
    "verdict",
]
_MOST = 100_000  # images of a trial: more takes days


@with_flags(DECODING_FLAGS)
def certify(
    console: Console,
    model: Annotated[str, typer.Argument(help="The model.")] = "lanterns",
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Test many images of the model under every filter; takes hours."
        ),
    ] = False,
    power: Annotated[
        bool,
        typer.Option(
            "--power", help="Also break every rule, and count the images until a test rejects it."
        ),
    ] = False,
    modes: Annotated[
        list[str] | None,
        typer.Option(help="Audit the claims of these modes instead; all: of every mode and rule."),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help=PROMPTS_HELP)] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=_MOST,
            help="Images of the model in a trial. Default: 8; thorough, audit: 192.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the CSV files. Default: results/certify-MODEL or audit-MODEL."
        ),
    ] = None,
    settings: SettingsOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Check that lossless modes are lossless. Exit code 5 if a check fails.

    Tests many images of a model without a network, a few images of the model, and greedy decoding.
    With --modes, audits claims of authors: the claim of every mode, and whether its tokens agree
    (docs/audit.md).
    """
    from lantern_bench.checks.claims import audited_cells, plan_certification
    from lantern_bench.models.registry import model_of

    modes = split_words(modes or [])
    for flag, is_given in (("--thorough", thorough), ("--power", power)):
        if modes and is_given:
            raise UserError(
                f"{flag}: is not for the audit of --modes", f"Leave out {flag}, or --modes."
            )
    flags |= {"model": [model], "prompts": prompts or next(iter(model_of(model).prompt_sets))}
    cells = audited_cells(modes) if modes else [{"mode": "ar"}]
    # Few images in each of many cells: compiling them would take longer.
    resolved = resolve_cells(
        name="certify", flags=flags, cells=cells, settings=settings, compile=thorough
    )
    plan = plan_certification(
        resolved,
        is_audit=bool(modes),
        samples=samples or (192 if modes or thorough else 8),
        is_thorough=thorough,
        has_power=power,
    )
    title = "audit" if modes else "certify"
    folder = out or results_root() / f"{title}-{Path(model).name}"
    check_writable(folder)

    from lantern_bench.checks import certification
    from lantern_bench.checks.certification import LEVEL, failures
    from lantern_bench.devices.compute import set_threads
    from lantern_bench.storage.schema import frame

    set_threads(resolved.settings.threads)
    with console.events() as emit:
        tables = certification.certify(plan, folder, emit)

    checks = "audit" if modes else "certificate"
    name = "power" if power else checks
    table = frame(name, tables[name])
    if console.format not in ("csv", "json"):
        table = (table[_AUDIT] if modes else table.drop(columns="model")).dropna(axis=1, how="all")
    console.table(table, title=f"{name} of {plan.model}")
    console.say(f"a correct model fails with a chance of at most {LEVEL:g} (all tests together)")
    console.say(f"tables: {folder}")
    weak = failures(tables[checks], "weak")
    if weak:
        console.warn(
            f"{len(weak)} checks show too little: {'; '.join(weak)}",
            "Give more --samples, or --dtype float32.",
        )
    missed = [
        f"{row['fault']} ({row['setting']})"
        for row in tables.get("power", [])
        if row["images"] is None
    ]
    if missed:
        console.warn(
            f"{len(missed)} mistakes are not rejected: {'; '.join(missed)}", "Give more --samples."
        )
    failed = failures(tables[checks])
    if failed:
        raise CheckFailedError(f"{len(failed)} checks do not hold: " + "; ".join(failed))
