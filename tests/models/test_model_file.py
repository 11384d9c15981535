"""Model files: allowed keys, errors with lines, and how `--model` finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_bench.models.model_file import ModelFile, read_model_file
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.utils.errors import UserError

WHOLE = """
name: mine
family: llamagen-c2i
target:
  checkpoint: weights/target.pt
  config: {dim: 8, n_layer: 1, n_head: 2, num_classes: 7, vocab_size: 32}
tokenizer: {checkpoint: weights/vq.pt, config: {codebook_size: 32}}
drafter: {dir: drafter}
grid: [4, 6]
defaults: {cfg_scale: 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "drafter").mkdir()
    for name in ("target.pt", "vq.pt"):
        (tmp_path / "weights" / name).touch()
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "model.yaml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    file = read_model_file(write(folder, WHOLE))
    assert isinstance(file, ModelFile)
    assert file.name == "mine"
    assert file.target.path == folder / "weights" / "target.pt"
    assert file.tokenizer is not None
    assert file.tokenizer.config == {"codebook_size": 32}
    assert file.drafter is not None
    assert file.drafter.path == folder / "drafter"
    assert file.grid == (4, 6)
    assert file.text_encoder is None


def test_card_of_model_file_opens_no_checkpoint(folder: Path) -> None:
    path = write(folder, WHOLE)  # its checkpoints are empty files
    card = model_of(str(path))
    assert (card.family, card.tokens, card.codes) == ("llamagen-c2i", 24, 32)
    assert card.defaults["cfg_scale"] == 3
    assert defaults_of([str(path)])[str(path)] == card.defaults
    model_of(str(path)).check_prompt("class 6")
    with pytest.raises(UserError, match="there are 7 classes"):
        model_of(str(path)).check_prompt("7")


def test_error_lists_every_problem_with_its_line(folder: Path) -> None:
    text = """family: llamagen-c2i
target: {checkpoint: weights/none.pt, layout: offical, conifg: {}}
tokeniser: {checkpoint: weights/vq.pt}
drafter: {dir: weights/vq.pt}
grid: [4]
defaults: {cfg_scale: -1, tre: small-7}
"""
    with pytest.raises(UserError) as caught:
        read_model_file(write(folder, text))
    message = caught.value.message
    assert message.startswith(f"{folder / 'model.yaml'}: 8 problems")
    for words in (
        "line 2: target.checkpoint weights/none.pt: no such file",
        "line 2: target.layout offical: must be one of official, hf; did you mean official?",
        "line 2: target.conifg: unknown key; did you mean config?",
        "line 3: tokeniser: unknown key; did you mean tokenizer?",
        "line 4: drafter.dir weights/vq.pt: must be an existing folder",
        "line 5: grid [4]: must be [rows, columns]",
        "line 6: defaults.cfg_scale -1: must be a number of at least 0",
        "line 6: defaults.tre: unknown value; did you mean tree?",
    ):
        assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("family: llamagen-c2i", "target: missing"),
        ("target: {checkpoint: weights/target.pt}", "family: missing"),
        (
            "family: lamagen\ntarget: {checkpoint: weights/target.pt}",
            "lamagen: unknown family; did you mean llamagen",
        ),
        (
            "family: llamagen-c2i\ntarget: weights/target.pt",
            "target weights/target.pt: must be a mapping",
        ),
        ("family: llamagen-c2i\ntarget: {checkpoint: 3}", "target.checkpoint 3: must be a path"),
        ("family: [", "not valid YAML"),
        ("", "the file is empty"),
        (WHOLE + "grid: [4, 6]", "line 11: grid: is written twice"),
        (
            "family: llamagen-c2i\ntarget: {checkpoint: weights/target.pt}\nname: 3",
            "name 3: must be text",
        ),
        (
            WHOLE + "neighbours: {table: drafter}",
            "neighbours.table drafter: must be an existing file",
        ),
        (
            WHOLE.replace("n_head: 2", "n_head: two"),
            "target.config.n_head: two: must be a whole number",
        ),
        (
            WHOLE.replace("n_head: 2", "n_haed: 2"),
            "target.config.n_haed: unknown; did you mean n_head?",
        ),
        (
            WHOLE.replace("n_head: 2", "n_heads: 2"),
            "target.config.n_heads: unknown; did you mean n_head?",
        ),
        (
            WHOLE.replace("n_head: 2, ", ""),
            "target.config.num_attention_heads: missing: no checkpoint states it",
        ),
    ],
)
def test_invalid_model_file_is_refused(text: str, words: str, folder: Path) -> None:
    path = write(folder, text)
    with pytest.raises(UserError) as caught:
        model_of(str(path))
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_config_may_be_a_json_file(folder: Path) -> None:
    (folder / "sizes.json").write_text('{"num_classes": 3}')
    path = write(
        folder,
        "family: llamagen-c2i-B\ntarget: {checkpoint: weights/target.pt, config: sizes.json}\n",
    )
    with pytest.raises(UserError, match="there are 3 classes"):
        model_of(str(path)).check_prompt("3")
    (folder / "sizes.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        model_of(str(path))


def test_missing_file_and_misspelt_names_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--model nothing\.yaml: no such file"):
        model_of("nothing.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match="is a folder, not a file"):
        model_of(str(tmp_path / "folder.yaml"))
    with pytest.raises(UserError, match="did you mean llamagen-t2i-stage"):
        model_of("llamagen-t2i-stage")
    assert model_of("llamagen-c2i-XL").name == "llamagen-c2i-XL-384"
    assert model_of("llamagen-c2i-B").name == "llamagen-c2i-B-256"
