from __future__ import annotations

from typing import ClassVar

from scripts.docs.reliability import PAGE, TESTS, Fault, Outcomes, Result, faults, render, rows


def test_the_page_has_a_row_for_every_fault() -> None:
    listed = rows(PAGE.read_text(encoding="utf-8"))
    assert [fault for fault, _ in listed] == [fault.fault for fault in faults()], (
        "run: python -m scripts.docs.reliability"
    )
    assert len(listed) >= 20
    assert all(happens for _, happens in listed)


def test_every_fault_says_what_happened() -> None:
    for fault in faults():
        source = (TESTS / fault.file).read_text(encoding="utf-8")
        body = source.partition(f"def {fault.test}(")[2].partition("\n\n\n")[0]
        assert "outcome(" in body or 'record_property("outcome"' in body, fault.node


def test_the_table_is_rendered_from_results() -> None:
    results = {fault.node: Result(["a | b"], 1, 2) for fault in faults()}
    page = render(
        "before\n" + "<!-- Below: python -m scripts.docs.reliability -->\nstale row\n", results
    )
    assert page.startswith("before\n")
    assert "stale row" not in page
    assert rows(page)[0] == (faults()[0].fault, "a \\| b")


def test_a_failed_case_counts() -> None:
    class Report:
        when = "call"
        failed = False
        passed = True
        user_properties: ClassVar = [("outcome", "exit 3")]
        nodeid = "tests/faults/test_files.py::test_disk_full[1]"

    plugin = Outcomes()
    plugin.pytest_runtest_logreport(Report)  # type: ignore[arg-type]
    failed = type("Failed", (Report,), {"failed": True, "passed": False, "user_properties": []})
    plugin.pytest_runtest_logreport(failed)  # type: ignore[arg-type]
    assert plugin.results == {
        Fault("test_files.py", "test_disk_full", "").node: Result(["exit 3"], 1, 2)
    }
