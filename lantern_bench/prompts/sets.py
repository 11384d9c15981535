"""Prompt sets: sets of a model, published sets, and files."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.prompts.prompt import Prompt, PromptedModel, class_prompt
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256, read_text, without_doubles
from lantern_bench.utils.text import did_you_mean, listed

# Published sets, by the word before the colon, with an example of their file. `imagenet` needs no
# file.
SETS = {
    "coco": "captions_val2017.json",
    "coco-first": "captions_val2017.json",
    "parti": "PartiPrompts.tsv",
    "imagenet": "a file with a name a line",
}
SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".tsv", ".txt")
"""File types that prompts are read from."""

_IMAGENET_CLASSES = 1000
# Columns and keys of the text in published sets, in any case.
_PROMPT_KEYS = ("prompt", "prompts", "caption", "captions", "text", "caption_en")
_PROBLEMS_SHOWN = 5
# Control characters steer terminals, end strings in C, and are not allowed in HTML.
# A byte order mark inside a text is a rest of joined files, which nobody sees.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")
BLANKS = " \t\r\n\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
BLANKS += "\u2028\u2029\u202f\u205f\u3000"
"""White space around a text, which is removed. Control characters stay, and are refused."""


# A prompt of a file, after its location for messages, such as `line 3`.
_Located: TypeAlias = tuple[str, Prompt]


class _Source(NamedTuple):
    """The parts of a value of `--prompts`."""

    name: str  # a prompt set; empty for a file alone
    path: Path | None
    subset: str  # `100` or `0-100`; empty for all prompts


def load_prompts(
    source: str, model: PromptedModel, *, flag: str = "--prompts", column: str | None = None
) -> list[Prompt]:
    """Read prompts.

    Args:
        source: The value of the flag: a set of the model, a published set (`coco:FILE`), a file or
            a folder of .txt files, with `#100` for 100 of its prompts.
        model: The model that is given the prompts.
        flag: The flag, for messages.
        column: The column or key of the text, by default the one with a usual name.

    Raises:
        UserError: The file cannot be read, or the model cannot take a prompt. All problems of a
            file are listed.
    """
    flag = f"{flag} {source}"
    parts = _parse(source, model, flag)
    try:
        located = list(_read(parts, flag, model, column=column))
    except OSError as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not located:
        raise UserError(f"{flag}: contains no prompt", "Give a file with one prompt a line.")
    texts = ((location, prompt.text) for location, prompt in located)
    check_texts(texts, model, flag=flag, noun="prompts")
    return _subset([prompt for _, prompt in located], parts.subset, flag)


def describe_prompts(source: str, model: PromptedModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts for the manifest of a run.

    Args:
        source: The value of `--prompts`.
        model: The model that the prompts were read for.
        prompts: What `load_prompts` returned.
    """
    return prompt_facts(source, _parse(source, model, flag="").path, prompts)


