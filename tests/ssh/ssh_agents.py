"""Real ssh-agents of a test's own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_agent(socket: Path) -> Iterator[Path]:
    """An agent without keys that listens at a socket."""
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    try:
        while not socket.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        yield socket
    finally:
        process.terminate()
        process.wait(20)


def add_to_agent(key: Path, socket: Path) -> None:
    """Hand a key to an agent, with its certificate if there is one beside it."""
    environment = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
    subprocess.run(["ssh-add", "-q", key], check=True, stdin=subprocess.DEVNULL, env=environment, timeout=60)
