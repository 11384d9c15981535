"""What tests share: the bundled model and images of it, a finished run of tables, and the
compiler's cache.

Session fixtures are made once in each test process, on first use. Their results are shared: a test
that changes one copies it first (`dataclasses.replace`, `shutil.copytree`).
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from lantern_bench.utils.clock import collect_garbage, collect_seldom

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.decoding.loop import Decoded
    from lantern_bench.models.loaded_model import LoadedModel

CAPTION = "a red lantern"

# As in the commands.
collect_seldom()

# All test processes and all later runs of the tests find what inductor has compiled; `make clean`
# removes it.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "inductor")
)

# No test fails because the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Exempt the tests themselves from the collection of garbage."""
    collect_garbage()


@pytest.fixture(scope="session", autouse=True)
def decode_once() -> Iterator[None]:
    """Decode images once: each test process disturbs the images of the others."""
    from lantern_bench.sweeps import decoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_MAX_ATTEMPTS", 1)
        yield


@pytest.fixture(scope="session")
def lanterns() -> LoadedModel:
    """The bundled model in float32 on the CPU, not compiled."""
    import torch

    from lantern_bench.models.registry import model_of

    return model_of("lanterns").load(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def decode_lanterns(lanterns: LoadedModel) -> Callable[..., list[Decoded]]:
    """Decode an image of each caption with the bundled model; equal requests are decoded once.

    `decode_lanterns({"mode": "ar"}, ["a red lantern"], seed=3)`: image i has the seed 3 + i.
    Other keywords go to `decode`.
    """
    import torch

    from lantern_bench.config.decoding import Decoding
    from lantern_bench.decoding.loop import decode

    images: dict[str, list[Decoded]] = {}

    def decoded(
        values: dict[str, Any], captions: Sequence[str] = (CAPTION,), seed: int = 0, **keywords: Any
    ) -> list[Decoded]:
        key = json.dumps([values, list(captions), seed, keywords], sort_keys=True)
        if key not in images:
            generators = [
                torch.Generator().manual_seed(seed + number) for number in range(len(captions))
            ]
            condition = lanterns.condition(list(captions))
            images[key] = decode(
                model=lanterns,
                condition=condition,
                decoding=Decoding(**values),
                generators=generators,
                **keywords,
            )
        return images[key]

    return decoded


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of `tests.helpers.tiny_model.EXPERIMENT`: three images in
    each of six cells.
    """
    from lantern_bench.cli import main as cli
    from lantern_bench.models import registry
    from tests.helpers.tiny_model import EXPERIMENT, TinyModel

    folder = tmp_path_factory.mktemp("tiny")
    model = TinyModel()
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "models", lambda: {"tiny": model})
        command = [
            "sweep",
            str(folder / "tiny.yaml"),
            "--threads",
            "1",
            "--out",
            str(folder / "run"),
        ]
        assert cli.main(command) == 0
    return folder / "run"


@pytest.fixture
def published_forms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example package `published_forms`, installed: methods as published."""
    from lantern_bench.methods import catalog
    from lantern_bench.methods.draftings import Mode

    monkeypatch.syspath_prepend(str(Path(__file__).parent / "examples" / "published_forms"))
    package = importlib.import_module("published_forms")
    for row in (package.SCD, package.SJD_PAC, package.SJD_PLUS_PLUS, package.PATH_SPEC):
        monkeypatch.setitem(catalog.DRAFTINGS, row.name, row)
        monkeypatch.setitem(
            catalog.MODES,
            row.name,
            Mode(name=row.name, drafting=row.name, rule="strict"),
        )
    return importlib.import_module("published_forms.draftings")


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """The tables of the made-up run of `tests/helpers/made_up_run.py`."""
    from tests.helpers.made_up_run import build_tables, make_records, make_scores

    records = make_records()
    return build_tables(records, make_scores(records))