def prompt_facts(source: str, path: Path | None, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts that were read from a file, as `describe_prompts`.

    Args:
        source: What names the prompts.
        path: The file; None without one.
        prompts: The prompts.
    """
    ids = [prompt.id for prompt in prompts]
    values: dict[str, set[str]] = {}
    for prompt in prompts:
        for name, value in prompt.metadata.items():
            values.setdefault(name, set()).add(json.dumps(value))
    return {
        "set": source,
        "file_sha256": file_sha256(path) if path is not None and path.is_file() else None,
        "prompts": len(ids),
        "repeated_texts": sum(count > 1 for count in Counter(ids).values()),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
        # The number of different values of each column that is kept with the prompts.
        "metadata": {name: len(different) for name, different in values.items()},
    }


def _parse(source: str, model: PromptedModel, flag: str) -> _Source:
    match = re.fullmatch(r"(.*?)(?:#(\d+(?:-\d+)?))?", source, flags=re.DOTALL)
    assert match is not None
    name, subset = match.groups(default="")
    if name in model.prompt_sets or name == "imagenet":
        return _Source(name, None, subset)
    word, _, file = name.partition(":")
    if word not in SETS:
        word = ""
        file = name
    elif not file:
        raise UserError(f"{flag}: needs its file", f"For example {word}:{SETS[word]}")
    path = Path(file)
    is_folder = path.is_dir() and not word
    if not path.is_file() and not is_folder:
        sets = [*model.prompt_sets, "coco:FILE", "coco-first:FILE", "parti:FILE", "imagenet"]
        hint = did_you_mean(name, [*model.prompt_sets, *SETS])
        missing = f"no such file {path}" if word else f"no such file and no prompt set{hint}"
        if path.is_dir():
            missing = "is a folder, not a file"
        raise UserError(
            f"{flag}: {missing}",
            f"The sets are {', '.join(sets)}; or give a file that ends with {', '.join(SUFFIXES)}.",
        )
    return _Source(word, path, subset)


def _read(
    parts: _Source, flag: str, model: PromptedModel, *, column: str | None
) -> Iterable[_Located]:
    name = parts.name
    path = parts.path
    has_columns = path is not None and not path.is_dir() and name in ("", "parti")
    if column is not None and not has_columns:
        raise UserError(
            f"--prompt-column {column}: {flag} has no columns",
            "Leave it out; it is for .csv, .tsv, .json, .jsonl and .parquet files.",
        )
    if name in model.prompt_sets:
        texts = enumerate(model.prompt_sets[name], start=1)
        return [_located("prompt", number, text=text, of=name) for number, text in texts]
    if name == "imagenet" or path is None:
        return _read_imagenet(path, flag)
    if name.startswith("coco"):
        return _read_coco(path, flag, longest=name == "coco")
    if name == "parti" and path.suffix.lower() != ".tsv":
        raise UserError(f"{flag}: PartiPrompts is a .tsv file", "Rename it to end with .tsv.")
    if path.is_dir():
        return _read_folder(path, flag)
    return _one_per_item(_read_file(path, flag, name=name or path.name, column=column))


def _located(unit: str, number: int, *, text: str, of: str) -> _Located:
    return f"{unit} {number}", Prompt(text.strip(BLANKS), f"{of}:{number}")


def _read_file(path: Path, flag: str, *, name: str, column: str | None) -> Iterator[_Located]:
    """Yield the prompts of a file; `name` is the name of its set."""
    unit = "line" if path.suffix.lower() in (".csv", ".jsonl", ".tsv", ".txt") else "entry"
    keys = _PROMPT_KEYS if column is None else (column.strip().lower(),)
    for number, row in read_rows(path, flag):
        location = f"{flag} {unit} {number}"
        is_text = isinstance(row, str) and column is None
        text = row if is_text else text_under(row, keys, location)
        if text is None:
            raise lacks_keys(
                row,
                f"{location}: has no text under {' or '.join(keys)}",
                "Rename the column or key of the text to prompt; or name it with the flag "
                "--prompt-column of a sweep.",
            )
        place, prompt = _located(unit, number, text=text, of=name)
        beside = {} if is_text else _beside_text(row, keys, location)
        yield place, replace(prompt, metadata=beside)


def _beside_text(row: Mapping[str, Any], keys: Sequence[str], location: str) -> dict[str, Any]:
    """Return what a row holds beside its text, which the records of its images keep."""
    metadata = {}
    for name, value in row.items():
        is_text = isinstance(value, str) and name.lower() in keys
        if is_text or not name or value in ("", None):
            continue
        metadata[name] = value
        try:
            json.dumps([name, value], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{location}: {name!r} cannot be kept as JSON: {error}",
                "Remove this column, or write its values as text.",
            ) from error
    return metadata


def _one_per_item(located: Iterable[_Located]) -> Iterator[_Located]:
    """Join the rows of an item: the table of DPG-Bench has a row for each question of an item.

    Columns that differ between these rows describe the questions, and are left out.
    """
    for (item, _), rows in groupby(located, key=_item_and_text):
        first, *others = rows
        if item is None:
            yield from (first, *others)
            continue
        location, prompt = first
        shared = dict(prompt.metadata)
        for _, other in others:
            shared = {
                name: value for name, value in shared.items() if other.metadata.get(name) == value
            }
        yield location, replace(prompt, metadata=shared)


def _item_and_text(located: _Located) -> tuple[str | None, str]:
    prompt = located[1]
    return prompt.metadata.get("item_id"), prompt.text


def _read_folder(folder: Path, flag: str) -> Iterator[_Located]:
    """Yield the prompts of a folder of .txt files, one prompt each, as DPG-Bench has them."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    advice = "A folder of prompts has .txt files alone, each with one prompt. Or give one file."
    for file in files:
        if file.suffix.lower() != ".txt" or not file.is_file():
            raise UserError(f"{flag}: {file.name} in this folder is no .txt file", advice)
        text = read_text(file, f"{flag} {file.name}").strip(BLANKS)
        if "\n" in text:
            count = text.count("\n") + 1
            raise UserError(f"{flag}: {file.name} has {count} lines, not one prompt", advice)
        yield file.name, Prompt(text, f"{folder.name}:{file.stem}", {"id": file.stem})


def _read_coco(path: Path, flag: str, *, longest: bool) -> Iterator[_Located]:
    """Yield one caption for each image of MS-COCO's annotations: the longest, or the first."""
    data = _parse_json(read_text(path, flag), flag)
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        advice = "Give the official file, captions_val2017.json or captions_val2014.json."
        raise UserError(f"{flag}: has no list of annotations", advice)
    captions: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        stated = row if isinstance(row, dict) else {}
        image = stated.get("image_id")
        caption = stated.get("caption")
        if not isinstance(image, int) or not isinstance(caption, str):
            advice = "Give the caption annotations of MS-COCO, not instances or keypoints."
            raise UserError(f"{flag} annotation {number}: has no image_id and caption", advice)
        # Lengths include the spaces at both ends, as in the file.
        if image not in captions or (longest and len(caption) > len(captions[image])):
            captions[image] = caption
    for image, caption in captions.items():
        yield _located("image", image, text=caption, of="coco")


def _read_imagenet(path: Path | None, flag: str) -> Iterator[_Located]:
    """Yield the 1000 classes, with the names of a file if one is given.

    The file has lines, a JSON list, or JSON such as {"0": [id, name]}.
    """
    names = [""] * _IMAGENET_CLASSES
    if path is not None:
        text = read_text(path, flag)
        rows: Any = text.split("\n")
        if path.suffix.lower() == ".json":
            rows = _parse_json(text, flag)
        if isinstance(rows, dict):
            rows = [rows.get(str(number)) for number in range(len(rows))]
        names = []
        for row in rows if isinstance(rows, list) else ():
            name = row[-1] if isinstance(row, list) and row else row
            if isinstance(name, str) and name.strip():
                names.append(name.strip())
        if len(names) != _IMAGENET_CLASSES:
            raise UserError(f"{flag}: names {len(names)} classes, must name {_IMAGENET_CLASSES}")
    for number, name in enumerate(names):
        yield _located("class", number, text=class_prompt(number, name), of="imagenet")


def _subset(prompts: list[Prompt], subset: str, flag: str) -> list[Prompt]:
    """Return some of the prompts, in their order: `0-100` by position, `100` by hash.

    A choice by hash is spread over the whole set, and a larger one contains a smaller one.
    """
    if not subset:
        return prompts
    count = len(prompts)
    first, dash, last = subset.partition("-")
    begin = int(first) if dash else 0
    end = int(last or first)
    if not begin < end <= count:
        raise UserError(f"{flag}: there are {count} prompts", f"Take at most {count}.")
    if dash:
        return prompts[begin:end]
    # Numbers of prompts, since a text may occur several times.
    by_hash = sorted(range(count), key=lambda number: _hash_of(prompts[number]))
    return [prompts[number] for number in sorted(by_hash[:end])]


def _hash_of(prompt: Prompt) -> bytes:
    return hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).digest()


