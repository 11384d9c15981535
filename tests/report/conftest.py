"""What tests of reports share: a made-up run with pictures, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_bench.api import write_report
from tests.helpers.page_run import write_page_run


@pytest.fixture(scope="session")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder; its page must not be written again."""
    return write_page_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="session")
def page_file(page_run: Path) -> Path:
    """The page of the run."""
    return write_report([page_run], page_run / "report.html")
