"""The machines that a person names to `init`: addresses, a hostfile, or patterns of names in ~/.ssh/config."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from orchestrator.actions.inventory_file import load_inventory
from orchestrator.errors import InventoryError
from orchestrator.specs.inventory import Node

DEEPEST_INCLUDE = 16  # as OpenSSH


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alias:
    """A name of ~/.ssh/config, and `FILE:LINE: ` where it stands."""

    name: str
    place: str


def nodes_named(words: Sequence[str]) -> list[Node]:
    """The nodes that words on the command line stand for, in their order, each once; raises InventoryError.

    A word is the path of a hostfile or inventory, a pattern such as `node*` for names of ~/.ssh/config, or an address.
    """
    nodes: dict[tuple[str, int | None], Node] = {}
    for word in words:
        for node in _nodes(word):
            nodes.setdefault((node.host, node.port), node)
    return list(nodes.values())


def _nodes(word: str) -> list[Node]:
    if "/" in word or Path(word).is_file():
        return list(load_inventory(word).nodes)
    if "*" in word or "?" in word:
        return [_node(alias.name, alias.place) for alias in _matching(word)]
    return [_node(word)]


def _node(word: str, place: str = "") -> Node:
    try:
        return Node.model_validate(word)
    except ValidationError:
        raise InventoryError(
            f"{place}{word!r} is no host",
            advice="write HOST, user@HOST or HOST:PORT, name a hostfile, or a pattern such as 'node*'",
        ) from None


def _matching(pattern: str) -> list[_Alias]:
    config = Path("~/.ssh/config").expanduser()
    known = {alias.name: alias for alias in _aliases(config, set())}
    found = [alias for name, alias in known.items() if fnmatchcase(name, pattern)]
    if not found:
        names = f"it knows {', '.join(list(known)[:10])}" if known else "it names none"
        raise InventoryError(f"no host of {config} matches {pattern!r}", advice=f"{names}; the pattern must be quoted")
    return found


def _aliases(path: Path, read: set[Path], depth: int = 0) -> Iterator[_Alias]:
    """The names that stand after `Host` in an ssh_config and what it includes, without patterns; no file is read twice."""
    if depth > DEEPEST_INCLUDE or path in read or not path.is_file():
        return
    read.add(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, start=1):
        keyword, words = _words(line)
        if keyword == "host":
            place = f"{path}:{number}: "
            yield from (_Alias(name=word, place=place) for word in words if not set(word) & set("*?!"))
        elif keyword == "include":
            for word in words:
                for included in _included(word):
                    yield from _aliases(included, read, depth + 1)


def _included(word: str) -> list[Path]:
    """The files that an Include means, relative to ~/.ssh as OpenSSH has it; none where no such user or file is."""
    try:
        pattern = Path("~/.ssh").expanduser() / Path(re.sub(r"\*+", "*", word)).expanduser()
        base = Path(pattern.anchor)
        return sorted(base.glob(str(pattern.relative_to(base))))
    except (RuntimeError, ValueError, OSError):
        return []


def _words(line: str) -> tuple[str, list[str]]:
    """The keyword in lower case and its words; `Keyword value` and `Keyword=value` are the same."""
    try:
        words = shlex.split(line.strip().replace("=", " ", 1) if "=" in line.split(" ")[0] else line, comments=True)
    except ValueError:
        return "", []
    return (words[0].lower(), words[1:]) if words else ("", [])
