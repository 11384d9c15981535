"""Prompts to measure with: a set the family brings, a published set, or a file of one's own, and a part of any of them.

Every prompt is checked by the family before any model is loaded, and all that is wrong is said at once. `NAME#100`
takes 100 prompts by a hash of their text, so that everybody takes the same ones and a larger part holds the smaller;
`NAME#0-100` takes the first hundred. Which prompt becomes which image is decided in `spec/plan.py`. No torch here.
"""

from __future__ import annotations

import csv
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.errors import UserError
from lantern_bench.measure.prompt_files import READERS, Item
from lantern_bench.measure.prompt_sets import SETS
from lantern_bench.models.files import file_sha256
from lantern_bench.models.registry import Family
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.values import did_you_mean

__all__ = ["load_prompts", "prompt_facts"]

_SHOWN = 5


class _Asked(NamedTuple):
    """What `--prompts` says: a name or file, the published set it belongs to, and the part to take."""

    name: str
    kind: str | None
    path: Path | None
    part: str


def load_prompts(source: str, family: Family) -> list[Prompt]:
    """Read the prompts of a family's set, of a published set (`coco:FILE`, `parti:FILE`, `imagenet`), or of a file.

    Files are `.txt` with one a line, `.csv`, `.tsv` and `.jsonl` by prompt or caption, `.json` as a list. Empty ones
    are left out. Raises one `UserError` that names `--prompts` and its value: no such set or file, a file that cannot
    be read, or the first prompts the family cannot take, with their places.
    """
    asked = _asked(source, family)
    sets = family.prompt_sets()
    if asked.name in sets and asked.kind is None:
        own = enumerate(sets[asked.name], start=1)
        items = [Item(f"prompt {number}", f"{asked.name}:{number}", text) for number, text in own]
    else:
        items = _read(source, asked)
    _check(source, items, family)
    return _part(source, asked.part, [Prompt(item.text, item.source) for item in items])


def prompt_facts(source: str, family: Family, prompts: list[Prompt]) -> dict[str, Any]:
    """What a manifest says of the prompts: the set as typed, its file's SHA-256, how many, and a hash of their ids."""
    asked = _asked(source, family)
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(asked.path) if asked.path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _asked(source: str, family: Family) -> _Asked:
    sets = family.prompt_sets()
    match = re.fullmatch(r"(.*?)#(\d+(?:-\d+)?)", source, flags=re.DOTALL)
    name, part = (match[1], match[2]) if match else (source, "")
    if name in sets:
        return _Asked(name, None, None, part)
    kind, colon, rest = name.partition(":")
    if kind in SETS:
        known = SETS[kind]
        if not rest and (known.needs_file or colon):
            raise UserError(f"--prompts {source}: needs its file", f"For example {kind}:{known.file}")
        path = Path(rest) if rest else None
    else:
        kind, path = "", Path(name)
    if path is not None and not path.is_file():
        known_names = [*sets, *(f"{one}:FILE" if SETS[one].needs_file else one for one in SETS)]
        raise UserError(
            f"--prompts {source}: no such file" + (f" {path}" if kind else f" and no prompt set{_near(name, sets)}"),
            f"The sets are {', '.join(known_names)}; or give a file that ends with {', '.join(READERS)}.",
        )
    return _Asked(name, kind or None, path, part)


def _near(name: str, sets: Any) -> str:
    return did_you_mean(name, [*sets, *SETS])


def _read(source: str, asked: _Asked) -> list[Item]:
    """All prompts of a file or of a published set, empty ones left out."""
    try:
        if asked.kind is not None:
            items = list(SETS[asked.kind].read(asked.path, source))
        else:
            path = asked.path or Path(asked.name)
            reader = READERS.get(path.suffix.lower())
            if reader is None:
                raise UserError(f"--prompts {source}: unknown kind of file", f"The kinds are {', '.join(READERS)}.")
            items = list(reader(path, source))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--prompts {source}: cannot be read: {error}") from error
    kept = [item._replace(text=item.text.strip()) for item in items if item.text.strip()]
    if not kept:
        raise UserError(f"--prompts {source}: holds no prompt", "Give a file with one prompt a line.")
    return kept


def _part(source: str, part: str, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts a part names: `100` by hash, in the order of the set; `0-100` the first hundred."""
    if not part:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = part.partition("-")
    begin, end = (int(first), int(last)) if dash else (0, int(first))
    if not begin < end <= len(unique):
        raise UserError(f"--prompts {source}: there are {len(unique)} prompts", "Take fewer, or other ones.")
    if dash:
        return unique[begin:end]
    taken = set(sorted(unique, key=_lot)[:end])
    return [prompt for prompt in unique if prompt in taken]


def _lot(prompt: Prompt) -> str:
    return hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).hexdigest()


def _check(source: str, items: list[Item], family: Family) -> None:
    wrong: list[str] = []
    advice: str | None = None
    for item in items:
        try:
            family.check_prompt(item.text)
        except UserError as error:
            wrong.append(f"{item.place}: {error.message}")
            advice = advice or error.advice
    if len(wrong) == 1:
        raise UserError(f"--prompts {source} {wrong[0]}", advice)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        listed = "\n  ".join([*wrong[:_SHOWN], *more])
        raise UserError(f"--prompts {source}: {len(wrong)} prompts cannot be used\n  {listed}", advice)
