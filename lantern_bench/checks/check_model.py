"""Does a model keep the protocol of `decoding/protocol.py`? One line a check, for models of other packages above all.

Each check compares what decoding calls with another way to the same numbers, on random tokens: no trained weights are
needed. A mistake that both ways share shows only against a reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.spatial.distance import squareform
from scipy.stats import rankdata
from torch import Tensor

from lantern_bench.decoding.neighbours import SPACES, in_space
from lantern_bench.decoding.protocol import Logits, Target
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.utils.errors import UserError

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""By dtype: how far logits may differ, as a share of the largest."""
_TREE = StaticTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1)])
_PATHS = ((1, 5, 7), (2,))  # nodes below the root that each image keeps of its first tree
_PICTURES = 48
_ORDERS = 999

Rows: TypeAlias = list[Tensor]
"""Logits [B, N, V] with the prompt and, where there are any, without it."""
Gaps: TypeAlias = dict[str, float]
"""How far two ways to the same logits are apart, by what they are logits of."""


class Check(NamedTuple):
    """One line of the report."""

    check: str
    result: Literal["pass", "fail", "none"]  # none: nothing could be compared
    error: float | None  # None: the check has no number
    limit: float | None
    about: str


class Reference(NamedTuple):
    """Logits from elsewhere."""

    condition: Any
    tokens: Tensor  # int64 [B, N]
    cond: Tensor  # [B, N, V] with the prompt
    uncond: Tensor | None  # without it


