"""Jacobi drafting: lossless by enumeration, which sees broken variants; coupling; forced tokens.

Enumerated is the whole image, step after step: (tokens, rows, drafts) with their probabilities,
through the package's own `draft`, `verify` and `learn` (docs/algorithms.md, section 8.6). Maximal
coupling is part of the probability of a draft; Gumbel coupling is followed at V = 2 as intervals of
one uniform number for each position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.traversal import distribution_behind
from lantern_bench.decoding.acceptance.verify import accept_drafts, verify
from lantern_bench.decoding.drafting import jacobi
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, couple, redraft_below
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.tree import DraftTree, chain
from lantern_bench.methods.catalog import RULES
from lantern_bench.methods.rules import tree_rule
from tests.helpers.mistakes import StoredP, drafting_mistakes, strict_without_residual
from tests.helpers.rules import STRICT, broken
from tests.helpers.tabular import Prefix, Setting, Tabular, verify_step
from tests.models.families.test_forced_tokens import CODES, LINE
from tests.models.families.test_forced_tokens import Model as Lined

WITHOUT_RESIDUAL = broken("without residual", strict_without_residual)
BLOCK = ConfiguredRule(RULES["block"])
COUPLINGS = ("none", "maximal", "gumbel", "threshold")
INITIALS = ("uniform", "left", "above", "row")
SIZES = {"v2": (2, 5, 4), "v3": (3, 4, 2)}
"""Vocabulary, tokens of an image, window."""
# Gumbel drafts are enumerated by intervals of one uniform number, which serves two tokens.
CASES = [case for case in product(SIZES, COUPLINGS) if case != ("v3", "gumbel")]


def jacobi_decoding(**values: Any) -> Decoding:
    return Decoding(**{"mode": "sjd", **values})


# ---- exact


class Particles(NamedTuple):
    """Decodes with the same number of committed `tokens` [n, m], their probabilities, and the
    drafting's state.
    """

    weight: Tensor
    tokens: Tensor
    state: dict[str, Tensor]
    # Gumbel coupling: where the uniform number of each position of the last window may lie, [n, W]
    low: Tensor
    high: Tensor

    def repeated(self, times: int) -> Particles:
        tensors = (
            tensor.repeat_interleave(times, dim=0)
            for tensor in (self.weight, self.tokens, self.low, self.high)
        )
        weight, tokens, low, high = tensors
        state = {
            name: tensor.repeat_interleave(times, dim=0) for name, tensor in self.state.items()
        }
        return Particles(weight=weight, tokens=tokens, state=state, low=low, high=high)

    def selected(self, rows: Tensor) -> Particles:
        state = {name: tensor[rows] for name, tensor in self.state.items()}
        return Particles(
            weight=self.weight[rows],
            tokens=self.tokens[rows],
            state=state,
            low=self.low[rows],
            high=self.high[rows],
        )


STATE = (
    "_q",
    "_coupled_q",
    "_position_noise",
    "_committed",
    "_position",
    "_history",
    "_last_q",
    "_last_drafts",
    "_stayed_q",
    "_image",
)


def load(drafting: JacobiDrafting, particles: Particles) -> JacobiDrafting:
    for name, value in particles.state.items():
        getattr(drafting, name).copy_(value)
    return drafting


def merged(groups: list[Particles]) -> Particles:
    """One particle for all that are alike in what still matters."""
    tensors = [torch.cat(parts) for parts in zip(*(group[:2] for group in groups), strict=True)]
    state = {name: torch.cat([group.state[name] for group in groups]) for name in groups[0].state}
    low, high = (torch.cat([getattr(group, name) for group in groups]) for name in ("low", "high"))
    columns = [
        tensors[1],
        *(column for name, column in state.items() if name != "_position_noise"),
        low,
        high,
    ]
    key = torch.cat([column.reshape(len(low), -1).double() for column in columns], dim=1)
    _, place = torch.unique((key * 1e10).round(), dim=0, return_inverse=True)
    weight = torch.zeros(int(place.max()) + 1).index_add_(0, place, tensors[0])
    first = torch.zeros_like(weight, dtype=torch.int64).scatter_(0, place, torch.arange(len(place)))
    particles = Particles(
        weight=tensors[0], tokens=tensors[1], state=state, low=low, high=high
    ).selected(first)
    return particles._replace(weight=weight)


class Rows(Target):
    """A target whose pictures have rows of two tokens."""

    device = torch.device("cpu")
    line_length = 2

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocab_size = vocabulary
        self.image_tokens = length


class Exact:
    """The distribution of whole images of a tabular target under Jacobi drafting."""

    def __init__(
        self,
        size: tuple[int, int, int],
        values: dict[str, Any],
        seed: int = 1,
        drafting: type[JacobiDrafting] = JacobiDrafting,
        rule: ConfiguredRule | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.vocabulary, self.length, self.window = size
        self.model = Tabular(self.vocabulary, setting or Setting(), seed)
        self.target = Rows(self.vocabulary, self.length)
        self.decoding = jacobi_decoding(window=self.window, **values)
        self.gumbel = values.get("coupling") == "gumbel"
        self.kind = drafting
        self.rule = rule

    def drafting(self, batch: int) -> JacobiDrafting:
        return self.kind(self.decoding, self.target, batch)

    def error(self) -> float:
        """The total variation between the images' distribution and the target's."""
        decoded = self.distribution()
        truth = self.model.distribution_after((), self.length)
        return 0.5 * sum(
            abs(decoded.get(key, 0.0) - truth.get(key, 0.0))
            for key in decoded.keys() | truth.keys()
        )

    def distribution(self) -> dict[Prefix, float]:
        first = self.model.p(())
        drafting = self.drafting(self.vocabulary)
        drafting.start_images(first.expand(self.vocabulary, -1))
        none = torch.zeros(self.vocabulary, self.window)
        tokens = torch.arange(self.vocabulary)[:, None]
        groups = defaultdict(
            list,
            {
                1: [
                    Particles(
                        weight=first,
                        tokens=tokens,
                        state=self.state_of(drafting),
                        low=none,
                        high=none + 1.0,
                    )
                ]
            },
        )
        for committed in range(1, self.length):
            if committed in groups:
                self.advance(merged(groups.pop(committed)), committed, groups)
        final: dict[Prefix, float] = defaultdict(float)
        for group in groups.pop(self.length):
            for weight, row in zip(group.weight.tolist(), group.tokens.tolist(), strict=True):
                final[tuple(row)] += weight
        assert not groups
        return final

    def state_of(self, drafting: JacobiDrafting) -> dict[str, Tensor]:
        return {name: getattr(drafting, name).clone() for name in STATE if hasattr(drafting, name)}

    def advance(
        self, particles: Particles, committed: int, groups: dict[int, list[Particles]]
    ) -> None:
        """Add the outcomes of one step of all particles to `groups`."""
        limit = min(self.window, self.length - 1 - committed)
        wanted = self.drafts(limit)
        many = len(wanted)
        rest = len(particles.weight)
        particles = particles.repeated(many)
        chance, tree, drafting, particles = self.drafted(particles, wanted.repeat(rest, 1), limit)
        particles = particles._replace(weight=particles.weight * chance)
        p = self.target_at(particles.tokens, tree, limit)
        for stop, nodes, path, accepted, after in self.outcomes(
            drafting=drafting, tree=tree, p=p, limit=limit
        ):
            if not stop.any():
                continue
            step = self.learned(
                drafting=drafting,
                tree=tree,
                p=p,
                nodes=nodes,
                path=path,
                accepted=accepted,
                committed=committed,
            )
            for token in range(self.vocabulary):
                weight = particles.weight * stop * after[:, token]
                for length in accepted.unique().tolist():
                    rows = torch.nonzero((weight > 0) & (accepted == length)).flatten()
                    if len(rows):
                        tokens = torch.cat(
                            [
                                particles.tokens,
                                path[:, :length],
                                torch.full_like(path[:, :1], token),
                            ],
                            dim=1,
                        )
                        outcome = Particles(
                            weight=weight,
                            tokens=tokens,
                            state=step,
                            low=particles.low,
                            high=particles.high,
                        )
                        groups[committed + length + 1].append(self.trimmed(outcome.selected(rows)))

    def drafts(self, limit: int) -> Tensor:
        """All drafts [n, W], of which `limit` tokens differ."""
        wanted = torch.tensor(
            list(itertools.product(range(self.vocabulary), repeat=limit)), dtype=torch.int64
        )
        wanted = wanted.reshape(-1 if limit else 1, limit)
        return torch.nn.functional.pad(wanted, (0, self.window - limit))

    def outcomes(
        self, drafting: JacobiDrafting, tree: DraftTree, p: Tensor, limit: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """How a step can end: chances [n], path [n, D + 1], its tokens [n, D], accepted [n], what
        comes next [n, V].
        """
        del drafting
        ends = verify_step(tree=tree, p=p, depth_limit=limit, rule=self.rule)
        for node, (stop, path, accepted, after) in enumerate(zip(*ends, strict=True)):
            way = tree.attention[0, node].nonzero().flatten()
            yield (
                stop,
                torch.nn.functional.pad(way, (0, self.window + 1 - len(way)), value=-1),
                path,
                accepted,
                after,
            )

    def learned(
        self,
        drafting: JacobiDrafting,
        tree: DraftTree,
        p: Tensor,
        nodes: Tensor,
        path: Tensor,
        accepted: Tensor,
        committed: int,
    ) -> dict[str, Tensor]:
        """The state after a step that ended so; `drafting` stays as it is."""
        before = self.state_of(drafting)
        position = committed + accepted + 1
        nodes = nodes.expand(len(path), -1)
        verdict = verify(
            tree=tree,
            target_probs=p,
            rule=self.rule or STRICT,
            uniforms=torch.ones_like(tree.children, dtype=p.dtype),
            noise=torch.ones_like(p[:, 0]),
            depth_limit=torch.full((len(p),), min(self.window, self.length - 1 - committed)),
        )
        drafting.after_step(
            LastStep(
                p=p,
                path=nodes,
                accepted=accepted,
                tokens=path,
                position=position,
                visit_probability=verdict.visit_probability,
            )
        )
        after = self.state_of(drafting)
        for name, value in before.items():
            getattr(drafting, name).copy_(value)
        return after

    def trimmed(self, particles: Particles) -> Particles:
        """Forget what belongs to positions behind the image."""
        behind = particles.tokens.shape[1] + torch.arange(self.window) >= self.length
        for name in ("_q", "_coupled_q", "_last_q", "_stayed_q"):
            if name in particles.state:
                particles.state[name][:, behind[: particles.state[name].shape[1]]] = (
                    1.0 / self.vocabulary
                )
        if "_last_drafts" in particles.state:
            particles.state["_last_drafts"][:, behind] = 0
        if "_history" in particles.state:
            particles.state["_history"][:, particles.tokens.shape[1] :] = 0
        return particles

    def drafted(
        self, particles: Particles, wanted: Tensor, limit: int
    ) -> tuple[Tensor, DraftTree, JacobiDrafting, Particles]:
        """Draft `wanted` [n, W], of which `limit` count.

        Returns its chance [n], the tree, the drafting, and the particles after it.
        """
        moved = particles.state["_committed"]
        root = particles.tokens[:, -1]
        drafting = load(self.drafting(len(wanted)), particles)
        law = self.draw(drafting, root, wanted)
        if not self.gumbel:
            # What is drawn where a token is copied has no effect.
            chances = law.gather(2, wanted[:, :, None]).squeeze(2) / law.sum(dim=2)
            return chances[:, :limit].prod(dim=1), drafting.tree, drafting, particles
        copied = (torch.arange(self.window) + moved[:, None] > self.window) & (
            drafting._q.amax(dim=2) == 1
        )
        at = torch.arange(self.window) + moved[:, None]
        in_window = at < self.window
        at = at.clamp_max(self.window - 1)
        low = torch.where(in_window, particles.low.gather(1, at), 0.0)
        high = torch.where(in_window, particles.high.gather(1, at), 1.0)
        # token 0 is drawn where the number is below this
        first = (law[:, :, 0] / law.sum(dim=2)).clamp(low, high)
        lower = torch.where(wanted == 0, low, first)
        upper = torch.where(wanted == 0, first, high)
        lower = torch.where(copied, low, lower)
        upper = torch.where(copied, high, upper)
        counts = torch.arange(self.window) < limit
        chances = torch.where(copied, (wanted == 0) * 1.0, (upper - lower) / (high - low))
        chance = torch.where(counts, chances, 1.0).prod(dim=1)
        possible = chance > 0
        particles = particles.selected(possible)._replace(
            low=torch.where(counts, lower, 0.0)[possible],
            high=torch.where(counts, upper, 1.0)[possible],
        )
        in_window = in_window[possible]
        at = at[possible]
        wanted = wanted[possible]
        copied = copied[possible]
        middle = (particles.low + particles.high) / 2
        clocks = torch.stack([middle, 1.0 - middle], dim=2)
        # Where a position has its noise, new noise that says the opposite must not be looked at.
        noise = torch.where((in_window & counts)[:, :, None], clocks.flip(2), clocks)
        state = particles.state["_position_noise"]
        state[torch.arange(len(in_window))[:, None].expand_as(at)[in_window], at[in_window]] = (
            clocks[in_window]
        )
        drafting = load(self.drafting(len(wanted)), particles)
        drafting.draft(DraftInputs(particles.tokens[:, -1], noise, torch.tensor(0)))
        assert ((drafting.tree.tokens[:, 1:] == wanted) | copied | ~counts).all()
        return chance[possible], drafting.tree, drafting, particles

    def draw(self, drafting: JacobiDrafting, root: Tensor, wanted: Tensor) -> Tensor:
        """Draft with the draws `wanted`, and return what they are drawn from [n, W, V].

        The drafter's places of a hybrid window are drawn after the whole window, one after the
        other.
        """
        seen: list[Tensor] = []

        def sample(law: Tensor, noise: Tensor) -> Tensor:
            seen.append(law)
            return wanted if law.dim() == 3 else wanted[:, len(seen) - 2]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jacobi, "sample", sample)
            noise = torch.ones(*wanted.shape, self.vocabulary)
            drafting.draft(DraftInputs(root, noise, torch.tensor(0)))
        law, *head = seen
        return torch.cat([torch.stack(head, dim=1), law[:, len(head) :]], dim=1) if head else law

    def target_at(self, committed: Tensor, tree: DraftTree, limit: int) -> Tensor:
        """p [n, M, V] at the nodes of at most the depth `limit`."""
        ways = [seen.nonzero().flatten()[1:].tolist() for seen in tree.attention[0]]
        uniform = torch.full((self.vocabulary,), 1.0 / self.vocabulary)
        rows = []
        for before, drafts in zip(committed.tolist(), tree.tokens.tolist(), strict=True):
            ends = (
                (*before, *(drafts[node] for node in way)) if len(way) <= limit else None
                for way in ways
            )
            rows.append(
                torch.stack([uniform if end is None else self.model.p(end) for end in ends])
            )
        return torch.stack(rows)


@pytest.fixture
def _double() -> Iterator[None]:
    """Enumeration needs float64: the drafting's tensors have the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("initial", INITIALS)
