"""`python -m lantern_bench`: the command line without its console script.

Holds nothing of its own; `lantern_bench.cli.main` is the entry point of both.
"""

from __future__ import annotations

from lantern_bench.cli.main import run

if __name__ == "__main__":
    run()
