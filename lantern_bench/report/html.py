"""One run or several as one HTML file: no network, no second file, the pictures' own files linked.

A Jinja template takes the tables (`page_tables.py`) and the data (`page_data.py`); what moves is plain JavaScript over
that data, in `page/`. Charts are Plotly's, whose whole library lies inside the page, packed: the Python package brings
no smaller one, and packed it is a third of that. A page without JavaScript still shows its tables.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lantern_bench import __version__
from lantern_bench.errors import UserError
from lantern_bench.report.named_runs import read_named
from lantern_bench.report.page_data import page_data
from lantern_bench.report.page_tables import highlights, run_facts, summary
from lantern_bench.report.points import curve_tables
from lantern_bench.runs.jsonl import write_atomically
from lantern_bench.runs.store import RunData

__all__ = ["render", "write_report"]

_PAGE = "page"
# In the order in which they build on each other.
_SCRIPTS = ("state.js", "chips.js", "table.js", "charts.js", "pictures.js", "stage.js", "maps.js", "start.js")


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of these runs to `out` and return it.

    Raises as `named_runs.read_named`, and `UserError` when the file cannot be written.
    """
    text = render(read_named(folders), out.parent)
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}", "Give a file you may write.") from error
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; `home` is the folder it will lie in, to which links to pictures are relative."""
    import jinja2

    made = {name: curve_tables(run) for name, run in runs.items()}
    data = page_data(runs, home, made)
    numbers = {(cell["run"], cell["model"], cell["cell"]): number for number, cell in enumerate(data["cells"])}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", _PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=" + ".join(runs),
        version=__version__,
        cells=data["cells"],
        grid=data["grid"],
        pictures=len(data["pictures"]),
        prompts=len(data["prompts"]),
        highlights=highlights(made, numbers, [cell["name"] for cell in data["cells"]]),
        summary=summary(made, numbers),
        runs=[run_facts(name, run, made[name]) for name, run in runs.items()],
        style=_part("report.css"),
        scripts="\n".join(_part(name) for name in _SCRIPTS),
        data=_as_script(data),
        plotly=_packed_plotly(),
    )


def _part(name: str) -> str:
    return resources.files("lantern_bench.report").joinpath(_PAGE, name).read_text(encoding="utf-8")


def _as_script(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _packed_plotly() -> str:
    """Plotly's library, gzip and base64; the same bytes each time."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")
