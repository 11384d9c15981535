"""Scenes are painted in small chunks: a chunk is painted whole, however few of its scenes a test
asks for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.train_lanterns import scenes


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "_CHUNK", 12)
        yield
