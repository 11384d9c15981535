"""A drafting without a drafter: every draft is drawn from the target's last distribution."""

from lantern_bench.methods import Drafting, Parameter, whole_number

LENGTH = Parameter(
    "length", whole_number(1), "Draft tokens of the echo drafting.", in_id="structure"
)

DRAFTING = Drafting(
    "echo",
    make="echo_drafting.method:Echo",
    about="the target's last distribution, repeated",
    parameters=(LENGTH,),
    defaults={"length": 3},
    needs_drafter=False,
    chain=True,
    label=lambda values: f"w{values['length']}",
)
