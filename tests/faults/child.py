"""The command line in processes that are forked from one with everything imported: they start
within milliseconds.

`FAMILY` is installed beside the experiment, so that worker processes find it too. Environment
variables make it fail, and a file `die` with a caption ends the process that decodes it. A file
`stop` stops the process in the next image.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import sys
from pathlib import Path

from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from tests.helpers.tiny_model import EXPERIMENT

# What commands import when they run takes seconds.
for name in (
    "sweeps.decode_missing",
    "sweeps.worker_process",
    "checks.check_run",
    "analysis.tables",
):
    importlib.import_module(f"lantern_bench.{name}")
for name in ("pandas.io.formats.csvs", "scipy.stats"):
    importlib.import_module(name)

ROOT = Path(__file__).parents[2]
# Three cells of three images, so that a sweep takes a second.
SMALL = re.sub(r"  - .*(temperature|mode: speculative).*\n", "", EXPERIMENT).replace("[2, 5]", "2")
IMAGES = 9
FAMILY = """
import os, signal, time
from pathlib import Path
import torch
from tests.helpers.tiny_model import TinyModel, TinyTarget

DIE = Path(__file__).with_name("die")
STOP = Path(__file__).with_name("stop")


class Target(TinyTarget):
    def session(self, batch, *, guided, nodes):
        if str(nodes) == os.environ.get("TINY_FULL"):
            torch.empty(1 << 60)  # more memory than there is
        session = super().session(batch, guided=guided, nodes=nodes)
        session.table.cond = self.cond.clone()
        plain = session.prefill

        def prefill(condition, features=None):
            if STOP.exists():
                STOP.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            return plain(condition, features)

        session.prefill = prefill
        return session


class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python raises here, and prints what a finalizer raises


class Fragile(TinyModel):
    def load(self, device, dtype):
        model = super().load(device, dtype)
        model.target, plain, calls = Target(1.0, 1), model.condition, 0

        def condition(prompts):
            nonlocal calls
            calls += 1
            time.sleep(float(os.environ.get("TINY_SLEEP", 0)))
            if os.environ.get("TINY_SWALLOW") == str(calls):
                Interrupting()
            if DIE.exists() and DIE.read_text() in prompts:
                os._exit(9)
            if os.environ.get("TINY_HANG") in prompts:
                time.sleep(3600)
            if os.environ.get("TINY_NAN") in prompts:
                model.target.cond[:] = float("nan")
            return plain(prompts)

        model.condition = condition
        return model


family = Fragile()
"""


def install(folder: Path, experiment: str = SMALL) -> None:
    """Write the experiment and the family as an installed package."""
    (folder / "tiny.yaml").write_text(experiment)
    (folder / "fragile_family.py").write_text(FAMILY)
    info = folder / "fragile_family-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile-family\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lantern_bench.models]\ntiny = fragile_family:family\n")


def run(
    arguments: list[str],
    folder: str,
    output: str,
    environment: dict[str, str],
    largest_file: int | None,
) -> None:
    """Run one command in `folder` and exit with its code; what it prints is appended to the file
    `output`.
    """
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment, PYTHONPATH=os.pathsep.join([folder, str(ROOT)]))
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.path.insert(0, folder)
    registry.find_models.cache_clear()
    sys.exit(cli.main(arguments))
