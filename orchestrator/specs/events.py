"""What happens while a command works, as values; the console turns them into text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the work; `node` is empty for steps of the whole."""

    text: str
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that is not as asked, and why; or something good to know."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes on their way to a node; `what` names the things of which `sent_items` of `total_items` are through."""

    node: str
    what: str
    sent_bytes: int
    total_bytes: int
    sent_items: int = 0
    total_items: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    r"""A piece of one rank's output.

    Args:
        rank: the global rank, or None for mpirun's own output.
        stream: "out" or "err".
        text: a line without its end, or several with "\n" between them: so that a fast job costs little per line.
        transient: it ended in a carriage return: the next piece writes over it.
    """

    node: str
    rank: int | None
    stream: str
    text: str
    transient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A command's answer: `document` for `--json`, `text` for people."""

    document: Mapping[str, Any]
    text: str


Event = Step | Notice | Transfer | LogText | Result
Emit = Callable[[Event], None]
