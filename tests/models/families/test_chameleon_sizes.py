"""Chameleon's vocabulary, sizes and prompts, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.families.chameleon import Chameleon, Lumina
from lantern_bench.models.families.word_model import Vocabulary, read_tokenizer
from lantern_bench.models.networks.target import prompt_condition
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers import tiny_chameleon as tiny

ANOLE: Any = model_of("anole")
LUMINA: Any = model_of("lumina-mgpt")


def lumina(folder: Path, grid: tuple[int, int]) -> Lumina:
    return Lumina(
        "lumina", ModelSpec(about="Lumina-mGPT", config={}, vq={}, grid=grid), {"target": folder}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("chameleon") / "target")


def test_codes_are_found_by_name(folder: Path) -> None:
    codes = tiny.anole(folder).image_words()
    assert [tiny.vocabulary()[tiny.code_name(code)] for code in range(tiny.CODES)] == list(codes)
    assert list(codes) != sorted(codes)


def test_prompts_without_a_caption(folder: Path) -> None:
    numbers = tiny.vocabulary()
    names = ["<racm3:break>", "<reserved08802>", "<reserved08803>"]
    wanted = {
        tiny.anole(folder): [numbers["<s>"], numbers["<racm3:break>"]],
        lumina(folder, (4, 6)): [numbers[name] for name in names],
    }
    for model, null in wanted.items():
        assert model.unconditional(model.prompt_tokens("red")) == null
    text = LUMINA.wording().template.format(caption="a cat")
    assert text == "Generate an image of 768x768 according to the following prompt:\na cat"


def test_the_published_size_is_seven_billion() -> None:
    # The number of parameters of transformers' ChameleonForConditionalGeneration, its image encoder
    # left out.
    parameters = (
        32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 4 * 4096) + 2 * 65536 * 4096 + 4096
    )
    assert ANOLE.parameters == LUMINA.parameters == parameters
    assert (ANOLE.tokens, ANOLE.codes, LUMINA.tokens, LUMINA.codes) == (1024, 8192, 2352, 8192)
    assert (LUMINA.sizes.vocab_size, LUMINA.sizes.line_length, LUMINA.defaults["cfg_scale"]) == (
        8193,
        49,
        3.0,
    )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"<s>": 0}, "no image codes"),
        ({tiny.code_name(0): 4, tiny.code_name(2): 6}, "no image code 1, and others above it"),
    ],
)
def test_vocabulary_without_codes_is_refused(numbers: dict[str, int], message: str) -> None:
    anole = Chameleon("anole", ANOLE.spec)
    anole.vocabulary = Vocabulary(numbers, "a file", "a Chameleon model")
    with pytest.raises(UserError, match=message):
        anole.image_words()
    with pytest.raises(UserError, match="a file: the vocabulary has no <racm3:break>"):
        _ = anole.vocabulary["<racm3:break>"]


def test_odd_grids_are_refused_in_sized_prompts(folder: Path) -> None:
    with pytest.raises(
        UserError, match="grid 3x4: this model's pictures have a multiple of 2 of each"
    ):
        lumina(folder, (3, 4)).wording()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type: is llama"),
        ({"attention_bias": True}, "attention_bias: is True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: is"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0: must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1: must be a number above 0"),
    ],
)
def test_impossible_configs_are_refused(
    changes: dict[str, object], message: str, folder: Path
) -> None:
    anole = tiny.anole(folder)
    anole.config = tiny.config(**changes)
    with pytest.raises(UserError) as caught:
        _ = anole.sizes
    assert message in caught.value.message


def test_newer_config_keys_are_read() -> None:
    stated = {"rope_parameters": {"rope_theta": 500.0}, "swin_norm": True, "num_key_value_heads": 8}
    sizes = Chameleon(
        "anole", structs.replace(ANOLE.spec, config={**ANOLE.spec.config, **stated})
    ).sizes
    assert (sizes.rope_base, sizes.norm_after, sizes.kv_heads, sizes.dim) == (500.0, True, 8, 4096)


def test_captions_become_prompts(folder: Path) -> None:
    anole = tiny.anole(folder)
    names = ["<s>", "a", "red", "lantern", "<reserved08706>", "<racm3:break>"]
    assert anole.prompt_tokens("a red lantern") == [tiny.vocabulary()[name] for name in names]
    # "64x96" and ":" are no words of this tokenizer.
    wide = lumina(folder, (4, 6))
    text = "Generate an image of <unk> according to the following prompt <unk> red"
    names = [
        "<s>",
        *text.split(),
        "<reserved08706>",
        "<racm3:break>",
        "<reserved08802>",
        "<reserved08803>",
    ]
    assert wide.prompt_tokens("red") == [tiny.vocabulary()[name] for name in names]


def test_both_prompts_are_padded_on_the_left() -> None:
    condition = prompt_condition(
        [(prompt, [prompt[0], prompt[-1]]) for prompt in ([0, 9, 8, 7], [0, 9, 9, 9, 8, 7])]
    )
    assert condition.values.tolist() == [
        [[1, 1, 0, 9, 8, 7], [1, 1, 1, 1, 0, 7]],
        [[0, 9, 9, 9, 8, 7], [1, 1, 1, 1, 0, 7]],
    ]
    assert condition.valid.sum(-1).tolist() == [[4, 2], [6, 2]]
    assert bool((condition.valid.int().diff(dim=-1) >= 0).all())


def described(folder: Path) -> Any:
    """The model of a file that names the target's folder."""
    path = folder.parent / "model.yaml"
    path.write_text("family: anole\ngrid: [4, 4]\ntarget: {checkpoint: target}\n")
    return model_of(str(path))


