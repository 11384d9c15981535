"""The documents are true: citations, links and files exist; shown code and tables are current."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from lantern_bench.cli.main import main
from lantern_bench.sweeps.request import Request
from lantern_bench.utils.files import file_sha256
from scripts.docs import audit as make_audit
from scripts.docs import commands as make_commands
from scripts.docs import experiment_files as make_experiment_files
from scripts.docs import figures as make_figures
from scripts.docs import frontier_picture
from scripts.docs import pictures as make_pictures
from scripts.docs import prediction_tables as make_prediction
from scripts.docs import results_format as make_results_format

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "results" / "reference").rglob("manifest.json"))
# Runs of experiments that have other cells today.
OUTDATED = {"quality"}
# Figures of other papers, of a long test (tests/metrics/test_constructions.py) and of old engines.
NOT_OF_RUNS = {
    "algorithms.md": {"0.122 [", "0.131 [", "0.105 [", "0.074 [", "0.045 ["},
    "llamagen.md": {"0.93x", "1.69x", "1.75x", "1.82x"},
    "log.md": {"8 ms", "3 ms", "5 ms", "2 ms"},
    "prediction.md": {"4.65x"},
}
SKIPPED = (Path(__file__).name, "mkdocs.yml")
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TEXTS = (".py", ".md", ".yaml", ".yml", ".cff")
CITATION = re.compile(
    r"docs/algorithms\.md, sections? (\d(?:\.\d)?(?!\d))"
    r"(?:, ([A-C]\d+))?(?: (?:and|to) ([A-C]\d+|\d\b))?"
)
BARE = re.compile(r"(?<!docs/)(?<!\]\()(?<!\[)algorithms\.md|\bfindings? [A-C]\d")
ECHO = ("echo_drafting/__init__.py", "echo_drafting/method.py", "pyproject.toml", "echo.yaml")
FILE = re.compile(
    r"(?<![\w./-])(?:lantern_bench|docs|tests|experiments|scripts|results/reference)/[\w./-]*[\w/]"
)


def repository_files() -> list[Path]:
    """Committed files and new ones that git does not ignore; the files of an unpacked archive
    without git.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths: list[Path] = []
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        for folder in ("lantern_bench", "docs", "tests", "experiments"):
            paths += (ROOT / folder).rglob("*")
    texts = [path for path in paths if path.suffix in TEXTS and path.name not in SKIPPED]
    return [path for path in texts if path.is_file()]


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each file, with the line breaks and comment signs of wrapped lines taken
    out.
    """
    for path in repository_files():
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(ROOT)), re.sub(r"\s*\n\s*(?:#+ )?", " ", text)


def headings() -> set[str]:
    return set(re.findall(r"^#+ (\d(?:\.[A-C]?\d*)?)\b", ALGORITHMS, re.MULTILINE))


def test_every_citation_of_the_algorithms_resolves() -> None:
    known = headings()
    cited = 0
    for name, text in texts():
        for match in CITATION.finditer(text):
            for entry in filter(None, match.groups()):
                assert (entry if entry[0].isdigit() else f"9.{entry}") in known, (
                    f"{name}: {match[0]}"
                )
            cited += 1
        for number in re.findall(
            r"\[(?:docs/)?algorithms\.md\]\([^)]*\), (?:section )?(\d(?:\.[A-C]?\d+)?)", text
        ):
            assert number in known, f"{name}: section {number}"
        assert text.count("docs/algorithms.md, section") == len(CITATION.findall(text)), (
            f"{name}: a citation has no number"
        )
        bare = BARE.search(text)
        assert not bare, f"{name}: ...{text[max(bare.start() - 30, 0) : bare.end() + 30]}..."
    assert cited > 40


def test_every_cited_file_exists() -> None:
    for name, text in texts():
        for cited in FILE.findall(text):
            assert (ROOT / cited).exists(), f"{name} cites {cited}"


def test_numbers_are_written_as_0_5_and_95_percent() -> None:
    """No `.5` without its zero, and no space before a percent sign."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"(?<![0-9])\.[0-9].*", text) == [], page.name
        assert re.findall(r".*[0-9] %", text) == [], page.name


