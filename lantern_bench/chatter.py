"""Lines that other libraries print and that mean nothing here, each silenced by its own text; others are shown."""

from __future__ import annotations

import logging
import warnings

# Torch's compiler on a GPU advises to round float32 products, which we leave exact, and names a fusion it left out.
_COMPILER = (r"TensorFloat32 tensor cores .* available but not enabled", r"\s*Online softmax is disabled on the fly")


def silence_compiler() -> None:
    """Silence torch's messages while it compiles."""
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_cuda)
    for text in _COMPILER:
        warnings.filterwarnings("ignore", text, UserWarning)


def _is_no_missing_cuda(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No CUDA runtime is found")
