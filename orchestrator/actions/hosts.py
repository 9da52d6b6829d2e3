"""The machines that a person names to `init`: addresses, a hostfile, or patterns of names in ~/.ssh/config."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from orchestrator.actions.inventory_file import load_inventory
from orchestrator.errors import InventoryError
from orchestrator.specs.inventory import Node

DEEPEST_INCLUDE = 16  # as OpenSSH


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
        return [_node(name) for name in _matching(word)]
    return [_node(word)]


def _node(word: str) -> Node:
    try:
        return Node.model_validate(word)
    except ValidationError:
        raise InventoryError(
            f"{word!r} is no host", advice="write HOST, user@HOST or HOST:PORT, name a hostfile, or a pattern such as 'node*'"
        ) from None


def _matching(pattern: str) -> list[str]:
    config = Path("~/.ssh/config").expanduser()
    names = dict.fromkeys(_aliases(config))
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        known = f"it knows {', '.join(list(names)[:10])}" if names else "it names none"
        raise InventoryError(f"no host of {config} matches {pattern!r}", advice=f"{known}; the pattern must be quoted")
    return found


def _aliases(path: Path, depth: int = 0) -> Iterator[str]:
    """The names that stand after `Host` in an ssh_config and what it includes, without patterns."""
    if depth > DEEPEST_INCLUDE:
        return
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        keyword, words = _words(line)
        if keyword == "host":
            yield from (word for word in words if not set(word) & set("*?!"))
        elif keyword == "include":
            for word in words:
                place = Path(word).expanduser()
                base = place if place.is_absolute() else Path("~/.ssh").expanduser() / place
                for included in sorted(base.parent.glob(base.name)):
                    yield from _aliases(included, depth + 1)


def _words(line: str) -> tuple[str, list[str]]:
    """The keyword in lower case and its words; `Keyword value` and `Keyword=value` are the same."""
    try:
        words = shlex.split(line.strip().replace("=", " ", 1) if "=" in line.split(" ")[0] else line, comments=True)
    except ValueError:
        return "", []
    return (words[0].lower(), words[1:]) if words else ("", [])