@pytest.mark.parametrize(("size", "coupling"), CASES)
def test_enumerated_images_follow_the_target(size: str, coupling: str, initial: str) -> None:
    for seed in (1, 2):
        error = Exact(SIZES[size], {"coupling": coupling, "initial": initial}, seed).error()
        print(f"{size} {coupling} {initial}: TV {error:.1e}")
        assert error < 1e-12


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("coupling", ["none", "maximal", "threshold"])
def test_enumerated_images_with_filters_follow_the_target(coupling: str) -> None:
    setting = Setting(temperature=0.9, top_k=2, cfg_scale=1.5)
    assert Exact((3, 4, 3), {"coupling": coupling}, setting=setting).error() < 1e-12


# ---- block verification of coupled drafts (docs/algorithms.md, section 8.8)

BLOCK_SIZES = {"v2": (2, 5, 4), "v3": (3, 4, 3)}
"""Vocabulary, tokens of an image, window: some mistakes need a window of 3."""
FILTERS = Setting(temperature=0.9, top_k=2, cfg_scale=1.5)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("initial", INITIALS)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_enumerated_block_walks_over_coupled_drafts_follow_the_target(
    size: str, initial: str
) -> None:
    for seed in (1, 2):
        values = {"coupling": "maximal", "initial": initial}
        error = Exact(BLOCK_SIZES[size], values, seed, rule=BLOCK).error()
        print(f"block {size} {initial}: TV {error:.1e}")
        assert error < 1e-12


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("initial", ["uniform", "row"])
def test_enumerated_block_walks_with_filters_follow_the_target(initial: str) -> None:
    values = {"coupling": "maximal", "initial": initial}
    assert Exact((3, 4, 3), values, rule=BLOCK, setting=FILTERS).error() < 1e-12


