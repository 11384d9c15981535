"""Rows of SCD, SJD-PAC, SJD++ and PathSpec as published, which is not lossless. No torch."""

from dataclasses import replace

from lantern_bench.methods.draftings import SHIPPED_DRAFTINGS

DRAFTINGS = {row.name: row for row in SHIPPED_DRAFTINGS}


def problem(values):
    """Return the key and the sentence of a value with which the published code does not differ;
    None: it does.
    """
    for key, only in (("coupling", "maximal"), ("initial", "uniform")):
        if values[key] != only:
            return key, f"the published code differs only with {key} {only}"
    return None


SCD = replace(
    DRAFTINGS["jacobi"],
    name="scd-published",
    make="published_forms.draftings:PublishedScd",
    about="as SCD's authors coded it, not lossless",
    defaults={"window": 16, "initial": "uniform", "coupling": "maximal"},
    lossless=False,
    lookahead={},
    problem=problem,
)
SJD_PAC = replace(
    DRAFTINGS["pac"],
    name="sjd-pac-published",
    make="published_forms.draftings:PublishedSjdPac",
    about="as SJD-PAC's authors coded it, not lossless",
    defaults={**DRAFTINGS["pac"].defaults, "initial": "uniform"},
    lossless=False,
    lookahead={},
    problem=problem,
)


def threshold_problem(values):
    """Return the key and the sentence of a coupling in which the published form does not differ."""
    if values["coupling"] != "threshold":
        return "coupling", "the published form differs only with coupling threshold"
    return DRAFTINGS["jacobi"].problem(values)


SJD_PLUS_PLUS = replace(
    DRAFTINGS["jacobi"],
    name="sjdpp-published",
    make="published_forms.draftings:PublishedSjdPlusPlus",
    about="SJD++ as published, not lossless",
    defaults={"window": 16, "initial": "uniform", "coupling": "threshold"},
    lossless=False,
    lookahead={},
    problem=threshold_problem,
)


def paths_problem(values):
    """Return the key and the sentence of a coupling, which PathSpec does not have."""
    if values["coupling"] != "none":
        return "coupling", "PathSpec draws every draft anew; leave it out"
    return DRAFTINGS["jacobi"].problem(values)


PATH_SPEC = replace(
    DRAFTINGS["jacobi"],
    name="pathspec-published",
    make="published_forms.draftings:PublishedPathSpec",
    about="PathSpec as its authors coded it, not lossless",
    defaults={"window": 12, "initial": "uniform"},
    chain=False,
    lossless=False,
    lookahead={},
    problem=paths_problem,
    nodes=lambda values: 2 * values["window"],
)
