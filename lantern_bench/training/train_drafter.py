"""One training of a drafter from start to end: the loop, evaluations, and the exported folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml
from safetensors.torch import save

from lantern_bench.models.checkpoints.drafter_files import (
    INPUT_TYPES,
    drafter_key_map,
    load_drafter,
)
from lantern_bench.models.checkpoints.key_map import export
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.model_file import is_model_file
from lantern_bench.models.networks.eagle import EagleDrafter, untrained_drafter
from lantern_bench.models.networks.target import CachedTarget
from lantern_bench.training.drafter_job import DrafterJob
from lantern_bench.training.drafter_task import DrafterTask, Sequences, drafter_like
from lantern_bench.training.token_data import decode_slots, make_tokens
from lantern_bench.training.trainer import (
    Processes,
    TrainEvent,
    TrainReport,
    read_checkpoint,
    train,
)
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file, write_json
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

_HELD_OUT_SEQUENCES = 32
_BATCH = 16

COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "feature_loss",
    "soft_loss",
    "train_one_minus_tv",
    "lr",
    "tokens_per_s",
    "one_minus_tv",
    "mal",
    "mal_images",
)
"""The columns of `log.csv`; figures that were not measured at a step are empty."""


class Observations(NamedTuple):
    """The observations from which an interval is computed."""

    # One value per observation.
    numerator: list[float]
    denominator: list[float]
    prompts: list[str]

    @property
    def value(self) -> float:
        """Sum over sum."""
        return sum(self.numerator) / sum(self.denominator)


class Evaluated(NamedTuple):
    """A drafter at the end."""

    name: str
    one_minus_tv: float  # on held-out sequences
    # Tokens over steps of each image, whose value is the mean accepted length; None without images.
    accepted: Observations | None


def train_drafter(
    job: DrafterJob,
    model: LoadedModel,
    *,
    emit: Emit,
    processes: Processes,
) -> tuple[TrainReport, list[Evaluated]]:
    """Train a drafter, write `job.out`, and evaluate.

    Args:
        job: What to train and how.
        model: The loaded target.
        emit: Receives progress, and the losses with it.
        processes: The processes that train together.

    Returns:
        The report of the loop; and in the first process the evaluation of the written drafter and
        of the model's own, if it has one.

    Raises:
        UserError: A flag does not fit the model, or a picture cannot be read.
        RefusedError: The checkpoint has other settings, or the loss diverges.
    """
    recipe = job.recipe
    if recipe.batch % processes.count:
        raise UserError(
            f"--batch {recipe.batch}: must be a multiple of the {processes.count} processes"
        )
    target = transformer_of(model)
    settings = job.settings(model)
    drafter = _initial_drafter(job, model, target)
    # A checkpoint of another training is refused before hours of sampling.
    read_checkpoint(settings)

    # 1. The token sequences; some are held out.
    captions = job.data.captions
    with processes.first_alone():
        # The other processes read what the first one wrote.
        tokens = make_tokens(job, model, emit)
    generator = torch.Generator().manual_seed(job.flags.seed)
    order = torch.randperm(len(tokens), generator=generator).tolist()
    held_out = order[: job.held_out]

    def sequences(numbers: list[int]) -> Sequences:
        chosen = [captions[number] for number in numbers]
        return Sequences(
            target, tokens[numbers], lambda rows: model.condition([chosen[row] for row in rows])
        )

    # 2. The training.
    task = DrafterTask(
        drafter=drafter,
        training=sequences(order[job.held_out :]),
        held_out=sequences(held_out[:_HELD_OUT_SEQUENCES]),
        recipe=recipe,
        decoding=job.decoding,
        seed=job.flags.seed,
        processes=processes,
    )
    if job.flags.compile:
        if model.compiles:
            target.transformer.compile()
        drafter.compile()
    evaluation = _Evaluation(
        job=job,
        model=model,
        task=task,
        prompts=job.prompts or list(dict.fromkeys(captions[number] for number in held_out)),
        rows=read_log(job.out / "log.csv") if job.flags.resume else [],
        emit=emit,
    )
    report = train(
        task,
        settings,
        target.device,
        on_event=evaluation.log if processes.first else ignore_events,
        processes=processes,
    )
    if not processes.first:
        return report, []

    # 3. The folder of the drafter, and the evaluation of what was written.
    write_drafter(drafter=drafter, folder=job.out, target=job.flags.target, weights=model.weights)
    written = load_drafter(job.out, target)
    images = job.flags.final_images
    evaluated = [evaluation.measure("trained", written, images, emit=emit)]
    if isinstance(model.drafter, EagleDrafter):
        evaluated.append(evaluation.measure("the model's own", model.drafter, images, emit=emit))
    _write_report(job, report, evaluated)
    return report, evaluated


def _initial_drafter(job: DrafterJob, model: LoadedModel, target: CachedTarget) -> EagleDrafter:
    """Return the drafter to start from, float32, on the target's device."""
    target.requires_grad_(requires_grad=False).eval()
    if job.init_name == "random":
        with torch.random.fork_rng(devices=[]):
            # Layers draw from the global stream, which is forked here.
            torch.manual_seed(job.flags.seed)  # noqa: TID251
            return untrained_drafter(target).to(target.device)
    drafter = model.drafter
    if job.init_name == "folder":
        drafter = load_drafter(Path(job.flags.init), target, dtype=torch.float32)
    if not isinstance(drafter, EagleDrafter):
        raise UserError(
            f"--init shipped: {model.name} has no drafter", "Use --init random, or give a folder."
        )
    return drafter_like(drafter, torch.float32)