def read_reference(path: Path, model: LoadedModel) -> Reference:
    """Read the arrays `tokens`, `cond`, `uncond` (may be missing) and `prompts` of an .npz; else `UserError`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        tokens = torch.from_numpy(arrays["tokens"])
        cond = torch.from_numpy(arrays["cond"])
        uncond = torch.from_numpy(arrays["uncond"]) if "uncond" in arrays else None
        condition = model.condition([str(text) for text in np.atleast_1d(arrays["prompts"])])
        if (
            tokens.shape != cond.shape[:2]
            or tokens.dim() != 2
            or (uncond is not None and uncond.shape != cond.shape)
        ):
            raise ValueError("tokens must be [n, N], cond and uncond [n, N, V]")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = f"{error.args[0]} must be there" if isinstance(error, KeyError) else error
        problem = f"--reference {path}: {reason}"
        raise UserError(problem, "Give an .npz with tokens, cond, uncond and prompts.") from None
    return Reference(condition=condition, tokens=tokens.long(), cond=cond, uncond=uncond)


@torch.inference_mode()
def check_model(
    model: LoadedModel,
    prompts: Sequence[str],
    *,
    tolerance: float,
    generator: torch.Generator,
    tokens: int | None = None,
    reference: Reference | None = None,
) -> list[Check]:
    """Run every check on two of `prompts`, along `tokens` tokens (default: some rows) that `generator` (CPU) draws."""
    height, width = model.grid
    line_length = width + (model.target.image_tokens - height * width) // height
    length = min(model.target.image_tokens, tokens or max(2 * line_length + 2, 32))
    checks = _Checks(
        model=model,
        prompts=[prompts[0], prompts[-1]],
        length=length,
        tolerance=tolerance,
        generator=generator,
    )
    others = [checks.cache, checks.tree, checks.forced_tokens, checks.guidance, checks.codebook]
    return [checks.logits(reference), *(check() for check in others)]


class _Checks:
    """The checks of one model; two images, each with a prompt and random tokens."""

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[str],
        length: int,
        tolerance: float,
        generator: torch.Generator,
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.tolerance = tolerance
        self.generator = generator
        self.length = length
        self.target: Target = model.target
        self.n_codes = self.target.n_codes
        # The forced token of each position int64 [image_tokens], -1 where none is forced.
        self.forced = self.target.forced(
            torch.arange(self.target.image_tokens, device=self.target.device)
        ).cpu()
        drawn = torch.randint(self.n_codes, (2, length), generator=generator)
        self.tokens = torch.where(self.forced[:length] < 0, drawn, self.forced[:length]).to(
            self.target.device
        )
        words = prompts[0].split()
        # Other prompts of the first one's length, and the second.
        self.other_prompts = [
            " ".join(words[1:] + words[:1]),
            " ".join(reversed(words)),
            prompts[1],
        ]
        list(model.prepare([*prompts, *self.other_prompts]))
        self.conditions = [model.condition([text]) for text in prompts]
        # The logits that all sessions are compared with: chains in one forward, of each image alone.
        self.chains = [self._chain(image, self.tokens[image]) for image in range(2)]

    def logits(self, reference: Reference | None) -> Check:
        """Compare with logits from elsewhere: a file, or the model's own reference."""
        source = "the reference"
        if reference is None and self.model.reference is not None:
            condition = self.model.condition(self.prompts)
            source = "the model's own reference"
            reference = Reference(
                condition, self.tokens, *self.model.reference(condition, self.tokens, True)
            )
        if reference is None:
            return Check(
                check="logits",
                result="none",
                error=None,
                limit=None,
                about="no reference: give --reference FILE.npz",
            )
        tokens = reference.tokens
        most = self.target.image_tokens
        vocab_size = self.target.vocab_size
        n, width = reference.cond.shape[1:]
        lowest = int(tokens.min())
        highest = int(tokens.max())
        if n > most or lowest < 0 or highest >= vocab_size or width != vocab_size:
            theirs = (
                f"{source} has {n} tokens from {lowest} to {highest} and {width} logits a token"
            )
            about = f"{theirs}; an image here has {most} tokens, from 0 to {vocab_size - 1}"
            return Check(check="logits", result="fail", error=None, limit=None, about=about)
        is_guided = reference.uncond is not None
        tokens = tokens.to(self.target.device)
        scores = teacher_forced(
            target=self.target, condition=reference.condition, tokens=tokens, guided=is_guided
        ).logits
        gaps = _gaps("", _rows(scores), _rows(reference))
        return self._compared("logits", gaps, f"along {n} tokens against {source}")

    def cache(self) -> Check:
        """Compare token by token through the cache with a forward without one (where the target has one)."""
        gaps: Gaps = {}
        against = "a chain in one forward"
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.device)
        for image, condition in enumerate(self.conditions):
            tokens = self.tokens[image : image + 1]
            session = self.target.session(1, guided=True, nodes=1)
            steps = [[row[:, -1:] for row in _rows(session.prefill(condition))]]
            for position in range(tokens.shape[1] - 1):
                steps.append(
                    _rows(session.score(tokens[:, position : position + 1], zero, zero[None] == 0))
                )
                session.commit(zero, zero[0] + 1)
            ours = [torch.cat(column, dim=1) for column in zip(*steps, strict=True)]
            theirs = self.chains[image]
            fresh = self.target.logits_without_cache(condition, tokens, True)
            if fresh is not None:
                theirs = [row for row in fresh if row is not None]
                against = "a fresh forward without a cache"
            gaps |= _gaps(f"image {image} ", ours, theirs)
        return self._compared(
            "cache", gaps, f"{self.tokens.shape[1]} tokens one at a time against {against}"
        )

    def tree(self) -> Check:
        """Compare two trees in a row, of two images that keep different paths, with a chain for each path."""
        device = self.target.device
        gaps = Gaps()
        session = self.target.session(2, guided=True, nodes=len(_TREE.parents))
        session.prefill(self.model.condition(self.prompts))
        leaves = [node for node in range(len(_TREE.parents)) if not (_TREE.parents == node).any()]
        depths = _TREE.depths.expand(2, -1).to(device)
        attention = _TREE.attention.expand(2, -1, -1).to(device)
        committed: list[list[int]] = [[], []]
        for step in range(2):
            drawn = torch.stack([self._tree_tokens(committed[image]) for image in range(2)])
            rows = _rows(session.score(drawn.to(device), depths, attention))
            for image, leaf in itertools.product(range(2), leaves):
                path = _TREE.attention[leaf].nonzero().flatten()
                chain = self._chain(
                    image, torch.tensor([*committed[image], *drawn[image, path].tolist()])
                )
                first = len(committed[image]) + 1
                theirs = [row[0, first : first + len(path)] for row in chain]
                # In a small image the tree reaches beyond the last token, which a chain has no logits for.
                ours = [row[image, path[: len(theirs[0])]] for row in rows]
                gaps |= _gaps(f"image {image}, tree {step}, node {leaf} ", ours, theirs)
            paths = torch.full((2, _TREE.max_depth + 1), -1)
            for image, nodes in enumerate(_PATHS):
                paths[image, : len(nodes) + 1] = torch.tensor([0, *nodes])
                committed[image] += drawn[image, [0, *nodes]].tolist()
            counts = torch.tensor([len(nodes) + 1 for nodes in _PATHS])
            session.commit(paths.to(device), counts.to(device))
        return self._compared("tree", gaps, "two trees of two images against a chain for each path")

    def forced_tokens(self) -> Check:
        """Check that an image has them beyond its codes, certain there and impossible elsewhere."""
        height, width = self.model.grid
        total = self.target.image_tokens
        expected = total - height * width
        count = int((self.forced >= 0).sum())
        if count != expected:
            about = (
                f"an image has {total} tokens and {height}x{width} codes, but {count} forced tokens"
            )
            return Check(check="forced tokens", result="fail", error=None, limit=None, about=about)
        if not expected:
            return Check(
                check="forced tokens",
                result="pass",
                error=None,
                limit=None,
                about="the image has none",
            )
        errors = []
        for logits in (row for rows in self.chains for row in rows):
            p = logits[0].float().softmax(-1).cpu()
            for position, token in enumerate(self.forced[: len(p)].tolist()):
                mass = p[position, token] if token >= 0 else p[position, : self.n_codes].sum()
                errors.append((float((1 - mass).abs()), position))
        error, position = max(errors)
        about = (
            f"{expected} an image; worst at token {position}"
            if error > 1e-6
            else f"{expected} an image"
        )
        return Check(
            check="forced tokens",
            result="pass" if error <= 1e-6 else "fail",
            error=error,
            limit=1e-6,
            about=about,
        )

    def guidance(self) -> Check:
        """Check the rows of guidance: the prompt moves the first, and neither depends on the other."""
        if any(len(rows) == 1 for rows in self.chains):
            return Check(
                check="guidance",
                result="fail",
                error=None,
                limit=None,
                about="a guided session gives no logits without the prompt",
            )
        moved = []
        for text in dict.fromkeys(self.other_prompts):
            try:
                condition = self.model.condition([text])
            except UserError:  # classes have no words
                continue
            if text != self.prompts[0]:
                scores = teacher_forced(
                    target=self.target, condition=condition, tokens=self.tokens[:1], guided=True
                ).logits
                moved.append(
                    [_gap(*pair) for pair in zip(_rows(scores), self.chains[0], strict=True)]
                )
        if not moved:
            return Check(
                check="guidance",
                result="none",
                error=None,
                limit=None,
                about="needs two different prompts",
            )
        # In some models a longer prompt moves both rows.
        most, least = min(moved, key=lambda gaps: min(gaps) / max(*gaps, 1e-12))
        about = f"another prompt moves logits by {most:.2g} with it and {least:.2g} without it"
        if not most > least:
            return Check(
                check="guidance",
                result="fail",
                error=least,
                limit=most,
                about=f"{about}: rows swapped?",
            )
        gaps: Gaps = {}
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.device)
        for image, condition in enumerate(self.conditions):
            tokens = self.tokens[image : image + 1]
            cond, uncond = self.chains[image]
            alone = teacher_forced(
                target=self.target, condition=condition, tokens=tokens, guided=False
            ).logits.cond
            gaps[f"image {image} unguided"] = _gap(alone, cond)
            session = self.target.session(1, guided=True, nodes=1)
            session.prefill(condition)
            guided = session.score_guided(
                tokens=tokens[:, :1], depths=zero, attention=zero[None] == 0, cfg_scale=3.0
            )[0]
            gaps[f"image {image} guided"] = _gap(guided, guide(cond[:, 1:2], uncond[:, 1:2], 3.0))
        return self._compared("guidance", gaps, about)

    def codebook(self) -> Check:
        """Check that pictures of near codes are alike: more so than with the codebook's rows in other orders."""
        codes = self.model.codebook
        if codes is None:
            return Check(
                check="codebook",
                result="none",
                error=None,
                limit=None,
                about="the model has no tokenizer",
            )
        if len(codes) != self.n_codes:
            return Check(
                check="codebook",
                result="fail",
                error=None,
                limit=None,
                about=f"{len(codes)} rows, and {self.n_codes} tokens can be chosen",
            )
        if len(codes) < 8:
            return Check(
                check="codebook",
                result="none",
                error=None,
                limit=None,
                about=f"{len(codes)} codes are too few to compare",
            )
        chosen = torch.randperm(len(codes), generator=self.generator)[:_PICTURES]
        # Half the cells have the code, the rest a pattern: some tokenizers norm pictures of one code to nothing.
        pattern = torch.randint(len(codes), self.forced.shape, generator=self.generator)
        has_code = torch.rand(self.forced.shape, generator=self.generator) < 0.5
        pictures = []
        for code in chosen:
            tokens = torch.where(
                self.forced >= 0, self.forced, torch.where(has_code, code, pattern)
            )
            pictures.append(self.model.pixels.pixels(tokens[None])[0].flatten().float())
        shown = torch.pdist(torch.stack(pictures)).numpy()
        if np.ptp(shown) == 0:
            return Check(
                check="codebook",
                result="none",
                error=None,
                limit=None,
                about="all pictures are alike",
            )
        near = [
            torch.pdist(in_space(codes, space)[chosen.to(codes.device)]).cpu().numpy()
            for space in SPACES
        ]
        shown_ranks = rankdata(shown)
        near_ranks = [squareform(rankdata(distances)) for distances in near]

        def correlation(order: Any) -> float:
            """The rank correlation with the codes in an order, in the space where it is largest."""
            return max(
                np.corrcoef(shown_ranks, squareform(ranks[np.ix_(order, order)]))[0, 1]
                for ranks in near_ranks
            )

        noise = np.random.default_rng(self.generator.initial_seed())
        ours = correlation(np.arange(len(chosen)))
        as_good = sum(correlation(noise.permutation(len(chosen))) >= ours for _ in range(_ORDERS))
        p = (1 + as_good) / (1 + _ORDERS)
        about = f"distances of codes and of their pictures: rank correlation {ours:.2f}; p against other orders of rows"
        return Check(
            check="codebook",
            result="pass" if p <= 0.01 else "fail",
            error=float(p),
            limit=0.01,
            about=about,
        )

    def _tree_tokens(self, committed: Sequence[int]) -> Tensor:
        """Tokens for the nodes of the tree behind the committed ones, forced ones at their positions."""
        forced = self.forced[(len(committed) + _TREE.depths).clamp_max(len(self.forced) - 1)]
        drawn = torch.randint(self.n_codes, forced.shape, generator=self.generator)
        return torch.where(forced < 0, drawn, forced)

    def _chain(self, image: int, tokens: Tensor) -> Rows:
        """The logits [1, N, V] of up to N tokens of an image, scored as a chain of N with filler."""
        chain = torch.zeros(1, self.length, dtype=torch.int64, device=self.target.device)
        chain[0, : len(tokens)] = tokens[: self.length].to(chain.device)
        return _rows(
            teacher_forced(
                target=self.target, condition=self.conditions[image], tokens=chain, guided=True
            ).logits
        )

    def _compared(self, check: str, gaps: Gaps, about: str) -> Check:
        worst = max(gaps, key=lambda name: gaps[name])
        if gaps[worst] <= self.tolerance:
            return Check(
                check=check, result="pass", error=gaps[worst], limit=self.tolerance, about=about
            )
        return Check(
            check=check,
            result="fail",
            error=gaps[worst],
            limit=self.tolerance,
            about=f"{about}; worst: {worst}",
        )


def _rows(scores: Logits | Reference) -> Rows:
    """A copy of the rows: a session may write over them."""
    return [row.clone() for row in (scores.cond, scores.uncond) if row is not None]


def _gaps(name: str, ours: Rows, theirs: Rows) -> Gaps:
    """The gap of each row that both have."""
    rows = zip(("with the prompt", "without it"), ours, theirs, strict=False)
    return {name + row: _gap(a, b) for row, a, b in rows}


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits, as a share of the largest of them; inf where one of them is impossible."""
    ours = ours.float().cpu()
    theirs = theirs.float().cpu()
    low = torch.finfo(torch.float16).min
    if (
        ours.shape != theirs.shape
        or ours.isnan().any()
        or not ((ours <= low) == (theirs <= low)).all()
    ):
        return float("inf")
    counts = (ours > low) & (theirs > low)
    if not counts.any():
        return 0.0
    return float((ours - theirs)[counts].abs().max() / theirs[counts].abs().max().clamp_min(1e-6))
