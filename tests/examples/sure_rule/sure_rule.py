"""A relaxed rule that accepts more drafts where the target is certain of its next token."""

from lantern_bench.methods import probability_rule


@probability_rule("sure", example=0.2)
def sure(draft, values):
    """f [n, V]: min(1, p / q), and `bound` times the certainty exp(-H(p)) on top."""
    certainty = (-draft.entropy).exp()
    return draft.ratio.clamp_max(1.0) + values["bound"] * certainty[:, None]
