"""A command as a person calls it, who sits at a terminal and answers what it asks."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 120.0
# stdout becomes the terminal of the session.
_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def at_terminal(
    command: Sequence[str | Path],
    answers: Sequence[tuple[str, str]],
    *,
    env: Mapping[str, str] | None = None,
    stdin_is_terminal: bool = True,
    limit_s: float = LIMIT_S,
) -> tuple[int, str]:
    """The exit code, and all that the terminal showed.

    Args:
        answers: the end of a question, and what is typed then, in the order in which they are asked.
    """
    terminal, its = pty.openpty()
    stdin = its if stdin_is_terminal else subprocess.DEVNULL
    argv = [sys.executable, "-c", _TAKE_TERMINAL, *map(str, command)]
    process = subprocess.Popen(argv, env=env, stdin=stdin, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown, seen, left, deadline = "", 0, list(answers), time.monotonic() + limit_s
    try:
        while True:
            assert time.monotonic() < deadline, shown
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # it has ended
                break
            if left and left[0][0] in shown[seen:]:
                seen = len(shown)
                os.write(terminal, left.pop(0)[1].encode() + b"\n")
    finally:
        os.close(terminal)
        if time.monotonic() > deadline:
            process.kill()
        process.wait(LIMIT_S)
    assert not left, (left, shown)
    return process.returncode, shown
