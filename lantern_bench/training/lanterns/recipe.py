"""The recipe of the embedded family: five parts, what each learns from, for how long, and what is written of it.

One function trains one part from start to end: it prepares the data, builds the task, runs the one loop (with
checkpoints in the work folder), writes the weights and enters a report beside them. The losses are in `recipe_*`, the
data in `recipe_data`; whether the result is good enough is `bars`' question.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lantern_bench import __version__
from lantern_bench.config.decoding import Decoding
from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.models.eagle import EagleDrafter, fresh_drafter
from lantern_bench.models.lanterns import FILES, GUIDANCE
from lantern_bench.models.lanterns.captions import HELD_OUT, TRAIN
from lantern_bench.models.lanterns.model import (
    TOKENIZER_CONFIG,
    build_target,
    fill,
    load_tokenizer,
    part_hash,
    write_weights,
)
from lantern_bench.models.transformer.conditioning import Condition
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.models.vq import VQModel
from lantern_bench.training.drafter.features import Lessons, LiveFeatures, Sequenced
from lantern_bench.training.drafter.recipe import RECIPES
from lantern_bench.training.drafter.task import DrafterTask, loop_settings
from lantern_bench.training.lanterns.scenes import SceneSet, scene_set
from lantern_bench.training.lanterns.scorers import ClipTask, FeaturesTask, Pool, judge_pool, reconstruct, save_clip
from lantern_bench.training.lanterns.tasks import (
    Sequences,
    TargetTask,
    TokenizerTask,
    all_conditions,
    caption_numbers,
    tokenize,
)
from lantern_bench.training.loop import Task, TrainEvent, TrainReport, TrainSettings, train

# ---- What the five parts learn from: painted scenes, their tokens, and scenes as the tokenizer gives them back


TRAIN_SEED, HELD_OUT_SEED = 1, 2
_AT_ONCE = 512

OnProgress = Callable[[str, float], None]
"""What is being prepared, and the share that is done."""


@dataclass(frozen=True)
class RecipeData:
    """The data of one training, in `work`: `scenes` pictures to learn from and `held_out` to evaluate on."""

    work: Path
    scenes: int
    held_out: int
    on_progress: OnProgress = lambda _what, _done: None

    def painted(self) -> SceneSet:
        """Scenes of the training captions."""
        return self._scenes("scenes.npz", "painting scenes", TRAIN_SEED)

    def painted_held_out(self) -> SceneSet:
        """Scenes of the held-out captions."""
        return self._scenes("held_out.npz", "painting held-out scenes", HELD_OUT_SEED)

    def sequences(self, tokenizer: VQModel, digest: str) -> Sequences:
        """Tokens of the training scenes and, after them, of their mirror images."""
        scenes = self.painted()
        attributes = torch.from_numpy(scenes.attributes)

        def make() -> Tensor:
            both = [self._tokens(tokenizer, scenes, mirrored) for mirrored in (False, True)]
            return torch.cat(both)

        kept = self.work / f"tokens-{self.scenes}-{digest[:8]}.safetensors"
        return Sequences(_kept(kept, make), torch.cat([attributes, attributes]))

    def held_out_sequences(self, tokenizer: VQModel, digest: str) -> Sequences:
        """Tokens of the held-out scenes."""
        scenes = self.painted_held_out()
        kept = self.work / f"held-out-tokens-{self.held_out}-{digest[:8]}.safetensors"
        tokens = _kept(kept, lambda: self._tokens(tokenizer, scenes, False))
        return Sequences(tokens, torch.from_numpy(scenes.attributes))

    def pool(self, tokenizer: VQModel, digest: str) -> Pool:
        """What the judges learn from: training scenes, a share of them passed through the tokenizer."""
        scenes = self.painted()
        attributes = torch.from_numpy(scenes.attributes)
        kept = self.work / f"pool-{self.scenes}-{digest[:8]}.safetensors"
        return Pool(_kept(kept, lambda: judge_pool(scenes, self._through(tokenizer)).pixels), attributes)

    def _scenes(self, name: str, what: str, seed: int) -> SceneSet:
        among, count = (TRAIN, self.scenes) if seed == TRAIN_SEED else (HELD_OUT, self.held_out)
        return scene_set(among, count, seed, self.work / name, lambda done, total: self.on_progress(what, done / total))

    def _tokens(self, tokenizer: VQModel, scenes: SceneSet, mirrored: bool) -> Tensor:
        what = "tokenizing mirrored scenes" if mirrored else "tokenizing scenes"
        pictures = torch.from_numpy(scenes.pixels)
        return self._by_parts(what, pictures, lambda part: tokenize(tokenizer, part, mirrored))

    def _through(self, tokenizer: VQModel) -> Callable[[Tensor], Tensor]:
        what = "passing scenes through the tokenizer"
        return lambda pixels: self._by_parts(what, pixels, lambda part: reconstruct(tokenizer, part))

    def _by_parts(self, what: str, pictures: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        done, out = 0, []
        for part in pictures.split(_AT_ONCE):
            out.append(work(part))
            done += len(part)
            self.on_progress(what, done / len(pictures))
        return torch.cat(out)


def _kept(path: Path, make: Callable[[], Tensor]) -> Tensor:
    """Read a tensor from its file, or make it and write the file."""
    if path.exists():
        return load_file(path)["kept"]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({"kept": made.contiguous()}, part)
    os.replace(part, path)
    return made


# ---- How the embedded drafter is trained: the task of every drafter, on painted scenes, with the recipe `lanterns`

_BATCH = RECIPES["lanterns"].batch
_EVALUATED = 32


def drafter_task(
    drafter: EagleDrafter, target: TransformerTarget, sequences: Sequences, held_out: Sequences, seed: int = 0
) -> DrafterTask:
    """Train a drafter for the embedded target, which is frozen by this."""
    target.eval().requires_grad_(False)
    recipe = replace(RECIPES["lanterns"], batch=_BATCH)
    features, examined = (LiveFeatures(target, _sequenced(part)) for part in (sequences, held_out))
    rows = range(min(_EVALUATED, len(held_out.tokens)))
    learnt = range(len(sequences.tokens))
    lessons = Lessons(
        features, learnt, recipe.batch, recipe.dropped, seed, lambda: examined.examined(rows), guided=recipe.guided
    )
    examined_with = Decoding(mode="ar", drafting="none", rule="none", cfg_scale=GUIDANCE)
    return DrafterTask(drafter, lessons, recipe, examined_with)


def _sequenced(sequences: Sequences) -> Sequenced:
    """Tokens, and the condition of rows by their attributes."""
    conditions, numbers = all_conditions(), caption_numbers(sequences.attributes)

    def condition(rows: Sequence[int]) -> Condition:
        chosen = numbers[list(rows)]
        return Condition(conditions.values[chosen], conditions.valid[chosen])

    return Sequenced(sequences.tokens, condition)


# ----

REPORT = "training_report.json"
_TOKENIZER_STEPS_A_MINUTE = 80  # a guess from two cores: says only until when dead codes are revived
_LIBRARIES = ("torch", "numpy", "open_clip_torch", "safetensors")


@dataclass(frozen=True)
class Part:
    """One model of the family: minutes it trains by default on a small CPU, how, and the parts it needs before."""

    minutes: float
    settings: TrainSettings
    needs: tuple[str, ...] = ()


PARTS: dict[str, Part] = {
    "tokenizer": Part(20, TrainSettings(lr=1.5e-3, weight_decay=0.0, betas=(0.9, 0.99))),
    "features": Part(6, TrainSettings(lr=2e-3, log_every=25), ("tokenizer",)),
    "clip": Part(
        8, TrainSettings(lr=1e-3, warmup=100, betas=(0.9, 0.98), weight_decay=0.1, log_every=25), ("tokenizer",)
    ),
    "target": Part(60, TrainSettings(lr=1.5e-3, warmup=100), ("tokenizer",)),
    "drafter": Part(55, loop_settings(RECIPES["lanterns"]), ("tokenizer", "target")),
}
"""In the order in which they are trained."""


@dataclass(frozen=True)
class RecipeSettings:
    """What may be chosen of a training. `minutes` and `steps` of None mean the part's own minutes.

    `log_every` and `checkpoint_every` are steps; None leaves them to the part. `compiled` compiles the training of
    tokenizer, target and drafter, where a compiler is at hand.
    """

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    resume: bool = True
    init_from: Path | None = None
    scenes: int = 16_000
    held_out: int = 500
    log_every: int | None = None
    checkpoint_every: int | None = None
    compiled: bool = True


def check_part(part: str, folder: Path, among: tuple[str, ...] = (), init_from: Path | None = None) -> None:
    """Raise `UserError` for a part there is not, and `RefusedError` when one it needs is missing in `folder`.

    `among` are parts that will be trained before it. `init_from`, when given, must hold the part (`UserError`).
    """
    if part not in PARTS:
        raise UserError(f"--part {part}: unknown part{did_you_mean(part, PARTS)}", f"The parts are {', '.join(PARTS)}.")
    for needed in PARTS[part].needs:
        if needed not in among and not (folder / FILES[needed]).is_file():
            raise RefusedError(
                f"--part {part} needs the {needed}, and {FILES[needed]} is not in the folder of weights",
                f"First: lantern-bench train lanterns --part {needed}",
            )
    if init_from is not None and not (init_from / FILES[part]).is_file():
        raise UserError(f"--init-from {init_from}: there is no {FILES[part]}", "Give a folder with the part's weights.")


def train_part(
    part: str,
    folder: Path,
    work: Path,
    settings: RecipeSettings,
    device: torch.device,
    on_event: Callable[[TrainEvent], None] = lambda _event: None,
    on_progress: OnProgress = lambda _what, _done: None,
) -> TrainReport:
    """Train one part, write its weights and its report into `folder`, and return the report.

    `work` keeps rendered data and checkpoints; an interrupted training continues there. `on_progress(what, share)`
    tells of the preparation, `on_event` of the training. Raises `UserError` for an unknown part or for weights of
    another model in `init_from`, `RefusedError` for a part that is needed and missing, a checkpoint of other settings
    and a loss that diverges.
    """
    check_part(part, folder, init_from=settings.init_from)
    whole = _entries(folder)
    data = RecipeData(work, settings.scenes, settings.held_out, on_progress)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # noqa: TID251  # layers draw from the global stream; this fork of it is ours
        task = _BUILD[part](data, folder, settings, device)
    if settings.init_from is not None:
        fill(task.module, settings.init_from / FILES[part])
    loop = _loop_settings(part, folder, work, settings)
    report = train(task, loop, device, on_event)
    _export(part, task.module, folder)
    _write_report(folder, whole | {part: _entry(report, part, folder, settings, device, task.module)})
    return report


def _loop_settings(part: str, folder: Path, work: Path, settings: RecipeSettings) -> TrainSettings:
    """The part's settings with what was chosen; a checkpoint belongs to the weights the training rests on."""
    chosen = PARTS[part]
    minutes = settings.minutes if settings.minutes is not None or settings.steps is not None else chosen.minutes
    changed: dict[str, Any] = {"minutes": minutes, "steps": settings.steps, "seed": settings.seed}
    for key in ("log_every", "checkpoint_every"):
        if getattr(settings, key) is not None:
            changed[key] = getattr(settings, key)
    rests_on = [part_hash(folder / FILES[needed])[:8] for needed in chosen.needs]
    if settings.init_from is not None:
        rests_on.append("from-" + part_hash(settings.init_from / FILES[part])[:8])
    name = "-".join([part, str(settings.scenes), *rests_on])
    return replace(chosen.settings, checkpoint=work / f"{name}.ckpt", resume=settings.resume, **changed)