class KeptOldQ(JacobiDrafting):
    """A draft that stays is verified with the row of the step before."""

    reads_last_drafts = True

    def after_step(self, step: LastStep) -> None:
        old = self._q[self._shifted(step.accepted + 1, self.depth - 1)]
        super().after_step(step)
        self._last_q.copy_(old)

    def draft(self, inputs: DraftInputs) -> None:
        super().draft(inputs)
        is_old = self._offsets[:-1] + self._committed[:, None] < self.depth
        stays = is_old & (self.tree.tokens[:, 1:] == self._last_drafts)
        self._q.copy_(torch.where(stays[:, :, None], self._last_q, self._q))


BROKEN_BLOCK: dict[str, Any] = {
    mistake.name: mistake.make
    for mistake in drafting_mistakes(
        jacobi_decoding(rule="block", initial="uniform", coupling="maximal")
    )
}
BROKEN_BLOCK["old q kept with a draft"] = KeptOldQ


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("mistake", BROKEN_BLOCK)
def test_enumeration_sees_mistakes_of_block_walks_over_coupled_drafts(mistake: str) -> None:
    errors = [
        Exact(
            size=BLOCK_SIZES["v2"],
            values={"initial": "uniform", "coupling": "maximal"},
            seed=seed,
            drafting=BROKEN_BLOCK[mistake],
            rule=BLOCK,
        ).error()
        for seed in (1, 2, 3)
    ]
    print(f"block, {mistake}: TV {errors}")
    assert min(errors) > 0.002


