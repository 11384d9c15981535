"""Whether the tokens of finished images follow the target: sums over the tokens of an image.

One forward of the target scores a whole image. It shares no draft tree, no drafting code and no
earlier step with decoding, so it sees their mistakes. `analysis/token_distance.py` turns the sums
into figures; docs/algorithms.md, section 6.2, has the mathematics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.decoding.filter_edge import edge_tolerance, sure_tokens
from lantern_bench.decoding.protocol import Target
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
    """Write a row of level `tokens` for each image that has none.

    Args:
        store: The run, opened for scoring.
        device: Where the models run, with the dtype that decoded the images.
        emit: Receives progress, and a warning if images are left out.

    Returns:
        The number of images scored.
    """
    scored = {row["record_key"] for row in read_scores(store.folder) if row["level"] == "tokens"}
    cells = finished_by_cell(
        row for row in read_records(store.folder) if row["record_key"] not in scored
    )
    if not cells:
        return 0

    experiment = load_experiment(store.manifest["experiment"], defaults_of)
    models = load_models(experiment, choose_compute(device, store.manifest["key"]["dtype"]))
    decodings = {cell.cell_id: cell.decoding for cell in experiment.cells}
    images = sum(len(rows) for rows in cells.values())
    done = 0
    for cell_id, pending in cells.items():
        name = pending[0]["model"]
        model = models[name]
        prompts = dict.fromkeys(record["prompt"] for record in pending)
        for count, total in model.prepare(list(prompts)):
            emit(ProgressEvent(f"captions for {name}", count, total))

        # 1. The images whose pictures hold the tokens that were decoded.
        kept = []
        tokens = []
        for record in pending:
            of_picture = read_tokens(store.folder / record["image"])
            if of_picture is not None and tokens_sha256(of_picture) == record["tokens_sha256"]:
                kept.append(record)
                tokens.append(of_picture)

        # 2. Their sums.
        batch = max(1, _LOGITS // (model.target.image_tokens * model.target.vocab_size))
        for start in range(0, len(kept), batch):
            some = slice(start, start + batch)
            sums = token_sums(
                model=model,
                condition=model.condition([record["prompt"] for record in kept[some]]),
                tokens=torch.stack(tokens[some]).long().to(model.target.device),
                decoding=decodings[cell_id],
                dtype=store.manifest["key"]["dtype"],
            )
            for record, row in zip(kept[some], sums, strict=True):
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


# ---- The sums of images

_VALUES = 2**22  # probabilities in float64 at once


@torch.inference_mode()
def token_sums(
    model: LoadedModel, condition: Any, tokens: Tensor, decoding: Decoding, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Compute the columns that `scores.jsonl` has of each image (level `tokens`).

    Args:
        model: The model. Its drafter is used if `decoding` drafts with it.
        condition: What the tokens were decoded with.
        tokens: Tokens of B images, int64 [B, N].
        decoding: Guidance, filters and drafting.
        dtype: The dtype of the decode steps, whose rounding the edge of the filters allows for.

    Raises:
        LogitsError: Target or drafter gives NaN or infinite logits.
    """
    forced = teacher_forced(
        target=model.target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
    )
    q = None
    if model.drafter is not None and decoding.drafting_row.needs_drafter and not decoding.greedy:
        q = drafted_along(model.drafter, forced, decoding)
    return sums_along(target=model.target, forced=forced, q=q, decoding=decoding, dtype=dtype)


def sums_along(
    target: Target,
    forced: TeacherForced,
    q: Tensor | None,
    decoding: Decoding,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Compute the rows of `token_sums` from distributions that are known.

    Args:
        target: The target.
        forced: Its logits along the tokens of B images.
        q: Distributions of the drafter at all tokens but the first, [B, N - 1, V].
        decoding: Guidance and filters.
        dtype: The dtype of the decode steps.
    """
    positions = torch.arange(forced.tokens.shape[1], device=forced.tokens.device)
    is_drawn = target.forced_tokens(positions) < 0
    uncond = forced.logits.uncond
    return [
        _sums_of_image(
            tokens,
            cond=forced.logits.cond[image],
            uncond=None if uncond is None else uncond[image],
            q=None if q is None else q[image],
            is_drawn=is_drawn,
            decoding=decoding,
            dtype=dtype,
        )
        for image, tokens in enumerate(forced.tokens)
    ]


def _sums_of_image(
    tokens: Tensor,
    *,
    cond: Tensor,
    uncond: Tensor | None,
    q: Tensor | None,
    is_drawn: Tensor,
    decoding: Decoding,
    dtype: str,
) -> dict[str, Any]:
    """Compute the row of one image from logits [N, V] and the drafter's q [N - 1, V]."""
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
    ranges = []
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
        if q is not None:
            drafted = q[max(0, start - 1) : start + step - 1].double()
            if start == 0:
                # The first token is never drafted.
                drafted = torch.cat([p[:1], drafted])
            further["drafter_tilt"] = (drafted - p) / (drafted + p)
        summed, reached = _sums(p, tokens[now, None], further.values(), is_drawn=is_drawn[now])
        chunks.append(summed)
        ranges.append(reached)

    sums = torch.stack(chunks).sum(dim=0).tolist()
    drawn, impossible, entropy, largest, ten_largest, *of_features = sums
    return {
        "tokens": int(drawn),
        "impossible_tokens": int(impossible),
        "edge_tokens": edge_tokens,
        "entropy": entropy / drawn,
        "largest_p": largest / drawn,
        "ten_largest_p": ten_largest / drawn,
        "features": " ".join(["surprise", "squared_surprise", *further]),
        "feature_sums": of_features,
        "feature_ranges": torch.stack(ranges).amax(dim=0).tolist(),
    }


def _sums(
    p: Tensor, x: Tensor, further: Iterable[Tensor], is_drawn: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums over tokens `x` [N, 1] drawn from p [N, V] as one vector, and ranges.

    First five sums over all drawn tokens: 1, p = 0, entropy, largest probability, ten largest
    probabilities. Then, over drawn tokens with p > 0, each feature minus its mean under p, and the
    upper triangle of the covariance of the features under p. The ranges are how far each feature of
    a possible token can be above its mean, then how far below.
    """
    surprise = torch.where(p > 0, -p.log(), 0.0)
    entropy = (p * surprise).sum(dim=-1, keepdim=True)
    features = [surprise, (surprise - entropy).square()]
    features += [feature.double() for feature in further]
    f = torch.stack([torch.where(p > 0, feature, 0.0) for feature in features])
    centred = f - (p * f).sum(dim=-1, keepdim=True)

    is_possible = (p.gather(1, x) > 0).squeeze(1)
    used = (is_drawn & is_possible).double()
    differences = centred.gather(2, x.expand(len(f), -1, -1)).squeeze(2) @ used
    weighted = centred * (p * used[:, None])
    covariance = torch.einsum("inv,jnv->ij", weighted, centred)
    rows, columns = torch.triu_indices(len(f), len(f))
    possible = torch.where(p > 0, centred, 0.0) * used[:, None]
    ranges = torch.cat([possible.amax(dim=(1, 2)), -possible.amin(dim=(1, 2))])

    largest = p.topk(min(10, p.shape[1]), dim=-1).values
    totals = [is_drawn, is_drawn & ~is_possible]
    of_tokens = [entropy[:, 0], largest[:, 0], largest.sum(dim=-1)]
    totals += [torch.where(is_drawn, values, 0.0) for values in of_tokens]
    sums = [values.double().sum() for values in totals]
    return torch.cat([torch.stack(sums), differences, covariance[rows, columns]]), ranges
