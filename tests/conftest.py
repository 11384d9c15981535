"""What every test needs: no tuned cell of the user reaches a sweep of the tests, and none of theirs is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_tuned_cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache of tuned cells of commands that run in this process is a folder without any."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lantern_bench.runs.tuned.cache_folder", lambda: folder)
        yield