def strict_ahead(children: Children, rule: ConfiguredRule) -> Acceptance:
    """The strict rule, as another package might write it for whole trees."""
    return accept_children(children, replace(rule, row=RULES["strict"]))


@pytest.mark.usefixtures("_double")
def test_walks_of_other_tree_rules_are_coupled_with_the_rows() -> None:
    """Only a walk of `accept_traversal` leaves what it leaves."""
    rule = broken("strict ahead", strict_ahead)
    assert Exact(BLOCK_SIZES["v2"], {"coupling": "maximal"}, rule=rule).error() < 1e-12


@pytest.mark.parametrize(
    ("law_of_drafts", "wanted"),
    [(distribution_behind, 1 / 2), (lambda _p, q, _w: q, 7 / 12)],
    ids=["what block leaves", "rows"],
)
def test_the_smallest_counterexample_of_coupling_with_the_rows(
    law_of_drafts: Any, wanted: float
) -> None:
    """p is (0.5, 0.5) everywhere; the drafts come from (0.75, 0.25) and (0.25, 0.75).

    Asked for is P(1 after 1). The next step's row for the second draft is p, so it always accepts.
    """
    p = torch.full((4, 3, 2), 0.5, dtype=torch.float64)
    q = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64).expand(4, -1, -1)
    tokens = torch.tensor([[0, *drafts] for drafts in product((0, 1), repeat=2)])
    tree = chain(2).draft(tokens, q)
    chances = q.gather(2, tokens[:, 1:, None]).squeeze(2).prod(dim=1)
    (none, one, both), _, _, after = verify_step(tree, p, rule=BLOCK)
    w = accept_drafts(tree, p, BLOCK)[1].visit_probability
    assert w is not None
    last_q = law_of_drafts(p[:, 1], q[:, 1], tree.by_node(w)[:, 1])
    redrawn = couple(p[:, 1], last_q, tokens[:, 2])

    first_is_1 = tokens[:, 1] == 1
    emits_1 = none * after[0, :, 1] + (one + both) * first_is_1
    emits_11 = none * after[0, :, 1] * redrawn[:, 1]
    emits_11 += first_is_1 * (one * after[1, :, 1] + both * (tokens[:, 2] == 1))
    answer = float((chances * emits_11).sum() / (chances * emits_1).sum())
    assert answer == pytest.approx(wanted)