# ---- Rows of text files, which captions of pictures are read from as well


def read_rows(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, from 1.

    A row is a line of .txt, a dict of .csv, .tsv and .parquet, or any JSON value of .json and
    .jsonl. Empty lines are skipped. `flag` is the flag with its value, for messages.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        advice = f"Give a file that ends with {', '.join(SUFFIXES)}."
        raise UserError(f"{flag}: unknown file type", advice)
    if suffix == ".parquet":
        yield from enumerate(_read_parquet(path, flag), start=1)
        return
    text = read_text(path, flag)
    if suffix in (".csv", ".tsv"):
        fields = _csv_fields(text, flag) if suffix == ".csv" else _tsv_fields(text, flag)
        yield from _table_rows(fields, flag)
        return
    _refuse_other_type(text, suffix, flag)
    if suffix == ".json":
        rows = _parse_json(text, flag)
        if isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values()):
            rows = [{"id": name, **row} for name, row in rows.items()]
        if not isinstance(rows, list):
            problem = f"{flag}: must be a JSON list of prompts, or an object of ids with objects"
            raise lacks_keys(rows, problem, "Write coco:FILE for MS-COCO annotations.")
        yield from enumerate(rows, start=1)
        return
    # Other characters that end a line elsewhere, such as U+2028, are part of a prompt here.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(BLANKS):
            yield number, line if suffix == ".txt" else _parse_json(line, f"{flag} line {number}")


