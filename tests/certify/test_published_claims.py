"""The example of docs/audit.md for SCD: by hand in fractions, and by the form that its authors published."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lantern_bench.certify.tabular import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep

IMAGES = 60_000
Law = list[Fraction]


def law(*parts: int) -> Law:
    return [Fraction(part, sum(parts)) for part in parts]


def residual(p: Law, q: Law) -> Law:
    """norm(max(p - q, 0)); p itself where nothing remains."""
    remains = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [mass / sum(remains) for mass in remains] if sum(remains) else p


def without(q: Law, x: int) -> Law:
    remains = [Fraction(0) if token == x else chance for token, chance in enumerate(q)]
    return [mass / sum(remains) for mass in remains] if sum(remains) else remains


def accept(p: Law, q: Law, x: int) -> Fraction:
    return min(Fraction(1), p[x] / q[x]) if q[x] else Fraction(0)


def close(measured: Tensor, wanted: Law) -> bool:
    """Whether shares of `IMAGES` images are within five standard deviations."""
    exact = torch.tensor([float(chance) for chance in wanted])
    return bool(((measured - exact).abs() <= 5 * (exact * (1 - exact) / IMAGES).sqrt() + 1e-9).all())


def shares(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocabulary) / len(tokens)


def test_an_old_q_kept_with_a_draft() -> None:
    q, r, p = law(1, 1), law(3, 1), law(1, 1)
    emitted = [Fraction(0)] * 2
    for x, drawn in enumerate(q):
        keeps = accept(r, q, x)
        drafts = [(x, q, drawn * keeps)] + [
            (token, r, drawn * (1 - keeps) * chance) for token, chance in enumerate(residual(r, q))
        ]
        for draft, believed, weight in drafts:
            taken = accept(p, believed, draft)
            emitted[draft] += weight * taken
            for token, chance in enumerate(residual(p, believed)):
                emitted[token] += weight * (1 - taken) * chance
    assert emitted == [Fraction(2, 3), Fraction(1, 3)]
    assert close(_second_draft("scd", {"drafting": "scd-published"}, q, r, p), emitted)
    assert close(_second_draft("scd", {}, q, r, p), p)


def _second_draft(mode: str, values: dict[str, Any], q: Law, r: Law, p: Law) -> Tensor:
    """Shares of the first token where a draft of q is drawn again from r, and verified with p."""
    decoding = Decoding(**{"mode": mode, "window": 2, **values})
    target: Any = TabularModel(len(p), 4, seed=0)
    noise = torch.Generator().manual_seed(1)
    method: Any = drafting_of(decoding, target, IMAGES)

    def exponential(*shape: int) -> Tensor:
        return torch.empty(IMAGES, *shape).exponential_(generator=noise)

    def rows(distribution: Law) -> Tensor:
        return torch.tensor([float(chance) for chance in distribution]).expand(IMAGES, method.nodes, -1).contiguous()

    root, limit = torch.zeros(IMAGES, dtype=torch.int64), torch.full((IMAGES,), 2)
    method.start_images(rows(q)[:, 0])
    tree = method.tree(method.draft(DraftInputs(root, exponential(method.noises, len(p)), limit)))
    method._q.copy_(rows(q)[:, :2])
    drawn = torch.multinomial(rows(q)[:, 0], 1, generator=noise).expand(-1, method.nodes)
    # One draft of q at each place: the published SCD starts with q = 1 instead.
    tokens = torch.where(torch.tensor(mode == "scd"), drawn, tree.tokens)
    tree = type(tree)(**{**vars(tree), "tokens": tokens})
    path = torch.tensor([[0, -1, -1]]).expand(IMAGES, -1)
    nothing = torch.zeros(IMAGES, dtype=torch.int64)
    method.after_step(LastStep(tree, rows(r), path, nothing, path, nothing + 2, nothing == 0))
    tree = method.tree(method.draft(DraftInputs(root, exponential(method.noises, len(p)), limit)))
    uniforms = torch.rand(IMAGES, method.nodes, method.fanout, generator=noise)
    verdict = method.verify(tree, rows(p), AcceptanceRule(), uniforms, exponential(len(p)), limit)
    return shares(verdict.tokens[:, 0], len(p))