def _tokenizer_task(data: RecipeData, _folder: Path, settings: RecipeSettings, _device: torch.device) -> Task:
    scenes, held_out = data.painted(), data.painted_held_out()
    model = VQModel(TOKENIZER_CONFIG)
    if settings.compiled and _can_compile():
        model.encoder.compile()
        model.decoder.compile()
    minutes = settings.minutes if settings.minutes is not None else PARTS["tokenizer"].minutes
    return TokenizerTask(model, scenes, held_out, settings.steps or int(minutes * _TOKENIZER_STEPS_A_MINUTE))


def _judge_task(kind: type[FeaturesTask] | type[ClipTask]) -> Callable[..., Task]:
    def build(data: RecipeData, folder: Path, settings: RecipeSettings, device: torch.device) -> Task:
        tokenizer, digest = _tokenizer(folder, device)
        pool = data.pool(tokenizer, digest)
        return kind(pool, lambda pictures: reconstruct(tokenizer, pictures), seed=settings.seed)

    return build


def _target_task(data: RecipeData, folder: Path, settings: RecipeSettings, device: torch.device) -> Task:
    tokenizer, digest = _tokenizer(folder, device)
    sequences, held_out = data.sequences(tokenizer, digest), data.held_out_sequences(tokenizer, digest)
    target = build_target()
    if settings.compiled and _can_compile():
        target.transformer.compile()
    return TargetTask(target, sequences, held_out)