def _read_parquet(path: Path, flag: str) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file, with values of Python."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        convert = f"import pandas; pandas.read_parquet({str(path)!r})"
        convert += ".to_json('NEW.jsonl', orient='records', lines=True)"
        raise UserError(
            f"{flag}: reading Parquet needs pyarrow, which is not installed",
            f"pip install pyarrow; or convert it where pyarrow is: "
            f"python -c {shlex.quote(convert)}",
        ) from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise UserError(
            f"{flag}: not Parquet, or damaged: {error}", "Download it again."
        ) from error
    return rows


def _refuse_other_type(text: str, suffix: str, flag: str) -> None:
    """Raise `UserError` for a file of another type than its ending says, as its beginning tells."""
    text = text.lstrip("\n")
    first = text.partition("\n")[0]
    kind = suffix
    columns = [name.strip(' "').lower() for name in re.split(r"[,;\t]", first)]
    if suffix == ".txt" and not set(columns).isdisjoint(_PROMPT_KEYS):
        kind = ".csv or .tsv"
    with contextlib.suppress(ValueError, RecursionError):
        value, end = json.JSONDecoder().raw_decode(text)
        next_line, _, more = text[end:].partition("\n")
        is_alone = isinstance(value, dict | list) and not next_line.strip()
        if is_alone and (isinstance(value, list) or "\n" in text[:end]):
            kind = ".json"
        elif is_alone and (more.strip() or suffix == ".txt"):
            kind = ".jsonl"
    if kind != suffix:
        raise UserError(
            f"{flag} line 1: begins as a {kind} file: {first[:60]!r}",
            f"Rename it to end with {kind}, or remove that line.",
        )


# The fields of one row of a table, after the number of its line.
_Fields: TypeAlias = tuple[int, list[str]]


def _csv_fields(text: str, flag: str) -> Iterator[_Fields]:
    """Yield the rows of a .csv file, each with the number of its first line."""
    lines = text.split("\n")
    reader = csv.reader(io.StringIO(text), strict=True)
    columns: list[str] = []
    number = 1
    try:
        for row in reader:
            columns = columns or row
            has_spaces = any(name.startswith(" ") for name in columns)
            if not has_spaces and len(row) <= len(columns):
                written = "\n".join(lines[number - 1 : reader.line_num])
                _refuse_doubtful_comma(row, written, f"{flag} line {number}")
            yield number, row
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{flag} line {number}: not CSV: {error}",
            'Close each quotation mark; one inside a field is written "a ""quoted"" word".',
        ) from error


def _refuse_doubtful_comma(row: list[str], written: str, location: str) -> None:
    """Raise `UserError` for two fields that may be one text, without quotes: `red, tall`."""
    for before, after in pairwise(row):
        is_number = re.fullmatch(r"[\d\s.-]*", before) is not None
        is_quoted = '"' + before.replace('"', '""') + '"' in written
        if after.startswith(" ") and not is_number and not is_quoted:
            comma = f"{before},{after}"
            raise UserError(
                f"{location}: the comma in {comma[:60]!r} separates two columns, and may be meant "
                "as a comma of the text",
                "Put text with a comma in quotes, or remove the space after the comma.",
            )


# A field of .tsv in quotes, with doubled quotation marks inside.
_QUOTED = re.compile(r'(?<![^\t])"[^\t]*""[^\t]*"(?![^\t])')


def _tsv_fields(text: str, flag: str) -> Iterator[_Fields]:
    """Yield the rows of a .tsv file, where a quotation mark is a character as any other."""
    for number, line in enumerate(text.split("\n"), start=1):
        quoted = _QUOTED.search(line)
        if quoted is not None:
            raise UserError(
                f"{flag} line {number}: {quoted[0][:60]!r} is quoted as in CSV, and text of .tsv "
                "is taken as it is written",
                "Remove the quotes that are not part of the text, or write a .csv file.",
            )
        yield number, line.split("\t")


