"""`lantern-bench doctor`: each check finds what is broken, and says how to repair it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torchvision

from lantern_bench.checks import doctor
from lantern_bench.checks.doctor import Finding
from lantern_bench.cli import main as cli
from lantern_bench.decoding import engine as compiling
from lantern_bench.utils.clock import Usage


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_error_of_a_check_is_its_finding() -> None:
    finding = only(doctor._guarded("torch", raising(OSError("libcudart.so: cannot open"))))
    assert finding.state == "fail"
    assert "report" in finding.fix
    assert "OSError: libcudart.so: cannot open" in finding.result
    missing = list(doctor._guarded("device", lambda: doctor._device("cuda:77")))[-1]
    assert missing.check == "device"
    assert missing.state == "fail"
    assert "--device cpu" in missing.fix


def test_checks_without_torch_come_first_and_a_broken_torch_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_torch", raising(ImportError("libtorch.so")))
    monkeypatch.setattr(doctor, "_device", raising(AssertionError("called")))
    findings = list(doctor.examine())
    assert {"package", "load", "memory", "weights", "network"} <= {
        finding.check for finding in findings
    }
    assert findings[-1].check == "torch"
    assert findings[-1].state == "fail"


def test_torchvision_of_another_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.state for finding in doctor._torch()] == ["ok", "ok"]
    monkeypatch.setattr(
        torchvision.ops, "nms", raising(RuntimeError("operator torchvision::nms does not exist"))
    )
    states = {finding.check: finding for finding in doctor._torch()}
    assert states["torch"].state == "ok"
    assert states["torchvision"].state == "fail"
    assert "does not exist" in states["torchvision"].result
    assert "pip install" in states["torchvision"].fix


# The files of two packages: one with a row that fails, and one whose groups are misspelt.
_PACKAGES = {
    "broken": """[lantern_bench.rules]
mine = broken:RULE
[lantern_bench.metrics]
mine = json:dumps
""",
    "odd": """[lantern_bench.rule]
x = odd:RULE
[lantern-bench.models]
y = odd:MODEL
""",
}
_LIST = """
from lantern_bench.checks import doctor
for row in doctor._plugins():
    print(*row, sep="|")
"""


def test_plug_ins_are_listed_with_what_keeps_them_from_being_used(tmp_path: Path) -> None:
    """In a process of its own: plug-ins are found once."""
    for package, entry_points in _PACKAGES.items():
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entry_points)
    examples = Path(__file__).parents[1] / "examples"
    path = [tmp_path, examples / "distance_rule", examples / "echo_drafting", *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", _LIST],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=True,
    )
    usable, *others = done.stdout.splitlines()
    assert usable == (
        "plug-ins|ok|installed and usable: drafting echo of the package echo-drafting, "
        "rule by-distance of the package distance-rule|"
    )
    refused, wrong_kind, *misplaced = others
    reason = "the rule mine of the package broken cannot be loaded: ModuleNotFoundError"
    assert refused.startswith(f"plug-ins|warning|{reason}")
    assert refused.endswith("|Fix the package broken, or uninstall it.")
    assert "the metric mine of the package broken cannot be used" in wrong_kind
    assert [line.split("|")[2] for line in misplaced] == [
        "the model y of the package odd is not found: its group lantern-bench.models is unknown",
        "the rule x of the package odd is not found: its group lantern_bench.rule is unknown",
    ]
    assert "lantern_bench.draftings, lantern_bench.rules" in misplaced[0]


@pytest.mark.parametrize(("free", "state"), [(9e9, "ok"), (1e9, "warning"), (1e8, "fail")])
def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=1e10)
    )
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free / 2))
    memory = only(doctor._memory())
    assert memory.state == state
    assert bool(memory.fix) == (state != "ok")
    assert {finding.state for finding in doctor._disk()} == {state}


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.tempfile, "TemporaryFile", raising(OSError(30, "Read-only file system"))
    )
    states = {finding.check: finding for finding in doctor._disk()}
    assert states["disk for runs"].state == "fail"
    assert "LANTERN_BENCH_RESULTS" in states["disk for runs"].fix
    assert states["disk for cache"].state == "warning"
    assert "Read-only" in states["disk for runs"].result


def test_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = iter(
        [
            Usage(
                cpu_seconds=0.0,
                waited_seconds=None,
                involuntary_switches=None,
                steal_seconds=None,
                busy_seconds=0.0,
            ),
            Usage(
                cpu_seconds=0.1,
                waited_seconds=None,
                involuntary_switches=None,
                steal_seconds=None,
                busy_seconds=5.0,
            ),
        ]
    )
    monkeypatch.setattr(doctor, "usage", lambda: next(usages))
    finding = only(doctor._load())
    assert finding.state == "warning"
    assert "stop other programs" in finding.fix


def test_incomplete_weights_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    anole = doctor.PARTS["anole-7b"]
    here = [
        doctor.PARTS["llamagen-c2i-B-256"]["target"],
        *(anole[part] for part in ("target", "tokenizer", "drafter")),
    ]
    identities = {id(part) for part in here}
    monkeypatch.setattr(doctor, "local_path", lambda part: id(part) in identities or None)
    listed, lacking = doctor._weights()
    assert listed.state == "ok"
    assert "anole-7b" in listed.result
    assert lacking.state == "warning"
    assert lacking.result == "llamagen-c2i-B-256 lacks tokenizer"
    assert lacking.fix == "lantern-bench weights get llamagen-c2i-B-256"


def test_variables_of_the_network_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = list(doctor._package())[-1]
    assert finding.state == "ok"
    assert "HF_HUB_OFFLINE" in finding.result
    assert "nothing was contacted" in finding.result


def test_missing_compiler_is_a_warning_and_the_decode_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "compiler_problem", lambda _: "InvalidCxxCompiler: none")
    finding, _ = doctor._compiler(CPU)
    assert finding.state == "warning"
    assert "apt install g++" in finding.fix
    assert "eager only" in only(doctor._decode(CPU, "float32")).result


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace programs whole, but run them with torch's own kernels: seconds, not a minute."""
    monkeypatch.setattr(compiling, "Engine", partial(compiling.Engine, backend="aot_eager"))
    monkeypatch.setattr(compiling, "compiler_problem", lambda _: None)


