"""Benchmark of relaxed speculative decoding for visual autoregressive image generation.

The command line (`lantern-bench`) is the public face; the package root holds the version and imports nothing, so that
`lantern-bench --help` is quick.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
