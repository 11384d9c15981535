"""The recipe of the bundled models: five parts, their data, their settings, and what is written of each.

The losses are in `tasks` and in `lantern_bench/training/drafter_task.py`; `quality_gates` decides whether the result is
good enough.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
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
from lantern_bench.models.networks.conditions import Condition
from lantern_bench.models.networks.eagle import EagleDrafter, untrained_drafter
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.training.drafter_task import DrafterTask, Sequences
from lantern_bench.training.recipe import RECIPES, Device, StrictSettings, TrainSettings
from lantern_bench.training.trainer import OnEvent, TrainReport, train
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
# estimated on two cores; decides only how long dead codes are revived
_TOKENIZER_STEPS_PER_MINUTE = 80
_LIBRARIES = ("torch", "numpy", "open_clip_torch", "safetensors")


@dataclass(frozen=True)
class Part:
    """One model of the family: its default minutes on a small CPU, its settings, and the parts it needs."""

    minutes: float
    settings: TrainSettings
    needs: tuple[str, ...] = ()


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
    "drafter": Part(55, RECIPES["lanterns"].train_settings(None), ("tokenizer", "target")),
}
"""In the order in which they are trained."""


class RecipeSettings(StrictSettings):
    """The settings of a training. Without `minutes` and `steps` a part trains for its own minutes.

    `log_every` and `checkpoint_every` are steps; None leaves them to the part. `compiled` compiles the training of
    tokenizer, target and drafter, where a compiler is installed. `images` are sampled with `--evaluate`.
    """

    minutes: PositiveFloat | None = None
    steps: PositiveInt | None = None
    seed: NonNegativeInt = 0
    resume: bool = True
    init_from: Path | None = None
    device: Device = "auto"
    images: PositiveInt = 500
    scenes: PositiveInt = 16_000
    held_out: PositiveInt = 500
    log_every: PositiveInt | None = None
    checkpoint_every: PositiveInt | None = None
    compiled: bool = True


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as float16 safetensors; an existing file is replaced when the new one is complete."""
    half = {
        name: value.detach().half() if value.is_floating_point() else value
        for name, value in state.items()
    }
    write_atomically(path, save({name: value.cpu().contiguous() for name, value in half.items()}))


def check_part(
    part: str, folder: Path, among: Sequence[str] = (), init_from: Path | None = None
) -> None:
    """Raise `UserError` for an unknown part, and `RefusedError` when one it needs is missing in `folder`.

    `among` are parts that will be trained before it. `init_from`, when given, must hold the part (`UserError`).
    """
    if part not in PARTS:
        raise UserError(
            f"--part {part}: unknown part{did_you_mean(part, PARTS)}",
            f"The parts are {', '.join(PARTS)}.",
        )
    for needed in PARTS[part].needs:
        if needed not in among and not (folder / FILES[needed]).is_file():
            problem = f"--part {part} needs the {needed}, and {FILES[needed]} is not in the folder of weights"
            raise RefusedError(problem, f"First: python -m scripts.train_lanterns --part {needed}")
    if init_from is not None and not (init_from / FILES[part]).is_file():
        raise UserError(
            f"--init-from {init_from}: there is no {FILES[part]}",
            "Give a folder with the part's weights.",
        )


def train_part(
    part: str,
    folder: Path,
    work: Path,
    settings: RecipeSettings,
    device: torch.device,
    on_event: OnEvent = lambda _event: None,
    emit: Emit = ignore_events,
) -> PartReport:
    """Train one part, write its weights and its report into `folder`, and return the report.

    `work` keeps rendered data and checkpoints; an interrupted training continues there. `emit`
    receives the progress of the preparation. Raises `UserError` for an unknown part or for weights of another model in `init_from`,
    `RefusedError` for a part that is needed and missing, a checkpoint of other settings and a loss that diverges.
    """
    check_part(part, folder, init_from=settings.init_from)
    path = folder / REPORT
    try:  # before the training, so that a broken file costs no training time
        entries_before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as JSON: {error}", "Move it away; a new one is written."
        ) from error
    data = _Data(folder=folder, work=work, settings=settings, device=device, emit=emit)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # noqa: TID251  # layers draw from the global stream; this forks it
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
        is_drafter = isinstance(task, DrafterTask)
        figures = {"one_minus_tv": task.overlap(task.drafter)} if is_drafter else task.evaluate()
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


