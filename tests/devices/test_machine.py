"""The machine block: complete, JSON-ready, without host name and paths."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from lantern_bench.devices import machine
from lantern_bench.devices.compute import has_bfloat16


def test_machine_block_is_complete_and_json() -> None:
    block = json.loads(json.dumps(machine.machine_block()))
    assert block["cpu"]["model"]
    assert block["cpu"]["usable_cores"] >= 1
    assert block["cpu"]["torch_threads"] == torch.get_num_threads()
    assert block["memory_bytes"] > block["memory_available_bytes"] > 0
    assert block["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert set(block["versions"]) == set(machine.PACKAGES)


def test_machine_block_has_no_host_and_no_path() -> None:
    text = json.dumps(machine.machine_block())
    assert str(Path.home()) not in text
    assert str(Path(machine.__file__).parent) not in text
    assert "host" not in machine.machine_block()
    assert socket.gethostname() not in text


def test_a_torch_that_names_no_instructions_has_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names are private; another torch may lack them."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert not has_bfloat16(torch.device("cpu"))


def test_git_state_is_the_commit() -> None:
    folder = Path(machine.__file__).parent
    asked = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "machine.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    head = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    expected = head.stdout.strip() if asked.stdout.strip() else None
    assert machine.git_state()["commit"] == expected


def test_git_state_is_none_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "devices.py"))
    assert machine.git_state() == {"commit": None, "dirty": None}


def test_gpu_state_is_read_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(command: list[str]) -> str:
        asked.append(command)
        return "580.1, 1980, 2619, 1980, 120.5, 700.0, 41, 0x0000000000000004"

    monkeypatch.setattr(machine, "_output", answer)
    state = machine._gpu_state("GPU-1")
    assert state["driver"] == "580.1"
    assert state["throttle_reasons"] == "0x0000000000000004"
    assert "--id=GPU-1" in asked[0]
    monkeypatch.setattr(machine, "_output", lambda _command: None)
    assert set(machine._gpu_state("GPU-1").values()) == {None}


def test_missing_or_failing_command_gives_none() -> None:
    assert machine._output(["no-such-command-here"]) is None
    assert machine._output(["git", "no-such-subcommand"]) is None


@pytest.mark.gpu
def test_a_gpu_is_described() -> None:
    (first, *_others) = machine.gpu_blocks()
    assert first["name"] == torch.cuda.get_device_name(0)
    assert first["driver"]
    assert first["clock_sm_mhz"]
