"""Training of the tokenizer: dead codes are revived, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.train_lanterns import tasks
from experiments.train_lanterns.scenes import SceneSet, scene_set
from experiments.train_lanterns.tasks import TokenizerTask
from lantern_bench.models.lanterns.captions import TRAIN
from lantern_bench.models.vq import VQConfig, VQModel
from lantern_bench.training.loop import TrainReport, train
from lantern_bench.training.settings import TrainSettings

CONFIG = VQConfig(codes=1024, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1)
SETTINGS = TrainSettings(steps=8, log_every=1, checkpoint_every=5, autocast=False)


@pytest.fixture(scope="module")
def scenes() -> SceneSet:
    return scene_set(TRAIN, 8, seed=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_BATCH", 2)
    monkeypatch.setattr(tasks, "_REVIVE_EVERY", 2)
    # With this decay a code that a few batches leave out counts as dead.
    monkeypatch.setattr(tasks, "_USE_DECAY", 0.3)


def _task(scenes: SceneSet) -> TokenizerTask:
    torch.manual_seed(0)  # layers draw from the global stream
    return TokenizerTask(VQModel(CONFIG), scenes, scenes)


def _trained(scenes: SceneSet, settings: TrainSettings) -> tuple[TokenizerTask, TrainReport]:
    task = _task(scenes)
    return task, train(task, settings, torch.device("cpu"))


def test_dead_codes_are_revived_from_the_batch(scenes: SceneSet) -> None:
    task = _task(scenes)
    generator = torch.Generator().manual_seed(0)
    before = task.model.quantize.embedding.weight.detach().clone()
    task.loss(generator)
    task._use[:10] = 0.0
    task.after_step(2, generator)
    changed = (task.model.quantize.embedding.weight != before).any(dim=1)
    assert changed[:10].all() and task.state_dict()["use"][:10].eq(1.0).all()


def test_resumed_training_revives_the_same_codes(scenes: SceneSet, tmp_path: Path) -> None:
    whole, course = _trained(scenes, SETTINGS)
    kept = SETTINGS.model_copy(update={"checkpoint": tmp_path / "tokenizer.ckpt"})
    _trained(scenes, kept)
    resumed, again = _trained(scenes, kept)
    assert again.losses == course.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_forgotten_use_counts_change_the_training(
    scenes: SceneSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would not notice forgotten counts if nothing were revived after the checkpoint."""
    _, course = _trained(scenes, SETTINGS)
    kept = SETTINGS.model_copy(update={"checkpoint": tmp_path / "tokenizer.ckpt"})
    _trained(scenes, kept)
    monkeypatch.setattr(TokenizerTask, "load_state_dict", lambda _self, _state: None)
    assert _trained(scenes, kept)[1].losses != course.losses
