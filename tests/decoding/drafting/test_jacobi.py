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
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.drafting import jacobi
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, couple
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.tree import DraftTree
from tests.helpers.mistakes import strict_without_residual
from tests.helpers.rules import broken
from tests.helpers.tabular import Prefix, Setting, Tabular, verify_step
from tests.models.families.test_forced_tokens import CODES, LINE
from tests.models.families.test_forced_tokens import Model as Lined

WITHOUT_RESIDUAL = broken("without residual", strict_without_residual)
COUPLINGS = ("none", "maximal", "gumbel")
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
        drafting.after_step(
            LastStep(
                p=p,
                path=nodes,
                accepted=accepted,
                tokens=path,
                position=position,
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
@pytest.mark.parametrize("coupling", ["none", "maximal"])
def test_enumerated_images_with_filters_follow_the_target(coupling: str) -> None:
    setting = Setting(temperature=0.9, top_k=2, cfg_scale=1.5)
    assert Exact((3, 4, 3), {"coupling": coupling}, setting=setting).error() < 1e-12


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


# ---- coupling


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
    with pytest.raises(ParameterError, match="the drafting jacobi w16-maximal does not give"):
        jacobi_decoding(rule="block", coupling="maximal")
    assert jacobi_decoding(rule="block", coupling="maximal", temperature=0).rule == "strict"
