"""A relaxed rule: the neighbours of a draft count the less, the farther their codes are."""

from lantern_bench.methods import Rule


def most_mass(draft, values):
    """The most m(x) [...]: the mean of p over the neighbours, weighted by a softmax of their distances / `bound`."""
    weights = (-draft.distances / values["bound"]).softmax(-1)
    return (weights * draft.neighbour_p).sum(-1)


RULE = Rule(name="by-distance", limit=most_mass, example=0.3, neighbours=100, codebook=True, label="by distance")
