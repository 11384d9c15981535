"""Score the tokens of a run: from its pictures to rows of scores.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.devices.compute import choose_compute
from lantern_bench.metrics.score_pictures import finished_by_cell
from lantern_bench.metrics.token_sums import token_sums
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import defaults_of
from lantern_bench.storage.pictures import read_tokens, tokens_sha256
from lantern_bench.storage.run_directory import read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

_LOGITS = 2**25  # of the images of a batch


def score_tokens(store: RunStore, device: str, emit: Emit) -> int:
    """Score the tokens of the images that have no such scores.

    Args:
        store: The run, opened for scoring.
        device: Where the models run, with the dtype that decoded the images.
        emit: Receives progress, and a warning if images are left out.

    Returns:
        The number of images scored.
    """
    scores = read_scores(store.folder)
    scored = {row["record_key"] for row in scores if row["level"] == "tokens"}
    records = read_records(store.folder)
    cells = finished_by_cell(row for row in records if row["record_key"] not in scored)
    if not cells:
        return 0

    experiment = load_experiment(store.manifest["experiment"], defaults_of)
    models = load_models(experiment, choose_compute(device, store.key["dtype"]))
    prompts = {name: dict[str, None]() for name in models}
    for rows in cells.values():
        prompts[rows[0]["model"]] |= dict.fromkeys(row["prompt"] for row in rows)
    for name, model in models.items():
        for count, total in model.prepare(list(prompts[name])):
            emit(ProgressEvent(f"captions for {name}", count, total))

    decodings = {cell.cell_id: cell.decoding for cell in experiment.cells}
    images = sum(len(rows) for rows in cells.values())
    done = 0
    written = 0
    for cell_id, pending in cells.items():
        model = models[pending[0]["model"]]
        batch = max(1, _LOGITS // (model.target.image_tokens * model.target.vocab_size))
        for start in range(0, len(pending), batch):
            some = pending[start : start + batch]
            rows = measure_tokens(some, store.folder, model, decoding=decodings[cell_id])
            for row in rows:
                store.append_score({"level": "tokens", "cell_id": cell_id, **row})
            done += len(some)
            written += len(rows)
            emit(ProgressEvent("distance from the target", done, images))
    if written < images:
        text = f"the distance leaves out {images - written} images: their pictures do not hold "
        text += "the tokens that were decoded"
        emit(Note(text, "Restore the pictures as the run wrote them.", "warning"))
    return written


def measure_tokens(
    records: Sequence[Row], folder: Path, model: LoadedModel, decoding: Decoding
) -> list[Row]:
    """Return rows of level `tokens` of images of one cell.

    Args:
        records: Records of the images. A picture without the tokens of its record has no row.
        folder: The run directory.
        model: The model that decoded the images.
        decoding: The settings of the cell.
    """
    tokens = []
    kept = []
    for record in records:
        of_picture = read_tokens(folder / record["image"])
        if of_picture is not None and tokens_sha256(of_picture) == record["tokens_sha256"]:
            tokens.append(of_picture)
            kept.append(record)
    if not kept:
        return []
    sums = token_sums(
        model=model,
        condition=model.condition([record["prompt"] for record in kept]),
        tokens=torch.stack(tokens).long().to(model.target.device),
        decoding=decoding,
    )
    keys = [{"record_key": record["record_key"]} for record in kept]
    return [key | row for key, row in zip(keys, sums, strict=True)]
