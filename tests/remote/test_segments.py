"""Segments of shared memory that MPICH leaves: looked for beside everything else that a keeper does."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from supervised import REMOTE, until

sys.path.insert(0, str(REMOTE))

import segments


def test_a_process_that_does_not_show_its_memory_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO stands in for the maps of a process that holds its memory's lock: what it tells later counts all the same."""
    os.mkfifo(tmp_path / "7")
    monkeypatch.setattr(segments, "MAPS", f"{tmp_path}/%d")
    left = Path(f"/dev/shm/mpich_shm_test_{os.getpid()}")
    left.touch()
    try:
        seen = segments.Segments()
        asked = threading.Thread(target=lambda: [seen.note(7) for _ in range(3)], daemon=True)
        asked.start()
        asked.join(30)
        assert not asked.is_alive()
        (tmp_path / "7").write_text(f"7f-80 rw-s 0 00:1a {left.stat().st_ino} {left}\n")
        until(lambda: (seen.remove(), not left.exists())[1], "the removal of what was told late")
    finally:
        left.unlink(missing_ok=True)
