"""Prompt files, published sets in their authors' formats, subsets, and every error in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lantern_bench.config.settings import Overrides
from lantern_bench.prompts.prompt import Prompt, class_number, class_prompt
from lantern_bench.prompts.sets import describe_prompts, load_prompts
from lantern_bench.sweeps.request import prepare
from lantern_bench.utils.errors import UserError
from tests.helpers.tiny_model import PROMPTS


class Anything:
    """A model that takes every prompt but one with the word bad."""

    prompt_sets: ClassVar = {"held-out": PROMPTS}

    def check_prompt(self, text):
        if "bad" in text:
            raise UserError(f"{text!r} is bad", "Be good.")


def load(source):
    return load_prompts(str(source), Anything())


def texts(source):
    return [prompt.text for prompt in load(source)]


ANNOTATIONS = [
    (391895, 1, "A man with a red helmet"),
    (522418, 2, "A woman cuts cake."),
    (391895, 3, "A man with a red helmet on a small moped on a dirt road. "),
    (522418, 4, "A woman eats it!! "),
    (391895, 5, "Man riding a motor bike on a dirt road on the country!!!!"),
    (184613, 6, "\nTwo cows"),
]


@pytest.fixture
def coco(tmp_path):
    rows = [
        {"image_id": image, "id": number, "caption": text} for image, number, text in ANNOTATIONS
    ]
    path = tmp_path / "captions_val2017.json"
    path.write_text(json.dumps({"info": {}, "images": [{"id": 184613}], "annotations": rows}))
    return path


def test_coco_takes_the_longest_caption_of_each_image(coco):
    # Both of the first image's long captions have 57 characters with their spaces: the earlier one
    # stays.
    assert len(ANNOTATIONS[2][2]) == len(ANNOTATIONS[4][2]) == 57
    prompts = load(f"coco:{coco}")
    assert [prompt.text for prompt in prompts] == [
        "A man with a red helmet on a small moped on a dirt road.",
        "A woman cuts cake.",
        "Two cows",
    ]
    assert [prompt.source for prompt in prompts] == ["coco:391895", "coco:522418", "coco:184613"]
    assert texts(f"coco-first:{coco}") == [
        "A man with a red helmet",
        "A woman cuts cake.",
        "Two cows",
    ]


def test_text_may_look_like_other_types(tmp_path):
    path = tmp_path / "a.txt"
    lines = [
        "[1] a red lantern",
        "{red|blue} lantern",
        "<lantern> [2]",
        "a prompt, a caption",
        "[]x",
    ]
    for count in range(len(lines)):
        path.write_text("\n".join(lines[count:]))
        assert texts(path) == lines[count:]


def test_parti_prompts(tmp_path):
    path = tmp_path / "PartiPrompts.tsv"
    path.write_text(
        "Prompt\tCategory\tChallenge\tNote\n"
        "bond\tAbstract\tBasic\t\n"
        '"G I G G L E" painted on a wall\tWorld\tBasic\tx\n'
        '"never closed\tWorld\tBasic\t\n'
        '"in quotes"\tWorld\n'
    )
    prompts = load(f"parti:{path}")
    assert [(prompt.text, prompt.source) for prompt in prompts] == [
        ("bond", "parti:2"),
        ('"G I G G L E" painted on a wall', "parti:3"),
        ('"never closed', "parti:4"),
        ('"in quotes"', "parti:5"),
    ]
    assert texts(path) == [prompt.text for prompt in prompts]


def test_imagenet_classes_with_and_without_names(tmp_path):
    assert texts("imagenet")[207] == "class 207"
    assert len(load("imagenet")) == 1000
    names = [f"name {number}" for number in range(1000)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "list.json").write_text(json.dumps(names))
    (tmp_path / "index.json").write_text(
        json.dumps({str(n): [f"n{n:08}", name] for n, name in enumerate(names)})
    )
    for file in ("names.txt", "list.json", "index.json"):
        prompts = load(f"imagenet:{tmp_path / file}")
        assert (prompts[207].text, prompts[207].source) == ("class 207: name 207", "imagenet:207")
        assert [class_number(prompt.text, 1000) for prompt in prompts] == list(range(1000))


@pytest.mark.parametrize(
    "text", ["207", "class 207", "Class 207: golden retriever", " class 207 : a: b"]
)
def test_a_class_is_read_from_its_prompt(text):
    assert class_number(text, 1000) == 207
    assert class_number(class_prompt(207, "x"), 208) == 207


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("golden", "is not a class"), ("class -1", "is not a class"), ("1000", "1000 c")],
)
def test_wrong_class_prompts_are_refused(text, wrong):
    with pytest.raises(UserError, match=wrong):
        class_number(text, 1000)


def test_prompt_parts_are_deterministic_and_nested(tmp_path):
    many = [f"prompt {number}" for number in range(200)]
    path = tmp_path / "many.txt"
    path.write_text("\n".join(many))
    ten = texts(f"{path}#10")
    fifty = texts(f"{path}#50")
    assert len(ten) == 10
    assert len(fifty) == 50
    assert set(ten) < set(fifty)
    assert ten == [text for text in many if text in ten]
    assert ten != many[:10]
    path.write_text("\n".join(reversed(many)))
    assert set(texts(f"{path}#10")) == set(ten)
    assert texts(f"{path}#5-8") == many[::-1][5:8]
    assert texts("held-out#2") == [text for text in PROMPTS if text in texts("held-out#2")]
    with pytest.raises(UserError, match="there are 200 prompts"):
        texts(f"{path}#201")
    with pytest.raises(UserError, match="there are 200 prompts"):
        texts(f"{path}#8-8")


def test_prompt_equality_ignores_the_source():
    assert Prompt("a", "coco:1") == Prompt("a", "coco:2")
    assert len({Prompt("a", "x"), Prompt("a")}) == 1


def test_describe_prompts_of_the_manifest(coco):
    source = f"coco:{coco}#2"
    facts = describe_prompts(source, Anything(), load(source))
    assert facts["set"] == source
    assert facts["prompts"] == 2
    assert len(facts["file_sha256"]) == 64
    assert len(facts["ids_sha256"]) == 64
    assert describe_prompts("held-out", Anything(), load("held-out"))["file_sha256"] is None
    other = describe_prompts(f"coco:{coco}", Anything(), load(f"coco:{coco}"))
    assert other["ids_sha256"] != facts["ids_sha256"]
    assert other["file_sha256"] == facts["file_sha256"]


@pytest.mark.parametrize("column", ["prompt", "caption"])
def test_files_of_all_kinds(tmp_path, column):
    wanted = ["one red lantern", "two blue lanterns"]
    (tmp_path / "a.txt").write_text(
        "\ufeffone red lantern\r\n\n  two blue lanterns  ", encoding="utf-8"
    )
    (tmp_path / "a.csv").write_text(f"id,{column}\n1,one red lantern\n,\n3,two blue lanterns\n")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({column: text}) + "\n\n" for text in wanted)
    )
    (tmp_path / "a.json").write_text(json.dumps([wanted[0] + " ", {column: wanted[1]}]))
    assert [texts(tmp_path / name) for name in ("a.txt", "a.csv", "a.jsonl", "a.json")] == [
        wanted
    ] * 4
    assert load(tmp_path / "a.json")[1].source == "a.json:2"


@pytest.mark.parametrize(
    ("source", "content", "wrong"),
    [
        ("a.txt", b"\n \n", "contains no prompt"),
        ("a.jsonl", b"\x1f\x8b\x08\0\0\0", "is compressed, not text"),
        ("a.csv", b"PK\3\4\x14\0", "is a ZIP archive, as .xlsx and .docx files are, not text"),
        ("a.txt", b"PAR1\x15\x04", "is a Parquet file, not text"),
        ("a.txt", b"%PDF-1.7\n", "is a PDF, not text"),
        ("a.txt", rb"{\rtf1\ansi red lantern}", "is RTF, not text"),
        ("a.txt", b"\xef\xbb\xbf\n<!DOCTYPE html>\n<p>one</p>", "is a web page or XML, not text"),
        ("a.json", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, for"),
        ("a.txt", b'["one", "two"]', "line 1: begins as a .json file: '"),
        ("a.txt", b'{\n "prompt": "one"\n}\n', "line 1: begins as a .json file: '{'"),
        ("a.txt", b'{"prompt": "one"}\n{"prompt": "two"}\n', "line 1: begins as a .jsonl file"),
        ("a.txt", b'{"prompt": "one"}', "line 1: begins as a .jsonl file"),
        ("a.json", b'{"prompt": "one"}\n{"prompt": "two"}\n', "line 1: begins as a .jsonl file"),
        ("a.jsonl", b'[\n {"prompt": "one"}\n]\n', "line 1: begins as a .json file: '['"),
        ("a.txt", b'id,"Prompt"\n1,one\n', "line 1: begins as a .csv or .tsv file: 'id,"),
        ("a.txt", "one\ntwo\n".encode("utf-16"), "line 1: the file is in UTF-16, not"),
        ("a.csv", "id,prompt\n1,two\n".encode("utf-16-le"), "line 1: the file is in UTF-16LE, not"),
        ("coco:a", "{}".encode("utf-32"), "line 1: the file is in UTF-32, not"),
        ("a.txt", b"one\ntwo \x93lanterns\x94\n", "line 2: byte 0x93 is not UTF-8; Windows"),
        ("a.txt", b"one red lantern\none bad lantern\n", "line 2: 'one bad lantern' is bad"),
        ("a.txt", b"bad\n" * 7, "7 prompts cannot be used"),
        ("a.csv", b"id,words\n1,one\n", "line 2: has no text under prompt or prompts or c"),
        ("a.csv", b"id,words\n1,one\n", "or caption_en; it has 'id', 'words'"),
        ("a.jsonl", b'{"prompt": "one"}\n{oops\n', "line 2: not JSON"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1: has no text"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": ""}\n', "line 2: is empty"),
        (
            "a.jsonl",
            b'{"prompt": "a", "prompt": "b"}\n',
            "line 1: not JSON: prompt stands",
        ),
        ("a.jsonl", b'{"prompt": "a", "caption": "b"}\n', "different texts under prompt and c"),
        ("a.jsonl", b'{"Prompt": "a", "PROMPT": "b"}\n', "different texts under Prompt and PROM"),
        ("a.jsonl", b'{"prompt": "a", "size": NaN}\n', "line 1: 'size' cannot be kept as JSON"),
        ("a.jsonl", b'{"prompt": "a", "by": "\\ud800"}\n', "line 1: 'by' cannot be kept as JSON"),
        ("a.csv", b"id,prompt\n1,a\n2,\n", "line 3: is empty"),
        ("a.csv", b"prompt,prompt\na,b\n", "line 1: the column prompt stands twice"),
        ("a.csv", b"prompt\nred, tall lantern\n", "line 2: has more fields"),
        ("a.csv", b"prompt,note\nok,n\nred, tall lantern\n", "line 3: the comma in 'red, tall l"),
        ("a.csv", b"note,prompt\nred, tall lantern\n", "line 2: the comma in 'red, tall lantern'"),
        ("a.csv", b'prompt\nok\n"never closed\nother\n', "line 3: not CSV: unexpected end"),
        ("a.csv", b'prompt\n"a" lantern\n', "line 2: not CSV"),
        ("a.csv", b"id;prompt\n1;a\n", "'id;prompt' has columns separated by ';'"),
        ("a.csv", b"prompt;id\na, b;1\n", "line 1: 'prompt;id' has columns separated by ';'"),
        ("a.csv", b"id\tprompt\n1\ta\n", "has columns separated by '\\t', where .csv has commas"),
        ("a.tsv", b"id,prompt\n1,a\n", "'id,prompt' has columns separated by ','"),
        ("a.tsv", b'prompt\tid\n"a ""sign"""\t1\n', 'line 2: \'"a ""sign"""\' is quoted as in CSV'),
        ("a.txt", b"ok\na\x0bb\n", "line 2: contains the control character '\\x0b'"),
        ("a.txt", b"ok\n\x0c\n", "line 2: contains the control character '\\x0c'"),
        ("a.txt", b"ok\na\x1c\n", "line 2: contains the control character '\\x1c'"),
        ("a.txt", "ok\na\x85b\n".encode(), "line 2: contains the control character '\\x85'"),
        ("a.txt", "ok\n\ufeffa\n".encode(), "line 2: contains the control character '\\ufeff'"),
        ("a.jsonl", '{"prompt": "ok"}\n{"prompt": "a\x85b"}\n'.encode(), "line 2: contains the co"),
        ("a.jsonl", b"[1]\n", "line 1: begins as a .json file"),
        ("a.xlsx", b"", "unknown file type"),
        ("a.json", b'{"annotations": []}', "must be a JSON list"),
        ("a.json", b'{"a": 1}', "must be a JSON list"),
        ("a.json", b'["a", 3]', "entry 2: has no text"),
        ("a.json", b'["a",\nx]', "not JSON: Expecting value: line 2"),
        (
            "coco:a",
            b'{"annotations": [\n{"image_id": 1,\nx}]}',
            "enclosed in double quotes: line 3",
        ),
        ("coco:a", b'{"images": []}', "no list of annotations"),
        ("coco:a", b'["a"]', "no list of annotations"),
        (
            "coco:a",
            b'{"annotations": [{"image_id": 1, "caption": "a"}, {"image_id": 1}]}',
            "annotation 2: has no",
        ),
        ("coco:a", b'{"annotations": []}', "contains no prompt"),
        (
            "coco:a",
            b'{"annotations": [{"image_id": 7, "caption": "bad"}]}',
            "image 7: 'bad' is bad",
        ),
        ("coco:a", b'{"annotations": [{"image_id": 7, "caption": " "}]}', "image 7: is empty"),
        ("parti:a.txt", b"Prompt\tNote\na\tb\n", "PartiPrompts is a .tsv file"),
        ("parti:a.tsv", b"Words\tNote\na\tb\n", "line 2: has no text under prompt or prompts"),
        ("parti:a.tsv", b"Prompt\tNote\na\tb\nc\td\te\n", "line 3: has more fields"),
        ("imagenet:a.json", b'["a"]', "names 1 classes"),
        ("imagenet:a.json", b'["a", 3]', "names 1 classes, must name 1000"),
    ],
)
def test_malformed_files_are_refused_with_line_numbers(
    tmp_path, monkeypatch, source, content, wrong
):
    monkeypatch.chdir(tmp_path)
    Path(source.split(":")[-1]).write_bytes(content)
    with pytest.raises(UserError) as caught:
        texts(source)
    assert caught.value.message.startswith(f"--prompts {source}")
    assert wrong in caught.value.message


