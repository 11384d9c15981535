"""One training of a drafter from start to end: what it was asked for, the loop, evaluations, the exported folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.models.checkpoints.drafter_files import (
    INPUT_TYPES,
    drafter_key_map,
    load_drafter,
)
from lantern_bench.models.checkpoints.key_map import export
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.model import Model
from lantern_bench.models.model_file import is_model_file
from lantern_bench.models.networks.eagle import EagleDrafter, untrained_drafter
from lantern_bench.models.networks.target import CachedTarget
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt_files import read_captioned
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.training.drafter_task import (
    Data,
    DrafterTask,
    Sequences,
    decode_slots,
    drafter_like,
    make_tokens,
)
from lantern_bench.training.recipe import (
    DrafterFlags,
    DrafterRecipe,
    Optimisation,
    TrainSettings,
    flag_of,
    recipe_of,
)
from lantern_bench.training.trainer import (
    OnEvent,
    Processes,
    TrainEvent,
    TrainReport,
    read_checkpoint,
    train,
)
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

_SAMPLING = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "cfg_default")
_HELD_OUT_SEQUENCES = 32
_BATCH = 16

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "feature_loss", "soft_loss", "train_one_minus_tv"),
    *("lr", "tokens_per_s", "one_minus_tv", "mal", "mal_images"),
)
"""The columns of `log.csv`; figures that were not measured at a step are empty."""

# ---- The job: settings that are checked before a model is loaded, and the plan of a training


@dataclass(frozen=True)
class DrafterJob:
    """What to train and how."""

    flags: DrafterFlags
    data: Data
    recipe: DrafterRecipe
    # Mode `speculative` with its tree, guidance and filters measures accepted lengths; where the target samples the
    # images, it uses the same guidance and filters.
    decoding: Decoding
    prompts: Sequence[str]  # of the measurement; empty: the held-out captions
    out: Path
    work: Path

    @property
    def init_name(self) -> str:
        """Where the drafter starts from, without paths: `random`, `shipped` (the model's own drafter) or `folder`."""
        return self.flags.init if self.flags.init in ("random", "shipped") else "folder"

    @property
    def held_out(self) -> int:
        """The number of sequences that are held out: at least one, never all."""
        count = len(self.data.captions)
        return min(count - 1, max(1, round(self.recipe.held_out * count)))

    @property
    def sequences(self) -> int:
        """The number of training sequences."""
        return len(self.data.captions) - self.held_out

    def settings(self, model: LoadedModel) -> TrainSettings:
        """Return the settings of the loop."""
        flags = self.flags
        recipe = self.recipe
        settings = flags.model_dump(include={"minutes", "seed", "resume"})
        if flags.minutes is not None and recipe.steps is None:
            settings["steps"] = None
        depends_on = {
            "target weights": model.weights.get("target", ""),
            "data": self.data.sha256()[:16],
        }
        depends_on |= {
            "init": self.init_name,
            **recipe.model_dump(mode="json", exclude=set(Optimisation.model_fields)),
        }
        settings |= {"checkpoint": self.work / "drafter.ckpt", "depends_on": depends_on}
        return recipe.train_settings(self.sequences, **settings)


def make_job(flags: DrafterFlags, drafters: Path) -> DrafterJob:
    """Read and check what the flags name; the default of `--out` is a folder in `drafters`."""
    recipe = recipe_of(flags)
    try:
        model = model_of(flags.target)
    except UserError as error:
        raise UserError(error.message.replace("--model", "--target"), error.advice) from error
    # Lossless speculative decoding with a static tree; guidance and filters default to the model's.
    values = flags.model_dump(include={"cfg_scale", "temperature", "top_k", "tree"})
    guidance = model.defaults.get("cfg_scale", 1.0)
    try:
        decoding = Decoding(
            "speculative", cfg_default=guidance, model_defaults=model.defaults, **values
        )
    except ParameterError as error:
        raise UserError(
            f"{flag_of(error.key or 'tree')} {values[error.key or 'tree']}: {error.text}"
        ) from error
    prompts = (
        [] if flags.eval_prompts is None else _prompts(flags.eval_prompts, "--eval-prompts", model)
    )
    out = flags.out or drafters / Path(model.name).stem
    job = DrafterJob(
        flags=flags,
        data=_data(flags, model),
        recipe=recipe,
        decoding=decoding,
        prompts=prompts,
        out=out,
        work=flags.work or out / "work",
    )
    if job.init_name == "folder" and not Path(flags.init).is_dir():
        raise UserError(
            f"--init {flags.init}: no such folder",
            "Use random or shipped, or give a drafter's folder.",
        )
    return job


def _data(flags: DrafterFlags, model: Model) -> Data:
    """Read `--data`: a folder holds pictures with captions, anything else names captions."""
    source = flags.data
    images = flags.images
    if Path(source).is_dir():
        items = read_captioned(Path(source), flags.captions, model)
        if images is not None and images > len(items):
            raise UserError(f"--images {images}: --data {source} holds {len(items)} pictures")
        pictures = [(item.path, False) for item in items[:images]]
        mirrored = [(path, True) for path, _ in pictures] if flags.mirror else []
        data = Data(
            [item.caption for item in items[:images]] * (1 + flags.mirror), pictures + mirrored
        )
    elif flags.captions is not None or flags.mirror:
        flag = "--mirror" if flags.captions is None else "--captions"
        raise UserError(
            f"{flag}: needs pictures, and --data {source} is not a folder", "Leave it out."
        )
    else:
        texts = _prompts(source, "--data", model)
        data = Data([texts[number % len(texts)] for number in range(images or len(texts))])
    if len(data.captions) < 2:
        raise UserError(
            f"--data {source}: one picture is too few", "Give at least two; some are held out."
        )
    return data


def _prompts(source: str, flag: str, model: Model) -> list[str]:
    try:
        return [prompt.text for prompt in load_prompts(source, model)]
    except UserError as error:
        raise UserError(error.message.replace("--prompts", flag), error.advice) from error


def plan_rows(job: DrafterJob) -> list[tuple[str, str]]:
    """Return what the training would make, and how much of it."""
    flags = job.flags
    recipe = job.recipe
    total = len(job.data.captions)
    model = model_of(flags.target)
    target = transformer_of(
        model.with_random_weights() or model.load(torch.device("cpu"), torch.float32)
    )
    steps = recipe.total_steps(job.sequences)
    image_tokens = target.config.image_tokens
    source = "encoded" if job.data.pictures is not None else "sampled by the target"
    evaluations = steps // flags.eval_every if flags.eval_every else 0
    count = f"{steps:,}"
    epochs = f"{steps / recipe.steps_per_epoch(job.sequences):.3g}"
    if flags.minutes is not None:
        count = epochs = f"as many as {flags.minutes:g} minutes allow"
    return [
        (f"pictures {source}", f"{total:,}" + (" with mirror images" if flags.mirror else "")),
        ("tokens", f"{total * image_tokens:,} ({image_tokens:,} a picture)"),
        ("held out", f"{job.held_out:,} of {total:,}"),
        ("steps", f"{count} of {recipe.batch * recipe.accumulate} sequences"),
        ("epochs", epochs),
        (
            "evaluations",
            f"{evaluations} of {flags.eval_images} images, one of {flags.final_images} at the end",
        ),
    ]


# ---- The training


class Observations(NamedTuple):
    """What an interval is computed from."""

    over: list[float]  # numerators
    under: list[float]  # denominators
    prompts: list[str]  # of each observation

    @property
    def value(self) -> float:
        """Sum over sum."""
        return sum(self.over) / sum(self.under)


class Evaluated(NamedTuple):
    """A drafter at the end."""

    name: str
    one_minus_tv: float  # on held-out sequences
    # tokens over steps of each image; the value is the mean accepted length
    accepted: Observations | None


def train_drafter(
    job: DrafterJob,
    model: LoadedModel,
    on_event: OnEvent,
    emit: Emit,
    processes: Processes,
) -> tuple[TrainReport, list[Evaluated]]:
    """Train, write `job.out`, and evaluate the written drafter and the model's own, where it has one."""
    flags = job.flags
    recipe = job.recipe
    captions = job.data.captions
    if recipe.batch % processes.count:
        raise UserError(
            f"--batch {recipe.batch}: must be a multiple of the {processes.count} processes"
        )
    target = transformer_of(model)
    settings = job.settings(model)
    drafter = _initial_drafter(job, model, target)
    read_checkpoint(settings)  # one of another training is refused before hours of sampling
    tokens = _tokens(
        job=job,
        model=model,
        needed=target.image_tokens,
        emit=emit,
        processes=processes,
    )
    order = torch.randperm(
        len(tokens), generator=torch.Generator().manual_seed(flags.seed)
    ).tolist()
    held_out = order[: job.held_out]
    training = order[job.held_out :]

    def sequences(numbers: list[int]) -> Sequences:
        chosen = [captions[number] for number in numbers]
        return Sequences(
            target, tokens[numbers], lambda rows: model.condition([chosen[row] for row in rows])
        )

    examined = sequences(held_out[:_HELD_OUT_SEQUENCES])
    task = DrafterTask(
        drafter=drafter,
        training=sequences(training),
        held_out=examined,
        recipe=recipe,
        decoding=job.decoding,
        seed=flags.seed,
        processes=processes,
    )
    prompts = list(job.prompts) or list(dict.fromkeys(captions[number] for number in held_out))
    if flags.compile:
        if model.compiles:
            target.transformer.compile()
        drafter.compile()
    logged = (
        _logged(job=job, model=model, task=task, prompts=prompts, on_event=on_event)
        if processes.first
        else lambda _event: None
    )
    report = train(
        task=task, settings=settings, device=target.device, on_event=logged, processes=processes
    )
    if not processes.first:
        return report, []
    write_drafter(drafter=drafter, folder=job.out, target=flags.target, weights=model.weights)
    drafters = {"trained": load_drafter(job.out, target, dtype=target.dtype, device=target.device)}
    if isinstance(model.drafter, EagleDrafter):
        drafters["the model's own"] = model.drafter
    evaluated = []
    with torch.compiler.set_stance("force_eager"):
        for name, written in drafters.items():
            accepted = _accepted(
                job=job,
                model=replace(model, drafter=written),
                prompts=prompts,
                images=flags.final_images,
                emit=emit,
                label=f"decoding, drafter: {name}",
            )
            evaluated.append(Evaluated(name, task.overlap(written), accepted))
    _write_report(job, report, evaluated)
    return report, evaluated


def _tokens(
    job: DrafterJob, model: LoadedModel, needed: int, emit: Emit, processes: Processes
) -> Tensor:
    """Encode or sample the sequences; other processes read what the first one wrote."""
    emit = emit if processes.first else ignore_events
    with processes.first_alone():
        for done, total in model.prepare(list(dict.fromkeys([*job.data.captions, *job.prompts]))):
            emit(ProgressEvent("encoding captions", done / total))
        sampling = Decoding(mode="ar", **{name: getattr(job.decoding, name) for name in _SAMPLING})
        tokens = make_tokens(
            data=job.data,
            model=model,
            decoding=sampling,
            seed=job.flags.seed,
            work=job.work,
            emit=emit,
        )
    if tokens.shape[1] != needed:
        raise UserError(
            f"--data: the pictures have {tokens.shape[1]} tokens, and the target {needed}"
        )
    return tokens


def _logged(
    job: DrafterJob,
    model: LoadedModel,
    task: DrafterTask,
    prompts: Sequence[str],
    on_event: OnEvent,
) -> OnEvent:
    """Return what adds a row to the log for each event, with held-out figures every `eval_every` steps."""
    path = job.out / "log.csv"
    flags = job.flags
    target = transformer_of(model)
    sequences = job.recipe.batch * job.recipe.accumulate  # of a step
    rows = read_log(path) if flags.resume else []

    def log(event: TrainEvent) -> None:
        # Rows of this step and later belong to an interrupted training.
        rows[:] = [row for row in rows if row["step"] < event.step]
        before, seconds = (rows[-1]["step"], rows[-1]["seconds"]) if rows else (0, 0.0)
        tokens = (event.step - before) * sequences * target.image_tokens
        elapsed = event.seconds - seconds
        row: dict[str, Any] = {
            "step": event.step,
            "epoch": event.step * sequences / job.sequences,
            "seconds": event.seconds,
            "loss": event.loss,
            "feature_loss": event.figures["feature"],
            "soft_loss": event.figures["soft"],
            "train_one_minus_tv": event.figures["one_minus_tv"],
            "lr": event.lr,
            "tokens_per_s": tokens / elapsed if elapsed > 0 else None,
        }
        if flags.eval_every and event.step // flags.eval_every != before // flags.eval_every:
            with torch.compiler.set_stance("force_eager"):
                drafter = drafter_like(task.drafter, target.dtype, target.device).eval()
                accepted = _accepted(
                    job=job,
                    model=replace(model, drafter=drafter),
                    prompts=prompts,
                    images=flags.eval_images,
                )
                row |= {"one_minus_tv": task.overlap(task.drafter), "mal_images": flags.eval_images}
            if accepted is not None:
                row["mal"] = accepted.value
                event = replace(event, figures={**event.figures, "mal": accepted.value})
        rows.append(row)
        table = pd.DataFrame(rows, columns=COLUMNS)
        write_file(path, table.to_csv(index=False, float_format="%.6g").encode())
        on_event(event)

    return log


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the log of a training; none where there is no file."""
    if not path.is_file():
        return []
    table = pd.read_csv(path)
    if tuple(table.columns) != COLUMNS:
        raise RefusedError(
            f"{path}: is not the log of a training", "Move it away, or give another folder (--out)."
        )
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _accepted(
    job: DrafterJob,
    model: LoadedModel,
    prompts: Sequence[str],
    images: int,
    emit: Emit = ignore_events,
    label: str = "",
) -> Observations | None:
    """Decode `images` images, repeating the prompts, and return their accepted lengths."""
    slots = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(images)]
    committed: list[Sequence[int]] = []
    for start in range(0, images, _BATCH):
        decoded = decode_slots(
            model=model,
            decoding=job.decoding,
            seed=job.flags.seed,
            slots=slots[start : start + _BATCH],
        )
        committed += [image.trace.committed for image in decoded]
        emit(ProgressEvent(label, len(committed) / images))
    tokens = [float(sum(counts)) for counts in committed]
    steps = [float(len(counts)) for counts in committed]
    return Observations(tokens, steps, [prompt for prompt, _ in slots]) if images else None


def _write_report(job: DrafterJob, report: TrainReport, evaluated: Sequence[Evaluated]) -> None:
    drafters = {}
    for name, one_minus_tv, accepted in evaluated:
        mal, images = (None, 0) if accepted is None else (accepted.value, len(accepted.over))
        drafters[name] = {"one_minus_tv": one_minus_tv, "mal": mal, "images": images}
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
    write_file(job.out / "training_report.json", json.dumps(content, indent=1).encode() + b"\n")


def _initial_drafter(job: DrafterJob, model: LoadedModel, target: CachedTarget) -> EagleDrafter:
    """Return the drafter to start from, float32, on the target's device."""
    target.requires_grad_(False).eval()
    if job.init_name == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.flags.seed)  # noqa: TID251  # layers draw from the global stream; this forks it
            return untrained_drafter(target).to(target.device)
    drafter = model.drafter
    if job.init_name == "folder":
        drafter = load_drafter(
            Path(job.flags.init), target, dtype=torch.float32, device=target.device
        )
    if not isinstance(drafter, EagleDrafter):
        raise UserError(
            f"--init shipped: {model.name} has no drafter", "Use --init random, or give a folder."
        )
    return drafter_like(drafter, torch.float32, target.device)


def write_drafter(
    drafter: EagleDrafter, folder: Path, target: str, weights: Mapping[str, str]
) -> None:
    """Write a drafter in the published layout, and a model file; `weights` are the hashes of the target."""
    state = {
        name: tensor.float() for name, tensor in export(drafter, drafter_key_map(drafter)).items()
    }
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
        described |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        described |= {"mask_padding": drafter.mask_padding, "rope_base": config.rope_base}
        for name, sizes in INPUT_TYPES.items():
            if sizes == (config.grid, config.prefix):
                described["input_type"] = name
        if drafter.fc.bias is None:
            described["bias"] = False
    write_file(folder / "config.json", json.dumps(described, indent=1).encode() + b"\n")
    name = os.path.relpath(target, folder) if is_model_file(target) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_file(folder / "model.yaml", model.encode())
