"""`python -m lantern_bench`: the command line without its console script."""

from __future__ import annotations

from lantern_bench.cli.main import run

if __name__ == "__main__":
    run()
