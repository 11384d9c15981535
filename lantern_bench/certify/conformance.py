"""Does a model keep the protocol of `decoding/protocol.py`? One line a check, for models of other packages above all.

Each check compares what decoding calls (sessions, pixel decoder, codebook) with another way to the same numbers, on
random tokens: no trained weights are needed. A mistake that both ways share shows only against a reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.decoding.neighbours import SPACES, in_space
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.errors import UserError
from lantern_bench.models.loaded_model import LoadedModel

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""By dtype: how far logits may differ, as a share of the largest."""
_TREE = StaticTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1)])
_PATHS = ((1, 5, 7), (2,))  # nodes below the root that each image keeps of its first tree
_PICTURES, _ORDERS = 48, 999


class Check(NamedTuple):
    """One line: `result` "none" where nothing could be compared; error and limit None where a check has no number."""

    check: str
    result: Literal["pass", "fail", "none"]
    error: float | None
    limit: float | None
    about: str


class Reference(NamedTuple):
    """Logits from elsewhere: condition, tokens int64 [B, N], logits [B, N, V] with and without the prompt."""

    condition: Any
    tokens: Tensor
    cond: Tensor
    uncond: Tensor | None


def read_reference(path: Path, model: LoadedModel) -> Reference:
    """Read the arrays `tokens`, `cond`, `uncond` (may be missing) and `prompts` of an .npz.

    Raises `UserError` for a file that is none, or whose arrays do not fit each other.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        tokens, cond = (torch.from_numpy(arrays.pop(name)) for name in ("tokens", "cond"))
        uncond = torch.from_numpy(arrays.pop("uncond")) if "uncond" in arrays else None
        condition = model.condition([str(text) for text in np.atleast_1d(arrays["prompts"])])
        if tokens.shape != cond.shape[:2] or tokens.dim() != 2 or (uncond is not None and uncond.shape != cond.shape):
            raise ValueError("tokens must be [n, N], cond and uncond [n, N, V]")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = f"{error.args[0]} must be there" if isinstance(error, KeyError) else error
        raise UserError(
            f"--reference {path}: {reason}", "Give an .npz with tokens, cond, uncond and prompts."
        ) from None
    return Reference(condition, tokens.long(), cond, uncond)


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
    """Run every check on two of `prompts`, along the first `tokens` tokens of an image (default: some rows of it).

    `generator` (on the CPU) draws the tokens.
    """
    known = model.grid[1] + (model.target.image_tokens - model.grid[0] * model.grid[1]) // model.grid[0]
    length = min(model.target.image_tokens, tokens or max(2 * known + 2, 32))
    run = _Run(model, [prompts[0], prompts[-1]], length, tolerance, generator)
    checks: list[Callable[[], Check]] = [
        lambda: run.logits(reference), run.cache, run.tree, run.forced, run.guidance, run.codebook,
    ]  # fmt: skip
    return [check() for check in checks]


class _Run:
    """The checks of one model; two images, each with a prompt and random tokens."""

    def __init__(
        self, model: LoadedModel, prompts: Sequence[str], length: int, tolerance: float, generator: torch.Generator
    ) -> None:
        self.model, self.prompts, self.tolerance, self.generator = model, prompts, tolerance, generator
        self.length = length
        self.target: Target = model.target
        self.choices = self.target.n_codes
        self.places = self._forced_at(torch.arange(self.target.image_tokens))
        drawn = torch.randint(self.choices, (2, length), generator=generator)
        self.tokens = torch.where(self.places[:length] < 0, drawn, self.places[:length]).to(self.target.device)
        words = prompts[0].split()
        # Other prompts of the first one's length, and the second.
        self.others = [" ".join(words[1:] + words[:1]), " ".join(reversed(words)), prompts[1]]
        list(model.prepare([*prompts, *self.others]))
        self.conditions = [model.condition([text]) for text in prompts]
        # What all sessions are compared with: chains in one forward, of each image alone.
        self.chains = [self._chain(image, self.tokens[image]) for image in range(2)]

    def logits(self, reference: Reference | None) -> Check:
        """Against logits from elsewhere: a file, or the model's own reference."""
        if reference is None and self.model.reference is not None:
            condition = self.model.condition(self.prompts)
            reference = Reference(condition, self.tokens, *self.model.reference(condition, self.tokens, True))
            source = "the model's own reference"
        elif reference is None:
            return Check("logits", "none", None, None, "no reference: give --reference FILE.npz")
        else:
            source = "the reference"
        tokens, vocabulary = reference.tokens.to(self.target.device), self.target.vocab_size
        if tokens.shape[1] > self.target.image_tokens or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            told = f"{tokens.shape[1]} tokens from {int(tokens.min())} to {int(tokens.max())}"
            ours = f"an image here has {self.target.image_tokens}, from 0 to {vocabulary - 1}"
            return Check("logits", "fail", None, None, f"{source} has {told}; {ours}")
        if reference.cond.shape[2] != vocabulary:
            told = f"{source} has {reference.cond.shape[2]} logits a token; the target has {vocabulary}"
            return Check("logits", "fail", None, None, told)
        guided = reference.uncond is not None
        made = teacher_forced(self.target, reference.condition, tokens, guided).logits
        pairs = {"with the prompt": (made.cond, reference.cond)}
        if made.uncond is not None and reference.uncond is not None:
            pairs["without it"] = (made.uncond, reference.uncond)
        return self._compared("logits", pairs, f"along {tokens.shape[1]} tokens against {source}")

    def cache(self) -> Check:
        """Token by token through the cache, against a forward without one (where the target has one)."""
        pairs = {}
        for image, condition in enumerate(self.conditions):
            tokens, session = self.tokens[image : image + 1], self.target.session(1, True, 1)
            start = session.prefill(condition)
            found = [[start.cond[:, -1:]], [] if start.uncond is None else [start.uncond[:, -1:]]]
            zero = torch.zeros(1, 1, dtype=torch.int64, device=tokens.device)
            for place in range(tokens.shape[1] - 1):
                scores = session.score(tokens[:, place : place + 1], zero, zero[None] == 0)
                session.commit(zero, zero[0] + 1)
                for row, logits in zip(found, (scores.cond, scores.uncond), strict=True):
                    row += [] if logits is None else [logits.clone()]
            fresh = self.target.logits_without_cache(condition, tokens, True)
            rows = self.chains[image] if fresh is None else fresh
            for name, ours, theirs in zip(("with the prompt", "without it"), found, rows, strict=True):
                if ours and theirs is not None:
                    pairs[f"image {image} {name}"] = (torch.cat(ours, dim=1), theirs)
        against = "a fresh forward without a cache" if fresh is not None else "a chain in one forward"
        return self._compared("cache", pairs, f"{self.tokens.shape[1]} tokens one at a time against {against}")

    def tree(self) -> Check:
        """Two trees in a row, of two images that keep different paths, against a chain for each path."""
        nodes, session = len(_TREE.parents), self.target.session(2, True, len(_TREE.parents))
        session.prefill(self.model.condition(self.prompts))
        kept: list[list[int]] = [[], []]
        pairs = {}
        for step in range(2):
            drawn = torch.stack([self._tree_tokens(kept[image]) for image in range(2)])
            scores = session.score(
                drawn.to(self.target.device),
                _TREE.depths.expand(2, -1).to(self.target.device),
                _TREE.attention.expand(2, -1, -1).to(self.target.device),
            )
            found = (scores.cond.clone(), _copy(scores.uncond))
            for image in range(2):
                for leaf in (node for node in range(nodes) if not (_TREE.parents == node).any()):
                    path = _TREE.attention[leaf].nonzero().flatten()
                    chain = self._chain(image, torch.tensor([*kept[image], *drawn[image, path].tolist()]))
                    behind = slice(len(kept[image]) + 1, len(kept[image]) + len(path) + 1)
                    for row, ours in enumerate(found):
                        theirs = chain[row]
                        if ours is not None and theirs is not None:
                            name = f"image {image}, tree {step}, node {leaf}, {('with', 'without')[row]} the prompt"
                            pairs[name] = (ours[image, path], theirs[0, behind])
            path = torch.full((2, _TREE.max_depth + 1), -1)
            for image, nodes_kept in enumerate(_PATHS):
                path[image, : len(nodes_kept) + 1] = torch.tensor([0, *nodes_kept])
                kept[image] += drawn[image, [0, *nodes_kept]].tolist()
            counts = torch.tensor([len(one) + 1 for one in _PATHS])
            session.commit(path.to(self.target.device), counts.to(self.target.device))
        return self._compared("tree", pairs, "two trees of two images against a chain for each path")

    def forced(self) -> Check:
        """Forced tokens: as many as the image has beyond its codes, certain in their places, impossible elsewhere."""
        grid, total = self.model.grid, self.target.image_tokens
        expected, here = total - grid[0] * grid[1], self.places >= 0
        if int(here.sum()) != expected:
            told = f"an image has {total} tokens and {grid[0]}x{grid[1]} codes, but {int(here.sum())} forced tokens"
            return Check("forced tokens", "fail", None, None, told)
        if not expected:
            return Check("forced tokens", "pass", None, None, "the image has none")
        wrong = []
        for rows in self.chains:
            for logits in (one for one in rows if one is not None):
                p = logits[0].float().softmax(-1).cpu()
                for place in range(p.shape[0]):
                    token = int(self.places[place])
                    mass = p[place, token] if token >= 0 else p[place, : self.choices].sum()
                    wrong.append((float((1 - mass).abs()), place))
        error, place = max(wrong)
        told = f"{expected} an image; worst at token {place}" if error > 1e-6 else f"{expected} an image"
        return Check("forced tokens", "pass" if error <= 1e-6 else "fail", error, 1e-6, told)

    def guidance(self) -> Check:
        """The rows of guidance: the prompt moves the first, and neither depends on the other."""
        if any(rows[1] is None for rows in self.chains):
            return Check("guidance", "fail", None, None, "a guided session gives no logits without the prompt")
        moved = [self._moved(other) for other in self._other_conditions()]
        if not moved:
            return Check("guidance", "none", None, None, "needs two different prompts")
        # In some models a longer prompt moves both rows: the clearest pair of prompts counts.
        most, least = min(moved, key=lambda pair: min(pair) / max(*pair, 1e-12))
        about = f"another prompt moves logits by {most:.2g} with it and {least:.2g} without it"
        if not most > least:
            return Check("guidance", "fail", least, most, f"{about}: rows swapped?")
        pairs = {}
        for image, condition in enumerate(self.conditions):
            alone = teacher_forced(self.target, condition, self.tokens[image : image + 1], False).logits.cond
            pairs[f"image {image} unguided"] = (alone, self.chains[image][0])
            session = self.target.session(1, True, 1)
            session.prefill(condition)
            zero = torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.device)
            guided = session.score_guided(self.tokens[image : image + 1, :1], zero, zero[None] == 0, 3.0)[0]
            rows = [logits[:, 1:2] for logits in self.chains[image] if logits is not None]
            pairs[f"image {image} guided"] = (guided, guide(rows[0], rows[1], 3.0))
        return self._compared("guidance", pairs, about)

    def codebook(self) -> Check:
        """Pictures of near codes are alike: more so than with the codebook's rows in other orders."""
        rows = self.model.codebook
        if rows is None:
            return Check("codebook", "none", None, None, "the model has no tokenizer")
        if len(rows) != self.choices:
            return Check("codebook", "fail", None, None, f"{len(rows)} rows, and {self.choices} tokens can be chosen")
        if len(rows) < 8:
            return Check("codebook", "none", None, None, f"{len(rows)} codes are too few to compare")
        chosen = torch.randperm(len(rows), generator=self.generator)[:_PICTURES]
        # Half the cells have the code, the rest a pattern: some tokenizers norm pictures of one code to nothing.
        pattern = torch.randint(len(rows), self.places.shape, generator=self.generator)
        same = torch.rand(self.places.shape, generator=self.generator) < 0.5
        drawn = []
        for code in chosen:
            tokens = torch.where(self.places >= 0, self.places, torch.where(same, code, pattern))
            drawn.append(self.model.pixels.pixels(tokens[None])[0].flatten().float())
        shown = torch.pdist(torch.stack(drawn)).numpy()
        if np.ptp(shown) == 0:
            return Check("codebook", "none", None, None, "all pictures are alike")
        near = [torch.pdist(in_space(rows, space)[chosen.to(rows.device)]).cpu().numpy() for space in SPACES]
        noise = np.random.default_rng(self.generator.initial_seed())
        orders = [np.arange(len(chosen)), *(noise.permutation(len(chosen)) for _ in range(_ORDERS))]
        ours, *others = np.max([_correlations(shown, distances, orders) for distances in near], axis=0)
        p = (1 + sum(other >= ours for other in others)) / len(orders)
        told = f"distances of codes and of their pictures: rank correlation {ours:.2f}; p against other orders of rows"
        return Check("codebook", "pass" if p <= 0.01 else "fail", float(p), 0.01, told)

    def _other_conditions(self) -> Iterator[Any]:
        """Conditions of other prompts than the first."""
        for text in dict.fromkeys(self.others):
            with contextlib.suppress(UserError):  # classes have no words
                if text != self.prompts[0]:
                    yield self.model.condition([text])

    def _moved(self, condition: Any) -> tuple[float, float]:
        """How far a condition moves each row of logits, along the tokens of the first image."""
        scores = teacher_forced(self.target, condition, self.tokens[:1], True).logits
        rows = zip((scores.cond, scores.uncond), self.chains[0], strict=True)
        found = [_gap(one, other) for one, other in rows if one is not None and other is not None]
        return found[0], found[1]

    def _forced_at(self, places: Tensor) -> Tensor:
        """The forced token of each place int64 [...] on the CPU, -1 where none is."""
        return self.target.forced(places.to(self.target.device)).cpu()

    def _tree_tokens(self, kept: Sequence[int]) -> Tensor:
        """Tokens for the nodes of the tree behind `kept`, forced ones in their places."""
        forced = self.places[(len(kept) + _TREE.depths).clamp_max(len(self.places) - 1)]
        drawn = torch.randint(self.choices, forced.shape, generator=self.generator)
        return torch.where(forced < 0, drawn, forced)

    def _chain(self, image: int, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits [1, N, V] of tokens [up to N] of an image, scored as a chain of N with filler in one forward."""
        chain = torch.zeros(1, self.length, dtype=torch.int64, device=self.target.device)
        chain[0, : len(tokens)] = tokens.to(chain.device)
        scores = teacher_forced(self.target, self.conditions[image], chain, True).logits
        return scores.cond.clone(), _copy(scores.uncond)

    def _compared(self, check: str, pairs: dict[str, tuple[Tensor, Tensor]], about: str) -> Check:
        gaps = {name: _gap(*pair) for name, pair in pairs.items()}
        worst = max(gaps, key=lambda name: gaps[name])
        passed = gaps[worst] <= self.tolerance
        told = about if passed else f"{about}; worst: {worst}"
        return Check(check, "pass" if passed else "fail", gaps[worst], self.tolerance, told)


def _copy(logits: Tensor | None) -> Tensor | None:
    return None if logits is None else logits.clone()


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference of logits, as a share of the largest of them; inf where one of them is impossible."""
    one, other = one.float().cpu(), other.float().cpu()
    low = torch.finfo(torch.float16).min
    if one.shape != other.shape or one.isnan().any() or not ((one <= low) == (other <= low)).all():
        return float("inf")
    counts = (one > low) & (other > low)
    if not counts.any():
        return 0.0
    return float((one - other)[counts].abs().max() / other[counts].abs().max().clamp_min(1e-6))


def _correlations(
    shown: NDArray[np.float32], distances: NDArray[np.float32], orders: Sequence[NDArray[np.int64]]
) -> list[float]:
    """Rank correlations of two vectors of distances of pairs, with the things of the second in each order."""
    one, other = ((ranks := values.argsort().argsort()) - ranks.mean() for values in (shown, distances))
    upper = np.triu_indices(len(orders[0]), 1)
    square = np.zeros((len(orders[0]), len(orders[0])))
    square[upper] = other
    square += square.T
    scale = np.linalg.norm(one) * np.linalg.norm(other)
    return [float(one @ square[order][:, order][upper] / scale) for order in orders]