# ---- Evaluation and log


@dataclass(frozen=True)
class _Evaluation:
    """Measures the drafter during the training and at its end, and writes `log.csv`."""

    job: DrafterJob
    model: LoadedModel
    task: DrafterTask
    prompts: Sequence[str]
    rows: list[dict[Any, Any]]  # of the log
    emit: Emit

    def log(self, event: TrainEvent) -> None:
        """Add a row to the log, with held-out figures every `eval_every` steps."""
        job = self.job
        every = job.flags.eval_every
        # Rows of this step and later belong to an interrupted training.
        self.rows[:] = [row for row in self.rows if row["step"] < event.step]
        last = self.rows[-1] if self.rows else {"step": 0, "seconds": 0.0}
        sequences = (event.step - last["step"]) * job.recipe.step_sequences
        tokens = sequences * self.model.target.image_tokens
        row: dict[str, Any] = {
            **vars(event),
            **event.figures,
            "epoch": event.step / job.recipe.steps_per_epoch(job.sequences),
            "tokens_per_s": tokens / (event.seconds - last["seconds"]),
        }
        figures = {"step": str(event.step), "loss": event.loss, **event.figures}
        if every and event.step // every != last["step"] // every:
            drafter = drafter_like(self.task.drafter, transformer_of(self.model).dtype).eval()
            measured = self.measure(
                "in training", drafter, job.flags.eval_images, emit=ignore_events
            )
            row |= {"one_minus_tv": measured.one_minus_tv, "mal_images": job.flags.eval_images}
            if measured.accepted is not None:
                row["mal"] = figures["mal"] = measured.accepted.value
        self.rows.append(row)
        table = pd.DataFrame(self.rows, columns=COLUMNS)
        content = table.to_csv(index=False, float_format="%.6g")
        write_file(job.out / "log.csv", content.encode())
        self.emit(ProgressEvent("training the drafter", event.fraction, figures=figures))

    def measure(self, name: str, drafter: EagleDrafter, images: int, emit: Emit) -> Evaluated:
        """Evaluate a drafter as it would be used; the images repeat the prompts."""
        model = replace(self.model, drafter=drafter)
        count = len(self.prompts)
        slots = [(self.prompts[image % count], image // count) for image in range(images)]
        committed: list[list[int]] = []  # tokens of each step, by image
        with torch.compiler.set_stance("force_eager"):
            one_minus_tv = self.task.overlap(drafter)
            for start in range(0, images, _BATCH):
                decoded = decode_slots(
                    model,
                    self.job.decoding,
                    seed=self.job.flags.seed,
                    slots=slots[start : start + _BATCH],
                )
                committed += [image.trace.committed for image in decoded]
                emit(ProgressEvent(f"decoding, drafter: {name}", len(committed) / images))
        accepted = None
        if images:
            accepted = Observations(
                numerator=[sum(steps) for steps in committed],
                denominator=[len(steps) for steps in committed],
                prompts=[prompt for prompt, _ in slots],
            )
        return Evaluated(name, one_minus_tv, accepted)


def read_log(path: Path) -> list[dict[Any, Any]]:
    """Return the rows of the log of a training; none if there is no file."""
    if not path.is_file():
        return []
    table = pd.read_csv(path)
    if tuple(table.columns) != COLUMNS:
        raise RefusedError(
            f"{path}: is not the log of a training", "Move it away, or give another folder (--out)."
        )
    return table.to_dict("records")


# ---- The exported folder


def _write_report(job: DrafterJob, report: TrainReport, evaluated: Sequence[Evaluated]) -> None:
    drafters = {
        name: {
            "one_minus_tv": one_minus_tv,
            "mal": None if accepted is None else accepted.value,
            "images": job.flags.final_images,
        }
        for name, one_minus_tv, accepted in evaluated
    }
    content = {
        "target": Path(job.flags.target).name,
        "init": job.init_name,
        "sequences": len(job.data.captions),
        "recipe": job.recipe.model_dump(mode="json"),
        "decoding": job.decoding.settings(),
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "settings": report.settings,
        "drafters": drafters,
    }
    write_json(job.out / "training_report.json", content)


def write_drafter(
    drafter: EagleDrafter, folder: Path, target: str, weights: Mapping[str, str]
) -> None:
    """Write a drafter in the published layout, and a model file.

    Args:
        drafter: The drafter, in float32.
        folder: The folder to write.
        target: Name or file of the target, for the model file.
        weights: Hashes of the target's weights.
    """
    state = export(drafter, drafter_key_map(drafter))
    write_file(folder / "model.safetensors", save(state, metadata={"format": "pt"}))

    config = drafter.config
    # The keys that the published code and this package read.
    described: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.embedded_tokens,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "trained_for": weights.get("target", ""),
    }
    if config.qk_norm:
        described |= {
            "model_type": "chameleon",
            "rope_theta": config.rope_base,
            "swin_norm": config.norm_after,
        }
    else:
        described |= {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "mask_padding": drafter.mask_padding,
            "rope_base": config.rope_base,
        }
        for name, sizes in INPUT_TYPES.items():
            if sizes == (config.grid, config.prefix):
                described["input_type"] = name
        if drafter.fc.bias is None:
            described["bias"] = False
    write_json(folder / "config.json", described)

    name = os.path.relpath(target, folder) if is_model_file(target) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_file(folder / "model.yaml", model.encode())
