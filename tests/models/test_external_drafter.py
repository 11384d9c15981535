"""Model files that give a model another drafter; images encoded to tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lantern_bench.models.checkpoints.drafter_files import load_drafter
from lantern_bench.models.loaded_model import VQPixels, transformer_of
from lantern_bench.models.networks.target import with_line_ends, without_line_ends
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from tests.helpers import golden_models, tiny_chameleon
from tests.helpers.golden_models import GOLDEN
from tests.helpers.tiny_model import TinyModel

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: lanterns\n", "drafter: missing; give drafter: {dir: FOLDER}"),
        ("model: lanterns\ndrafter: {dir: none}\n", "drafter.dir none: no such file or folder"),
        ("model: lanterns\ndrafter: {dir: .}\nfamily: lanterns\n", "family: unknown key"),
        ("model: m.yaml\ndrafter: {dir: .}\n", "model m.yaml: is this file itself"),
        ("model: 3\ndrafter: {dir: .}\n", "model 3: must be text"),
        (
            "model: lanterns\ndrafter: {dir: .}\ndefaults: {trees: a}\n",
            "defaults.trees: unknown value",
        ),
    ],
)
def test_problem_in_an_external_drafter_file_names_its_key(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        model_of(str(path))
    assert message in caught.value.message
    assert "m.yaml" in caught.value.message


def test_external_drafter_file_overrides_the_model_defaults(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "model: lanterns\ndrafter: {dir: .}\ndefaults: {cfg_scale: 3}\ndescription: mine\n"
    )
    card = model_of(str(path))
    known = model_of("lanterns")
    assert (card.name, card.description, card.family) == (str(path), "mine", "lanterns")
    assert card.defaults == dict(known.defaults) | {"cfg_scale": 3.0}
    assert card.files()["drafter"] == tmp_path
    assert card.files()["target"] == known.files()["target"]
    assert card.prompt_sets == known.prompt_sets
    with pytest.raises(UserError):
        card.check_prompt("a submarine")


def test_external_drafter_equals_the_same_drafter_in_a_model_file(tmp_path: Path) -> None:
    whole = golden_models.end_to_end(tmp_path / "whole")
    (tmp_path / "own").mkdir()
    path = golden_models.write_model(
        tmp_path / "own", model=whole, drafter={"dir": GOLDEN / "end_to_end"}
    )
    inside = golden_models.load(whole)
    outside = golden_models.load(path)
    assert outside.name == str(path)
    assert not outside.drafter.mask_padding
    for name, tensor in inside.drafter.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, outside.drafter.state_dict()[name])  # type: ignore[union-attr]
    assert inside.weights == outside.weights


def test_drafter_of_another_family_is_refused(tmp_path: Path) -> None:
    llamagen = golden_models.load(golden_models.recorded_target(tmp_path / "t2i", "t2i"))
    folder = tiny_chameleon.write_drafter(tmp_path / "drafter")
    with pytest.raises(UserError, match="hidden_size: is 32"):
        load_drafter(folder, transformer_of(llamagen))
    with pytest.raises(UserError, match="EAGLE drafters need the features"):
        transformer_of(TinyModel().load(CPU, torch.float32))


def test_images_are_encoded_to_tokens_with_line_ends(tmp_path: Path) -> None:
    path = tiny_chameleon.write_model_file(tmp_path / "lumina", "lumina-mgpt-7b-768", (4, 4))
    model = model_of(str(path)).load(CPU, torch.float32)
    reader = model.pixels
    assert isinstance(reader, VQPixels)
    assert reader.size == (8, 8)
    pictures = torch.randint(
        256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    tokens = reader.tokens(pictures)
    assert tokens.shape == (2, 20)
    assert (tokens[:, 4::5] == model.target.vocab_size - 1).all()
    codes = without_line_ends(tokens, (4, 4))
    assert torch.equal(with_line_ends(codes, (4, 4), model.target.vocab_size - 1), tokens)
    assert int(codes.max()) < 64


def test_encoding_a_decoded_image_returns_nearly_the_same_image() -> None:
    model = model_of("lanterns").load(CPU, torch.float32)
    reader = model.pixels
    assert isinstance(reader, VQPixels)
    assert reader.size == (64, 64)
    tokens = torch.randint(2048, (2, 256), generator=torch.Generator().manual_seed(1))
    drawn = reader.pixels(tokens)  # type: ignore[attr-defined]
    again = reader.pixels(reader.tokens(drawn))  # type: ignore[attr-defined]
    assert (again.float() - drawn.float()).abs().mean() < 12
