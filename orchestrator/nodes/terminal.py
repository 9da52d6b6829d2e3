"""Questions whose answer is not shown: asked on the person's terminal, wherever stdin and stdout lead."""

from __future__ import annotations

import getpass
import os


def has_terminal() -> bool:
    """Whether there is a person to ask."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ask_hidden(question: str) -> str:
    """What the person types, nothing of which is shown; empty where they give up (Return, Ctrl-D), or there is no terminal."""
    if not has_terminal():
        return ""
    try:
        return getpass.getpass(question)
    except EOFError:
        return ""
