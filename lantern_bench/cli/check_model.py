"""`lantern-bench check-model`: does a model keep the protocol of decoding? One line a check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.options import DEVICE_HELP, FormatOption
from lantern_bench.console import Console
from lantern_bench.errors import CheckFailedError, UserError


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
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
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

    from lantern_bench.certify.conformance import TOLERANCE, read_reference
    from lantern_bench.certify.conformance import check_model as run
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
    given = None if reference is None else read_reference(reference, loaded)
    found = run(
        loaded,
        prompts[:2],
        tolerance=TOLERANCE[compute.dtype_name],
        generator=torch.Generator().manual_seed(seed),
        tokens=tokens,
        reference=given,
    )
    table = pd.DataFrame(found).rename(columns={"limit": "at most"})
    console.table(table, title=f"{model}, {compute.dtype_name}", format=format)
    if failed := [one.check for one in found if one.result == "fail"]:
        raise CheckFailedError(f"{model}: {len(failed)} of {len(found)} checks failed: {', '.join(failed)}")
