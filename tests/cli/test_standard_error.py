"""Standard error has our own lines only: commands and calls in a process of their own, as a user
runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

# Of torch 2.11 on a GPU, word for word, two warnings to silence; and in each step a line of our own
# to show.
SCRIPT = """
import sys, warnings
import torch
from lantern_bench.decoding.engine import compiler_problem
assert compiler_problem(torch.device("cpu")) is None
import torch.utils.cpp_extension as extension
assert extension.CUDA_HOME == "/tmp"
extension.logger.warning("compiled")
warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available but not "
              "enabled. Consider setting `torch.set_float32_matmul_precision('high')` "
              "for better performance.")
warnings.warn("\\nOnline softmax is disabled on the fly since Inductor decides to\\n"
              "split the reduction.")
warnings.warn("warned")
from lantern_bench.metrics.extractors import features_of, find_extractor
features_of(torch.zeros(2, 3, 64, 64, dtype=torch.uint8), find_extractor())
print("features", file=sys.stderr)
from lantern_bench.cli.main import main
typed = "profile --size 1x64x16x4 --images 1 --no-compile --tree 6n2d3b --threads 1"
assert main(typed.split()) == 0
"""


def stderr_of(*words: str, **variables: str) -> list[str]:
    typed = [sys.executable, *words]
    around = {**os.environ, **variables}
    done = subprocess.run(typed, capture_output=True, text=True, check=False, env=around)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_standard_error_has_our_own_lines_only() -> None:
    """Compiling with a CUDA toolkit and no GPU, warnings of a GPU, a feature extractor, and a
    profile.
    """
    lines = stderr_of("-c", SCRIPT, CUDA_HOME="/tmp", CUDA_VISIBLE_DEVICES="")
    assert lines[0].endswith("compiled")
    assert lines[1].endswith("UserWarning: warned")
    first = lines.index("features")
    assert first <= 3, lines[:first]  # the warning may show its line of code
    ours = re.compile(r"cpu: reads .* of this model|measuring (memory|forwards|steps)(: \d+.*)?")
    assert lines[first + 1 :]
    assert [line for line in lines[first + 1 :] if not ours.fullmatch(line)] == []


def test_torch_names_a_missing_gpu_without_us() -> None:
    shown = stderr_of(
        "-c", "import torch.utils.cpp_extension", CUDA_HOME="/tmp", CUDA_VISIBLE_DEVICES=""
    )
    assert len(shown) == 1
    assert "No CUDA runtime is found" in shown[0]