class KeptDraft(JacobiDrafting):
    """Drafts that are never redrawn, verified with the new rows."""

    def after_step(self, step: LastStep) -> None:
        super().after_step(step)
        one_hot_drafts = torch.nn.functional.one_hot(self.tree.tokens[:, 1:], self._q.shape[2]).to(
            self._q
        )
        images, at = self._shifted(step.accepted + 1, self.depth)
        self._coupled_q.copy_(torch.cat([one_hot_drafts, step.p[:, -1:]], dim=1)[images, at])


class CalledUniform(JacobiDrafting):
    """Copied drafts that are verified as if they had been drawn from all tokens alike."""

    def draft(self, inputs: DraftInputs) -> None:
        super().draft(inputs)
        fresh = self._offsets[:-1] + self._committed[:, None] > self.depth
        self._q.copy_(torch.where(fresh[:, :, None], self._uniform, self._q))


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize(
    ("drafting", "values", "rule", "least"),
    [
        (KeptDraft, {"coupling": "maximal"}, None, 0.05),
        (StoredP, {"coupling": "threshold"}, None, 0.01),
        (StoredP, {"coupling": "threshold", "tau": 0.9}, None, 0.005),
        (CalledUniform, {"initial": "left"}, None, 0.1),
        (JacobiDrafting, {}, WITHOUT_RESIDUAL, 0.03),
    ],
)
def test_enumeration_sees_what_is_broken(
    drafting: Any, values: Any, rule: Any, least: float
) -> None:
    errors = [
        Exact(size=SIZES["v2"], values=values, seed=seed, drafting=drafting, rule=rule).error()
        for seed in (1, 2, 3)
    ]
    print(f"broken, {drafting.__name__}: TV {errors}")
    assert sum(errors) / len(errors) > least


