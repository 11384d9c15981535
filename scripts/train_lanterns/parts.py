"""The recipe of the bundled models: five parts, their data, their settings, and their reports.

The losses are in `part_tasks` and in `lantern_bench/training/drafter_task.py`. `quality_gates`
decides whether the result is good enough.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lantern_bench import __version__
from lantern_bench.config.decoding import Decoding
from lantern_bench.metrics.extractors import Extractor, features_of
from lantern_bench.models.families.lanterns.description import FILES, GUIDANCE, HELD_OUT, TRAIN
from lantern_bench.models.families.lanterns.modules import (
    TOKENIZER_CONFIG,
    load_tokenizer,
    new_target,
)
from lantern_bench.models.networks.eagle import EagleDrafter, untrained_drafter
from lantern_bench.models.networks.target import Condition, TransformerTarget
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.training.drafter_task import DrafterTask, Sequences
from lantern_bench.training.recipe import RECIPES, Device, StrictSettings, TrainSettings
from lantern_bench.training.trainer import TrainReport, train
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import file_sha256, write_atomically
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events
from lantern_bench.utils.text import did_you_mean
from scripts.train_lanterns import part_tasks
from scripts.train_lanterns.scenes import SceneSet, scene_set

REPORT = "training_report.json"
TRAIN_SEED = 1
HELD_OUT_SEED = 2
_AT_ONCE = 512
_BATCH = RECIPES["lanterns"].batch
# Estimated on two cores. It only decides how long dead codes are revived.
_TOKENIZER_STEPS_PER_MINUTE = 80
_LIBRARIES = ("torch", "numpy", "open_clip_torch", "safetensors")


@dataclass(frozen=True)
class Part:
    """One model of the family."""

    minutes: float  # of training by default, on a small CPU
    settings: TrainSettings
    needs: tuple[str, ...] = ()  # parts that must exist


def _settings(**values: Any) -> TrainSettings:
    shared = {
        "weight_decay": 0.05,
        "clip": 1.0,
        "clip_by": "norm",
        "schedule": "cosine",
        "final_lr": 0.02,
        "warmup": 50,
    }
    return TrainSettings(**shared | values)


PARTS: dict[str, Part] = {
    "tokenizer": Part(20, _settings(lr=1.5e-3, weight_decay=0.0, betas=(0.9, 0.99))),
    "features": Part(6, _settings(lr=2e-3, log_every=25), ("tokenizer",)),
    "clip": Part(
        8,
        _settings(lr=1e-3, warmup=100, betas=(0.9, 0.98), weight_decay=0.1, log_every=25),
        ("tokenizer",),
    ),
    "target": Part(60, _settings(lr=1.5e-3, warmup=100), ("tokenizer",)),
    "drafter": Part(55, RECIPES["lanterns"].train_settings(), ("tokenizer", "target")),
}
"""In the order in which they are trained."""


class RecipeSettings(StrictSettings):
    """The settings of a training.

    Without `minutes` and `steps` a part trains for its own minutes.
    """

    minutes: PositiveFloat | None = None
    steps: PositiveInt | None = None
    seed: NonNegativeInt = 0
    resume: bool = True
    init_from: Path | None = None
    device: Device = "auto"
    images: PositiveInt = 500  # sampled with `--evaluate`
    scenes: PositiveInt = 16_000
    held_out: PositiveInt = 500
    log_every: PositiveInt | None = None  # steps; None: the part's own
    checkpoint_every: PositiveInt | None = None  # steps; None: the part's own
    # Compile the training of tokenizer, target and drafter, if a compiler is installed.
    compiled: bool = True


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as float16 safetensors; a file is replaced when the new one is complete."""
    half = {}
    for name, value in state.items():
        written = value.detach().half() if value.is_floating_point() else value
        half[name] = written.cpu().contiguous()
    write_atomically(path, save(half))


