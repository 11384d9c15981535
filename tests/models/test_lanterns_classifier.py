"""The attribute classifier: its size, its file, what counts as a right answer, and the gate of the bundled one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from experiments.train_lanterns.recipe import write_weights
from experiments.train_lanterns.tasks import held_out_scenes
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.lanterns import FIELDS, Attributes
from lantern_bench.models.lanterns.modules import AttributeClassifier, load_classifier, predict, prompt_accuracy


@pytest.fixture(scope="module")
def model() -> AttributeClassifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AttributeClassifier().eval()


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return torch.randint(0, 256, (7, 3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def test_sizes(model: AttributeClassifier, pictures: torch.Tensor) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    pixels = pictures.float() / 255
    assert model.features(pixels).shape == (7, 64)
    assert [tuple(logits.shape) for logits in model(pixels)] == [(7, len(values)) for values in FIELDS.values()]


def test_a_file_brings_the_same_answers_back(
    model: AttributeClassifier, pictures: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "features.safetensors"
    write_weights(model.state_dict(), path)
    loaded = load_classifier(path)
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.allclose(loaded.features(pictures / 255), model.features(pictures / 255), atol=2e-3)
    assert path.stat().st_size < 2.2 * sum(value.numel() for value in model.state_dict().values())


def test_missing_weights_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"features\.safetensors") as caught:
        load_classifier(tmp_path / "features.safetensors")
    assert "python -m experiments.train_lanterns --part features" in str(caught.value.advice)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not weights at all")
    with pytest.raises(UserError, match=r"other\.safetensors"):
        load_classifier(path)
    write_weights(torch.nn.Linear(2, 2).state_dict(), path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds the weights of another model"):
        load_classifier(path)


def test_right_means_all_five(model: AttributeClassifier, pictures: torch.Tensor) -> None:
    seen = [Attributes(*row) for row in predict(model, pictures).tolist()]
    assert prompt_accuracy(model, pictures, seen).tolist() == [True] * 7
    for column, name in enumerate(FIELDS):
        asked = list(seen)
        asked[column] = dataclasses.replace(
            seen[column], **{name: (getattr(seen[column], name) + 1) % len(FIELDS[name])}
        )
        assert prompt_accuracy(model, pictures, asked).tolist() == [row != column for row in range(7)]


def test_no_pictures(model: AttributeClassifier) -> None:
    nothing = torch.zeros((0, 3, 64, 64), dtype=torch.uint8)
    assert predict(model, nothing).shape == (0, 5)
    assert prompt_accuracy(model, nothing, []).tolist() == []


def test_the_shipped_classifier_meets_its_gate() -> None:
    """All five right on 97 % of held-out scenes; on 120 here, the full figures are in the training report."""
    pictures, attributes = held_out_scenes(120, seed=5)
    assert float(prompt_accuracy(load_classifier(), pictures, attributes).float().mean()) >= 0.97


def test_the_shipped_features_tell_worse_pictures() -> None:
    """Noise and blur that leave the attributes readable move the features, so that fidelity can see them."""
    pictures, _attributes = held_out_scenes(40, seed=6)
    pixels = pictures.float() / 255
    model = load_classifier()
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    clean, little, much = (model.features((pixels + strength * noise).clamp(0, 1)) for strength in (0, 0.05, 0.2))
    spread = clean.std(0).norm()
    assert 0.05 * spread < (little - clean).norm(dim=1).mean() < (much - clean).norm(dim=1).mean()
