"""Code that a row names by its module, so that a row is read without importing torch."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

Code: TypeAlias = str | Callable[..., Any]
"""A function or class, or its name as "module:object"; then the module is imported at the first use."""


def load_code(code: Code) -> Callable[..., Any]:
    """Return the function or class; imports its module if the code is a name."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def fingerprint_of(code: Code) -> str:
    """Return 16 hex digits that change when the file of the code changes."""
    try:
        text = Path(inspect.getfile(load_code(code))).read_bytes()
    except (OSError, TypeError, ImportError, ValueError):  # ImportError: a strict rule has no code of its own
        text = repr(code).encode()
    return hashlib.sha256(text).hexdigest()[:16]
