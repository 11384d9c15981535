"""Chameleon's vocabulary, sizes and prompts, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.chameleon import (
    FIRST_WORD,
    PUBLISHED,
    STYLES,
    ChameleonVocabulary,
    chameleon_vocabulary,
    published_vocabulary,
    read_config,
)
from lantern_bench.models.prompt_tokens import PromptBuilder, TextTokenizer, invented_prompts
from lantern_bench.models.target import prompt_condition
from tests.models import tiny_chameleon as tiny

ANOLE, LUMINA = STYLES["anole-7b"], STYLES["lumina-mgpt-7b-768"]


def wrong(key: str, text: str) -> UserError:
    return UserError(f"{key}: {text}")


def test_codes_are_found_by_name() -> None:
    codes = ChameleonVocabulary(tiny.vocabulary(), "tiny").codes
    assert [tiny.vocabulary()[tiny.code_name(code)] for code in range(tiny.CODES)] == list(codes)
    assert list(codes) != sorted(codes)


def test_published_token_numbers() -> None:
    vocabulary = published_vocabulary()
    assert vocabulary.codes == tuple(range(4, 8196))
    assert vocabulary.token_ids(ANOLE) == vocabulary.codes
    assert vocabulary.token_ids(LUMINA) == (*vocabulary.codes, 8803)
    assert ANOLE.around([9000, 9001], vocabulary) == [0, 9000, 9001, 8710, 8197]
    assert LUMINA.around([9000], vocabulary) == [0, 9000, 8710, 8197, 8828, 8828]
    assert ANOLE.without_caption([0, 9000, 9001, 8710, 8197]) == [0, 8197]
    assert LUMINA.without_caption([0, 9000, 8710, 8197, 8828, 8828]) == [8197, 8828, 8828]
    assert LUMINA.text("a cat") == "Generate an image of 768x768 according to the following prompt:\na cat"


def test_the_published_size_is_seven_billion() -> None:
    # The number of parameters of transformers' ChameleonForConditionalGeneration, its image encoder left out.
    assert PUBLISHED.parameters == 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 4 * 4096) + 2 * 65536 * 4096 + 4096
    config = PUBLISHED.transformer(LUMINA, published_vocabulary().token_ids(LUMINA))
    assert (config.image_tokens, config.vocab_size, config.line_length) == (2352, 8193, 49)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ({"<s>": 0}, "no image codes"),
        ({tiny.code_name(0): 4, tiny.code_name(2): 6}, "no image code 1, and others above it"),
    ],
)
def test_vocabulary_without_codes_is_refused(ids: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        _ = ChameleonVocabulary(ids, "a file").codes


def test_missing_token_is_named() -> None:
    with pytest.raises(UserError, match="a file: the vocabulary has no <racm3:break>"):
        ANOLE.around([], ChameleonVocabulary({"<s>": 0, "<reserved08706>": 1}, "a file"))


def test_odd_grids_are_refused_in_sized_prompts() -> None:
    with pytest.raises(UserError, match="grid 3x4"):
        replace(LUMINA, grid=(3, 4)).around([], published_vocabulary())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "llama"}, "model_type: is llama"),
        ({"hidden_act": "gelu"}, "hidden_act: is gelu"),
        ({"attention_bias": True}, "attention_bias: is True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: is"),
        ({"hidden_size": "32"}, "hidden_size: 32: must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0: must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1: must be a number above 0"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3: does not divide the width 32"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(tiny.config(**changes), wrong)
    assert told in caught.value.message


def test_newer_config_keys_are_read() -> None:
    size = read_config({"rope_parameters": {"rope_theta": 500.0}, "swin_norm": True, "num_key_value_heads": 8}, wrong)
    assert (size.rope_base, size.norm_after, size.kv_heads, size.dim) == (500.0, True, 8, 4096)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_captions_become_prompts(tokenizer: Path) -> None:
    vocabulary = chameleon_vocabulary({}, tokenizer, "config.json")
    words = PromptBuilder(replace(ANOLE, grid=(4, 4)), vocabulary, TextTokenizer(tokenizer)).words("a red lantern")
    names = ["<s>", "a", "red", "lantern", "<reserved08706>", "<racm3:break>"]
    assert words == [tiny.vocabulary()[name] for name in names]
    # "768x768" and ":" are no words of this tokenizer.
    words = PromptBuilder(replace(LUMINA, grid=(4, 6)), vocabulary, TextTokenizer(tokenizer)).words("red")
    text = "Generate an image of <unk> according to the following prompt <unk> red"
    names = ["<s>", *text.split(), "<reserved08706>", "<racm3:break>", "<reserved08802>", "<reserved08803>"]
    assert words == [tiny.vocabulary()[name] for name in names]


def test_both_prompts_are_padded_on_the_left() -> None:
    condition = prompt_condition([(one, ANOLE.without_caption(one)) for one in ([0, 9, 8, 7], [0, 9, 9, 9, 8, 7])])
    assert condition.values.tolist() == [
        [[1, 1, 0, 9, 8, 7], [1, 1, 1, 1, 0, 7]],
        [[0, 9, 9, 9, 8, 7], [1, 1, 1, 1, 0, 7]],
    ]
    assert condition.valid.sum(-1).tolist() == [[4, 2], [6, 2]]
    assert bool((condition.valid.int().diff(dim=-1) >= 0).all())


def test_empty_and_long_captions_are_refused(tokenizer: Path) -> None:
    vocabulary = chameleon_vocabulary({}, tokenizer, "config.json")
    prompts = PromptBuilder(replace(ANOLE, positions=6), vocabulary, TextTokenizer(tokenizer))
    with pytest.raises(UserError, match="is empty"):
        prompts.words("  ")
    assert len(prompts.words("a red lantern")) == 6
    with pytest.raises(UserError, match="its prompt has 7 tokens, and at most 6 are taken"):
        prompts.words("a red lantern over")


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        PromptBuilder(ANOLE, published_vocabulary(), TextTokenizer(path)).words("a cat")
    path.write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        PromptBuilder(ANOLE, published_vocabulary(), TextTokenizer(path)).words("a cat")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        chameleon_vocabulary({}, path, "config.json")


def test_captions_need_the_tokenizers_package(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RefusedError, match="captions need the package tokenizers"):
        PromptBuilder(ANOLE, published_vocabulary(), TextTokenizer(tokenizer)).words("a cat")


def test_invented_prompts_depend_on_words_alone() -> None:
    prompts = invented_prompts(LUMINA, published_vocabulary(), FIRST_WORD, PUBLISHED.words - 1)
    one, two = prompts(["a red lantern"]), prompts(["a blue lantern"])
    assert one.values.equal(prompts(["a red lantern"]).values)
    same = (one.values == two.values).flatten().tolist()
    assert same.count(False) == 1
    assert one.values.max() < PUBLISHED.words


def test_listing_and_checking_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from lantern_bench.models.registry import model_of\n"
        "assert model_of('anole').codes == 8192\n"
        "model_of('anole').check_prompt('a cat')\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
