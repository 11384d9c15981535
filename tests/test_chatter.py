"""Standard error has our own lines only: commands and calls in a process of their own, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from lantern_bench.chatter import silence_profiler

COMPILE = """
import torch
from lantern_bench.decoding.compile import compiler_problem
assert compiler_problem(torch.device("cpu")) is None
import torch.utils.cpp_extension as extension
assert extension.CUDA_HOME == "/tmp"
extension.logger.warning("another warning")
"""
# What torch 2.11 says on a GPU, word for word, and a warning of its own.
GPU_WARNINGS = """
import warnings
from lantern_bench.decoding import compile
warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider "
              "setting `torch.set_float32_matmul_precision('high')` for better performance.")
warnings.warn("\\nOnline softmax is disabled on the fly since Inductor decides to\\nsplit the reduction.")
warnings.warn("another warning")
"""
FEATURES = """
import torch
from lantern_bench.metrics.features import features_of, find_extractor
features_of(torch.zeros(2, 3, 64, 64, dtype=torch.uint8), find_extractor())
"""


def stderr_of(*words: str, **variables: str) -> list[str]:
    typed, around = [sys.executable, *words], {**os.environ, **variables}
    done = subprocess.run(typed, capture_output=True, text=True, check=False, env=around)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_profile_prints_its_own_lines_only() -> None:
    typed = ["-m", "lantern_bench", "profile", "--size", "1x64x16x4", "--images", "1", "--no-compile"]
    ours = re.compile(r"cpu: reads .* of this model|measuring (memory|forwards|steps)(: \d+%.*)?")
    lines = stderr_of(*typed, "--tree", "chain-3", "--threads", "1")
    assert lines and [line for line in lines if not ours.fullmatch(line)] == []


def test_compiling_with_a_cuda_toolkit_and_no_gpu_prints_nothing() -> None:
    (line,) = stderr_of("-c", COMPILE, CUDA_HOME="/tmp", CUDA_VISIBLE_DEVICES="")
    assert line.endswith("another warning")
    shown = stderr_of("-c", "import torch.utils.cpp_extension", CUDA_HOME="/tmp", CUDA_VISIBLE_DEVICES="")
    assert len(shown) == 1 and "No CUDA runtime is found" in shown[0]  # what torch says without us


def test_only_known_warnings_of_compiling_for_a_gpu_are_silenced() -> None:
    lines = [line for line in stderr_of("-c", GPU_WARNINGS) if "UserWarning" in line]
    assert len(lines) == 1 and lines[0].endswith("UserWarning: another warning")


def test_a_feature_extractor_prints_nothing() -> None:
    assert stderr_of("-c", FEATURES) == []


def test_only_known_lines_of_the_profiler_are_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), silence_profiler():
        os.write(2, b"USDT:2026-11-22 09:30:40 2016:2016 SyncActivityProfilerHandler.cpp:39] profiler_start\n")
        os.write(2, b"ERROR:2026-11-22 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n")
        os.write(2, b"ERROR:2026-11-22 DeviceProperties.cpp:60] another error\n")
        os.write(2, b"[W1122 CPUAllocator.cpp:245] Memory block of unknown size was allocated before the profiling "
                    b"started, profiler results will not include the deallocation event\n")  # fmt: skip
        os.write(2, b"our own line\n")
        raise ValueError
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["ERROR:2026-11-22 DeviceProperties.cpp:60] another error", "our own line"]
