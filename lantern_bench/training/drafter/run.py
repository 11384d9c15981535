"""One training of a drafter from start to end: sequences, features, the loop, evaluations, the exported folder.

Tokens, features and checkpoints are kept in the work folder of the job, and an interrupted training continues there.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from lantern_bench.training.drafter.dataset import make_dataset, split
from lantern_bench.training.drafter.features import ConditionedTokens, FeatureBatches, FeatureShards, LiveFeatures
from lantern_bench.training.drafter.job import DrafterJob, check_work
from lantern_bench.training.drafter.task import DrafterTask, drafter_like, loop_settings
from lantern_bench.training.loop import Distributed, OnEvent, TrainEvent, TrainReport, train

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
    """What an interval is computed from: a numerator, a denominator and the prompt of each observation."""

    over: list[float]
    under: list[float]
    prompts: list[str]

    @property
    def value(self) -> float:
        """Sum over sum."""
        return sum(self.over) / sum(self.under)

    @classmethod
    def of_lengths(cls, traces: Sequence[ImageTrace], prompts: Sequence[str]) -> Observations:
        """Accepted lengths: tokens committed by steps, and steps; the value is the mean accepted length."""
        committed = [float(sum(trace.committed)) for trace in traces]
        return cls(committed, [float(len(trace.committed)) for trace in traces], list(prompts))


class Evaluated(NamedTuple):
    """A drafter at the end: 1 - TV on held-out sequences, and accepted lengths (None where no image was decoded)."""

    name: str
    one_minus_tv: float
    accepted: Observations | None


def train_drafter(
    job: DrafterJob, model: LoadedModel, on_event: OnEvent, on_progress: OnProgress, distributed: Distributed
) -> tuple[TrainReport, list[Evaluated]]:
    """Train, write `job.out`, and evaluate the written drafter and the model's own, where it has one.

    Raises `UserError` for a target without features or data that do not fit, `RefusedError` for a work folder of
    another training and a loss that diverges.
    """
    if job.recipe.batch % distributed.count:
        raise UserError(f"--batch {job.recipe.batch}: must be a multiple of the {distributed.count} processes")
    run = _Run(job, model, distributed, on_progress)
    report = run.train(on_event)
    if not distributed.first:
        return report, []
    write_drafter(run.drafter, job.out, job.flags.target, model.weights)
    evaluated = run.final()
    found = {
        one.name: {
            "one_minus_tv": one.one_minus_tv,
            "mal": one.accepted.value if one.accepted else None,
            "images": len(one.accepted.over) if one.accepted else 0,
        }
        for one in evaluated
    }
    target = job.flags.target
    about = {
        "target": Path(target).name if target.endswith((".yaml", ".yml")) else target,
        "init": job.init_name,
        "sequences": len(job.data),
        "recipe": job.recipe.model_dump(mode="json"),
        "decoding": job.decoding.model_dump(mode="json"),
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "settings": report.settings,
        "drafters": found,
    }
    write_atomically(job.out / "training_report.json", json.dumps(about, indent=1).encode() + b"\n")
    return report, evaluated


class _Run:
    """A job with all that is made for it."""

    def __init__(self, job: DrafterJob, model: LoadedModel, distributed: Distributed, on_progress: OnProgress) -> None:
        self.job, self.model, self.distributed, self.on_progress = job, model, distributed, on_progress
        self.target = transformer_of(model)
        self.drafter = _initial_drafter(job, model, self.target)
        check_work(job, model, distributed)
        recipe, seed = job.recipe, job.flags.seed
        tokens, self.sources = self._dataset()
        training, held_out = (part.tolist() for part in split(len(tokens), recipe.held_out, seed))
        self.sequences, caption = len(training), job.data.caption
        conditioned = ConditionedTokens(tokens, lambda rows: model.condition([caption(row) for row in rows]))
        self.live = LiveFeatures(self.target, conditioned)
        features, evaluated = self._features(), held_out[:_HELD_OUT_SEQUENCES]
        settings = (training, recipe.batch, recipe.dropped, seed, lambda: self.live.pairs(evaluated))
        batches = FeatureBatches(features, *settings, distributed, recipe.guided)
        self.task = DrafterTask(self.drafter, batches, recipe, job.decoding)
        self.prompts = list(job.prompts) or list(dict.fromkeys(caption(row) for row in held_out))

    def train(self, on_event: OnEvent) -> TrainReport:
        """The loop, with a row of the log for each event."""
        job, flags, recipe = self.job, self.job.flags, self.job.recipe
        settings = replace(
            loop_settings(recipe, self.sequences),
            minutes=flags.minutes,
            seed=flags.seed,
            log_every=flags.log_every,
            checkpoint_every=flags.checkpoint_every,
            checkpoint=job.work / "drafter.ckpt",
            resume=flags.resume,
        )
        if flags.minutes is not None and recipe.steps is None:
            settings = replace(settings, steps=None)
        if flags.compile:
            self.target.transformer.compile()
            self.drafter.compile()
        log = TrainingLog(job.out / "log.csv", flags.resume)
        sequences = recipe.batch * recipe.accumulate

        def log_event(event: TrainEvent) -> None:
            if not self.distributed.first:
                return
            step, seconds = log.before(event.step)
            tokens, took = (event.step - step) * sequences * self.target.image_tokens, event.seconds - seconds
            row: dict[str, float | None] = {
                "step": event.step,
                "epoch": event.step * sequences / self.sequences,
                "seconds": event.seconds,
                "loss": event.loss,
                "feature_loss": event.parts["feature"],
                "soft_loss": event.parts["soft"],
                "train_one_minus_tv": event.parts["one_minus_tv"],
                "lr": event.lr,
                "tokens_per_s": tokens / took if took > 0 else None,
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
            on_event(event if mal is None else replace(event, parts={**event.parts, "mal": mal}))

        return train(self.task, settings, self.target.device, log_event, self.distributed)

    def final(self) -> list[Evaluated]:
        """Evaluate the drafter as it was written, read again, and the model's own."""
        target = self.target
        drafters = {"trained": load_drafter(self.job.out, target, dtype=target.dtype, device=target.device)}
        if isinstance(self.model.drafter, EagleDrafter):
            drafters["the model's own"] = self.model.drafter
        evaluated, images = [], self.job.flags.final_images
        with torch.compiler.set_stance("force_eager"):
            for name, drafter in drafters.items():
                overlap = self.task.overlap(drafter)
                what = f"decoding, drafter: {name}"
                accepted = self._accepted(drafter, images, what, self.on_progress) if images else None
                evaluated.append(Evaluated(name, overlap, accepted))
        return evaluated

    def _dataset(self) -> tuple[Tensor, str]:
        """Encode or sample the sequences and encode the captions: the first process does it, the others read it."""
        job, first = self.job, self.distributed.first
        on_progress = self.on_progress if first else no_progress
        if not first:
            self.distributed.wait()
        for done, total in self.model.prepare(list(dict.fromkeys([*job.data.captions, *job.prompts]))):
            on_progress("encoding captions", done / total)
        sampling = Decoding(mode="ar", **{name: getattr(job.decoding, name) for name in _SAMPLING})
        tokens, sources = make_dataset(job.data, self.model, sampling, job.flags.seed, job.work, on_progress)
        self.distributed.wait()
        if first:
            self.distributed.wait()
        found, wanted = int(tokens.shape[1]), self.target.image_tokens
        if found != wanted:
            raise UserError(f"--data: the pictures have {found} tokens, and the target {wanted}")
        return tokens, sources

    def _features(self) -> LiveFeatures | FeatureShards:
        recipe, flags, target = self.job.recipe, self.job.flags, self.target
        if flags.features == "live":
            return self.live
        dtype = torch.bfloat16 if recipe.autocast else target.dtype
        key: dict[str, Any] = {"weights": dict(self.model.weights), "sequences": self.sources}
        key |= {"dropped": "both" if recipe.guided else recipe.dropped, "seed": flags.seed}
        if recipe.guided:
            dropped = torch.arange(2 * len(self.live)) >= len(self.live)
        else:
            dropped = torch.rand(len(self.live), generator=torch.Generator().manual_seed(flags.seed)) < recipe.dropped
        if self.distributed.first:
            shards = FeatureShards(self.job.work, key, dtype, target.device)
            shards.make(self.live, max(8, recipe.batch), dropped, recipe.autocast, self.on_progress)
        self.distributed.wait()
        return FeatureShards(self.job.work, key, dtype, target.device)

    def _accepted(
        self, drafter: EagleDrafter, images: int, what: str = "", on_progress: OnProgress = no_progress
    ) -> Observations:
        """Decode `images` images with a drafter of the target's dtype, repeating the prompts; `what` names the work."""
        # A new engine: compiled programs of another drafter must not run.
        model = replace(self.model, drafter=drafter, engine=Engine())
        slots = [(self.prompts[n % len(self.prompts)], n // len(self.prompts)) for n in range(images)]
        traces = list[ImageTrace]()
        for start in range(0, images, _BATCH):
            part = slots[start : start + _BATCH]
            texts = [text for text, _ in part]
            seeds = [record_seed(self.job.flags.seed, Prompt(text).id, repeat) for text, repeat in part]
            draws = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
            traces += [image.trace for image in decode(model, model.condition(texts), self.job.decoding, draws)]
            on_progress(what, (start + len(part)) / images)
        return Observations.of_lengths(traces, [text for text, _ in slots])


def _initial_drafter(job: DrafterJob, model: LoadedModel, target: TransformerTarget) -> EagleDrafter:
    """The drafter to start from, float32, on the target's device."""
    target.requires_grad_(False).eval()
    if job.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.flags.seed)  # noqa: TID251  # layers draw from the global stream; this forks it
            return untrained_drafter(target).to(target.device)
    given = model.drafter
    if isinstance(job.init, Path):
        given = load_drafter(job.init, target, dtype=torch.float32, device=target.device)
    if not isinstance(given, EagleDrafter):
        raise UserError(f"--init shipped: {model.name} has no drafter", "Use --init random, or give a folder.")
    return drafter_like(given, torch.float32, target.device)


class TrainingLog:
    """The log of a training as a CSV file; with `resume` its rows are kept."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._rows = list[dict[str, str]]()
        if resume and path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != COLUMNS:
                    advice = "Move it away, or give another folder (--out)."
                    raise RefusedError(f"{path}: is not the log of a training", advice)
                # A line that was cut off while it was written lacks its last fields.
                self._rows = [row for row in reader if None not in row.values() and row["step"].isdigit()]

    def before(self, step: int) -> tuple[int, float]:
        """Step and seconds of the last row before `step`; zeros without one."""
        rows = (row for row in reversed(self._rows) if int(row["step"]) < step)
        row = next(rows, {"step": "0", "seconds": "0"})
        return int(row["step"]), float(row["seconds"])

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row; rows of its step and later belong to an interrupted training and are removed."""
        self._rows = [old for old in self._rows if int(old["step"]) < int(row["step"] or 0)]
        texts = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
        self._rows.append({name: "" if texts.get(name) is None else str(texts[name]) for name in COLUMNS})
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self._path, out.getvalue().encode())


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
        described |= {} if drafter.fc.bias is not None else {"bias": False}
    described["trained_for"] = weights.get("target", "")
    write_atomically(folder / "config.json", json.dumps(described, indent=1).encode() + b"\n")
    name = os.path.relpath(target, folder) if target.lower().endswith((".yaml", ".yml")) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_atomically(folder / "model.yaml", model.encode())
