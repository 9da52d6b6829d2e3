"""What of the logs a person wants to see: whose, since when, which lines. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from orchestrator.planning.loglines import Piece

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """A choice among lines; empty sets choose all.

    Args:
        ranks, nodes: of which ranks, on which nodes.
        pattern: what must occur in a line; progress bars that are written over are then left out.
        age_s, since_unix_s: only what was written so long ago at most, or after that time.
        last_lines: only so many of each file.
    """

    ranks: frozenset[int] = field(default=frozenset())
    nodes: frozenset[str] = field(default=frozenset())
    pattern: re.Pattern[str] | None = None
    age_s: float | None = None
    since_unix_s: float | None = None
    last_lines: int | None = None

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self == LogView()

    def has(self, node: str, rank: int | None) -> bool:
        """Whether lines of a rank (None: mpirun's own) on a node are wanted at all."""
        return (not self.nodes or node in self.nodes) and (not self.ranks or rank in self.ranks)

    def chosen(self, piece: Piece) -> str | None:
        """The wanted lines of a piece, whoever wrote it; None where there are none."""
        if self.pattern is None:
            return piece.text
        lines = [] if piece.transient else [line for line in piece.text.split("\n") if self.pattern.search(line)]
        return "\n".join(lines) if lines else None

    def start_arguments(self) -> list[str]:
        """Where remote/tail.py is to begin."""
        chosen = {"--age-s": self.age_s, "--since-unix-s": self.since_unix_s, "--lines": self.last_lines}
        return [word for name, value in chosen.items() if value is not None for word in (name, f"{value}")]


def parse_since(text: str) -> tuple[float | None, float | None]:
    """(age in seconds, None) of `90s`, `10m`, `2h`, `1h30m`, `2d`; (None, unix time) of an ISO time, local unless it says.

    Raises ValueError for anything else.
    """
    parts = _AGE.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts), None
    # Python 3.10 does not know the Z of UTC.
    return None, datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text)).timestamp()
