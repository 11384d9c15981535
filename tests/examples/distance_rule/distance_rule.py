"""A relaxed rule: the neighbours of a draft count the less, the farther their codes are."""

from lantern_bench.methods import neighbour_rule


@neighbour_rule("by-distance", neighbours=100, example=0.3, codebook=True, label="by distance")
def by_distance(draft, values):
    """The most m(x) [n]: the mean of p over the neighbours, weighted by a softmax of their
    distances / `bound`.
    """
    weights = (-draft.distances / values["bound"]).softmax(-1)
    return (weights * draft.neighbour_p).sum(-1)
