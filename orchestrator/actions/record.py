"""The record of a run where the person types: what was launched, every rank's log, how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORD = "record.json"
LONGEST_LINE_BYTES = 1 << 20


def runs_dir(log_dir: str | None = None) -> Path:
    """Where records are kept: `log_dir`, else $XDG_STATE_HOME/cluster-train/runs."""
    if log_dir:
        return Path(log_dir).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "cluster-train" / "runs"


class RunRecord:
    """One run's directory; everything in it is readable by its owner alone, for logs may hold anything."""

    def __init__(self, run_id: str, log_dir: str | None = None) -> None:
        self.path = runs_dir(log_dir) / run_id
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def append(self, name: str, offset: int, data: bytes) -> None:
        """Put `data` at `offset` of a log file: the same piece twice leaves the file the same."""
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)

    def line_ends(self) -> dict[str, int]:
        """By log file, how far it is here in whole lines: what ends there was shown, half a line is shown with its end."""
        found: dict[str, int] = {}
        for path in (*self.path.glob("rank-*.out"), *self.path.glob("rank-*.err"), *self.path.glob("mpirun.*")):
            with path.open("rb") as log:
                before = max(0, path.stat().st_size - LONGEST_LINE_BYTES)
                log.seek(before)
                data = log.read()
            end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
            found[path.name] = before + (end or (len(data) if before else 0))
        return found

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace a JSON file as a whole."""
        temporary = self.path / f".{name}.{os.getpid()}.part"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump(document, out, indent=1)
        temporary.replace(self.path / name)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the record, {} if it is not there."""
        try:
            loaded: dict[str, Any] = json.loads((self.path / name).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return loaded


def records(log_dir: str | None = None) -> Iterator[RunRecord]:
    """Every record, newest first (a run's id begins with its time)."""
    directory = runs_dir(log_dir)
    if directory.is_dir():
        for path in sorted(directory.iterdir(), reverse=True):
            if (path / RECORD).exists():
                yield RunRecord(path.name, log_dir)
