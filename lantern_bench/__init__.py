"""Benchmark of relaxed speculative decoding for visual autoregressive image generation.

The Python API (docs/python-api.md) is imported when one of its names is first used, so that
`import lantern_bench` imports neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Its exit handler runs last only if it is registered first.
from lantern_bench.utils import quick_exit as _quick_exit  # noqa: F401

if TYPE_CHECKING:
    from lantern_bench.api import (
        Run,
        compare,
        curves,
        decode,
        explore,
        load_model,
        load_run,
        predict,
        recommend,
        score,
        sweep,
        write_report,
    )
    from lantern_bench.sweeps.decoded_image import DecodedImage

__all__ = [
    "DecodedImage",
    "Run",
    "__version__",
    "compare",
    "curves",
    "decode",
    "explore",
    "load_model",
    "load_run",
    "predict",
    "recommend",
    "score",
    "sweep",
    "write_report",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("lantern_bench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
