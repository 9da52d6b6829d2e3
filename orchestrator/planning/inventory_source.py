"""What is known of an inventory's text before it is validated: plain data, and the line on which each piece stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.errors import InventoryError

KeyPath = tuple[str | int, ...]
Data: TypeAlias = "str | list[Data] | dict[str, Data] | None"

# So many tell what is wrong; more would push the first ones off the screen.
_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where, and what to write instead; `path` is empty where no key is concerned."""

    line: int
    path: KeyPath = ()
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An inventory as written.

    Args:
        data: mappings, lists and text; None where a key has no value.
        lines: the 1-based line of every key path in `data`.
        problems: what is already known to be wrong.
        secrets: values that came from the environment and must not be shown.
    """

    data: Data
    lines: Mapping[KeyPath, int]
    problems: tuple[Problem, ...] = ()
    secrets: frozenset[str] = frozenset()

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest enclosing key that was written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def refusal(file: str, problems: Iterable[Problem]) -> InventoryError:
    """All problems as one error, in the order of the file, one line `file:line: key: text` each."""
    ordered = sorted(problems, key=lambda problem: problem.line)
    rows = [
        f"{file}:{problem.line}: {key_text(problem.path) + ': ' if problem.path else ''}{problem.text}"
        for problem in ordered[:_SHOWN]
    ]
    if len(ordered) > _SHOWN:
        rows.append(f"{file}: and {len(ordered) - _SHOWN} more problems")
    return InventoryError("\n".join(rows))


def key_text(path: KeyPath) -> str:
    """`("nodes", 1, "port")` as `nodes[1].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_plain(part)}"
    return text.removeprefix(".")


def shown(text: str, limit: int = 60) -> str:
    """Quoted and shortened, with everything escaped that could drive a terminal."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _plain(key: str) -> str:
    return key if key.isascii() and key.isprintable() and 0 < len(key) <= 60 and not set(key) & set(" .[]'\"") else shown(key)
