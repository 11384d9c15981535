"""The grammar of the captions: how many there are, which are held out, which words exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lantern_bench.errors import UserError
from lantern_bench.models.lanterns import (
    ALL_ATTRIBUTES,
    FIELDS,
    HELD_OUT,
    MAX_WORDS,
    TRAIN,
    VOCABULARY,
    Attributes,
    attributes_of,
    words,
)

EXAMPLE = "two round red lanterns over a lake at dusk"
FIRST_HELD_OUT = [
    "three tall red lanterns over a meadow at dusk",
    "two square yellow lanterns over the snow in a storm",
]


def test_a_tenth_of_the_1008_captions_is_held_out() -> None:
    captions = {item.caption() for item in ALL_ATTRIBUTES}
    assert len(ALL_ATTRIBUTES) == len(captions) == 1008 == 3 * 3 * 7 * 4 * 4
    assert EXAMPLE in captions and "one tall white lantern over the snow in a storm" in captions
    assert len(HELD_OUT) == 100 and len(TRAIN) == 908
    assert not set(HELD_OUT) & set(TRAIN)
    assert set(HELD_OUT) | set(TRAIN) == set(ALL_ATTRIBUTES)
    for column, values in enumerate(FIELDS.values()):
        indices = set(range(len(values)))
        assert {item.indices()[column] for item in HELD_OUT} == {item.indices()[column] for item in TRAIN} == indices


def test_held_out_split_is_fixed() -> None:
    """The bundled weights were trained on it: another split would hold out captions that were trained."""
    assert [item.caption() for item in HELD_OUT[:2]] == FIRST_HELD_OUT


def test_captions_fit_and_use_every_word() -> None:
    numbers = [words(item.caption()) for item in ALL_ATTRIBUTES]
    assert max(map(len, numbers)) <= MAX_WORDS
    # 0 is padding, and no caption contains it.
    assert {number for row in numbers for number in row} == set(range(1, len(VOCABULARY)))
    assert " ".join(VOCABULARY[number] for number in words(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize("written", [EXAMPLE.upper(), EXAMPLE + ".", "two round, red lanterns over a lake at dusk"])
def test_case_and_punctuation_are_ignored(written: str) -> None:
    assert words(written) == words(EXAMPLE)


def test_unknown_word_is_named_with_the_known_words() -> None:
    with pytest.raises(UserError) as caught:
        words("two round pink lanterns over a lake at dusk")
    assert caught.value.exit_code == 2
    assert "'pink'" in caught.value.message
    advice = (caught.value.advice or "").replace(":", " ").replace(";", " ").split()
    assert set(VOCABULARY[1:]) <= set(advice)
    assert "<pad>" not in advice
    with pytest.raises(UserError, match=r"did you mean purple\?"):
        words("one round purpel lantern over a lake at dusk")


@pytest.mark.parametrize("caption", ["", " . ", " ".join(["red"] * (MAX_WORDS + 1))])
def test_too_few_and_too_many_words_are_refused(caption: str) -> None:
    with pytest.raises(UserError, match=f"1 to {MAX_WORDS}"):
        words(caption)


def test_attributes_are_parsed_from_captions() -> None:
    assert attributes_of([item.caption() for item in ALL_ATTRIBUTES]) == list(ALL_ATTRIBUTES)
    assert attributes_of([EXAMPLE.capitalize() + ".", "red lake", "lanterns round two"]) == [
        Attributes(1, 0, 0, 0, 0),
        None,
        None,
    ]


def test_captions_need_no_torch() -> None:
    code = "import sys, lantern_bench.models.lanterns; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
