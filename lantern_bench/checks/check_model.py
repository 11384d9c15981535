"""Check that a model keeps the protocol of `decoding/protocol.py`.

Each check computes the same logits in two ways, along random tokens, so no trained weights are
needed. A mistake that both ways share shows only against a reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import squareform
from scipy.stats import permutation_test, rankdata
from torch import Tensor

from lantern_bench.decoding.neighbours import SPACES, in_space
from lantern_bench.decoding.protocol import Logits, Target
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.models.loaded_model import CodeMap, LoadedModel
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
_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1))
_LEAVES = (3, 4, 6, 7, 8)  # nodes of the tree
_KEPT = ((0, 1, 5, 7), (0, 2, -1, -1))  # nodes that each image keeps of a tree

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
    rows: Rows


def read_reference(path: Path, model: LoadedModel) -> Reference:
    """Read the arrays `tokens`, `cond`, `prompts` and, if there, `uncond` of an .npz file.

    Raises:
        UserError: An array is missing or has the wrong shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        tokens = torch.from_numpy(arrays["tokens"]).long()
        names = ("cond", "uncond") if "uncond" in arrays else ("cond",)
        rows = [torch.from_numpy(arrays[name]) for name in names]
        condition = model.condition([str(text) for text in np.atleast_1d(arrays["prompts"])])
        width = rows[0].shape[-1]
        if tokens.dim() != 2 or any(row.shape != (*tokens.shape, width) for row in rows):
            raise ValueError("tokens must be [n, N], cond and uncond [n, N, V]")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = f"{error.args[0]} must be there" if isinstance(error, KeyError) else error
        raise UserError(
            f"--reference {path}: {reason}", "Give an .npz with tokens, cond, uncond and prompts."
        ) from None
    return Reference(condition, tokens, rows)


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
        tokens: Tokens of an image that are scored. Default: two rows, at least 32, behind a
            coarse grid.
        reference: Logits from other software. Default: the model's own reference, if it has one.
    """
    images = _Images(model, prompts, tokens, generator=generator)
    return [
        _check_logits(images, reference, tolerance),
        _check_cache(images, tolerance),
        _check_tree(images, tolerance),
        _check_forced_tokens(images),
        _check_guidance(images, tolerance),
        _check_codebook(images),
    ]


# ---- The images that are scored


class _Images:
    """Two images, each with a prompt and random tokens, and their logits."""

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[str],
        tokens: int | None,
        *,
        generator: torch.Generator,
    ) -> None:
        target = model.target
        self.model = model
        self.target = target
        self.generator = generator
        positions = torch.arange(target.image_tokens, device=target.device)
        # int64 [image_tokens]: the forced token of each position, or -1
        self.forced_tokens = target.forced_tokens(positions)
        usual = max(target.coarse_tokens + 2 * target.line_length + 2, 32)
        length = min(target.image_tokens, tokens or usual)
        # the tokens of both images, int64 [2, N]
        self.tokens = self.random_tokens(positions[:length].expand(2, -1))
        # the only node of a tree without drafts, [1, 1]
        self.zero = torch.zeros_like(self.tokens[:1, :1])

        self.prompts = [prompts[0], prompts[-1]]
        words = prompts[0].split()
        # Two prompts as long as the first one, and the last one.
        self.other_prompts = [
            " ".join(words[1:] + words[:1]),
            " ".join(reversed(words)),
            prompts[-1],
        ]
        for _ in model.prepare([*self.prompts, *self.other_prompts]):
            pass
        self.conditions = [model.condition([text]) for text in self.prompts]
        # Each image scored alone, as one chain. All sessions are compared with these logits.
        self.chains = [_score(target, condition, row) for _, condition, row in self.each()]

    def each(self) -> Iterator[tuple[int, Any, Tensor]]:
        """Yield number, condition and tokens [1, N] of each image."""
        for image, condition in enumerate(self.conditions):
            yield image, condition, self.tokens[image : image + 1]

    def random_tokens(self, positions: Tensor) -> Tensor:
        """Random tokens int64, with the forced ones at their positions."""
        forced = self.forced_tokens[positions.clamp_max(len(self.forced_tokens) - 1)]
        drawn = torch.randint(self.target.n_codes, forced.shape, generator=self.generator)
        return torch.where(forced < 0, drawn.to(forced.device), forced)


# ---- The checks


def _check_logits(images: _Images, reference: Reference | None, tolerance: float) -> Check:
    """Compare with logits from other software: a file, or the model's own reference."""
    model = images.model
    source = "the reference"
    if reference is None and model.reference is not None:
        source = "the model's own reference"
        condition = model.condition(images.prompts)
        rows = list(model.reference(condition, images.tokens))
        reference = Reference(condition, images.tokens, rows)
    if reference is None:
        return Check("logits", "none", about="no reference: give --reference FILE.npz")

    tokens = reference.tokens
    length, width = reference.rows[0].shape[1:]
    lowest, highest = map(int, tokens.aminmax())
    most = model.target.image_tokens
    vocab_size = model.target.vocab_size
    if length > most or lowest < 0 or highest >= vocab_size or width != vocab_size:
        return Check(
            "logits",
            "fail",
            about=f"{source} has {length} tokens from {lowest} to {highest} and {width} logits per "
            f"token; an image here has {most} tokens, from 0 to {vocab_size - 1}",
        )
    ours_along = _score(
        target=model.target,
        condition=reference.condition,
        tokens=tokens.to(model.target.device),
        guided=len(reference.rows) == 2,
    )
    return _compared(
        "logits",
        _gaps("", ours_along, reference.rows),
        tolerance,
        about=f"along {length} tokens against {source}",
    )


