"""Bytes of a log as lines, as they come in pieces: newlines, progress bars with carriage returns, broken characters. Pure."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

# A line that never ends (a binary, a megabyte of JSON) is shown in pieces of this many characters.
LONGEST_LINE = 16_384
_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Piece:
    r"""One or more whole lines, with "\n" between but not at the end; `transient` is always one alone: a carriage return says
    that the next one is written over it.
    """

    text: str
    transient: bool


class LineSplitter:
    """Cuts one stream into pieces; what was fed in whatever portions gives the same lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that `data` completes."""
        return self._cut(self._rest + self._decoder.decode(data), final=False)

    def finish(self) -> list[Piece]:
        """What is left at the end of the stream."""
        return self._cut(self._rest + self._decoder.decode(b"", final=True), final=True)

    def _cut(self, text: str, *, final: bool) -> list[Piece]:
        pieces, self._rest = _plain(text) if "\r" not in text else _with_returns(text, final)
        while len(self._rest) > LONGEST_LINE or (final and self._rest):
            pieces.append(Piece(self._rest[:LONGEST_LINE].rstrip("\r"), transient=False))
            self._rest = self._rest[LONGEST_LINE:]
        return pieces


def _plain(text: str) -> tuple[list[Piece], str]:
    """The whole lines in one piece, at no cost for each, and what is left."""
    lines, end, rest = text.rpartition("\n")
    return [Piece(lines, transient=False)] if end else [], rest


def _with_returns(text: str, final: bool) -> tuple[list[Piece], str]:
    """Each line by itself, and what is left."""
    pieces: list[Piece] = []
    start = 0
    for end in _END.finditer(text):
        if end.group() == "\r" and end.end() == len(text) and not final:
            break  # a newline may still follow
        pieces.append(Piece(text[start : end.start()], end.group() == "\r"))
        start = end.end()
    return pieces, text[start:]
