"""Lines that other libraries print and that mean nothing here, each silenced by its own text; others are shown."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Torch's profiler reports its start and stop, CUDA on a machine without a GPU, and memory of an earlier decode.
_PROFILER = re.compile(
    rb"(USDT:[^\n]*profiler_(start|stop)|ERROR:[^\n]*gpuGetDeviceCount failed with code \d+"
    rb"|\[W[^\n]*Memory block of unknown size was allocated before the profiling started[^\n]*)\n"
)
# Torch's compiler on a GPU advises to round float32 products, which we leave exact, and names a fusion it left out.
_COMPILER = (r"TensorFloat32 tensor cores .* available but not enabled", r"\s*Online softmax is disabled on the fly")
# Torch 2.11's profiler warns that it forgets earlier cycles. We profile a single one.
_CYCLES = "Warning: Profiler clears events at the end of each cycle"


def silence_compiler() -> None:
    """Silence torch's messages while it compiles."""
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_cuda)
    for text in _COMPILER:
        warnings.filterwarnings("ignore", text, UserWarning)


def _is_no_missing_cuda(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No CUDA runtime is found")


@contextmanager
def silence_profiler() -> Iterator[None]:
    """Silence torch's profiler, which also writes to standard error from C++."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as captured, warnings.catch_warnings():
        warnings.filterwarnings("ignore", _CYCLES, UserWarning)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            captured.seek(0)
            os.write(2, _PROFILER.sub(b"", captured.read()))