def _check_cache(images: _Images, tolerance: float) -> Check:
    """Compare scoring token by token with one forward, which has no cache if the model allows."""
    gaps: Gaps = {}
    against = "a chain in one forward"
    zero = images.zero
    for image, condition, tokens in images.each():
        session = images.target.session(batch=1, guided=True, nodes=1)
        steps = [[row[:, -1:] for row in _rows(session.prefill(condition))]]
        for token in tokens[0, :-1]:
            steps.append(_rows(session.score(token.view(1, 1), zero, zero[None] == 0)))
            session.commit(zero, zero[0] + 1)
        ours = [torch.cat(column, dim=1) for column in zip(*steps, strict=True)]

        theirs = images.chains[image]
        fresh = images.target.logits_without_cache(condition, tokens)
        if fresh is not None:
            theirs = list(fresh)
            against = "a fresh forward without a cache"
        gaps |= _gaps(f"image {image} ", ours, theirs)
    return _compared(
        "cache",
        gaps,
        tolerance,
        about=f"{images.tokens.shape[1]} tokens one at a time against {against}",
    )


def _check_tree(images: _Images, tolerance: float) -> Check:
    """Compare two successive trees with chains. The two images keep different paths."""
    target = images.target
    tree = StaticTree.of(_TREE, target.device)
    kept = torch.tensor(_KEPT, device=target.device)
    session = target.session(batch=2, guided=True, nodes=len(tree.depths))
    session.prefill(images.model.condition(images.prompts))
    depths = tree.depths.expand(2, -1)
    attention = tree.attention.expand(2, -1, -1)
    gaps: Gaps = {}
    committed = [images.tokens[0, :0]] * 2
    for step in range(2):
        # 1. Score a tree of random tokens behind each image.
        trees = [images.random_tokens(len(earlier) + tree.depths) for earlier in committed]
        scored = _rows(session.score(torch.stack(trees), depths, attention))

        # 2. Score each path of the trees as a chain.
        for image, (earlier, drawn) in enumerate(zip(committed, trees, strict=True)):
            for leaf in _LEAVES:
                path = tree.attention[leaf].nonzero().flatten()
                # One more token, so that the chain gives the logits of the leaf.
                tokens = torch.cat([earlier, drawn[path], images.zero[0]])
                tokens = tokens[None, : target.image_tokens]
                chain = _score(target, images.conditions[image], tokens)
                # In a small image the tree has nodes behind the last token; the chain has none.
                theirs = [row[0, len(earlier) + 1 :] for row in chain]
                ours = [row[image, path[: len(theirs[0])]] for row in scored]
                gaps |= _gaps(f"image {image}, tree {step}, node {leaf} ", ours, theirs)

        # 3. Commit another path in each image.
        session.commit(kept, (kept >= 0).sum(dim=1))
        for image, path in enumerate(kept):
            of_path = trees[image][path[path >= 0]]
            committed[image] = torch.cat([committed[image], of_path])
    return _compared(
        "tree", gaps, tolerance, about="two trees of two images against a chain for each path"
    )


def _check_forced_tokens(images: _Images) -> Check:
    """Check that tokens beyond the codes are forced: certain there, impossible elsewhere."""
    check = "forced tokens"
    height, width = images.model.grid
    total = images.target.image_tokens
    coarse = images.target.coarse_tokens
    expected = total - coarse - height * width
    count = int((images.forced_tokens >= 0).sum())
    if count != expected:
        return Check(
            check,
            "fail",
            about=f"an image has {total - coarse} tokens and {height}x{width} codes, "
            f"but {count} forced tokens",
        )
    if not expected:
        return Check(check, "pass", about="the image has none")

    forced = images.forced_tokens[: images.tokens.shape[1], None]
    tokens = torch.arange(images.target.vocab_size, device=forced.device)
    is_possible = torch.where(forced >= 0, tokens == forced, tokens < images.target.n_codes)
    gaps: Gaps = {}
    for image, chain in enumerate(images.chains):
        for row, logits in zip(_ROW_NAMES, chain, strict=False):
            p = logits[0].float().softmax(dim=-1)
            errors = (1 - (p * is_possible).sum(dim=-1)).abs().nan_to_num(nan=torch.inf)
            position = int(errors.argmax())
            gaps[f"image {image} {row}, token {position}"] = float(errors[position])
    return _compared(check, gaps, _FORCED_TOLERANCE, about=f"{expected} an image")


