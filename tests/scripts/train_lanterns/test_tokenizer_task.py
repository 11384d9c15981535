"""Training of the tokenizer: dead codes are revived, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lantern_bench.models.families.lanterns.description import TRAIN
from lantern_bench.models.networks.vq import VQConfig, VQModel
from lantern_bench.training.recipe import TrainSettings
from lantern_bench.training.trainer import TrainReport, train
from scripts.train_lanterns import part_tasks
from scripts.train_lanterns.part_tasks import TokenizerTask
from scripts.train_lanterns.scenes import SceneSet, scene_set

CONFIG = VQConfig(
    codes=1024, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1
)
SETTINGS = TrainSettings(steps=7, log_every=1, checkpoint_every=4, autocast=False)


@pytest.fixture(scope="module")
def scenes() -> SceneSet:
    return scene_set(TRAIN, 8, seed=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_tasks, "_BATCH", 2)
    monkeypatch.setattr(part_tasks, "_REVIVE_EVERY", 2)
    # With this decay a code that a few batches leave out counts as dead.
    monkeypatch.setattr(part_tasks, "_USE_DECAY", 0.3)


def tokenizer_task(scenes: SceneSet) -> TokenizerTask:
    torch.manual_seed(0)  # layers draw from the global stream
    return TokenizerTask(VQModel(CONFIG), scenes, scenes)


def trained(
    scenes: SceneSet, settings: TrainSettings = SETTINGS
) -> tuple[TokenizerTask, TrainReport]:
    task = tokenizer_task(scenes)
    return task, train(task, settings, torch.device("cpu"))


def test_dead_codes_are_revived_from_the_batch(scenes: SceneSet) -> None:
    task = tokenizer_task(scenes)
    generator = torch.Generator().manual_seed(0)
    before = task.model.quantize.embedding.weight.detach().clone()
    task.loss(generator)
    task._use[:10] = 0.0
    task.after_step(2, generator)
    changed = (task.model.quantize.embedding.weight != before).any(dim=1)
    assert changed[:10].all()
    assert task.state_dict()["use"][:10].eq(1.0).all()


def test_resumed_training_revives_the_same_codes(
    scenes: SceneSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten counts change the training, so codes are revived after the checkpoint."""
    task, report = trained(scenes)
    with_checkpoint = SETTINGS.model_copy(update={"checkpoint": tmp_path / "tokenizer.ckpt"})
    trained(scenes, with_checkpoint)
    resumed, resumed_report = trained(scenes, with_checkpoint)
    assert resumed_report.losses == report.losses
    for name, value in task.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    monkeypatch.setattr(TokenizerTask, "load_state_dict", lambda _self, _state: None)
    assert trained(scenes, with_checkpoint)[1].losses != report.losses