def _table_rows(rows: Iterable[_Fields], flag: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows below the first one, by column."""
    columns: list[str] = []
    for number, fields in rows:
        if not any(field.strip(BLANKS) for field in fields):
            continue
        location = f"{flag} line {number}"
        if not columns:
            columns = [field.strip().lower() for field in fields]
            _refuse_other_separator(columns, location)
            twice = [name for name in columns if name and columns.count(name) > 1]
            if twice:
                raise UserError(f"{location}: the column {twice[0]} stands twice", "Rename one.")
            continue
        if len(fields) > len(columns):
            raise UserError(
                f"{location}: has more fields than the first line ({len(fields)}, not "
                f"{len(columns)})",
                "Put text that contains the separator in quotes, in a .csv file.",
            )
        yield number, dict(zip_longest(columns, fields, fillvalue=""))


def _refuse_other_separator(columns: Sequence[str], location: str) -> None:
    """Raise `UserError` for one column whose name has a separator, as Excel writes `id;prompt`."""
    found = re.search(r"[;,|\t]", columns[0])
    if len(columns) > 1 or found is None:
        return
    separator = repr(found[0])
    convert = f"import csv, sys; rows = csv.reader(sys.stdin, delimiter={separator}); "
    convert += "csv.writer(sys.stdout).writerows(rows)"
    raise UserError(
        f"{location}: {columns[0][:60]!r} has columns separated by {separator}, where .csv has "
        "commas and .tsv tabs",
        f'Convert it: python -c "{convert}" < FILE > NEW.csv',
    )


def _parse_json(text: str, location: str) -> Any:
    """Return the value of a JSON text; raises `UserError` that begins with `location`."""
    try:
        return json.loads(text, object_pairs_hook=without_doubles)
    # Numbers of thousands of digits and thousands of brackets raise these errors too.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not JSON: {error}") from error


def text_under(row: Any, keys: tuple[str, ...], location: str) -> str | None:
    """Return the text of a row under one of the keys in any case, None if there is none.

    Args:
        row: The row.
        keys: The keys that mean the same, in lower case.
        location: Where the row is, for the message.

    Raises:
        UserError: The row has different texts under two of the keys.
    """
    if not isinstance(row, dict):
        return None
    texts = {
        name: value
        for name, value in row.items()
        if name.lower() in keys and isinstance(value, str)
    }
    # An empty field of a table says nothing.
    filled = {text for text in texts.values() if text.strip(BLANKS)}
    if len(filled) > 1:
        raise UserError(
            f"{location}: has different texts under {listed(list(texts))}",
            "Remove or rename all but one of them; or give a sweep --prompt-column.",
        )
    return next(iter([*filled, *texts.values()]), None)


def lacks_keys(row: Any, problem: str, advice: str) -> UserError:
    """Return the error for a row without the keys that are needed: it says which keys the row has.

    Args:
        row: The row.
        problem: The beginning of the message.
        advice: What to do.
    """
    if not isinstance(row, dict):
        shown = "a list" if isinstance(row, list) else repr(row)[:60]
        return UserError(f"{problem}; it is {shown}", advice)
    names = [repr(key)[:60] for key in list(row)[:8]]
    return UserError(f"{problem}; it has {', '.join(names) or 'no key'}", advice)


def check_texts(
    texts: Iterable[tuple[str, str]], model: PromptedModel, *, flag: str, noun: str
) -> None:
    """Raise one `UserError` that lists the texts that the model cannot take.

    Args:
        texts: Pairs of a location for the message and a text.
        model: The model that is given the texts.
        flag: The flag and its value, for the message.
        noun: What the texts are, for the message.
    """
    problems = []
    advice = None
    for location, text in texts:
        try:
            if not text:
                raise UserError("is empty", "Remove it, or fill it in.")
            match = _CONTROLS.search(text)
            if match is not None:
                raise UserError(f"contains the control character {match[0]!r}", "Remove it.")
            model.check_prompt(text)
        except UserError as error:
            problems.append(f"{location}: {error.message}")
            advice = advice or error.advice
    count = len(problems)
    if count == 1:
        raise UserError(f"{flag} {problems[0]}", advice)
    if count > _PROBLEMS_SHOWN:
        problems[_PROBLEMS_SHOWN:] = [f"and {count - _PROBLEMS_SHOWN} more"]
    if problems:
        lines = "\n  ".join(problems)
        raise UserError(f"{flag}: {count} {noun} cannot be used\n  {lines}", advice)
