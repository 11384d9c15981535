"""Where a command is started: without a home, a cache, streams, a working folder or memory."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.registry import model_of
from lantern_bench.storage import run_store
from lantern_bench.storage.run_store import lock_run
from lantern_bench.utils import causes
from lantern_bench.utils.errors import RefusedError, UserError

PROGRAM = [sys.executable, "-m", "lantern_bench"]
ROOT = Path(__file__).parents[2]


def run_in(
    folder: Path, shell: str, without: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which `lantern-bench` is this package."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    for name in ("LANTERN_BENCH_CACHE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", *without):
        if name not in variables:
            around.pop(name, None)
    line = f'lantern-bench() {{ {" ".join(PROGRAM)} "$@"; }}; {shell}'
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=around, capture_output=True, text=True, check=False
    )


# Where no other user can be had, or one that cannot read the interpreter: a user without an entry.
NO_ENTRY = """
import os, pwd
def missing(number):
    raise KeyError(number)
pwd.getpwuid = missing
from lantern_bench.cli.main import run
run()
"""


def unknown_user() -> list[str]:
    """The words that run the program for a user whom the machine does not know."""
    other = ["setpriv", "--reuid", "64999", "--regid", "64999", "--clear-groups", sys.executable]
    if os.getuid() == 0 and shutil.which("setpriv") is not None:
        started = subprocess.run([*other, "-c", ""], capture_output=True, check=False)
        if started.returncode == 0:
            return [*other, "-m", "lantern_bench"]
    return [sys.executable, "-c", NO_ENTRY]


@pytest.mark.parametrize("words", ["--version", "experiments"])
@pytest.mark.parametrize("user", [unknown_user(), [sys.executable, "-c", NO_ENTRY]])
def test_without_home_of_an_unknown_user(user: list[str], words: str) -> None:
    """As in a container that is started with a user's number."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        line = f"{shlex.join(user)} {words}"
        done = run_in(Path("/"), line, without=("HOME",), TMPDIR=folder)
        assert list(Path(folder).iterdir()) == []
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("HOME is not set") == (words != "--version")


@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME", "LANTERN_BENCH_CACHE"])
def test_a_cache_that_cannot_be_made_is_one_warning(tmp_path: Path, name: str) -> None:
    done = run_in(tmp_path, "lantern-bench experiments", **{name: "/proc/nothing"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning") == 1
    assert "the cache /proc/nothing" in done.stderr
    assert "set LANTERN_BENCH_CACHE" in done.stderr


@pytest.mark.parametrize("command", ["experiments", "--version", "sweep --help"])
@pytest.mark.parametrize(
    ("where", "code", "reason"),
    [
        (">&-", 3, "it is closed"),
        ("> /dev/full", 3, "No space left on device"),
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
        ("2>&- > out", 0, ""),
    ],
)
def test_standard_output_that_cannot_be_written(
    tmp_path: Path, command: str, where: str, code: int, reason: str
) -> None:
    done = run_in(tmp_path, f"lantern-bench {command} {where}")
    assert done.returncode == code, done.stderr
    assert reason in done.stderr
    assert bool(reason) == bool(done.stderr)
    assert "Traceback" not in done.stderr
    assert "a bug" not in done.stderr


def test_standard_error_on_a_full_disk(tmp_path: Path) -> None:
    assert run_in(tmp_path, "lantern-bench models 2> /dev/full").returncode == 3


def test_the_working_folder_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for command in ("doctor", "sweep --dry-run", "show x"):
        gone.mkdir()
        done = run_in(gone, f"rmdir '{gone}'; lantern-bench {command}")
        assert done.returncode == 3, done.stderr
        assert "the working folder is gone" in done.stderr


def test_a_limit_of_addresses_is_named(tmp_path: Path) -> None:
    done = run_in(tmp_path, "ulimit -v 900000; lantern-bench models lanterns")
    assert done.returncode == 3, done.stderr
    assert "out of memory, and this process may use 0.9 GB of addresses" in done.stderr
    assert "ulimit -v unlimited" in done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("can't start new thread"), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "too many open files"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"), "/tmp/x: No space left"),
    ],
)
def test_causes_in_the_machine(error: Exception, words: str) -> None:
    cause = causes.cause_in_machine(error)
    assert cause is not None
    assert words in cause.message