@pytest.mark.usefixtures("_double")
def test_enumeration_sees_what_is_broken_in_the_published_scd(published_forms: Any) -> None:
    values = {"drafting": "scd-published"}
    errors = [
        Exact(
            size=SIZES["v2"], values=values, seed=seed, drafting=published_forms.PublishedScd
        ).error()
        for seed in (1, 2, 3)
    ]
    print(f"published SCD: TV {errors}")
    assert sum(errors) / len(errors) > 0.005


@pytest.mark.usefixtures("_double")
def test_enumeration_sees_what_is_broken_in_the_published_sjd_plus_plus(
    published_forms: Any,
) -> None:
    """Its rows are at fault, whichever drafts a threshold keeps."""
    values = {"drafting": "sjdpp-published"}
    errors = [
        Exact(
            size=SIZES["v2"],
            values=values,
            seed=seed,
            drafting=published_forms.PublishedSjdPlusPlus,
        ).error()
        for seed in (1, 2, 3)
    ]
    print(f"published SJD++: TV {errors}")
    assert sum(errors) / len(errors) > 0.005


# ---- coupling


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("tau", [0.05, 0.9, 2.0])
@pytest.mark.parametrize("size", SIZES)
def test_enumerated_images_follow_the_target_with_any_threshold(size: str, tau: float) -> None:
    values = {"coupling": "threshold", "tau": tau}
    assert Exact(SIZES[size], values, seed=3).error() < 1e-12


