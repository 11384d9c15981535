"""Check that a model keeps the protocol of `decoding/protocol.py`.

Each check computes the same logits in two ways, along random tokens, so no trained weights are
needed. A mistake that both ways share shows only against a reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
"""Largest difference of logits by dtype, relative to the largest logit."""
_FORCED_TOLERANCE = 1e-6  # probability
_CODEBOOK_LEVEL = 0.01  # p-value
_FEWEST_CODES = 8
_PICTURES = 48  # codes whose pictures are compared
_ORDERS = 999  # random orders of the codebook
_CFG_SCALE = 3.0
_ROW_NAMES = ("with the prompt", "without it")
_TREE = StaticTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1)])
_KEPT = ((0, 1, 5, 7), (0, 2))  # nodes that each image keeps of its first tree, root included

Rows: TypeAlias = list[Tensor]
"""Logits [B, N, V] with the prompt and, with guidance, without it."""
Gaps: TypeAlias = dict[str, float]
"""Relative difference of two ways to the same logits, by the place that is compared."""


class Check(NamedTuple):
    """One row of the report."""

    check: str
    result: Literal["pass", "fail", "none"]  # none: nothing could be compared
    error: float | None = None  # None: the check has no number
    limit: float | None = None
    about: str = ""


class Reference(NamedTuple):
    """Logits from other software."""

    condition: Any
    tokens: Tensor  # int64 [B, N]
    cond: Tensor  # [B, N, V] with the prompt
    uncond: Tensor | None  # without it


def read_reference(path: Path, model: LoadedModel) -> Reference:
    """Read the arrays `tokens`, `cond`, `prompts` and, if there, `uncond` of an .npz file.

    Raises:
        UserError: An array is missing or has the wrong shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        tokens = torch.from_numpy(arrays["tokens"])
        cond = torch.from_numpy(arrays["cond"])
        uncond = torch.from_numpy(arrays["uncond"]) if "uncond" in arrays else None
        condition = model.condition([str(text) for text in np.atleast_1d(arrays["prompts"])])
        has_equal_rows = uncond is None or uncond.shape == cond.shape
        if tokens.dim() != 2 or tokens.shape != cond.shape[:2] or not has_equal_rows:
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
    """Run every check on two images.

    Args:
        model: The model, on its device.
        prompts: The first and the last are the prompts of the two images.
        tolerance: Largest relative difference of logits (see `TOLERANCE`).
        generator: CPU generator of the random tokens.
        tokens: Tokens of an image that are scored. Default: two rows, at least 32.
        reference: Logits from other software. Default: the model's own reference, if it has one.
    """
    images = _make_images(model, prompts, tokens, generator=generator)
    return [
        _check_logits(images, reference, tolerance),
        _check_cache(images, tolerance),
        _check_tree(images, tolerance),
        _check_forced_tokens(images),
        _check_guidance(images, tolerance),
        _check_codebook(images),
    ]


# ---- The images that are scored


@dataclass(frozen=True)
class _Images:
    """Two images, each with a prompt and random tokens, and their logits."""

    model: LoadedModel
    prompts: Sequence[str]
    other_prompts: Sequence[str]  # three that may differ from the first
    conditions: Sequence[Any]  # of each image
    tokens: Tensor  # int64 [2, N]
    forced_tokens: (
        Tensor  # int64 [image_tokens]: the forced token of each position, -1 where none is
    )
    generator: torch.Generator
    chains: Sequence[Rows]  # of each image alone, as one chain: what all sessions are compared with

    @property
    def target(self) -> Target:
        return self.model.target

    @property
    def zero(self) -> Tensor:
        """The only node of a tree without drafts, [1, 1]."""
        return torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.device)

    def each(self) -> Iterator[tuple[int, Any, Tensor]]:
        """Yield number, condition and tokens [1, N] of each image."""
        for image, condition in enumerate(self.conditions):
            yield image, condition, self.tokens[image : image + 1]

    def chain(self, image: int, tokens: Tensor) -> Rows:
        """The logits [1, N, V] along the tokens of an image, filled up to N tokens."""
        chain = torch.zeros_like(self.tokens[:1])
        kept = tokens[: chain.shape[1]]
        chain[0, : len(kept)] = kept.to(chain.device)
        return _score(self.target, self.conditions[image], chain)

    def random_tokens(self, positions: Tensor) -> Tensor:
        """Random tokens int64, with the forced ones at their positions."""
        forced = self.forced_tokens[positions.clamp_max(len(self.forced_tokens) - 1)]
        drawn = torch.randint(self.target.n_codes, forced.shape, generator=self.generator)
        return torch.where(forced < 0, drawn, forced)