def _check_guidance(images: _Images, tolerance: float) -> Check:
    """Check that the prompt moves the conditional row, and that neither row needs the other."""
    check = "guidance"
    if not images.model.guided:
        return Check(check, "none", about="the model was trained without guidance")
    if any(len(rows) == 1 for rows in images.chains):
        return Check(check, "fail", about="a guided session gives no logits without the prompt")
    moved = list(_moved_by_prompt(images))
    if not moved:
        return Check(check, "none", about="needs two different prompts")
    # In some models a longer prompt moves both rows: the prompt that moves least counts.
    cond_gap, uncond_gap = min(moved, key=lambda gaps: min(gaps) / max(*gaps, 1e-12))
    moves = f"another prompt moves logits by {cond_gap:.2g} with it and {uncond_gap:.2g} without it"
    if not cond_gap > uncond_gap:
        return Check(
            check, "fail", error=uncond_gap, limit=cond_gap, about=f"{moves}: rows swapped?"
        )

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
        except UserError:  # a model of classes takes no other words
            continue
        if text != images.prompts[0]:
            cond, uncond = _score(images.target, condition, images.tokens[:1])
            first_cond, first_uncond = images.chains[0]
            yield _gap(cond, first_cond), _gap(uncond, first_uncond)


def _check_codebook(images: _Images) -> Check:
    """Check that near codes have similar pictures, more similar than with shuffled codes."""
    check = "codebook"
    codes = images.model.codebook
    if codes is None:
        return Check(check, "none", about="the model has no tokenizer")
    if len(codes) != images.target.n_codes:
        return Check(
            check,
            "fail",
            about=f"{len(codes)} rows, and {images.target.n_codes} tokens can be chosen",
        )
    if isinstance(images.model.pixels, CodeMap):
        return Check(check, "none", about="no decoder here makes pixels of the codes")
    if len(codes) < _FEWEST_CODES:
        return Check(check, "none", about=f"{len(codes)} codes are too few to compare")
    chosen = torch.randperm(len(codes), generator=images.generator)[:_PICTURES]
    distances = torch.pdist(_pictures_of(images, chosen, len(codes))).numpy()
    if np.ptp(distances) == 0:
        return Check(check, "none", about="all pictures are equal")

    picture_ranks = rankdata(distances)
    code_ranks = []
    for space in SPACES:
        near = torch.pdist(in_space(codes, space)[chosen.to(codes.device)])
        code_ranks.append(squareform(rankdata(near.cpu().numpy())))

    def correlation(order: NDArray[Any]) -> float:
        """The rank correlation with reordered codes; the largest over the spaces."""
        reordered = [squareform(ranks[np.ix_(order, order)]) for ranks in code_ranks]
        return float(max(np.corrcoef(picture_ranks, ranks)[0, 1] for ranks in reordered))

    test = permutation_test(
        [np.arange(len(chosen))],
        correlation,
        permutation_type="pairings",
        vectorized=False,
        n_resamples=_ORDERS,
        alternative="greater",
        random_state=images.generator.initial_seed(),
    )
    return _bounded(
        check,
        float(test.pvalue),
        _CODEBOOK_LEVEL,
        about="distances of codes and of their pictures: rank correlation "
        f"{test.statistic:.2f}; p against other orders of rows",
    )


def _pictures_of(images: _Images, chosen: Tensor, n_codes: int) -> Tensor:
    """A flat picture for each chosen code, float32 [codes, pixels].

    Half the cells have the code and the rest a pattern, because some tokenizers normalize a picture
    of a single code to nothing.
    """
    forced = images.forced_tokens.cpu()
    pattern = torch.randint(n_codes, forced.shape, generator=images.generator)
    has_code = torch.rand(forced.shape, generator=images.generator) < 0.5
    pictures = []
    for code in chosen:
        drawn = torch.where(has_code, code, pattern)
        tokens = torch.where(forced >= 0, forced, drawn)
        pictures.append(images.model.draw(tokens[None])[0].flatten().float())
    return torch.stack(pictures)


# ---- Statistics


def _score(target: Target, condition: Any, tokens: Tensor, *, guided: bool = True) -> Rows:
    """The logits along tokens [B, N], scored as one chain."""
    forced = teacher_forced(target=target, condition=condition, tokens=tokens, guided=guided)
    return _rows(forced.logits)


def _rows(scores: Logits) -> Rows:
    """A copy of the rows: a session may write over them."""
    return [row.clone() for row in (scores.cond, scores.uncond) if row is not None]


def _gaps(name: str, ours: Rows, theirs: Rows) -> Gaps:
    """The gap of each row that both have."""
    return {name + row: _gap(a, b) for row, a, b in zip(_ROW_NAMES, ours, theirs, strict=False)}


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit of `theirs`.

    Infinite where only one of them makes a token impossible.
    """
    if ours.shape != theirs.shape:
        return torch.inf
    ours = ours.float().cpu()
    theirs = theirs.float().cpu()
    low = torch.finfo(torch.float16).min
    is_possible = ours > low
    if ours.isnan().any() or not is_possible.equal(theirs > low):
        return torch.inf
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
    return Check(check, "pass" if error <= limit else "fail", error=error, limit=limit, about=about)
