"""A `cluster-train` command that runs while the test goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import COMMAND, REPOSITORY, Ran

LIMIT_S = 120.0


class Running:
    """The command, with all that it says in a file.

    Args:
        directory: where that file and the records of runs are.
        settings: environment variables beside the test's own; where pip's are among them, they are all that pip is told.
        command: what is called instead of the installed command.
        stdin: a terminal, say.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str | Path,
        settings: Mapping[str, str] | None = None,
        command: tuple[str | Path, ...] = (COMMAND,),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        settings = settings or {}
        is_for_pip = any(name.startswith("PIP_") for name in settings)
        plain = {name: value for name, value in os.environ.items() if not (is_for_pip and name.startswith("PIP_"))}
        environment = {**plain, "XDG_STATE_HOME": str(directory / "state"), **settings}
        self._output = directory / f"output{time.monotonic_ns()}"
        with self._output.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdin=stdin,
                stdout=stream,
                stderr=stream,
                text=True,
            )

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._output.read_text()

    def until(self, word: str) -> str:
        """What it has said, once the word is in it."""
        self.wait_for(lambda: word in self.text)
        return self.text

    def wait_for(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Until a condition holds; the command must not be over by then."""
        deadline = time.monotonic() + limit_s
        while not condition():
            is_over = self.process.poll() is not None
            assert condition() or (not is_over and time.monotonic() < deadline), self.text
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def ended(self, limit_s: float = LIMIT_S) -> Ran:
        """What it was, once it has ended; both streams are in `stdout`."""
        return Ran(exit_code=self.process.wait(limit_s), stdout=self.text, stderr="")

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