def _make_images(
    model: LoadedModel, prompts: Sequence[str], tokens: int | None, *, generator: torch.Generator
) -> _Images:
    target = model.target
    height, width = model.grid
    line_length = width + (target.image_tokens - height * width) // height
    length = min(target.image_tokens, tokens or max(2 * line_length + 2, 32))
    forced = target.forced_tokens(torch.arange(target.image_tokens, device=target.device)).cpu()
    drawn = torch.randint(target.n_codes, (2, length), generator=generator)
    drawn = torch.where(forced[:length] < 0, drawn, forced[:length]).to(target.device)

    first = prompts[0]
    last = prompts[-1]
    words = first.split()
    # Two prompts as long as the first one, and the last one.
    others = [" ".join(words[1:] + words[:1]), " ".join(reversed(words)), last]
    for _ in model.prepare([first, last, *others]):
        pass
    conditions = [model.condition([text]) for text in (first, last)]
    return _Images(
        model=model,
        prompts=[first, last],
        other_prompts=others,
        conditions=conditions,
        tokens=drawn,
        forced_tokens=forced,
        generator=generator,
        chains=[
            _score(target, condition, row[None])
            for condition, row in zip(conditions, drawn, strict=True)
        ],
    )


# ---- The checks


def _check_logits(images: _Images, reference: Reference | None, tolerance: float) -> Check:
    """Compare with logits from other software: a file, or the model's own reference."""
    model = images.model
    source = "the reference"
    if reference is None and model.reference is not None:
        source = "the model's own reference"
        condition = model.condition(images.prompts)
        cond, uncond = model.reference(condition, images.tokens)
        reference = Reference(condition, images.tokens, cond=cond, uncond=uncond)
    if reference is None:
        return Check("logits", "none", about="no reference: give --reference FILE.npz")

    tokens = reference.tokens
    length, width = reference.cond.shape[1:]
    lowest = int(tokens.min())
    highest = int(tokens.max())
    most = model.target.image_tokens
    vocab_size = model.target.vocab_size
    if length > most or lowest < 0 or highest >= vocab_size or width != vocab_size:
        theirs = f"{length} tokens from {lowest} to {highest} and {width} logits per token"
        ours = f"an image here has {most} tokens, from 0 to {vocab_size - 1}"
        return Check("logits", "fail", about=f"{source} has {theirs}; {ours}")
    ours_along = _score(
        target=model.target,
        condition=reference.condition,
        tokens=tokens.to(model.target.device),
        guided=reference.uncond is not None,
    )
    gaps = _gaps("", ours_along, _rows(reference))
    return _compared("logits", gaps, tolerance, about=f"along {length} tokens against {source}")


def _check_cache(images: _Images, tolerance: float) -> Check:
    """Compare token by token through the cache with one forward, without a cache if it can."""
    gaps: Gaps = {}
    against = "a chain in one forward"
    zero = images.zero
    for image, condition, tokens in images.each():
        session = images.target.session(batch=1, guided=True, nodes=1)
        steps = [[row[:, -1:] for row in _rows(session.prefill(condition))]]
        for position in range(tokens.shape[1] - 1):
            scores = session.score(tokens[:, position : position + 1], zero, zero[None] == 0)
            steps.append(_rows(scores))
            session.commit(zero, zero[0] + 1)
        ours = [torch.cat(column, dim=1) for column in zip(*steps, strict=True)]

        theirs = images.chains[image]
        fresh = images.target.logits_without_cache(condition, tokens)
        if fresh is not None:
            theirs = list(fresh)
            against = "a fresh forward without a cache"
        gaps |= _gaps(f"image {image} ", ours, theirs)
    about = f"{images.tokens.shape[1]} tokens one at a time against {against}"
    return _compared("cache", gaps, tolerance, about=about)


def _check_tree(images: _Images, tolerance: float) -> Check:
    """Compare two trees in a row, of which the images keep different paths, with chains."""
    device = images.target.device
    nodes = len(_TREE.parents)
    session = images.target.session(batch=2, guided=True, nodes=nodes)
    session.prefill(images.model.condition(images.prompts))
    depths = _TREE.depths.expand(2, -1).to(device)
    attention = _TREE.attention.expand(2, -1, -1).to(device)
    gaps: Gaps = {}
    committed: list[list[int]] = [[], []]
    for step in range(2):
        # 1. Score a tree of random tokens behind each image.
        drawn = torch.stack(
            [images.random_tokens(len(earlier) + _TREE.depths) for earlier in committed]
        )
        scored = _rows(session.score(drawn.to(device), depths, attention))

        # 2. Score each path of the trees as a chain.
        for image, earlier in enumerate(committed):
            of_image = [row[image] for row in scored]
            for leaf, path, chain in _path_chains(images, image, earlier, drawn=drawn[image]):
                # In a small image the tree has nodes behind the last token; the chain has none.
                ours = [row[path[: len(chain[0])]] for row in of_image]
                gaps |= _gaps(f"image {image}, tree {step}, node {leaf} ", ours, chain)

        # 3. Commit another path in each image.
        kept = torch.full((2, _TREE.max_depth + 1), -1)
        for image, path_kept in enumerate(_KEPT):
            kept[image, : len(path_kept)] = torch.tensor(path_kept)
            committed[image] += drawn[image, list(path_kept)].tolist()
        counts = torch.tensor([len(path_kept) for path_kept in _KEPT])
        session.commit(kept.to(device), counts.to(device))
    about = "two trees of two images against a chain for each path"
    return _compared("tree", gaps, tolerance, about=about)