def check_part(
    part: str, folder: Path, among: Sequence[str] = (), init_from: Path | None = None
) -> None:
    """Check that a part can be trained.

    Args:
        part: The part.
        folder: Folder of weights.
        among: Parts that will be trained before it.
        init_from: Folder that must hold the part, if any.

    Raises:
        UserError: The part is unknown, or `init_from` does not hold it.
        RefusedError: `folder` lacks a part that this one needs.
    """
    if part not in PARTS:
        raise UserError(
            f"--part {part}: unknown part{did_you_mean(part, PARTS)}",
            f"The parts are {', '.join(PARTS)}.",
        )
    for needed in PARTS[part].needs:
        if needed not in among and not (folder / FILES[needed]).is_file():
            raise RefusedError(
                f"--part {part} needs the {needed}, "
                f"and {FILES[needed]} is not in the folder of weights",
                f"First: python -m scripts.train_lanterns --part {needed}",
            )
    if init_from is not None and not (init_from / FILES[part]).is_file():
        raise UserError(
            f"--init-from {init_from}: there is no {FILES[part]}",
            "Give a folder with the part's weights.",
        )


def train_part(
    part: str,
    folder: Path,
    work: Path,
    *,
    settings: RecipeSettings,
    device: torch.device,
    on_event: Emit = ignore_events,
    emit: Emit = ignore_events,
) -> PartReport:
    """Train one part, and write its weights and its report into `folder`.

    Args:
        part: The part.
        folder: Folder of weights.
        work: Folder of rendered data and checkpoints, where an interrupted training continues.
        settings: The settings of the training.
        device: Where to train.
        on_event: Receives the losses.
        emit: Receives the progress of the preparation.

    Raises:
        UserError: The part is unknown, or `init_from` holds weights of another model.
        RefusedError: A part that this one needs is missing, the checkpoint has other settings, or
            the loss diverges.
    """
    check_part(part, folder, init_from=settings.init_from)
    path = folder / REPORT
    # Read before the training, so that a broken file costs no training time.
    try:
        entries_before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as JSON: {error}", "Move it away; a new one is written."
        ) from error
    data = _Data(folder=folder, work=work, settings=settings, device=device, emit=emit)
    with torch.random.fork_rng(devices=[]):
        # Layers draw from the global stream, which is forked here.
        torch.manual_seed(settings.seed)  # noqa: TID251
        task = _task(part, data)
    if settings.init_from is not None:
        _read_weights(task.module, settings.init_from / FILES[part])
    trained = train(
        task=task,
        settings=_loop_settings(part=part, folder=folder, work=work, settings=settings),
        device=device,
        on_event=on_event,
    )
    # Few batches, of other shapes and precision than in training: not worth compiling.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if isinstance(task, DrafterTask):
            figures = {"one_minus_tv": task.overlap(task.drafter)}
        else:
            figures = task.evaluate()
    report = PartReport(**vars(trained), figures=figures)
    if part == "clip":
        part_tasks.save_clip(task.module, folder / "clip")
    else:
        write_weights(task.module.state_dict(), folder / FILES[part])
    entry = asdict(report) | {
        "seconds": round(report.seconds, 1),
        "losses": [[step, round(loss, 5)] for step, loss in report.losses],
        "data": {"scenes": settings.scenes, "held_out": settings.held_out},
        "started_from_weights": settings.init_from is not None,
        "parameters": sum(parameter.numel() for parameter in task.module.parameters()),
        "weights_sha256": file_sha256(folder / FILES[part]),
        "rests_on": {needed: file_sha256(folder / FILES[needed]) for needed in PARTS[part].needs},
        "device": device.type,
        "versions": {
            "lantern-bench": __version__,
            **{name: metadata.version(name) for name in _LIBRARIES},
        },
    }
    entries = (entries_before if isinstance(entries_before, dict) else {}) | {part: entry}
    ordered = {name: entries[name] for name in PARTS if name in entries}
    write_atomically(path, json.dumps(ordered, indent=1).encode() + b"\n")
    return report


@dataclass
class PartReport(TrainReport):
    """The report of a part's training."""

    figures: dict[str, float]  # at the end, on held-out data


