"""One training of a drafter from start to end: sequences, the loop, evaluations, the exported folder.

Tokens and checkpoints are in the work folder of the job, and an interrupted training continues there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from lantern_bench.clock import OnProgress, no_progress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.eagle import EagleDrafter, drafter_key_map, load_drafter, untrained_drafter
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.io.state_dict import export
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.target import TransformerTarget
from lantern_bench.training.data import DrafterJob, make_tokens, split
from lantern_bench.training.loop import OnEvent, Processes, TrainEvent, TrainReport, read_checkpoint, train
from lantern_bench.training.task import DrafterTask, Sequences, drafter_like

# The published code's name for each grid of LlamaGen; the number of condition positions tells t2i from c2i.
_INPUT_TYPES = {((16, 16), 120): "t2i", ((32, 32), 120): "t2i2", ((24, 24), 1): "c2i"}
_SAMPLING = ("temperature", "top_k", "top_p", "filter_order", "cfg_scale", "cfg_default")
_HELD_OUT_SEQUENCES = 32
_BATCH = 16

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "feature_loss", "soft_loss", "train_one_minus_tv"),
    *("lr", "tokens_per_s", "one_minus_tv", "mal", "mal_images"),
)
"""The columns of `log.csv`; figures that were not measured at a step are empty."""


class Observations(NamedTuple):
    """What an interval is computed from."""

    over: list[float]  # numerators
    under: list[float]  # denominators
    prompts: list[str]  # of each observation

    @property
    def value(self) -> float:
        """Sum over sum."""
        return sum(self.over) / sum(self.under)

    @classmethod
    def of_lengths(cls, traces: Sequence[ImageTrace], prompts: Sequence[str]) -> Observations:
        """Return accepted lengths: tokens committed by steps, and steps; the value is the mean accepted length."""
        committed = [float(sum(trace.committed)) for trace in traces]
        return cls(committed, [float(len(trace.committed)) for trace in traces], list(prompts))


class Evaluated(NamedTuple):
    """A drafter at the end."""

    name: str
    one_minus_tv: float  # on held-out sequences
    accepted: Observations | None  # accepted lengths, where images were decoded

    def figures(self) -> dict[str, float | None]:
        """Return the figures of the report."""
        mal, images = (None, 0) if self.accepted is None else (self.accepted.value, len(self.accepted.over))
        return {"one_minus_tv": self.one_minus_tv, "mal": mal, "images": images}


def train_drafter(
    job: DrafterJob, model: LoadedModel, on_event: OnEvent, on_progress: OnProgress, processes: Processes
) -> tuple[TrainReport, list[Evaluated]]:
    """Train, write `job.out`, and evaluate the written drafter and the model's own, where it has one.

    Raises `UserError` for a target without features or data that do not fit, `RefusedError` for a work folder of
    another training and a loss that diverges.
    """
    if job.recipe.batch % processes.count:
        raise UserError(f"--batch {job.recipe.batch}: must be a multiple of the {processes.count} processes")
    run = _Run(job, model, processes, on_progress)
    report = run.train(on_event)
    if not processes.first:
        return report, []
    write_drafter(run.drafter, job.out, job.flags.target, model.weights)
    evaluated = run.evaluate()
    target = job.flags.target
    content = {
        "target": Path(target).name if target.endswith((".yaml", ".yml")) else target,
        "init": job.init_name,
        "sequences": len(job.data),
        "recipe": job.recipe.model_dump(mode="json"),
        "decoding": job.decoding.settings(),
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "settings": report.settings,
        "drafters": {drafter.name: drafter.figures() for drafter in evaluated},
    }
    write_atomically(job.out / "training_report.json", json.dumps(content, indent=1).encode() + b"\n")
    return report, evaluated


class _Run:
    """A job with all that is made for it."""

    def __init__(self, job: DrafterJob, model: LoadedModel, processes: Processes, on_progress: OnProgress) -> None:
        self.job, self.model, self.processes, self.on_progress = job, model, processes, on_progress
        self.target = transformer_of(model)
        self.drafter = _initial_drafter(job, model, self.target)
        self.settings = job.settings(model)
        read_checkpoint(self.settings)  # one of another training is refused before hours of sampling
        tokens, caption = self._tokens(), job.data.caption
        training, held_out = split(len(tokens), job.recipe.held_out, job.flags.seed)

        def sequences(rows: Sequence[int]) -> Sequences:
            return Sequences(self.target, tokens, lambda rows: model.condition([caption(row) for row in rows]), rows)

        evaluated = sequences(held_out[:_HELD_OUT_SEQUENCES])
        options = (job.recipe, job.decoding, job.flags.seed, processes)
        self.task = DrafterTask(self.drafter, sequences(training), evaluated, *options)
        self.prompts = list(job.prompts) or list(dict.fromkeys(caption(row) for row in held_out))

    def train(self, on_event: OnEvent) -> TrainReport:
        """Run the loop, with a row of the log for each event."""
        job, flags = self.job, self.job.flags
        if flags.compile:
            self.target.transformer.compile()
            self.drafter.compile()
        log = TrainingLog(job.out / "log.csv", flags.resume)
        sequences = job.recipe.batch * job.recipe.accumulate

        def log_event(event: TrainEvent) -> None:
            if not self.processes.first:
                return
            step, seconds = log.before(event.step)
            tokens, elapsed = (event.step - step) * sequences * self.target.image_tokens, event.seconds - seconds
            row: dict[str, float | None] = {
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
            mal = None
            # Held-out figures, where this event is the first after a multiple of `eval_every`.
            if flags.eval_every and event.step // flags.eval_every != step // flags.eval_every:
                with torch.compiler.set_stance("force_eager"):
                    row["one_minus_tv"] = self.task.overlap(self.drafter)
                    drafter = drafter_like(self.drafter, self.target.dtype, self.target.device).eval()
                    mal = self._accepted(drafter, flags.eval_images).value if flags.eval_images else None
                row |= {"mal": mal, "mal_images": flags.eval_images}
            log.add(row)
            on_event(event if mal is None else replace(event, figures={**event.figures, "mal": mal}))

        return train(self.task, self.settings, self.target.device, log_event, self.processes)

    def evaluate(self) -> list[Evaluated]:
        """Evaluate the drafter as it was written, read again, and the model's own."""
        target = self.target
        drafters = {"trained": load_drafter(self.job.out, target, dtype=target.dtype, device=target.device)}
        if isinstance(self.model.drafter, EagleDrafter):
            drafters["the model's own"] = self.model.drafter
        evaluated, images = [], self.job.flags.final_images
        with torch.compiler.set_stance("force_eager"):
            for name, drafter in drafters.items():
                overlap = self.task.overlap(drafter)
                label = f"decoding, drafter: {name}"
                accepted = self._accepted(drafter, images, label, self.on_progress) if images else None
                evaluated.append(Evaluated(name, overlap, accepted))
        return evaluated

    def _tokens(self) -> Tensor:
        """Encode or sample the sequences and encode the captions; other processes read what the first one wrote."""
        job = self.job
        on_progress = self.on_progress if self.processes.first else no_progress
        with self.processes.first_alone():
            for done, total in self.model.prepare(list(dict.fromkeys([*job.data.captions, *job.prompts]))):
                on_progress("encoding captions", done / total)
            sampling = Decoding(mode="ar", **{name: getattr(job.decoding, name) for name in _SAMPLING})
            tokens = make_tokens(job.data, self.model, sampling, job.flags.seed, job.work, on_progress)
        length, needed = int(tokens.shape[1]), self.target.image_tokens
        if length != needed:
            raise UserError(f"--data: the pictures have {length} tokens, and the target {needed}")
        return tokens

    def _accepted(
        self, drafter: EagleDrafter, images: int, label: str = "", on_progress: OnProgress = no_progress
    ) -> Observations:
        """Decode `images` images with a drafter of the target's dtype, repeating the prompts."""
        # A new engine: compiled programs of another drafter must not run.
        model = replace(self.model, drafter=drafter, engine=Engine())
        slots = [(self.prompts[n % len(self.prompts)], n // len(self.prompts)) for n in range(images)]
        traces = list[ImageTrace]()
        for start in range(0, images, _BATCH):
            batch = slots[start : start + _BATCH]
            texts = [text for text, _ in batch]
            seeds = [record_seed(self.job.flags.seed, Prompt(text).id, repeat) for text, repeat in batch]
            draws = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
            traces += [image.trace for image in decode(model, model.condition(texts), self.job.decoding, draws)]
            on_progress(label, (start + len(batch)) / images)
        return Observations.of_lengths(traces, [text for text, _ in slots])


def _initial_drafter(job: DrafterJob, model: LoadedModel, target: TransformerTarget) -> EagleDrafter:
    """Return the drafter to start from, float32, on the target's device."""
    target.requires_grad_(False).eval()
    if job.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.flags.seed)  # noqa: TID251  # layers draw from the global stream; this forks it
            return untrained_drafter(target).to(target.device)
    drafter = model.drafter
    if isinstance(job.init, Path):
        drafter = load_drafter(job.init, target, dtype=torch.float32, device=target.device)
    if not isinstance(drafter, EagleDrafter):
        raise UserError(f"--init shipped: {model.name} has no drafter", "Use --init random, or give a folder.")
    return drafter_like(drafter, torch.float32, target.device)


class TrainingLog:
    """The log of a training as a CSV file; with `resume` its rows stay."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path, self._rows = path, list[dict[str, Any]]()
        if resume and path.is_file():
            table = pd.read_csv(path)
            if tuple(table.columns) != COLUMNS:
                advice = "Move it away, or give another folder (--out)."
                raise RefusedError(f"{path}: is not the log of a training", advice)
            self._rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]

    def before(self, step: int) -> tuple[int, float]:
        """Return step and seconds of the last row before `step`; zeros without one."""
        rows = [row for row in self._rows if row["step"] < step] or [{"step": 0, "seconds": 0.0}]
        return rows[-1]["step"], rows[-1]["seconds"]

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row; rows of its step and later belong to an interrupted training and are removed."""
        self._rows = [*(earlier for earlier in self._rows if earlier["step"] < row["step"]), dict(row)]
        table = pd.DataFrame(self._rows, columns=COLUMNS)
        write_atomically(self._path, table.to_csv(index=False, float_format="%.6g").encode())


def write_drafter(drafter: EagleDrafter, folder: Path, target: str, weights: Mapping[str, str]) -> None:
    """Write a drafter in the published layout, and a model file for it.

    `target` is the model's name or the path of its file; `weights` are the hashes of that model. Each file is written
    completely or not at all.
    """
    state = {name: tensor.float() for name, tensor in export(drafter, drafter_key_map(drafter)).items()}
    write_atomically(folder / "model.safetensors", save(state, metadata={"format": "pt"}))
    config = drafter.config
    # The keys that the published code and this package read.
    shared = {
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
    }
    described: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shared}
    if config.qk_norm:
        described = {"model_type": "chameleon", **shared, "rope_theta": config.rope_base}
        described["swin_norm"] = config.norm_after
    else:
        kind = _INPUT_TYPES.get((config.grid, config.prefix))
        described |= {} if kind is None else {"input_type": kind}
        described |= {"mask_padding": drafter.mask_padding, "rope_base": config.rope_base}
        described |= {} if "bias" in drafter.fc.state_dict() else {"bias": False}
    described["trained_for"] = weights.get("target", "")
    write_atomically(folder / "config.json", json.dumps(described, indent=1).encode() + b"\n")
    name = os.path.relpath(target, folder) if target.lower().endswith((".yaml", ".yml")) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_atomically(folder / "model.yaml", model.encode())