def _path_chains(
    images: _Images, image: int, earlier: Sequence[int], *, drawn: Tensor
) -> Iterator[tuple[int, Tensor, Rows]]:
    """Yield each leaf of the tree, its path, and the logits [D, V] of the path as a chain."""
    for leaf in range(len(_TREE.parents)):
        if (_TREE.parents == leaf).any():
            continue
        path = _TREE.attention[leaf].nonzero().flatten()
        chain = images.chain(image, torch.tensor([*earlier, *drawn[path].tolist()]))
        first = len(earlier) + 1
        yield leaf, path, [row[0, first : first + len(path)] for row in chain]


def _check_forced_tokens(images: _Images) -> Check:
    """Check that tokens beyond the codes are forced: certain there, impossible elsewhere."""
    check = "forced tokens"
    height, width = images.model.grid
    total = images.target.image_tokens
    expected = total - height * width
    count = int((images.forced_tokens >= 0).sum())
    if count != expected:
        codes = f"an image has {total} tokens and {height}x{width} codes"
        return Check(check, "fail", about=f"{codes}, but {count} forced tokens")
    if not expected:
        return Check(check, "pass", about="the image has none")

    gaps: Gaps = {}
    for image, chain in enumerate(images.chains):
        for row, logits in zip(_ROW_NAMES, chain, strict=False):
            p = logits[0].float().softmax(-1).cpu()
            forced = images.forced_tokens[: len(p), None]
            of_codes = p[:, : images.target.n_codes].sum(dim=-1)
            of_forced = p.gather(-1, forced.clamp_min(0)).squeeze(-1)
            errors = (1 - torch.where(forced[:, 0] >= 0, of_forced, of_codes)).abs()
            position = int(errors.argmax())
            place = f"image {image} {row}, token {position}"
            gaps[place] = float(errors[position].nan_to_num(nan=torch.inf))
    return _compared(check, gaps, _FORCED_TOLERANCE, about=f"{expected} an image")


def _check_guidance(images: _Images, tolerance: float) -> Check:
    """Check that the prompt moves the conditional row, and that neither row needs the other."""
    check = "guidance"
    if any(len(rows) == 1 for rows in images.chains):
        about = "a guided session gives no logits without the prompt"
        return Check(check, "fail", about=about)
    moved = list(_moved_by_prompt(images))
    if not moved:
        return Check(check, "none", about="needs two different prompts")
    # In some models a longer prompt moves both rows: the prompt that moves least counts.
    cond_gap, uncond_gap = min(moved, key=lambda gaps: min(gaps) / max(*gaps, 1e-12))
    moves = f"another prompt moves logits by {cond_gap:.2g} with it and {uncond_gap:.2g} without it"
    if not cond_gap > uncond_gap:
        about = f"{moves}: rows swapped?"
        return Check(check, "fail", error=uncond_gap, limit=cond_gap, about=about)

    gaps: Gaps = {}
    zero = images.zero
    for image, condition, tokens in images.each():
        cond, uncond = images.chains[image]
        (alone,) = _score(images.target, condition, tokens, guided=False)
        gaps[f"image {image} unguided"] = _gap(alone, cond)
        session = images.target.session(batch=1, guided=True, nodes=1)
        session.prefill(condition)
        guided, _ = session.score_guided(
            tokens=tokens[:, :1], depths=zero, attention=zero[None] == 0, cfg_scale=_CFG_SCALE
        )
        expected = guide(cond[:, 1:2], uncond[:, 1:2], _CFG_SCALE)
        gaps[f"image {image} guided"] = _gap(guided, expected)
    return _compared(check, gaps, tolerance, about=moves)


def _moved_by_prompt(images: _Images) -> Iterator[tuple[float, float]]:
    """Yield how far another prompt moves the logits with the prompt, and those without it."""
    for text in dict.fromkeys(images.other_prompts):
        try:
            condition = images.model.condition([text])
        except UserError:  # a class number is no sequence of words
            continue
        if text != images.prompts[0]:
            cond, uncond = _score(images.target, condition, images.tokens[:1])
            first_cond, first_uncond = images.chains[0]
            yield _gap(cond, first_cond), _gap(uncond, first_uncond)