# ---- Files


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ESTALE])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    # Below filelock: some of its versions take such an answer for a lock of another process.
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RefusedError, match="no working locks: ") as refused, lock_run(tmp_path):
        pass
    assert os.strerror(number) in refused.value.message
    assert "local disk" in str(refused.value.advice)
    monkeypatch.setattr(run_store, "_NO_LOCKS", ())
    with pytest.raises(UserError, match="cannot be written"), lock_run(tmp_path):
        pass


@pytest.mark.parametrize("damage", ["folder", "ref", "binary", "snapshots"])
def test_an_unreadable_entry_of_the_hub_cache_is_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    source = hub.PARTS["llamagen-t2i-stage1"]["target"][0]
    entry = hub._hub_cache() / f"models--{source.repo.replace('/', '--')}"
    reference = entry / "refs" / source.revision
    reference.parent.mkdir(parents=True)
    reference.write_bytes(b"\xff\x00\xfe" if damage == "binary" else b"abc")
    snapshot = entry / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    unreadable = {"folder": entry, "ref": reference, "snapshots": snapshot}.get(damage)

    def guarded(function, path, *arguments, **keywords):
        if unreadable is not None and Path(path).is_relative_to(unreadable):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path, *arguments, **keywords)

    # As root, modes of files forbid nothing.
    for name in ("stat", "listdir"):
        monkeypatch.setattr(os, name, functools.partial(guarded, getattr(os, name)))
    monkeypatch.setattr(Path, "read_text", functools.partialmethod(_read, guarded))
    assert cli.main(["models"]) == 0
    written = capsys.readouterr()
    assert "llamagen-t2i-stage1 is unreadable" in written.err
    assert "cannot be read" in written.err
    assert "\nlanterns," in written.out
    assert cli.main(["models", "llamagen-t2i-stage1"]) == 3
    assert "cannot be read" in capsys.readouterr().err


def _read(path: Path, guarded, **_: object) -> str:
    return guarded(lambda name: Path(name).read_bytes().decode(), path)


# ---- Code of users

HOSTED = """
import torch
from pathlib import Path
from transformers import GPT2Config, GPT2Model
from lantern_bench.models.hosted import HostedModel

class Mine(HostedModel):
    grid = (2, 2)
    codes = 8
    def __init__(self, checkpoint, device, dtype):
        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8)
        self.decoder = GPT2Model(config)
        FAULT
    def prompts(self, caption): return [1], [1]
    def embed_words(self, words): return torch.zeros(*words.shape, 16)
    def embed_codes(self, codes): return torch.zeros(*codes.shape, 16)
    def logits(self, features): return features[..., :8]
    def codebook(self): return torch.zeros(8, 2)
    def pixels(self, codes): return torch.zeros(len(codes), 2, 2, 3)
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pass", "mine.py: Mine cannot be built: AttributeError: 'GPT2Config' object has no"),
        ("self.size = self.sizes", "mine.py line 13: Mine cannot be built: AttributeError"),
        ("raise KeyError('n')", "mine.py line 13: Mine cannot be built: KeyError: 'n'"),
    ],
)
def test_a_hosted_model_that_raises_names_its_file(tmp_path: Path, fault: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(HOSTED.replace("FAULT", fault))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("python: mine.py\ncheckpoint: weights\n")
    with pytest.raises(UserError) as refused:
        model_of(str(tmp_path / "mine.yaml")).load(torch.device("cpu"), torch.float32)
    assert words in refused.value.message
    assert "docs/adding-a-model.md" in refused.value.message


def test_an_error_in_other_code_names_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def models() -> None:
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(registry, "models", models)
    assert cli.main(["generate", "x", "--model", "y"]) == 2
    written = capsys.readouterr().err
    assert f"{Path(__file__).resolve()} line" in written
    assert "in models: ZeroDivisionError: mine" in written
    assert "a bug" not in written


def test_code_that_the_compiler_wrote_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "written.py"
    written.write_text("def call():\n    raise ValueError('shapes')\n")
    names: dict[str, Any] = {}
    exec(compile(written.read_text(), str(written), "exec"), names)
    with pytest.raises(ValueError, match="shapes") as raised:
        names["call"]()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert "written.py line 2" in causes.explained(raised.value).message
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert "written.py" not in causes.explained(raised.value).message
