"""Run commands, each a JSON list of words, in one process with the tiny family in place of the
installed ones.
"""

from __future__ import annotations

import json
import sys

from lantern_bench.models import registry
from tests.helpers.tiny_model import TinyModel

MODEL = TinyModel()
registry.models = lambda: {"tiny": MODEL}

if __name__ == "__main__":
    from lantern_bench.cli.main import main

    for words in sys.argv[1:]:
        print(f"$ {words}", file=sys.stderr)
        code = main(json.loads(words))
        if code:
            sys.exit(code)