def _check_codebook(images: _Images) -> Check:
    """Check that near codes have similar pictures, more so than with codes in other orders."""
    check = "codebook"
    codes = images.model.codebook
    if codes is None:
        return Check(check, "none", about="the model has no tokenizer")
    if len(codes) != images.target.n_codes:
        about = f"{len(codes)} rows, and {images.target.n_codes} tokens can be chosen"
        return Check(check, "fail", about=about)
    if len(codes) < _FEWEST_CODES:
        return Check(check, "none", about=f"{len(codes)} codes are too few to compare")
    chosen = torch.randperm(len(codes), generator=images.generator)[:_PICTURES]
    distances = torch.pdist(_pictures_of(images, chosen, len(codes))).numpy()
    if np.ptp(distances) == 0:
        return Check(check, "none", about="all pictures are alike")

    picture_ranks = rankdata(distances)
    code_ranks = []
    for space in SPACES:
        near = torch.pdist(in_space(codes, space)[chosen.to(codes.device)])
        code_ranks.append(squareform(rankdata(near.cpu().numpy())))
    noise = np.random.default_rng(images.generator.initial_seed())
    ours = _largest_correlation(picture_ranks, code_ranks, np.arange(len(chosen)))
    as_good = 0
    for _ in range(_ORDERS):
        order = noise.permutation(len(chosen))
        as_good += int(_largest_correlation(picture_ranks, code_ranks, order) >= ours)
    p = (1 + as_good) / (1 + _ORDERS)
    about = (
        f"distances of codes and of their pictures: rank correlation {ours:.2f}; "
        "p against other orders of rows"
    )
    return _bounded(check, p, _CODEBOOK_LEVEL, about=about)


def _pictures_of(images: _Images, chosen: Tensor, n_codes: int) -> Tensor:
    """A flat picture for each chosen code, float32 [codes, pixels].

    Half the cells have the code and the others a pattern, because some tokenizers normalize a
    picture of one code to nothing.
    """
    forced = images.forced_tokens
    pattern = torch.randint(n_codes, forced.shape, generator=images.generator)
    has_code = torch.rand(forced.shape, generator=images.generator) < 0.5
    pictures = []
    for code in chosen:
        drawn = torch.where(has_code, code, pattern)
        tokens = torch.where(forced >= 0, forced, drawn)
        pictures.append(images.model.draw(tokens[None])[0].flatten().float())
    return torch.stack(pictures)


# ---- Statistics


def _largest_correlation(
    picture_ranks: NDArray[Any], code_ranks: Sequence[NDArray[Any]], order: NDArray[Any]
) -> float:
    """The rank correlation with the codes in an order, in the space where it is largest."""
    reordered = [squareform(ranks[np.ix_(order, order)]) for ranks in code_ranks]
    return float(max(np.corrcoef(picture_ranks, ranks)[0, 1] for ranks in reordered))


def _score(target: Target, condition: Any, tokens: Tensor, *, guided: bool = True) -> Rows:
    """The logits along tokens [B, N], scored as one chain."""
    forced = teacher_forced(target=target, condition=condition, tokens=tokens, guided=guided)
    return _rows(forced.logits)


def _rows(scores: Logits | Reference) -> Rows:
    """A copy of the rows: a session may write over them."""
    return [row.clone() for row in (scores.cond, scores.uncond) if row is not None]


def _gaps(name: str, ours: Rows, theirs: Rows) -> Gaps:
    """The gap of each row that both have."""
    rows = zip(_ROW_NAMES, ours, theirs, strict=False)
    return {name + row: _gap(a, b) for row, a, b in rows}


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit of `theirs`.

    Infinite where only one of them makes a token impossible.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    ours = ours.float().cpu()
    theirs = theirs.float().cpu()
    low = torch.finfo(torch.float16).min
    is_possible = ours > low
    if ours.isnan().any() or not is_possible.equal(theirs > low):
        return float("inf")
    if not is_possible.any():
        return 0.0
    difference = (ours - theirs)[is_possible].abs().max()
    return float(difference / theirs[is_possible].abs().max().clamp_min(1e-6))


def _compared(check: str, gaps: Gaps, tolerance: float, *, about: str) -> Check:
    """The row of a check that compares logits."""
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] > tolerance:
        about = f"{about}; worst: {worst}"
    return _bounded(check, gaps[worst], tolerance, about=about)


def _bounded(check: str, error: float, limit: float, *, about: str) -> Check:
    """The row of a check that passes if its error is at most the limit."""
    result: Literal["pass", "fail"] = "pass" if error <= limit else "fail"
    return Check(check, result, error=error, limit=limit, about=about)