@pytest.mark.parametrize(
    ("source", "wrong", "advice"),
    [
        ("coco", "needs its file", "coco:captions_val2017.json"),
        ("coco:none.json", "no such file", ""),
        ("part", "did you mean parti", ""),
        (
            "held_out",
            "no such file and no prompt set; did you mean held-out",
            "The sets are held-out",
        ),
    ],
)
def test_a_set_or_file_that_is_not_there(source, wrong, advice):
    with pytest.raises(UserError, match=wrong) as caught:
        texts(source)
    assert advice in str(caught.value.advice)


SEPARATORS_OF_UNICODE = "a\u2028b\u2029c"


def test_only_newlines_and_carriage_returns_end_a_line(tmp_path):
    wanted = [SEPARATORS_OF_UNICODE, "second", "third"]
    (tmp_path / "a.txt").write_bytes("\r".join(wanted).encode())
    (tmp_path / "b.txt").write_bytes("\r\n".join(wanted).encode())
    (tmp_path / "c.csv").write_bytes("\r\n".join(["prompt", *wanted]).encode())
    (tmp_path / "d.tsv").write_bytes("\n".join(["prompt", *wanted]).encode())
    rows = (json.dumps({"prompt": text}, ensure_ascii=False) for text in wanted)
    (tmp_path / "e.jsonl").write_bytes("\n".join(rows).encode())
    names = [f"name {number}" for number in range(999)]
    (tmp_path / "f.txt").write_bytes("\n".join([SEPARATORS_OF_UNICODE, *names]).encode())
    for name in ("a.txt", "b.txt", "c.csv", "d.tsv", "e.jsonl"):
        assert texts(tmp_path / name) == wanted
    assert texts(f"imagenet:{tmp_path / 'f.txt'}")[0] == f"class 0: {SEPARATORS_OF_UNICODE}"