@dataclass(frozen=True)
class PartReport(TrainReport):
    """The report of a part's training."""

    figures: dict[str, float]  # at the end, on held-out data


@dataclass(frozen=True)
class _Data:
    """The data of one training: painted scenes, their tokens and their reconstructions, kept in `work`."""

    folder: Path
    work: Path
    settings: RecipeSettings
    device: torch.device
    emit: Emit

    @cached_property
    def tokenizer(self) -> VQModel:
        """The trained tokenizer."""
        return load_tokenizer(self.folder, self.device)

    def scenes(self, held_out: bool = False) -> SceneSet:
        """Scenes of the training or of the held-out captions."""
        if held_out:
            among = HELD_OUT
            count = self.settings.held_out
            seed = HELD_OUT_SEED
            name = "held_out.npz"
        else:
            among = TRAIN
            count = self.settings.scenes
            seed = TRAIN_SEED
            name = "scenes.npz"
        what = "painting held-out scenes" if held_out else "painting scenes"
        return scene_set(
            among=among,
            n=count,
            seed=seed,
            cache=self.work / name,
            on_chunk=lambda done, all: self.emit(ProgressEvent(what, done / all)),
        )

    def sequences(self, held_out: bool = False) -> part_tasks.Sequences:
        """Tokens of the scenes; those of the training scenes are followed by those of their mirror images."""
        # loaded even if the tokens exist: making it draws from the global stream
        tokenizer = self.tokenizer
        scenes = self.scenes(held_out)
        pictures = torch.from_numpy(scenes.pixels)
        mirrors = (False,) if held_out else (False, True)

        def tokens(mirrored: bool) -> Tensor:
            what = "tokenizing mirrored scenes" if mirrored else "tokenizing scenes"
            return self._by_parts(
                what, pictures, lambda part: part_tasks.tokenize(tokenizer, part, mirrored)
            )

        def make() -> Tensor:
            return torch.cat([tokens(mirrored) for mirrored in mirrors])

        attributes = torch.cat([torch.from_numpy(scenes.attributes)] * len(mirrors))
        return part_tasks.Sequences(
            self._kept("held-out-tokens" if held_out else "tokens", held_out, make), attributes
        )

    def pool(self) -> part_tasks.Pool:
        """What the scorers learn from: training scenes, a share of them reconstructed by the tokenizer."""
        tokenizer = self.tokenizer
        scenes = self.scenes()
        what = "passing scenes through the tokenizer"

        def through(pixels: Tensor) -> Tensor:
            return self._by_parts(
                what, pixels, lambda part: part_tasks.reconstruct(tokenizer, part)
            )

        pixels = self._kept("pool", False, lambda: part_tasks.training_pool(scenes, through).pixels)
        return part_tasks.Pool(pixels, torch.from_numpy(scenes.attributes))

    def _by_parts(self, what: str, pictures: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        done = 0
        out = []
        for part in pictures.split(_AT_ONCE):
            out.append(work(part))
            done += len(part)
            self.emit(ProgressEvent(what, done / len(pictures)))
        return torch.cat(out)

    def _kept(self, name: str, held_out: bool, make: Callable[[], Tensor]) -> Tensor:
        """Read a tensor that depends on the tokenizer from its file, or make it and write the file."""
        count = self.settings.held_out if held_out else self.settings.scenes
        path = (
            self.work
            / f"{name}-{count}-{file_sha256(self.folder / FILES['tokenizer'])[:8]}.safetensors"
        )
        if not path.exists():
            write_atomically(path, save({"kept": make().contiguous()}))
        return load_file(path)["kept"]


def build_target() -> TransformerTarget:
    """Return the bundled target with fresh weights, drawn from torch's current stream."""
    target = new_target()
    for name, parameter in target.named_parameters():
        if parameter.dim() >= 2:
            deep = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(
                parameter, std=0.02 / (2 * target.config.layers) ** 0.5 if deep else 0.02
            )
    return target


def _read_weights(module: nn.Module, path: Path) -> None:
    """Read a file of weights into a float32 module; raises `UserError` for a damaged file or another model's."""
    try:
        state = load_file(path)
        module.load_state_dict(
            {name: v.float() if v.is_floating_point() else v for name, v in state.items()}
        )
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as weights: {problem}") from problem
    except RuntimeError as problem:
        # Torch's message has a heading and then a line for each tensor: one of them is enough.
        first = str(problem).splitlines()[1:2] or [str(problem)]
        raise UserError(
            f"{path} holds the weights of another model: {first[0].strip()}"
        ) from problem


def _task(part: str, data: _Data) -> part_tasks.EvaluatedTask | DrafterTask:
    """The task of a part, on fresh weights; data are read before the model is built, as both draw random numbers."""
    settings = data.settings
    # Compile where it is asked for and torch finds the C++ compiler that it needs.
    compilers = (os.environ.get("CXX") or "c++", "g++", "clang++")
    compiled = settings.compiled and any(shutil.which(name) for name in compilers)
    if part in ("features", "clip"):
        kind = part_tasks.FeaturesTask if part == "features" else part_tasks.ClipTask
        return kind(
            data.pool(),
            lambda pixels: part_tasks.reconstruct(data.tokenizer, pixels),
            seed=settings.seed,
        )
    if part == "tokenizer":
        scenes = data.scenes()
        held_out_scenes = data.scenes(held_out=True)
        model = VQModel(TOKENIZER_CONFIG)
        if compiled:
            model.encoder.compile()
            model.decoder.compile()
        minutes = settings.minutes if settings.minutes is not None else PARTS["tokenizer"].minutes
        steps = settings.steps or int(minutes * _TOKENIZER_STEPS_PER_MINUTE)
        return part_tasks.TokenizerTask(
            model=model, scenes=scenes, held_out=held_out_scenes, expected_steps=steps
        )
    sequences = data.sequences()
    held_out = data.sequences(held_out=True)
    target = build_target()
    if compiled:
        target.transformer.compile()
    if part == "target":
        return part_tasks.TargetTask(target, sequences, held_out)
    _read_weights(target, data.folder / FILES["target"])
    target.to(data.device).eval().requires_grad_(False)
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
    """The task of every drafter, on painted scenes, with the recipe `lanterns`; freezes the target."""
    target.eval().requires_grad_(False)
    recipe = RECIPES["lanterns"].model_copy(update={"batch": _BATCH})
    conditions = part_tasks.all_conditions()

    def sequences_of(scenes: part_tasks.Sequences, count: int) -> Sequences:
        numbers = part_tasks.caption_numbers(scenes.attributes)

        def condition(rows: Sequence[int]) -> Condition:
            chosen = numbers[list(rows)]
            return Condition(conditions.values[chosen], conditions.valid[chosen])

        return Sequences(target, scenes.tokens[:count], condition)

    decoding = Decoding(mode="ar", drafting="none", rule="none", cfg_scale=GUIDANCE)
    training = sequences_of(sequences, len(sequences.tokens))
    evaluated = sequences_of(held_out, 32)
    return DrafterTask(
        drafter=drafter,
        training=training,
        held_out=evaluated,
        recipe=recipe,
        decoding=decoding,
        seed=seed,
    )


def _loop_settings(part: str, folder: Path, work: Path, settings: RecipeSettings) -> TrainSettings:
    """The part's settings with those of the training; the checkpoint's name identifies the weights it depends on."""
    chosen = PARTS[part]
    minutes = (
        settings.minutes
        if settings.minutes is not None or settings.steps is not None
        else chosen.minutes
    )
    changed: dict[str, Any] = {"minutes": minutes, "steps": settings.steps, "seed": settings.seed}
    changed |= settings.model_dump(include={"log_every", "checkpoint_every"}, exclude_none=True)
    rests_on = [file_sha256(folder / FILES[needed])[:8] for needed in chosen.needs]
    if settings.init_from is not None:
        rests_on.append("from-" + file_sha256(settings.init_from / FILES[part])[:8])
    name = "-".join([part, str(settings.scenes), *rests_on])
    changed |= {"checkpoint": work / f"{name}.ckpt", "resume": settings.resume}
    return chosen.settings.model_copy(update=changed)


def write_embedded(path: Path, scenes: Tensor, extractor: Extractor, label: str) -> None:
    """Write the features of painted scenes, uint8 [n, 3, 64, 64], with the extractor's fingerprint."""
    metadata = {"label": label, "extractor": extractor.label}
    write_atomically(path, save({"features": features_of(scenes, extractor)}, metadata))
