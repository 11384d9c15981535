"""How far the tokens of finished images are from the target: sums over them, from one forward of the target.

The forward shares no draft tree, no drafting code and no earlier step with decoding, so that it sees their mistakes.
`analysis/token_distance.py` makes figures of the sums; docs/algorithms.md, section 6.2, has the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import broken_logits, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import Forced, drafted_along, teacher_forced
from lantern_bench.devices.compute import choose_compute
from lantern_bench.metrics.score_pictures import _by_cell
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import defaults_of
from lantern_bench.storage.pictures import read_tokens, tokens_sha256
from lantern_bench.storage.run_directory import read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import LogitsError
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

_VALUES = 2**22  # probabilities in float64 at once


@torch.inference_mode()
def token_sums(
    model: LoadedModel, condition: Any, tokens: Tensor, decoding: Decoding
) -> list[dict[str, Any]]:
    """Return a row for each image of `tokens` int64 [B, N]: what `scores.jsonl` has of it (level `tokens`).

    `condition` is what the tokens were decoded with. The drafter is asked where `decoding` drafts with it. Raises
    `LogitsError` where target or drafter gives logits that are no numbers.
    """
    forced = teacher_forced(
        target=model.target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
    )
    q = None
    if model.drafter is not None and decoding.drafting_row.needs_drafter and not decoding.greedy:
        q = drafted_along(model.drafter, forced, decoding)
    return sums_along(target=model.target, forced=forced, q=q, decoding=decoding)


def sums_along(
    target: Target, forced: Forced, q: Tensor | None, decoding: Decoding
) -> list[dict[str, Any]]:
    """Return the rows of `token_sums` from the target's logits and the drafter's q [B, N - 1, V]."""
    tokens = forced.tokens
    cond, uncond, _ = forced.logits
    is_drawn = target.forced(torch.arange(tokens.shape[1], device=tokens.device)) < 0
    uncond_rows, q_rows = ([None] * len(tokens) if rows is None else rows for rows in (uncond, q))
    images = zip(cond, uncond_rows, q_rows, tokens, strict=True)
    return [_sums_of_image(*image, is_drawn, decoding) for image in images]


def _sums_of_image(
    cond: Tensor,
    uncond: Tensor | None,
    q: Tensor | None,
    tokens: Tensor,
    is_drawn: Tensor,
    decoding: Decoding,
) -> dict[str, Any]:
    """Return the row of one image from its logits [N, V] and the drafter's q [N - 1, V] of all tokens but the first."""
    logits = guide(cond, uncond, decoding.cfg_scale)
    if bool(broken_logits(logits).any()):
        raise LogitsError(
            "a forward over a finished image gives NaN or infinite logits", "Check the weights."
        )
    if decoding.greedy:
        mismatches = (logits.argmax(dim=-1) != tokens) & is_drawn
        return {"tokens": int(is_drawn.sum()), "mismatched_tokens": int(mismatches.sum())}
    sums: Tensor | None = None
    step = max(1, _VALUES // logits.shape[1])
    for start in range(0, len(logits), step):
        now = slice(start, start + step)
        p = decoding_probabilities(logits[now], decoding).double()
        x = tokens[now, None]
        information = (
            None
            if uncond is None
            else cond[now].log_softmax(dim=-1) - uncond[now].log_softmax(dim=-1)
        )
        tilt = None
        if q is not None:
            drafted = q[max(0, start - 1) : start + step - 1].double()
            # the first token is never drafted
            drafted = torch.cat([p[:1], drafted]) if start == 0 else drafted
            tilt = (drafted - p) / (drafted + p)
        of_chunk = _sums(p=p, x=x, further=[information, tilt], is_drawn=is_drawn[now])
        sums = of_chunk if sums is None else sums + of_chunk
    assert sums is not None
    names = ["surprise", "squared_surprise"]
    names += ["prompt_information"] if uncond is not None else []
    names += ["drafter_tilt"] if q is not None else []
    drawn, impossible, entropy, largest, ten_largest, *of_features = sums.tolist()
    return {
        "tokens": int(drawn),
        "impossible_tokens": int(impossible),
        "entropy": entropy / drawn,
        "largest_p": largest / drawn,
        "ten_largest_p": ten_largest / drawn,
        "features": " ".join(names),
        "feature_sums": of_features,
    }


def _sums(p: Tensor, x: Tensor, further: list[Tensor | None], is_drawn: Tensor) -> Tensor:
    """Return sums over tokens `x` [N, 1] drawn from p [N, V], as one vector.

    Counts of tokens and of those with p = 0, entropy, largest and ten largest probabilities; then, over tokens with
    p > 0, each feature minus its mean under p, and the upper triangle of their covariance under p.
    """
    surprise = torch.where(p > 0, -p.log(), 0.0)
    entropy = (p * surprise).sum(dim=-1, keepdim=True)
    features = [
        surprise,
        (surprise - entropy).square(),
        *(f.double() for f in further if f is not None),
    ]
    f = torch.stack([torch.where(p > 0, feature, 0.0) for feature in features])
    centred = f - (p * f).sum(dim=-1, keepdim=True)
    is_possible = (p.gather(1, x) > 0).squeeze(1)
    used = (is_drawn & is_possible).double()
    differences = centred.gather(2, x.expand(len(f), -1, -1)).squeeze(2) @ used
    weighted = centred * (p * used[:, None])
    covariance = torch.einsum("inv,jnv->ij", weighted, centred)
    upper = torch.triu_indices(len(f), len(f))
    largest = p.topk(min(10, p.shape[1]), dim=-1).values
    of_all = [is_drawn, is_drawn & ~is_possible]
    of_all += [
        torch.where(is_drawn, values, 0.0)
        for values in (entropy[:, 0], largest[:, 0], largest.sum(dim=-1))
    ]
    totals = torch.stack([values.double().sum() for values in of_all])
    return torch.cat([totals, differences, covariance[upper[0], upper[1]]])


# ---- The tokens of a run against its targets

_LOGITS = 2**25  # of the images of a batch


def score_tokens(folder: Path, device: str, emit: Emit) -> int:
    """Score the tokens of the images without such scores, with the dtype that decoded them; return how many rows."""
    with RunStore.to_score(folder) as store:
        scored = {row["record_key"] for row in read_scores(folder) if row["level"] == "tokens"}
        cells = _by_cell(
            record for record in read_records(folder) if record["record_key"] not in scored
        )
        images = sum(map(len, cells.values()))
        done = 0
        others = 0
        if not images:
            return 0
        experiment = load_experiment(store.manifest["experiment"], defaults_of)
        models = load_models(experiment, choose_compute(device, store.key["dtype"]))
        for name, model in models.items():
            prompts = dict.fromkeys(
                row["prompt"] for rows in cells.values() for row in rows if row["model"] == name
            )
            for count, total in model.prepare(list(prompts)):
                emit(ProgressEvent(f"captions for {name}", count, total))
        decodings = {cell.cell_id: cell.decoding for cell in experiment.cells}
        for cell_id, records in cells.items():
            model = models[records[0]["model"]]
            batch = max(1, _LOGITS // (model.target.image_tokens * model.target.vocab_size))
            for start in range(0, len(records), batch):
                rows = measure_tokens(
                    records=records[start : start + batch],
                    folder=folder,
                    model=model,
                    decoding=decodings[cell_id],
                )
                for row in rows:
                    store.append_score({"level": "tokens", "cell_id": cell_id, **row})
                done += len(records[start : start + batch])
                others += len(records[start : start + batch]) - len(rows)
                emit(ProgressEvent("distance from the target", done, images))
        if others:
            text = f"the distance leaves out {others} images: their pictures hold no tokens, and decoding gave others"
            emit(
                Note(
                    text,
                    "Pictures of earlier versions need the machine and version that decoded them.",
                    "warning",
                )
            )
        return images - others


def measure_tokens(
    records: Sequence[Row], folder: Path, model: LoadedModel, decoding: Decoding
) -> list[Row]:
    """Return rows of level `tokens`; pictures of earlier versions hold none, and their images are decoded again."""
    images = []
    for record in records:
        tokens = read_tokens(folder / record["image"])
        if tokens is None:
            generator = torch.Generator(model.target.device).manual_seed(record["seed"])
            tokens = decode(
                model=model,
                condition=model.condition([record["prompt"]]),
                decoding=decoding,
                generators=[generator],
            )[0].tokens
        if tokens_sha256(tokens) == record["tokens_sha256"]:
            images.append((record, tokens))
    if not images:
        return []
    condition = model.condition([record["prompt"] for record, _ in images])
    tokens = torch.stack([tokens for _, tokens in images]).long().to(model.target.device)
    sums = token_sums(model=model, condition=condition, tokens=tokens, decoding=decoding)
    return [
        {"record_key": record["record_key"], **row}
        for (record, _), row in zip(images, sums, strict=True)
    ]