def _drafter_task(data: RecipeData, folder: Path, settings: RecipeSettings, device: torch.device) -> Task:
    tokenizer, digest = _tokenizer(folder, device)
    sequences, held_out = data.sequences(tokenizer, digest), data.held_out_sequences(tokenizer, digest)
    target = build_target()
    fill(target, folder / FILES["target"])
    target.to(device).eval().requires_grad_(False)
    drafter = fresh_drafter(target)
    if settings.compiled and _can_compile():
        target.transformer.compile()
        drafter.compile()
    return drafter_task(drafter, target, sequences, held_out, settings.seed)


_BUILD: dict[str, Callable[[RecipeData, Path, RecipeSettings, torch.device], Task]] = {
    "tokenizer": _tokenizer_task,
    "features": _judge_task(FeaturesTask),
    "clip": _judge_task(ClipTask),
    "target": _target_task,
    "drafter": _drafter_task,
}


def _tokenizer(folder: Path, device: torch.device) -> tuple[VQModel, str]:
    return load_tokenizer(folder, device), part_hash(folder / FILES["tokenizer"])


def _can_compile() -> bool:
    """Whether torch finds the C++ compiler that compiled training needs."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


def _export(part: str, module: nn.Module, folder: Path) -> None:
    if part == "clip":
        save_clip(module, folder / "clip")
    else:
        write_weights(module.state_dict(), folder / FILES[part])


def _entries(folder: Path) -> dict[str, Any]:
    """The folder's report, part by part; read before a training, so that a broken file costs nobody hours."""
    path = folder / REPORT
    if not path.is_file():
        return {}
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read as JSON: {problem}", "Move it away; it is written anew.") from problem
    return whole if isinstance(whole, dict) else {}


def _entry(
    report: TrainReport, part: str, folder: Path, settings: RecipeSettings, device: torch.device, module: nn.Module
) -> dict[str, Any]:
    """What the report says of one part."""
    entry = {key: value for key, value in asdict(report).items() if key != "task"}
    entry["seconds"] = round(report.seconds, 1)
    entry["losses"] = [[step, round(loss, 5)] for step, loss in report.losses]
    entry["data"] = {"scenes": settings.scenes, "held_out": settings.held_out}
    entry["started_from_weights"] = settings.init_from is not None
    entry["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    entry["weights_sha256"] = part_hash(folder / FILES[part])
    entry["rests_on"] = {needed: part_hash(folder / FILES[needed]) for needed in PARTS[part].needs}
    entry["device"] = device.type
    entry["versions"] = {"lantern-bench": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}
    return entry


def _write_report(folder: Path, whole: dict[str, Any]) -> None:
    """Write the report with its parts in the order of the recipe."""
    path = folder / REPORT
    temporary = path.with_suffix(".part")
    ordered = {part: whole[part] for part in PARTS if part in whole}
    temporary.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
