"""`make ray-overhead`: measure what one Ray worker costs against a local run.

Pairs of equal runs alternate on this machine. Each line shows how many times longer an image takes
with Ray: from one finished image to the next as the command sees it (`wall`), in recorded seconds
of decoding (`seconds`), and in CPU seconds of the decoding process (`cpu`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

FIGURES = ("wall", "seconds", "cpu")


def measure(engine: str, out: str, images: int) -> dict[str, float]:
    """Run both cells in this process; return means over the images."""
    import lantern_bench
    from lantern_bench.sweeps.events import ImageDone

    moments: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, ImageDone):
            moments.append(time.perf_counter())

    experiment = {
        "name": "overhead",
        "model": "lanterns",
        "metrics": ["speed"],
        "temperature": 1,
        "cells": [{"mode": "ar"}, {"mode": "speculative", "tree": "chain-7"}],
    }
    run = lantern_bench.sweep(
        experiment,
        out=out,
        ray="default" if engine == "ray" else None,
        progress=note,
        images=images,
        threads=1,
    )
    rows = run.records
    wall = (moments[-1] - moments[0]) / (len(moments) - 1)
    return {"wall": wall, "seconds": rows["seconds"].mean(), "cpu": rows["cpu_seconds"].mean()}


def main() -> None:
    """Run the pairs and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--images", type=int, default=24, help="of each of two cells")
    parser.add_argument(
        "--run", nargs=2, metavar=("ENGINE", "OUT"), help="one run, in this process"
    )
    flags = parser.parse_args()
    if flags.run:
        engine, out = flags.run
        print(json.dumps(measure(engine, out, flags.images)))
        return
    ratios: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(flags.pairs):
            figures = {}
            for engine in ("local", "ray") if pair % 2 else ("ray", "local"):
                out = Path(folder) / f"{engine}-{pair}"
                command = [sys.executable, "-m", "scripts.bench.ray_overhead"]
                command += ["--images", str(flags.images), "--run", engine, str(out)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                figures[engine] = json.loads(output.splitlines()[-1])
            shown = []
            ratio = {}
            for name in FIGURES:
                with_ray = figures["ray"][name]
                local = figures["local"][name]
                ratio[name] = with_ray / local
                shown.append(f"{name} {with_ray:.3f} / {local:.3f} = {ratio[name]:.3f}")
            ratios.append(ratio)
            print(f"pair {pair + 1}, seconds per image: {', '.join(shown)}")
    print("medians:", {name: round(median(ratio[name] for ratio in ratios), 3) for name in FIGURES})


if __name__ == "__main__":
    main()
