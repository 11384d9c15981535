"""Run commands, each a JSON list of words, in one process with the tiny family in place of the
installed ones.
"""

from __future__ import annotations

import json
import os
import sys

from lantern_bench.models import registry
from tests.helpers.tiny_model import TinyModel

MODEL = TinyModel()
registry.models = lambda: {"tiny": MODEL}

if __name__ == "__main__":
    from lantern_bench.cli.main import main

    # `certify` without an example runs the tables of all other settings.
    only = os.environ.get("ONLY_TABLES_OF")
    if only:
        from lantern_bench.checks import trials

        every = trials.table_decodings()
        of_example = {setting: cell for setting, cell in every.items() if only in setting}
        trials.table_decodings = lambda: of_example

    for words in sys.argv[1:]:
        print(f"$ {words}", file=sys.stderr)
        code = main(json.loads(words))
        if code:
            sys.exit(code)
