"""What was typed on the command line, to be laid over an experiment file.

Flags, `--set key=value` and `--modes` become one object here; nothing is checked yet, since a value is checked in the
same way wherever it came from. Which command has which flag is `cli/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lantern_bench.errors import UserError
from lantern_bench.spec.values import Place, is_tree

__all__ = ["Overrides"]


@dataclass(frozen=True)
class Overrides:
    """Values by key, each a list (a grid when longer than one), and the modes to keep (all when empty).

    A key is that of an experiment file; `cells.2.delta` and `models.NAME.delta` reach one cell or one model.
    `from_set` holds the keys that were given by `--set`, for the messages.
    """

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    modes: Sequence[str] = ()
    from_set: frozenset[str] = frozenset()

    @classmethod
    def from_flags(
        cls,
        flags: Mapping[str, Any],
        *,
        modes: str | Sequence[str] | None = None,
        settings: Sequence[str] = (),
    ) -> Overrides:
        """Make overrides from flags by key (None: not typed), `--modes` and the texts of `--set`.

        Texts are split at commas; one that starts with `[` is read as YAML. Raises `UserError` for a `--set`
        without `=` and for a text that is no YAML.
        """
        values = {key.replace("-", "_"): _split(value, f"--{key}") for key, value in flags.items() if value is not None}
        from_set = set()
        for text in settings:
            key, equals, value = text.partition("=")
            key = key.strip().replace("-", "_") if "." not in key else key.strip()
            if not equals or not key or not value.strip():
                raise UserError(f"--set {text}: must have the form key=value", "For example: --set temperature=0.9")
            values[key] = _split(value, f"--set {key}=")
            from_set.add(key)
        return cls(values, tuple(_split(modes, "--modes")) if modes is not None else (), frozenset(from_set))

    def place(self, key: str) -> Place:
        """Return the flag of a key, as it was typed; a tree's `@path` starts from the current folder."""
        return Place(f"--set {key}=" if key in self.from_set else f"--{key.replace('_', '-')}", None, Path())


def _split(value: Any, flag: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in _split(item, flag)]
    if not isinstance(value, str):
        return [value]
    if value.strip().startswith("["):
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{flag} {value}: not a valid list: {' '.join(str(error).split())}") from error
        return [parsed] if is_tree(parsed) else list(parsed)
    return [part.strip() for part in value.split(",") if part.strip()]
