"""A drafting without a drafter: every draft is drawn from the target's last distribution."""

from lantern_bench.plugins import Drafting, Parameter

WINDOW = Parameter(
    "window", int, "must be a whole number of at least 1", "Draft tokens of the echo drafting.", in_id="structure"
)

DRAFTING = Drafting(
    "echo",
    make="echo_drafting.method:Echo",
    about="the target's last distribution, repeated",
    parameters=(WINDOW,),
    defaults={"window": 3},
    needs_drafter=False,
    label=lambda values: f"w{values['window']}",
    problem=lambda values: ("window", WINDOW.allowed) if values["window"] < 1 else None,
    legend="echo",
)
