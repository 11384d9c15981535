"""Training of the scorers: batches, a few steps of learning, and a folder that open_clip reads."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch

from lantern_bench.metrics.image_scorers import load_clip
from lantern_bench.models.families.lanterns.description import (
    ALL_ATTRIBUTES,
    HELD_OUT,
    TRAIN,
)
from lantern_bench.models.families.lanterns.modules import prompt_accuracy
from scripts.train_lanterns import part_tasks
from scripts.train_lanterns.part_tasks import ClipTask, FeaturesTask, Pool, save_clip, training_pool
from scripts.train_lanterns.scenes import blur, degrade, drop_detail, scene_set


@pytest.fixture(scope="module")
def pool() -> Pool:
    return training_pool(scene_set(TRAIN, 96, seed=11), None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pool_reconstructs_its_first_share() -> None:
    scenes = scene_set(TRAIN, 20, seed=11)
    pool = training_pool(scenes, lambda pictures: 255 - pictures, fraction=0.25)
    painted = torch.from_numpy(scenes.pixels).permute(0, 3, 1, 2)
    assert torch.equal(pool.pixels[:5], 255 - painted[:5])
    assert torch.equal(pool.pixels[5:], painted[5:])


def test_classifier_learns(pool: Pool) -> None:
    task = FeaturesTask(pool, batch=32)
    optimiser = torch.optim.AdamW(task.module.parameters(), lr=3e-3)
    draws = generator()
    losses = []
    for _ in range(15):
        loss, _ = task.loss(draws)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_evaluation_uses_held_out_scenes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_tasks, "_EVALUATED", 6)
    task = FeaturesTask(pool, through=lambda pictures: pictures)
    figures = task.evaluate()
    assert figures["accuracy_scenes"] == figures["accuracy_reconstructions"]
    pictures, attributes = part_tasks.held_out_scenes(6)
    assert figures["accuracy_scenes"] == float(
        prompt_accuracy(task.classifier, pictures, attributes).float().mean()
    )
    assert attributes == list(HELD_OUT[:6])


def test_clip_batch_has_no_caption_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels of a picture are the number of its caption, so that the batch can be read back."""
    attributes = [ALL_ATTRIBUTES[number] for number in (0, 1, 2, 250)] * 5
    numbers = [ALL_ATTRIBUTES.index(item) % 251 for item in attributes]
    pixels = torch.tensor(numbers, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 64, 64)
    task = ClipTask(Pool(pixels, torch.tensor([item.indices() for item in attributes])), batch=4)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    tokens_of = {tuple(row.tolist()): number for number, row in enumerate(task._tokens)}

    def spy(
        pictures: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen.append((pictures, tokens))
        return torch.eye(len(pictures)), torch.eye(len(pictures)), torch.tensor(10.0)

    task.clip.forward = spy  # type: ignore[method-assign]
    monkeypatch.setattr(part_tasks, "degrade", lambda pictures, _generator: pictures)
    task.loss(generator())
    ((pictures, tokens),) = seen
    captions = [tokens_of[tuple(row.tolist())] for row in tokens]
    assert sorted(captions) == [0, 1, 2, 250]
    assert ((pictures[:, 0, 0, 0] + 1) / 2 * 255).round().long().tolist() == captions


def test_clip_is_small_and_open_clip_loads_its_folder(pool: Pool, tmp_path: Path) -> None:
    task = ClipTask(pool, batch=16)
    assert sum(parameter.numel() for parameter in task.module.parameters()) <= 5_000_000
    loss, parts = task.loss(generator())
    loss.backward()
    assert torch.isfinite(loss)
    assert 0 <= float(parts["top1"]) <= 1
    save_clip(task.clip, tmp_path / "clip")
    loaded, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'clip'}")
    pixels = pool.pixels[:4].float() / 127.5 - 1
    numbers = part_tasks.caption_numbers(pool.attributes[:4])
    attributes = [ALL_ATTRIBUTES[number] for number in numbers.tolist()]
    task.clip.eval()
    texts = task.clip.encode_text(part_tasks._caption_tokens(attributes))
    expected = torch.cosine_similarity(task.clip.encode_image(pixels), texts, dim=1).tolist()
    score = load_clip(weights=tmp_path / "clip")
    assert score(pool.pixels[:4], [item.caption() for item in attributes]) == pytest.approx(
        expected, abs=5e-3
    )
    rows = loaded.token_embedding.weight.detach().abs().sum(1)
    assert 20 < int((rows > 0).sum()) < 60


def test_initial_weights_are_reproducible_by_seed(pool: Pool) -> None:
    state = torch.get_rng_state()
    first, second = (ClipTask(pool, batch=8, seed=3).module.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(
        FeaturesTask(pool, seed=1).classifier.project.weight,
        FeaturesTask(pool, seed=2).classifier.project.weight,
    )


def test_logit_scale_stays_bounded(pool: Pool) -> None:
    task = ClipTask(pool, batch=8)
    with torch.no_grad():
        task.clip.logit_scale.fill_(9.0)
    task.after_step(1, generator())
    assert float(task.clip.logit_scale.detach().exp()) == pytest.approx(100, rel=1e-4)


def test_degrade_is_reproducible_and_stays_in_range(pool: Pool) -> None:
    pixels = pool.pixels[:40].float() / 255
    first, second = (degrade(pixels, generator(4)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == pixels.shape
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    changed = (first - pixels).abs().amax((1, 2, 3)) > 0
    assert 20 < int(changed.sum()) <= 40
    assert not torch.equal(first, degrade(pixels, generator(5)))


def test_blur_and_drop_detail(pool: Pool) -> None:
    flat = torch.full((1, 3, 16, 16), 0.3)
    assert torch.allclose(blur(flat), flat)
    pixels = pool.pixels[:4].float() / 255
    fine, coarse = (drop_detail(pixels, torch.full((4, 1, 1, 1), step)) for step in (1e-4, 0.2))
    assert torch.allclose(fine, pixels, atol=1e-3)
    assert float((coarse - pixels).abs().mean()) > 10 * float((fine - pixels).abs().mean())