@dataclass(frozen=True)
class _Data:
    """The data of one training, kept in `work`: scenes, their tokens, their reconstructions."""

    folder: Path
    work: Path
    settings: RecipeSettings
    device: torch.device
    emit: Emit

    @cached_property
    def tokenizer(self) -> VQModel:
        """The trained tokenizer."""
        return load_tokenizer(self.folder, self.device)

    def scenes(self, *, held_out: bool = False) -> SceneSet:
        """Return scenes of the training captions or of the held-out captions."""
        if held_out:
            among = HELD_OUT
            count = self.settings.held_out
            seed = HELD_OUT_SEED
            name = "held_out.npz"
            what = "painting held-out scenes"
        else:
            among = TRAIN
            count = self.settings.scenes
            seed = TRAIN_SEED
            name = "scenes.npz"
            what = "painting scenes"
        return scene_set(
            among=among,
            n=count,
            seed=seed,
            cache=self.work / name,
            on_chunk=lambda done, total: self.emit(ProgressEvent(what, done / total)),
        )

    def sequences(self, *, held_out: bool = False) -> part_tasks.Sequences:
        """Return the tokens of scenes; training scenes are followed by their mirror images."""
        # Loaded even if the tokens exist: making the tokenizer draws from the global stream.
        tokenizer = self.tokenizer
        scenes = self.scenes(held_out=held_out)
        pictures = torch.from_numpy(scenes.pixels)
        mirrors = (False,) if held_out else (False, True)

        def make() -> Tensor:
            made = []
            for mirrored in mirrors:
                what = "tokenizing mirrored scenes" if mirrored else "tokenizing scenes"
                tokenize = partial(part_tasks.tokenize, tokenizer, mirrored=mirrored)
                made.append(self._by_parts(what, pictures, tokenize))
            return torch.cat(made)

        name = "held-out-tokens" if held_out else "tokens"
        tokens = self._kept(name, len(pictures), make)
        attributes = torch.from_numpy(scenes.attributes)
        return part_tasks.Sequences(tokens, torch.cat([attributes] * len(mirrors)))

    def pool(self) -> part_tasks.Pool:
        """Return training scenes for the scorers, some of them reconstructed by the tokenizer."""
        reconstruct = partial(part_tasks.reconstruct, self.tokenizer)
        scenes = self.scenes()

        def through(pixels: Tensor) -> Tensor:
            return self._by_parts("passing scenes through the tokenizer", pixels, reconstruct)

        def make() -> Tensor:
            return part_tasks.training_pool(scenes, through).pixels

        pixels = self._kept("pool", len(scenes.pixels), make)
        return part_tasks.Pool(pixels, torch.from_numpy(scenes.attributes))

    def _by_parts(self, what: str, pictures: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        done = 0
        out = []
        for part in pictures.split(_AT_ONCE):
            out.append(work(part))
            done += len(part)
            self.emit(ProgressEvent(what, done / len(pictures)))
        return torch.cat(out)

    def _kept(self, name: str, count: int, make: Callable[[], Tensor]) -> Tensor:
        """Read a tensor that depends on scenes and tokenizer from its file, or make both."""
        digest = file_sha256(self.folder / FILES["tokenizer"])
        path = self.work / f"{name}-{count}-{digest[:8]}.safetensors"
        if not path.exists():
            write_atomically(path, save({"kept": make().contiguous()}))
        return load_file(path)["kept"]


def build_target() -> TransformerTarget:
    """Return the bundled target with fresh weights, drawn from torch's current stream."""
    target = new_target()
    for name, parameter in target.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.02
        if name.endswith(("wo.weight", "w2.weight")):
            std = 0.02 / (2 * target.config.layers) ** 0.5
        nn.init.normal_(parameter, std=std)
    return target


def _read_weights(module: nn.Module, path: Path) -> None:
    """Read a file of weights into a float32 module; raises `UserError` if it does not fit."""
    try:
        state = {}
        for name, value in load_file(path).items():
            state[name] = value.float() if value.is_floating_point() else value
        module.load_state_dict(state)
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as weights: {problem}") from problem
    except RuntimeError as problem:
        # Torch's message has a heading and then a line for each tensor. One of them is enough.
        first = str(problem).splitlines()[1:2] or [str(problem)]
        raise UserError(
            f"{path} holds the weights of another model: {first[0].strip()}"
        ) from problem


def _task(part: str, data: _Data) -> part_tasks.EvaluatedTask | DrafterTask:
    """Return the task of a part, on fresh weights.

    Data are read before the model is built, since both draw random numbers.
    """
    settings = data.settings
    # Compile if torch finds the C++ compiler that it needs.
    compilers = (os.environ.get("CXX") or "c++", "g++", "clang++")
    compiled = settings.compiled and any(shutil.which(name) for name in compilers)
    if part in ("features", "clip"):
        kind = part_tasks.FeaturesTask if part == "features" else part_tasks.ClipTask
        pool = data.pool()
        return kind(pool, partial(part_tasks.reconstruct, data.tokenizer), seed=settings.seed)
    if part == "tokenizer":
        scenes = data.scenes()
        held_out_scenes = data.scenes(held_out=True)
        model = VQModel(TOKENIZER_CONFIG)
        if compiled:
            model.encoder.compile()
            model.decoder.compile()
        minutes = settings.minutes or PARTS["tokenizer"].minutes
        steps = settings.steps or int(minutes * _TOKENIZER_STEPS_PER_MINUTE)
        return part_tasks.TokenizerTask(model, scenes, held_out_scenes, expected_steps=steps)
    sequences = data.sequences()
    held_out = data.sequences(held_out=True)
    target = build_target()
    if compiled:
        target.transformer.compile()
    if part == "target":
        return part_tasks.TargetTask(target, sequences, held_out)
    _read_weights(target, data.folder / FILES["target"])
    target.to(data.device).eval().requires_grad_(requires_grad=False)
    drafter = untrained_drafter(target)
    if compiled:
        drafter.compile()
    return drafter_task(
        drafter=drafter, target=target, sequences=sequences, held_out=held_out, seed=settings.seed
    )


def drafter_task(
    drafter: EagleDrafter,
    target: TransformerTarget,
    sequences: part_tasks.Sequences,
    held_out: part_tasks.Sequences,
    seed: int = 0,
) -> DrafterTask:
    """Return the task of a drafter on painted scenes, with the recipe `lanterns`.

    Args:
        drafter: The drafter.
        target: The target, which is frozen.
        sequences: Sequences to learn from.
        held_out: Sequences for the evaluation, of which 32 are used.
        seed: Seed of the order of the sequences.
    """
    target.eval().requires_grad_(requires_grad=False)
    recipe = RECIPES["lanterns"].model_copy(update={"batch": _BATCH})
    conditions = part_tasks.all_conditions()

    def sequences_of(scenes: part_tasks.Sequences, count: int) -> Sequences:
        numbers = part_tasks.caption_numbers(scenes.attributes)

        def condition(rows: Sequence[int]) -> Condition:
            chosen = numbers[list(rows)]
            return Condition(conditions.values[chosen], conditions.valid[chosen])

        return Sequences(target, scenes.tokens[:count], condition)

    return DrafterTask(
        drafter=drafter,
        training=sequences_of(sequences, len(sequences.tokens)),
        held_out=sequences_of(held_out, 32),
        recipe=recipe,
        decoding=Decoding(mode="ar", drafting="none", rule="none", cfg_scale=GUIDANCE),
        seed=seed,
    )


def _loop_settings(part: str, folder: Path, work: Path, settings: RecipeSettings) -> TrainSettings:
    """Return the settings of the loop; the checkpoint's name identifies the weights it needs."""
    chosen = PARTS[part]
    minutes = settings.minutes
    if minutes is None and settings.steps is None:
        minutes = chosen.minutes
    changed: dict[str, Any] = {"minutes": minutes, "steps": settings.steps, "seed": settings.seed}
    changed |= settings.model_dump(include={"log_every", "checkpoint_every"}, exclude_none=True)
    rests_on = [file_sha256(folder / FILES[needed])[:8] for needed in chosen.needs]
    if settings.init_from is not None:
        rests_on.append("from-" + file_sha256(settings.init_from / FILES[part])[:8])
    name = "-".join([part, str(settings.scenes), *rests_on])
    changed |= {"checkpoint": work / f"{name}.ckpt", "resume": settings.resume}
    return chosen.settings.model_copy(update=changed)


def write_embedded(path: Path, scenes: Tensor, extractor: Extractor, label: str) -> None:
    """Write the embedded reference.

    Args:
        path: The file.
        scenes: Painted scenes, uint8 [n, 3, 64, 64].
        extractor: The network of the features, whose fingerprint is written too.
        label: Name of the scenes in results.
    """
    metadata = {"label": label, "extractor": extractor.label}
    write_atomically(path, save({"features": features_of(scenes, extractor)}, metadata))