def test_a_space_after_a_comma_that_separates_columns(tmp_path):
    path = tmp_path / "a.csv"
    # All rows have the space; the text is quoted; the first column has numbers.
    for content in ("prompt, note\nred, t\n", 'prompt,note\n"red", t\n', "id,prompt\n1, red\n"):
        path.write_text(content)
        assert texts(path) == ["red"]


def test_texts_that_occur_twice_are_kept(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\none\nthree\n")
    prompts = load(path)
    assert [prompt.source for prompt in prompts] == ["a.txt:1", "a.txt:2", "a.txt:3", "a.txt:4"]
    facts = describe_prompts(str(path), Anything(), prompts)
    assert (facts["prompts"], facts["repeated_texts"]) == (4, 1)
    assert texts(f"{path}#0-3") == ["one", "two", "one"]
    assert set(texts(f"{path}#2")) <= set(texts(f"{path}#3"))
    assert sorted(texts(f"{path}#4")) == ["one", "one", "three", "two"]


# ---- Sets as they are published, in miniature: the file, its metadata and the texts that are read

GENEVAL = """\
{"tag": "single_object", "include": [{"class": "cup", "count": 1}], "prompt": "a photo of a cup"}
{"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [], "prompt": "two cups"}
"""
DPG_TABLE = """\
item_id,text,keywords,proposition_id,dependency,category_broad,tuple,question_natural_language
3,"a cup, blue",k,1,0,entity,entity - whole (cup),Is there a cup?
3,"a cup, blue",k,2,1,attribute,"attribute - color (cup, blue)",Is the cup blue?
7,two cups,,1,0,entity,entity - whole (cups),Are there cups?
"""
MJHQ = """\
{"01a": {"category": "food", "prompt": "a cup"}, "02b": {"category": "art", "prompt": "two cups"}}
"""
PUBLISHED: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "DrawBench.csv": (
        'Prompts,Category\nA red cup.,Colors\n"Two cups, blue",Counting\n',
        [
            ("A red cup.", {"category": "Colors"}),
            ("Two cups, blue", {"category": "Counting"}),
        ],
    ),
    "meta_data.json": (
        MJHQ,
        [
            ("a cup", {"id": "01a", "category": "food"}),
            ("two cups", {"id": "02b", "category": "art"}),
        ],
    ),
    "dpg_bench.csv": (
        DPG_TABLE,
        [
            ("a cup, blue", {"item_id": "3", "keywords": "k"}),
            (
                "two cups",
                {
                    "item_id": "7",
                    "proposition_id": "1",
                    "dependency": "0",
                    "category_broad": "entity",
                    "tuple": "entity - whole (cups)",
                    "question_natural_language": "Are there cups?",
                },
            ),
        ],
    ),
    "evaluation_metadata.jsonl": (
        GENEVAL,
        [
            (
                "a photo of a cup",
                {"tag": "single_object", "include": [{"class": "cup", "count": 1}]},
            ),
            (
                "two cups",
                {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": []},
            ),
        ],
    ),
    "PartiPrompts.tsv": (
        "Prompt\tCategory\tChallenge\tNote\na cup\tArtifacts\tBasic\t\ntwo cups\tFood\n",
        [
            ("a cup", {"category": "Artifacts", "challenge": "Basic"}),
            ("two cups", {"category": "Food"}),
        ],
    ),
    "anime.json": ('["a cup", "two cups"]', [("a cup", {}), ("two cups", {})]),
    "color_val.txt": ("a red cup\ntwo cups\n", [("a red cup", {}), ("two cups", {})]),
    "captions.jsonl": (
        '{"caption_en": "a cup", "url": "u"}\n{"Text": "two cups"}\n',
        [("a cup", {"url": "u"}), ("two cups", {})],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_with_all_that_it_says(tmp_path, name):
    content, wanted = PUBLISHED[name]
    (tmp_path / name).write_text(content)
    prompts = load(tmp_path / name)
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == wanted


def test_the_number_of_categories_is_described(tmp_path):
    (tmp_path / "a.jsonl").write_text(GENEVAL)
    facts = describe_prompts(str(tmp_path / "a.jsonl"), Anything(), load(tmp_path / "a.jsonl"))
    assert facts["metadata"] == {"tag": 2, "include": 2, "exclude": 1}


def test_a_folder_has_a_prompt_in_each_file(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "partiprompts2.txt").write_text("two cups\n")
    (folder / "10.txt").write_text("\ufeffa cup, blue")
    (folder / ".hidden").write_text("")
    prompts = load(folder)
    assert [(prompt.text, prompt.source, prompt.metadata) for prompt in prompts] == [
        ("a cup, blue", "prompts:10", {"id": "10"}),
        ("two cups", "prompts:partiprompts2", {"id": "partiprompts2"}),
    ]
    assert texts(f"{folder}#0-1") == ["a cup, blue"]
    assert describe_prompts(str(folder), Anything(), prompts)["file_sha256"] is None


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.txt", "one\ntwo\n", "a.txt has 2 lines, not one prompt"),
        ("a.txt", " \n", "a.txt: is empty"),
        ("a.png", "", "a.png in this folder is no .txt file"),
        (".a.txt", "one", "contains no prompt"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, name, content, wrong):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=wrong):
        load(tmp_path)


def test_a_column_may_be_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Prompt,Long\nshort,a long one\n")
    (prompt,) = load_prompts(str(path), Anything(), column="long")
    assert (prompt.text, prompt.metadata) == ("a long one", {"prompt": "short"})
    with pytest.raises(UserError, match="no text under other; it has 'prompt', 'long'"):
        load_prompts(str(path), Anything(), column="other")
    for source in ("held-out", "imagenet", str(tmp_path)):
        with pytest.raises(UserError, match=r"--prompt-column long: .* has no columns"):
            load_prompts(source, Anything(), column="long")
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(UserError, match="it is 'one'"):
        load_prompts(str(tmp_path / "a.txt"), Anything(), column="long")


def test_parquet_needs_its_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow") as caught:
        path = tmp_path / "a b.parquet"
        path.write_bytes(b"PAR1")
        load(path)
    assert "pip install pyarrow" in str(caught.value.advice)
    assert "a b.parquet" in str(caught.value.advice)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, the extra parquet")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["one", "two"], "tags": [["a"], None], "n": [1, 2]})
    parquet.write_table(table, path)
    assert [(prompt.text, prompt.metadata) for prompt in load(path)] == [
        ("one", {"tags": ["a"], "n": 1}),
        ("two", {"n": 2}),
    ]
    parquet.write_table(pyarrow.table({"text": ["one"], "picture": [b"x"]}), path)
    with pytest.raises(UserError, match="entry 1: 'picture' cannot be kept as JSON"):
        load(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not Parquet, or damaged"):
        load(path)


def test_missing_prompts_are_named_by_the_flag_or_the_key_of_the_file() -> None:
    source = {
        "name": "some",
        "model": "lanterns",
        "prompts": "nowhere.txt",
        "cells": [{"mode": "ar"}],
    }
    with pytest.raises(UserError, match=r"^prompts nowhere\.txt: no such file"):
        prepare(source, Overrides({}))
    with pytest.raises(UserError, match=r"^--prompts nowhere\.txt: no such file"):
        prepare("lanterns", Overrides.from_flags({"prompts": "nowhere.txt"}))
