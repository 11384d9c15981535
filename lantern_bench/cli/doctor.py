"""`lantern-bench doctor`: check the installation and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import DEVICE_HELP, FormatOption
from lantern_bench.errors import CheckFailedError

if TYPE_CHECKING:
    from lantern_bench.console import Console


def doctor(
    ctx: typer.Context,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    format: FormatOption = None,
) -> None:
    """Check installation, machine and decoding; paste the output into a bug report. It contacts nothing."""
    from lantern_bench.runs.doctor import examine

    console: Console = ctx.obj
    # Lines come as they are found: a check that crashes the process leaves those before it.
    lines, findings = format is None and console.format != "table", []
    with console.progress() as progress:
        for finding in examine(device):
            findings.append(finding)
            if lines:
                fix = f"\n{'':8}{'':22}fix: {finding.fix}" if finding.fix else ""
                console.data(f"{finding.state:8}{finding.check:22}{finding.found}{fix}")
            else:
                progress.share(f"checked {finding.check}", 1.0)
    if not lines:
        import pandas as pd

        console.table(pd.DataFrame(findings), format=format)
    failed = [finding.check for finding in findings if finding.state == "fail"]
    if failed:
        raise CheckFailedError(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")