def test_links_between_pages_lead_somewhere() -> None:
    """A page of the site links only what is in the site: docs/ without its scripts."""
    for path in repository_files():
        if path.suffix == ".md":
            for target in re.findall(
                r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")
            ):
                linked = (path.parent / target).resolve()
                assert linked.exists(), f"{path.relative_to(ROOT)} links {target}"
                if path.parent == ROOT / "docs":
                    inside = linked.is_relative_to(path.parent) and linked.suffix != ".py"
                    assert inside, (
                        f"{path.name}: write {target} as a path from the root, not as a link"
                    )


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed: list[str] = []
    for entry in navigation:
        listed += next(iter(entry.values())) if isinstance(entry, dict) else [entry]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(
    "script",
    [make_audit, make_commands, make_experiment_files, make_prediction, make_results_format],
)
def test_tables_show_the_schema_and_the_committed_runs(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(page), f"run: python -m {script.__name__}"


@pytest.mark.parametrize("script", ["commit_run", "docs.reliability", "docs.screenshots"])
def test_the_other_scripts_of_the_docs_can_be_imported(script: str) -> None:
    importlib.import_module(f"scripts.{script}")


def test_every_picture_is_shown_and_is_of_the_runs_that_are_here() -> None:
    pages = [path for path in repository_files() if path.suffix == ".md"]
    shown = set[Path]()
    for page in pages:
        sources = re.findall(r'<img src="([^":]+)"', page.read_text(encoding="utf-8"))
        shown |= {(page.parent / source).resolve() for source in sources}
    pictures = set(make_pictures.PICTURES.iterdir()) - {make_pictures.SOURCES}
    assert pictures == shown == {make_pictures.PICTURES / name for name in make_pictures.DRAWN}
    for name, files in json.loads(make_pictures.SOURCES.read_text(encoding="utf-8")).items():
        for file, digest in files.items():
            assert file_sha256(ROOT / file) == digest, (
                f"{file} changed: python -m scripts.docs.pictures {name}"
            )


@pytest.mark.skipif(
    not make_pictures.PAGE.exists(), reason="results/reference has no page: scripts/commit_run.py"
)
def test_every_picture_names_its_runs() -> None:
    assert (
        json.loads(make_pictures.SOURCES.read_text(encoding="utf-8")).keys()
        == make_pictures.DRAWN.keys()
    )


def test_the_frontier_picture_leaves_out_only_greedy_cells() -> None:
    cells = make_figures.cells_of(frontier_picture.RUN)
    shown: list[str] = []
    for kind in ("lossless", "relaxed"):
        shown += frontier_picture.sampled_cells(kind)
    greedy = [name for name, cell in cells.items() if not cell["temperature"].value]
    assert sorted([*shown, *greedy]) == sorted(cells)


def test_labels_of_the_frontier_picture_stay_apart_and_near_their_cells() -> None:
    for kind in ("lossless", "relaxed"):
        names = frontier_picture.sampled_cells(kind)
        places = frontier_picture.label_places(names)
        gaps = [above - below for above, below in pairwise(places)]
        assert min(gaps) > frontier_picture.GAP - 1e-9
        cells = make_figures.cells_of(frontier_picture.RUN)
        speedups = [cells[name]["speedup"].value for name in names]
        assert sum(places) == pytest.approx(sum(speedups))


def test_hollow_points_of_the_frontier_picture_are_the_marked_distances() -> None:
    axes = Figure().subplots()
    frontier_picture.draw_relaxed(axes)
    names = frontier_picture.sampled_cells("relaxed")
    for name, drawn in zip(names, axes.containers, strict=True):
        points = drawn[0]
        cell = make_figures.cells_of(frontier_picture.RUN)[name]
        place = [cell["distance"].value, cell["speedup"].value]
        assert [points.get_xdata()[0], points.get_ydata()[0]] == place
        is_marked = make_figures.marked_distance(cell).endswith("†")
        assert (points.get_markerfacecolor() == "white") == is_marked


def import_layers() -> list[str]:
    """The layers of the import contract of the package, highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers: list[str] = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return layers


def test_architecture_lists_every_folder_in_the_order_of_the_layers() -> None:
    listed = re.findall(r"^\| `(\w+)/` \| ", ARCHITECTURE, re.MULTILINE)
    package = ROOT / "lantern_bench"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(listed) >= folders
    layered = " | ".join(import_layers()).split(" | ")
    assert [name for name in listed if name in folders] == [
        name for name in layered if name in folders
    ]


def test_files_and_functions_of_architecture_exist() -> None:
    """A path is from the root or from the package; a name in brackets is defined in its file."""
    named = set()
    for line in ARCHITECTURE.replace("\n   ", " ").splitlines():
        files = []
        for span in re.findall(r"`([^`]+)`", line):
            if re.fullmatch(r"[\w/]+(?:/|\.py)", span):
                places = [ROOT / span, ROOT / "lantern_bench" / span]
                found = [place for place in places if place.exists()]
                assert found, f"{span} does not exist"
                files.append(found[0])
        names = re.findall(r"\(`(?:\w+\.)?(\w+)`[);]", line)
        names += re.findall(r"^\| `(\w+)` \(`", line)
        for name in names:
            sources = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
            for folder in files:
                sources += [file.read_text(encoding="utf-8") for file in folder.rglob("*.py")]
            defined = re.compile(rf"\b(?:def|class) {name}\b")
            assert any(defined.search(source) for source in sources), f"{name}: {line}"
            named.add(name)
    assert len(named) > 22


@pytest.mark.parametrize(("heading", "most"), [("lantern-bench sweep", 10), ("--delta 0.1", 8)])
def test_paths_through_the_code_are_short(heading: str, most: int) -> None:
    """Each step of a path enters one file, and none twice."""
    section = ARCHITECTURE.split(f"## The path of `{heading}`")[1].split("\n## ")[0]
    files = re.findall(r"^\d+\. `(lantern_bench/[\w/]+\.py)`", section, flags=re.MULTILINE)
    assert 5 < len(files) <= most
    assert len(set(files)) == len(files)


def test_contributing_lists_the_layers_of_the_import_contract() -> None:
    layers = import_layers()
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(.*?)`", row)) for row in listed] == layers


@pytest.mark.parametrize(
    ("page", "folder", "names", "most_lines"),
    [
        ("adding-a-drafting.md", "examples/echo_drafting", ECHO, 80),
        (
            "adding-a-metric.md",
            "examples/sharpness_metric",
            ("sharpness_metric.py", "pyproject.toml"),
            30,
        ),
        ("adding-a-model.md", "examples/third_party_family", ("pyproject.toml",), 20),
        ("adding-a-model.md", "examples/hosted_janus", ("hosted_janus.py", "janus.yaml"), 60),
        (
            "adding-a-rule.md",
            "examples/distance_rule",
            ("distance_rule.py", "pyproject.toml", "distance.yaml"),
            40,
        ),
        (
            "adding-a-rule.md",
            "examples/sure_rule",
            ("sure_rule.py", "pyproject.toml", "sure.yaml"),
            40,
        ),
    ],
)
def test_a_page_shows_its_example_which_is_short(
    page: str, folder: str, names: Sequence[str], most_lines: int
) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sources = [(ROOT / "tests" / folder / name).read_text(encoding="utf-8") for name in names]
    assert [source for source in sources if f"\n{source}```" not in text] == []
    assert sum(source.count("\n") for source in sources) < most_lines


def test_code_on_the_page_of_models_is_in_a_file() -> None:
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    files = [
        path for path in (ROOT / "tests").rglob("*.*") if path.suffix in (".py", ".toml", ".yaml")
    ]
    sources = [path.read_text(encoding="utf-8") for path in files]
    for block in re.findall(r"```(?:python|toml|yaml)\n(.*?)```", text, re.DOTALL):
        assert any(block in source for source in sources), f"code that is in no file:\n{block}"


@pytest.mark.parametrize("page", make_figures.pages(), ids=lambda page: page.name)
def test_figures_are_those_of_the_committed_runs(page: Path) -> None:
    text = make_figures.read_page(page)
    assert text == make_figures.render(text), "run: python -m scripts.docs.figures"


@pytest.mark.parametrize("page", make_figures.pages(), ids=lambda page: page.name)
def test_every_measured_figure_is_listed_with_its_run(page: Path) -> None:
    """Intervals, speedups, MAL and milliseconds come from runs.

    Shown outputs of commands are left out.
    """
    text = make_figures.read_page(page).partition("<!-- Below: ")[0]
    text = make_figures.TABLE.sub("", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    rest = make_figures.LISTED.sub("", make_figures.render(text, lambda source: ""))
    rest = re.sub(r"`[^`\n]*`|^    .*", "", rest, flags=re.MULTILINE)
    found = set(re.findall(r"\d\.\d+x|\d\.\d+ \[|MAL of \d|\d ms\b", rest))
    assert found == NOT_OF_RUNS.get(page.name, set()), "list them: scripts/docs/figures.py"


@pytest.mark.parametrize(
    "path",
    [path for path in MANIFESTS if path.parent.name not in OUTDATED],
    ids=lambda path: path.parent.name,
)
def test_the_command_of_a_committed_run_is_documented_and_plans_that_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    (command,) = manifest["commands"]
    command = command.partition(" --out ")[0].removeprefix("lantern-bench ")
    pages = [*make_figures.pages(), ROOT / "results" / "README.md"]
    documented = " ".join(page.read_text(encoding="utf-8") for page in pages)
    assert re.search(f"{re.escape(command)}(?:`| --out |\n)", documented)

    plans: list[dict[str, Any]] = []

    def plan_table(request: Request) -> tuple[pd.DataFrame, float]:
        plans.append(json.loads(json.dumps(request.experiment.to_dict())))
        return pd.DataFrame({"images": [], "done": [], "to_do": []}), 0.0

    monkeypatch.setattr("lantern_bench.cli.sweep.plan_table", plan_table)
    assert main([*shlex.split(command), "--dry-run"]) == 0
    (planned,) = plans
    decoded = manifest["experiment"]
    shared = planned.keys() & decoded.keys()
    assert [name for name in shared if differ(planned[name], decoded[name])] == []


def differ(planned: Any, decoded: Any) -> bool:
    """Whether settings differ; cells are compared in the settings that both versions know."""
    if not isinstance(decoded, list) or not isinstance(decoded[0], dict):
        return bool(planned != decoded)
    if len(planned) != len(decoded):
        return True
    for now, then in zip(planned, decoded, strict=True):
        known = now.keys() & then.keys()
        if any(now[name] != then[name] for name in known):
            return True
    return False