@pytest.mark.parametrize(("is_published", "wanted"), [(False, 1 / 2), (True, 7 / 12)])
def test_the_smallest_counterexample_of_the_published_threshold(
    is_published: bool, wanted: float
) -> None:
    """q (1/2, 1/2), new row (3/4, 1/4), p (1/2, 1/2), tau 1/2: P(0) of section 8.9."""
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    row = torch.tensor([0.75, 0.25], dtype=torch.float64)
    redraft = redraft_below(row.expand(2, 2), q.expand(2, 2), torch.arange(2), tau=0.5)
    drawn = q @ redraft.coupled
    assert torch.equal(drawn, redraft.q[0])
    verified_with = row if is_published else redraft.q[0]
    accepted = drawn * (q / verified_with).clamp_max(1.0)
    residual = (q - verified_with).clamp_min(0.0)
    emitted = accepted + (1.0 - accepted.sum()) * residual / residual.sum()
    assert float(emitted[0]) == pytest.approx(wanted)


def test_a_tau_without_its_coupling_is_refused() -> None:
    assert jacobi_decoding(coupling="threshold", tau=0.9).cell_id == (
        "sjd-jacobi-w16-row-threshold0.9-t1"
    )
    with pytest.raises(ParameterError, match="coupling maximal has no tau; write coupling"):
        jacobi_decoding(coupling="maximal", tau=0.9)


@pytest.mark.parametrize("seed", range(5))
def test_maximal_coupling_keeps_the_most_and_has_the_new_distribution(seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 9, generator=noise).double() * 2).softmax(dim=1)
    p[3] = q[4] = 0.0
    p = p / p.sum()
    q = q / q.sum()
    law = couple(p.expand(9, 9), q.expand(9, 9), torch.arange(9))
    possible = q > 0
    assert torch.allclose((q[:, None] * law)[possible].sum(dim=0), p, atol=1e-12)
    chance_to_stay = float((q * law.diagonal())[possible].sum())
    assert chance_to_stay == pytest.approx(1.0 - 0.5 * float((p - q).abs().sum()))
    same_row = couple(q.expand(9, 9), q.expand(9, 9), torch.arange(9))[possible]
    assert same_row.equal(torch.eye(9, dtype=same_row.dtype)[possible])


# ---- forced tokens


@pytest.mark.parametrize("initial", INITIALS)
def test_fresh_drafts_are_forced_tokens_exactly_where_these_belong(initial: str) -> None:
    target = Lined().target
    window = 13
    drafting = JacobiDrafting(jacobi_decoding(window=window, initial=initial), target, 1)
    first = torch.full((1, CODES + 1), 1.0 / CODES)
    first[:, CODES] = 0.0
    drafting.start_images(first)
    noise = torch.rand(1, window, CODES + 1, generator=torch.Generator().manual_seed(1))
    drafting.draft(DraftInputs(torch.tensor([4]), noise, torch.tensor([window])))
    tokens = drafting.tree.tokens
    ends = target.forced_tokens(torch.arange(1, window + 1)) == CODES
    assert ends.tolist() == [place % LINE == 0 for place in range(2, window + 2)]
    assert ((tokens[0, 1:] == CODES) == ends).all()
    assert drafting._q[0, :, CODES].tolist() == ends.float().tolist()
    assert torch.allclose(drafting._q.sum(dim=2), torch.ones(1, window))


# ---- rules and values


def test_rules_that_look_ahead_are_refused_with_coupled_drafts() -> None:
    assert jacobi_decoding(rule="block").rule == "block"
    assert jacobi_decoding(rule="block", coupling="maximal").rule == "block"
    refused = "jacobi w16-row-gumbel does not give. Use coupling: maximal, or rule: strict"
    with pytest.raises(ParameterError, match=refused):
        jacobi_decoding(rule="block", coupling="gumbel")
    with pytest.raises(ParameterError, match=r"hybrid w16d2-row-gumbel does not give\. Use"):
        Decoding("hybrid", rule="traversal", coupling="gumbel")
    assert jacobi_decoding(rule="block", coupling="gumbel", temperature=0).rule == "strict"


def test_a_tree_rule_that_leaves_something_else_is_refused_with_coupled_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, "block", tree_rule("block", chains=True)(strict_ahead))
    with pytest.raises(ParameterError, match=r"w16-row-maximal does not give\. Use rule: strict"):
        jacobi_decoding(rule="block", coupling="maximal")