CPU = torch.device("cpu")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_decode_agrees_here(dtype: str) -> None:
    finding = only(doctor._decode(CPU, dtype))
    assert finding.state == "ok", finding
    assert finding.result.startswith("eager = compiled, 25 of 25 tokens"), finding


def test_compiled_programs_that_are_wrong_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(engine: Any, key: Any, compiled_program: Any, device: Any) -> Any:
        if not engine.compile or key[0] != "score":
            return compiled_program

        def flipped(*arguments: Any) -> Any:
            logits, features = compiled_program(*arguments)
            return logits.flip(-1), features

        return flipped

    monkeypatch.setattr(compiling.Engine, "program", off)
    monkeypatch.setattr(compiling, "compiler_problem", lambda _: None)
    finding = only(doctor._decode(CPU, "float32"))
    assert finding.state == "fail"
    assert "--no-compile" in finding.fix


def image(tokens: list[int], shift: float = 0.0) -> Any:
    logits = torch.linspace(-4, 4, len(tokens) * 8).view(-1, 8)
    return SimpleNamespace(tokens=torch.tensor(tokens), logits=logits + shift)


@pytest.mark.parametrize(
    ("compiled", "graphs", "dtype", "state"),
    [
        (image([1, 2, 3]), image([1, 2, 3]), torch.float32, "ok"),
        (image([1, 2, 4], 0.01), image([1, 2, 4]), torch.float32, "fail"),
        (image([1, 2, 4], 0.01), image([1, 2, 4]), torch.bfloat16, "ok"),
        (image([1, 2, 4], 2.0), image([1, 2, 4]), torch.bfloat16, "fail"),
        (image([1, 2, 4], float("nan")), image([1, 2, 4]), torch.float16, "fail"),
        (image([1, 2, 3]), image([1, 5, 3]), torch.bfloat16, "fail"),
    ],
)
def test_token_comparison(compiled: Any, graphs: Any, dtype: torch.dtype, state: str) -> None:
    images = {"eager": image([1, 2, 3]), "compiled": compiled, "graphs": graphs}
    assert doctor._compared(check="decode", images=images, fallbacks={}, dtype=dtype).state == state


def test_fallback_of_the_decode_is_a_warning() -> None:
    images = {"eager": image([1, 2]), "compiled": image([1, 2]), "graphs": image([1, 2])}
    finding = doctor._compared(
        check="decode",
        images=images,
        fallbacks={"capture": "RuntimeError: no"},
        dtype=torch.float32,
    )
    assert finding.state == "warning"
    assert "capture fails: RuntimeError: no" in finding.result


def test_command_prints_lines_and_exits_5_on_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding("torch", "ok", "torch 2"),
        Finding(check="disk", state="warning", result="1 GB", fix="Make room."),
    ]
    monkeypatch.setattr(doctor, "examine", lambda device: iter(findings))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      torch                 torch 2",
        "warning disk                  1 GB",
        "                              fix: Make room.",
    ]
    findings[1] = Finding(check="device", state="fail", result="no", fix="Buy.")
    assert cli.main(["doctor", "--format", "json"]) == 5
    written = capsys.readouterr()
    assert [row["state"] for row in json.loads(written.out)] == ["ok", "fail"]
    assert "1 of 2 checks failed: device" in written.err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpu_decodes_agree(dtype: str) -> None:
    device = torch.device("cuda")
    finding = only(doctor._decode(device, dtype))
    assert finding.state == "ok", finding
