"""Whether the tokens of finished images follow the target: sums over the tokens of an image.

One forward of the target scores a whole image. It shares no draft tree, no drafting code and no
earlier step with decoding, so it sees their mistakes. `analysis/token_distance.py` turns the sums
into figures; docs/algorithms.md, section 6.2, has the mathematics.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.analysis.token_distance import ALIKE, BLOCKS, is_current
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.decoding.filter_edge import edge_tolerance, sure_tokens
from lantern_bench.decoding.sampling import broken_logits, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import TeacherForced, drafted_along, teacher_forced
from lantern_bench.devices.compute import choose_compute
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import defaults_of
from lantern_bench.storage.pictures import read_tokens, tokens_sha256
from lantern_bench.storage.run_directory import read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import LogitsError
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

# ---- The images of a run

_LOGITS = 2**25  # of the images of a batch


def finished_by_cell(records: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the finished records that have a picture, by cell."""
    cells: dict[str, list[Row]] = defaultdict(list)
    for record in records:
        if record["status"] == "ok" and record["image"]:
            cells[record["cell_id"]].append(record)
    return cells


def score_tokens(store: RunStore, device: str, emit: Emit) -> int:
    """Write a row of level `tokens` for each image that has none, or one of an older version.

    Args:
        store: The run, opened for scoring.
        device: Where the models run, with the dtype that decoded the images.
        emit: Receives progress, and a warning if images are left out.

    Returns:
        The number of images scored.
    """
    scored = {
        row["record_key"]
        for row in read_scores(store.folder)
        if row["level"] == "tokens" and is_current(row)
    }
    # Images of one cell count as earlier for each other, so cells are taken whole.
    cells = {
        cell_id: records
        for cell_id, records in finished_by_cell(read_records(store.folder)).items()
        if not scored.issuperset(record["record_key"] for record in records)
    }
    if not cells:
        return 0

    experiment = load_experiment(store.manifest["experiment"], defaults_of)
    models = load_models(experiment, choose_compute(device, store.manifest["key"]["dtype"]))
    decodings = {cell.cell_id: cell.decoding for cell in experiment.cells}
    every = itertools.chain.from_iterable(cells.values())
    images = sum(record["record_key"] not in scored for record in every)
    done = 0
    for cell_id, records in cells.items():
        name = records[0]["model"]
        model = models[name]
        pending = [record for record in records if record["record_key"] not in scored]
        prompts = dict.fromkeys(record["prompt"] for record in pending)
        for count, total in model.prepare(list(prompts)):
            emit(ProgressEvent(f"captions for {name}", count, total))

        # 1. Read the tokens of all images, scored or not.
        before = [record for record in records if record["record_key"] in scored]
        earlier = [tokens for _, tokens in _with_tokens(before, store.folder, model)]
        kept = list(_with_tokens(pending, store.folder, model))

        # 2. Score the images that have no score yet.
        batch = max(1, _LOGITS // (model.target.image_tokens * model.target.vocab_size))
        for start in range(0, len(kept), batch):
            some = kept[start : start + batch]
            tokens = [tokens for _, tokens in some]
            sums = token_sums(
                model=model,
                condition=model.condition([record["prompt"] for record, _ in some]),
                tokens=torch.stack(tokens),
                decoding=decodings[cell_id],
                dtype=store.manifest["key"]["dtype"],
                earlier=earlier,
            )
            earlier += tokens
            for (record, _), row in zip(some, sums, strict=True):
                store.append_score(
                    {
                        "level": "tokens",
                        "cell_id": cell_id,
                        "record_key": record["record_key"],
                        **row,
                    }
                )
            done += len(sums)
            emit(ProgressEvent("distance from the target", done, images))
    if done < images:
        emit(
            Note(
                f"the distance leaves out {images - done} images: their pictures do not hold "
                "the tokens that were decoded",
                "Restore the pictures as the run wrote them.",
                "warning",
            )
        )
    return done


def _with_tokens(
    records: Iterable[Row], folder: Path, model: LoadedModel
) -> Iterator[tuple[Row, Tensor]]:
    """Yield the records whose pictures hold the tokens that were decoded, with the tokens [N]."""
    for record in records:
        tokens = read_tokens(folder / record["image"])
        if tokens is not None and tokens_sha256(tokens) == record["tokens_sha256"]:
            yield record, tokens.to(model.target.device).long()


# ---- The sums of images

_VALUES = 2**17  # probabilities in float64 at once; with all features they fit in a cache


@torch.inference_mode()
def token_sums(
    model: LoadedModel,
    condition: Any,
    tokens: Tensor,
    decoding: Decoding,
    *,
    dtype: str = "float32",
    earlier: Sequence[Tensor] = (),
) -> list[dict[str, Any]]:
    """Compute the columns that `scores.jsonl` has of each image (level `tokens`).

    Args:
        model: The model. Its drafter is used if `decoding` drafts with it.
        condition: What the tokens were decoded with.
        tokens: Tokens of B images, int64 [B, N].
        decoding: Guidance, filters and drafting.
        dtype: The dtype of the decode steps, whose rounding the edge of the filters allows for.
        earlier: Tokens [N] of images of the cell that were scored before.

    Raises:
        LogitsError: Target or drafter gives NaN or infinite logits.
    """
    forced = teacher_forced(
        target=model.target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
    )
    q = None
    if model.drafter is not None and decoding.drafting_row.needs_drafter and not decoding.greedy:
        q = drafted_along(model.drafter, forced, decoding)
    return sums_along(
        model=model, forced=forced, q=q, decoding=decoding, dtype=dtype, earlier=earlier
    )


def sums_along(
    model: LoadedModel,
    forced: TeacherForced,
    q: Tensor | None,
    decoding: Decoding,
    *,
    dtype: str = "float32",
    earlier: Sequence[Tensor] = (),
) -> list[dict[str, Any]]:
    """Compute the rows of `token_sums` from distributions that are known.

    Args:
        model: The model.
        forced: The target's logits along the tokens of B images.
        q: Distributions of the drafter at all tokens but the first, [B, N - 1, V].
        decoding: Guidance and filters.
        dtype: The dtype of the decode steps.
        earlier: Tokens [N] of images that count as earlier than all of these.
    """
    images = ImageLayout.of(model)
    in_order = torch.stack([*earlier, *forced.tokens])
    uncond = forced.logits.uncond
    rows = []
    for image, tokens in enumerate(forced.tokens):
        row = _sums_of_image(
            tokens,
            cond=forced.logits.cond[image],
            uncond=None if uncond is None else uncond[image],
            q=None if q is None else q[image],
            others=in_order[: len(earlier) + image],
            images=images,
            decoding=decoding,
            dtype=dtype,
        )
        rows.append(row)
    return rows


class ImageLayout(NamedTuple):
    """What the images of a model have in common."""

    is_drawn: Tensor  # bool [N], false for forced tokens
    block: Tensor  # int64 [N], the block of each position
    line: int  # tokens of a row; of the whole image if they do not form rows
    # Codes of tokens [V, d], and their coordinates [V] along the first principal component. None
    # without a codebook.
    codes: Tensor | None
    component: Tensor | None

    @classmethod
    def of(cls, model: LoadedModel) -> ImageLayout:
        """Describe the images of a model."""
        target = model.target
        positions = torch.arange(target.image_tokens, device=target.device)
        line = target.line_length or target.image_tokens
        half = 2 * positions // target.image_tokens
        codes = None
        component = None
        if model.codebook is not None:
            codes = model.codes[: target.vocab_size].double()
            component = _first_component(codes, used=target.n_codes)
        return cls(
            is_drawn=target.forced_tokens(positions) < 0,
            block=4 * half + 2 * (positions // line % 2) + positions % line % 2,
            line=line,
            codes=codes,
            component=component,
        )

    def closeness(self, positions: Tensor, left: Tensor, above: Tensor) -> Tensor:
        """Return minus the squared distances of all codes to the codes on the left and above.

        Terms that are the same for all codes are left out.

        Args:
            positions: Positions in the image, int64 [n].
            left: The token on the left of each; any token at the start of a line, int64 [n].
            above: The token above each; any token in the first line, int64 [n].

        Returns:
            The sums [n, V].
        """
        assert self.codes is not None
        has_left = (positions % self.line > 0).to(self.codes.dtype)[:, None]
        has_above = (positions >= self.line).to(self.codes.dtype)[:, None]
        neighbours = has_left * self.codes[left] + has_above * self.codes[above]
        norms = self.codes.square().sum(dim=-1)
        return 2.0 * neighbours @ self.codes.T - (has_left + has_above) * norms


def _first_component(codes: Tensor, used: int) -> Tensor:
    """Return the coordinates [V] of codes [V, d] along the first principal component.

    The sign, which is arbitrary, makes the largest entry of the component positive.
    """
    centred = codes - codes[:used].mean(dim=0)
    _, vectors = torch.linalg.eigh(centred[:used].T @ centred[:used])
    first = vectors[:, -1]
    return centred @ (first * first[first.abs().argmax()].sign())


def _sums_of_image(
    tokens: Tensor,
    *,
    cond: Tensor,
    uncond: Tensor | None,
    q: Tensor | None,
    others: Tensor,
    images: ImageLayout,
    decoding: Decoding,
    dtype: str,
) -> dict[str, Any]:
    """Compute the row of one image.

    Args:
        tokens: Its tokens [N].
        cond: The target's logits [N, V].
        uncond: The unconditional logits, where there is guidance.
        q: The drafter's distributions [N - 1, V], where there is a drafter.
        others: The tokens of the images before it, [images, N].
        images: What the images have in common.
        decoding: Guidance and filters.
        dtype: The dtype of the decode steps.
    """
    is_drawn = images.is_drawn
    logits = guide(cond, uncond, decoding.cfg_scale)
    if bool(broken_logits(logits).any()):
        raise LogitsError(
            "a forward over a finished image gives NaN or infinite logits", "Check the weights."
        )
    if decoding.greedy:
        mismatches = (logits.argmax(dim=-1) != tokens) & is_drawn
        return {"tokens": int(is_drawn.sum()), "mismatched_tokens": int(mismatches.sum())}

    further: dict[str, Tensor] = {}
    chunks = []
    edge_tokens = 0
    step = max(1, _VALUES // logits.shape[1])
    for start in range(0, len(logits), step):
        now = slice(start, start + step)
        p = decoding_probabilities(logits[now], decoding).double()
        is_impossible = is_drawn[now] & (p.gather(1, tokens[now, None])[:, 0] == 0)
        if is_impossible.any():
            tolerance = edge_tolerance(dtype, decoding)
            _, fails = sure_tokens(logits[now], p, decoding, tolerance=tolerance)
            is_sure = fails.gather(1, tokens[now, None])[:, 0]
            edge_tokens += int((is_impossible & ~is_sure).sum())
        if uncond is not None:
            further["prompt_information"] = cond[now].log_softmax(dim=-1)
            further["prompt_information"] -= uncond[now].log_softmax(dim=-1)
        if images.component is not None:
            further["first_component"] = images.component.expand_as(p)
            here = torch.arange(len(tokens), device=tokens.device)[now]
            further["closeness"] = images.closeness(
                here, left=tokens[here - 1], above=tokens[(here - images.line).clamp_min(0)]
            )
        further[ALIKE] = _alike(others, now, p)
        if q is not None:
            drafted = q[max(0, start - 1) : start + step - 1].double()
            if start == 0:
                # The first token is never drafted.
                drafted = torch.cat([p[:1], drafted])
            further["drafter_tilt"] = (drafted - p) / (drafted + p)
        chunks.append(
            _sums(
                p,
                tokens[now, None],
                further.values(),
                is_drawn=is_drawn[now],
                block=images.block[now],
            )
        )

    totals = torch.stack([chunk.totals for chunk in chunks]).sum(dim=0).tolist()
    of_features = torch.stack([chunk.of_features for chunk in chunks]).sum(dim=0)
    ranges = torch.stack([chunk.ranges for chunk in chunks]).amax(dim=0)
    drawn, impossible, entropy, largest, ten_largest = totals
    return {
        "tokens": int(drawn),
        "impossible_tokens": int(impossible),
        "edge_tokens": edge_tokens,
        "entropy": entropy / drawn,
        "largest_p": largest / drawn,
        "ten_largest_p": ten_largest / drawn,
        "features": " ".join(["surprise", "squared_surprise", *further]),
        "feature_sums": [float(f"{value:.10g}") for value in of_features.flatten().tolist()],
        "feature_ranges": ranges.tolist(),
    }


def _alike(others: Tensor, positions: slice, p: Tensor) -> Tensor:
    """Return in how many other images each token has each position, [n, V] as p.

    The number is divided by the square root of how many images there are, so that the variances
    of all images are alike.
    """
    tokens = others[:, positions].T
    counts = torch.zeros_like(p)
    counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=p.dtype))
    return counts / max(1, len(others)) ** 0.5


class _Sums(NamedTuple):
    """Sums over tokens x."""

    totals: Tensor  # of all drawn tokens: 1, p = 0, entropy, largest p, ten largest p
    # Of drawn tokens with p > 0, [blocks, m + m (m + 1) / 2]: each feature minus its mean under p,
    # and the upper triangle of the covariance of the features under p
    of_features: Tensor
    # [2 m], how far each feature of a possible token can be above its mean, then how far below
    ranges: Tensor


def centred_features(p: Tensor, further: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return features of all tokens minus their means under p [n, V], and the entropies [n, 1].

    The features [n, m, V] are the surprise, its squared distance from the entropy, and `further`
    [n, V]. Tokens of probability 0 have 0.
    """
    surprise = torch.where(p > 0, -p.log(), 0.0)
    entropy = (p * surprise).sum(dim=-1, keepdim=True)
    f = torch.stack([surprise, (surprise - entropy).square(), *further], dim=1)
    is_impossible = (p == 0)[:, None]
    is_filtered = bool(is_impossible.any())
    if is_filtered:
        f.masked_fill_(is_impossible, 0.0)
    f -= f @ p[:, :, None]
    if is_filtered:
        f.masked_fill_(is_impossible, 0.0)
    return f, entropy


def _sums(
    p: Tensor, x: Tensor, further: Iterable[Tensor], *, is_drawn: Tensor, block: Tensor
) -> _Sums:
    """Sum over tokens `x` [n, 1] drawn from p [n, V] in blocks [n]."""
    f, entropy = centred_features(p, further)

    # 1. Per token, then per block.
    is_possible = (p.gather(1, x) > 0).squeeze(1)
    used = (is_drawn & is_possible).double()
    differences = f.gather(2, x[:, None].expand(-1, f.shape[1], -1)).squeeze(2)
    covariance = (f * p[:, None]) @ f.transpose(1, 2)
    rows, columns = torch.triu_indices(f.shape[1], f.shape[1])
    per_token = torch.cat([differences, covariance[:, rows, columns]], dim=1)
    in_block = functional.one_hot(block, BLOCKS).T * used

    # 2. Ranges, and sums over all drawn tokens.
    reached = torch.cat([f.amax(dim=2), -f.amin(dim=2)], dim=1)
    largest = p.topk(min(10, p.shape[1]), dim=-1).values
    totals = [is_drawn, is_drawn & ~is_possible]
    of_tokens = [entropy[:, 0], largest[:, 0], largest.sum(dim=-1)]
    totals += [torch.where(is_drawn, values, 0.0) for values in of_tokens]
    return _Sums(
        totals=torch.stack([values.double().sum() for values in totals]),
        of_features=in_block @ per_token,
        ranges=(reached * used[:, None]).amax(dim=0),
    )