def test_empty_and_long_captions_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anole = described(folder)
    with pytest.raises(UserError, match="is empty"):
        anole.check_prompt("  ")
    monkeypatch.setattr(Chameleon, "longest_prompt", 6)
    anole.check_prompt("a red lantern")
    with pytest.raises(UserError, match="its prompt has 7 tokens, and at most 6 are taken"):
        anole.check_prompt("a red lantern over")


def test_a_thousand_captions_parse_the_tokenizer_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_tokenizer.cache_clear()
    read = MagicMock(side_effect=Tokenizer.from_file)
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", read)
    anole = described(folder)
    for _ in range(1000):
        anole.check_prompt("a red lantern")
    read.assert_called_once()


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_target(tmp_path / "target")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        tiny.anole(folder).encode("a cat")
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        tiny.anole(folder).encode("a cat")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        tiny.anole(folder).image_words()


@pytest.mark.parametrize("family", ["anole", "lumina-mgpt", "emu3"])
def test_plans_and_captions_need_the_tokenizers_package(
    family: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(f"family: {family}\ngrid: [4, 4]\ntarget: {{checkpoint: {folder}}}\n")
    read_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = r"tokenizer\.json: reading it needs the package tokenizers, which is not installed"
    with pytest.raises(RefusedError, match=text) as planned:
        model_of(str(path))
    assert planned.value.advice == "Type `pip install -e '.[hf]'` in the clone."
    with pytest.raises(RefusedError, match=text):
        tiny.anole(folder).encode("a cat")


def test_invented_prompts_depend_on_words_alone() -> None:
    condition = LUMINA.random_prompts().condition
    red = condition(["a red lantern"])
    blue = condition(["a blue lantern"])
    assert red.values.equal(condition(["a red lantern"]).values)
    assert (red.values == blue.values).flatten().tolist().count(False) == 1
    assert red.values.max() < 65536


def test_listing_and_checking_need_no_torch() -> None:
    lines = [
        "import sys",
        "from lantern_bench.models.registry import model_of",
        "anole = model_of('anole')",
        "anole.codes",
        "anole.check_prompt('a cat')",
        "import lantern_bench.models.families.lanterns.family",
        "sys.exit('torch' in sys.modules)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    assert subprocess.run(command, check=False).returncode == 0
