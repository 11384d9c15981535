"""A relaxed rule: more neighbour mass where the target is undecided."""

import math

from lantern_bench.plugins import DraftView, Rule


def most_mass(draft: DraftView, bound: float):
    """The most m(x) [...]: `bound` times the entropy of p, as a share of the largest possible entropy."""
    p = draft.whole
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    return bound * entropy / math.log(p.shape[-1])


RULE = Rule(name="ambiguity", limit=most_mass, low=0, high=1, example=0.3, neighbours=100, label="by ambiguity")
