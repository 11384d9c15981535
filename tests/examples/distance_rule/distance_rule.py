"""A relaxed rule in which distant neighbours of a draft count less than near ones."""

from lantern_bench.methods import neighbour_rule


@neighbour_rule("by-distance", neighbours=100, example=0.3, codebook=True)
def by_distance(draft, values):
    """Limit m(x) [n] to the neighbours' mean p, weighted by softmax(-distance / bound)."""
    weights = (-draft.distances / values["bound"]).softmax(-1)
    return (weights * draft.neighbour_p).sum(-1)
