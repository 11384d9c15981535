"""The documents are true: citations resolve, files exist, shown code and tables equal their source."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from docs import make_audit, make_frontier, make_prediction
from docs.make_results_format import PAGE, render

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).name
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TEXTS = (".py", ".md", ".yaml", ".yml", ".cff")
CITATION = re.compile(
    r"docs/algorithms\.md, sections? (\d(?:\.\d)?(?!\d))(?:, ([A-C]\d+))?(?: (?:and|to) ([A-C]\d+|\d\b))?"
)
BARE = re.compile(r"(?<!docs/)(?<!\]\()(?<!\[)algorithms\.md|\bfindings? [A-C]\d")
PENDING: set[str] = set()
FILE = re.compile(r"(?<![\w./-])(?:lantern_bench|docs|tests|experiments|results/reference)/[\w./-]*[\w/]")


def repository_files() -> list[Path]:
    """Committed files and new ones that git does not ignore; the files of an unpacked archive without git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    folders = ("lantern_bench", "docs", "tests", "experiments")
    paths = [ROOT / name for name in names] or [path for name in folders for path in (ROOT / name).rglob("*")]
    return [path for path in paths if path.is_file() and path.suffix in TEXTS and path.name != HERE]


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each file, with the line breaks and comment signs of wrapped lines taken out."""
    for path in repository_files():
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(ROOT)), re.sub(r"\s*\n\s*(?:#+ )?", " ", text)


def headings() -> set[str]:
    return set(re.findall(r"^#+ (\d(?:\.[A-C]?\d*)?)\b", ALGORITHMS, re.MULTILINE))


def test_algorithms_has_its_sections_and_entries() -> None:
    counts = {"A": 13, "B": 6, "C": 6}
    entries = {f"9.{letter}{n}" for letter, count in counts.items() for n in range(1, count + 1)}
    sections = {str(n) for n in range(1, 10)} | {"3.1"} | {f"8.{n}" for n in range(1, 7)}
    assert entries | sections <= headings()


def test_every_citation_of_the_algorithms_resolves() -> None:
    known, cited = headings(), 0
    for name, text in texts():
        for match in CITATION.finditer(text):
            for entry in filter(None, match.groups()):
                assert (entry if entry[0].isdigit() else f"9.{entry}") in known, f"{name}: {match[0]}"
            cited += 1
        for number in re.findall(r"\[(?:docs/)?algorithms\.md\]\([^)]*\), (?:section )?(\d(?:\.[A-C]?\d+)?)", text):
            assert number in known, f"{name}: section {number}"
        assert text.count("docs/algorithms.md, section") == len(CITATION.findall(text)), (
            f"{name}: a citation has no number"
        )
    assert cited > 40


def test_no_citation_lacks_its_document() -> None:
    for name, text in texts():
        match = BARE.search(text)
        assert not match, f"{name}: ...{text[max(match.start() - 30, 0) : match.end() + 30]}..."


def test_every_cited_file_exists() -> None:
    for name, text in texts():
        for cited in FILE.findall(text):
            assert (ROOT / cited).exists(), f"{name} cites {cited}"


def test_links_between_pages_lead_somewhere() -> None:
    for path in repository_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links {target}"


def test_results_format_equals_the_schema() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "run: python -m docs.make_results_format"


def test_the_audit_shows_the_committed_run() -> None:
    page = make_audit.PAGE.read_text(encoding="utf-8")
    assert page == make_audit.render(page), "run: python -m docs.make_audit"
    assert page.count("measured: not") >= 3


@pytest.mark.parametrize("script", [make_frontier, make_prediction])
def test_tables_show_the_committed_runs(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(page), f"run: python -m {script.__name__}"


@pytest.mark.parametrize(
    "script", ["make_audit", "make_pictures", "make_reliability", "make_results_format", "screenshots"]
)
def test_the_scripts_of_the_docs_can_be_imported(script: str) -> None:
    importlib.import_module(f"docs.{script}")


def tree_of_architecture() -> list[str]:
    """The paths of the tree in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.search(r"```\n(.*?)```", page, re.DOTALL)[1].splitlines()  # type: ignore[index]
    paths, parents = [], [""] * 9
    for line in lines:
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth + 1] = parents[depth] + name
        paths.append(parents[depth + 1])
    return paths


def test_architecture_names_files_that_exist() -> None:
    for path in tree_of_architecture():
        assert (ROOT / path).exists(), path


def test_architecture_has_a_place_for_every_module() -> None:
    paths = set(tree_of_architecture()) - {"lantern_bench/"}
    for module in (ROOT / "lantern_bench").rglob("*.py"):
        name = module.relative_to(ROOT).as_posix()
        named = name in paths or any(path.endswith("/") and name.startswith(path) for path in paths)
        assert named or module.name in ("__init__.py", "__main__.py"), name
    folders = {f"{path.relative_to(ROOT).as_posix()}/" for path in (ROOT / "lantern_bench").rglob("__init__.py")}
    folders = {f"{Path(name).parent.as_posix()}/" for name in folders}
    assert folders - {"lantern_bench/"} <= paths


@pytest.mark.parametrize(("heading", "most"), [("lantern-bench sweep", 35), ("--delta 0.1", 8)])
def test_paths_through_the_code_are_short(heading: str, most: int) -> None:
    """Each step of a path enters one file, and none twice."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"## The path of `{heading}`")[1].split("\n## ")[0]
    files = re.findall(r"^(?:\| \d+ \| |\d+\. )`(lantern_bench/[\w/]+\.py)`", section, flags=re.MULTILINE)
    assert 5 < len(files) <= most and len(set(files)) == len(files)


def test_contributing_lists_the_layers_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = contracts[0]["layers"]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE)
    assert [" | ".join(re.findall(r"`(.*?)`", row)) for row in listed] == layers


_CODE = (".py", ".toml", ".yaml")


@pytest.mark.parametrize(
    ("page", "folder", "whole"),
    [
        ("adding-a-model.md", "tests/third_party_family", ("pyproject.toml",)),
        ("adding-a-model.md", "tests/examples/hosted_janus", ("hosted_janus.py", "janus.yaml")),
    ],
)
def test_a_page_shows_the_code_of_its_example(page: str, folder: str, whole: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.*")}
    shown = [block for _, block in re.findall(r"```(python|toml|yaml)\n(.*?)```", text, re.DOTALL)]
    everything = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.*") if path.suffix in _CODE]
    assert shown
    for block in shown:
        assert any(block in source for source in everything), f"{page} shows code that is in no file:\n{block}"
    for name in whole:
        assert sources[name] in shown, f"{page} does not show {name}"


def test_readme_has_the_figures_of_the_reference_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = pd.read_csv(ROOT / "results" / "reference" / "summary.csv")
    for row in summary.itertuples():
        speedup = f"{row.speedup:.2f}x [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
        parameters = "" if pd.isna(row.parameters) else row.parameters
        assert f"| {row.method} | {parameters} | {speedup} | {row.mean_accepted_length:.2f} |" in readme
