"""The local twin of an SSH connection: the same seam, this machine, no network."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import CommandError

READ_BYTES = 1 << 16


class LocalTransport:
    """Runs commands on this machine, from the home directory, as an SSH login would."""

    is_local = True
    host_key: str | None = None
    key_file: str | None = None

    def __init__(self, node: str) -> None:
        self.node = node
        self._channels: list[LocalChannel] = []

    def open(self, argv: Sequence[str]) -> LocalChannel:
        """Start `argv`; raises CommandError when the program is not there."""
        try:
            channel = LocalChannel(argv)
        except OSError as error:
            raise CommandError(f"{self.node}: cannot start {argv[0]}: {error.strerror}", node=self.node) from error
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """End the commands that still run."""
        for channel in self._channels:
            channel.close()


class LocalChannel:
    """One command as a child process; its stderr goes to a file, so that it can never block."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        # Its own session: a Ctrl-C meant for us must not reach what is to outlive us.
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=Path.home(),
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise
        assert self._process.stdin and self._process.stdout
        self._stdin = self._process.stdin
        self._stdout_fd = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout_fd, selectors.EVENT_READ)
        self._stderr_text: str | None = None

    def write(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def close_stdin(self) -> None:
        self._stdin.close()

    def read(self, timeout_s: float) -> bytes:
        if not self._selector.select(timeout_s):
            raise TimeoutError
        return os.read(self._stdout_fd, READ_BYTES)

    def wait(self, timeout_s: float) -> int:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return code if code >= 0 else 128 - code

    def stderr(self) -> str:
        if self._stderr_text is None:
            self._stderr.seek(0)
            self._stderr_text = self._stderr.read().decode(errors="replace")
        return self._stderr_text

    def preamble(self) -> str:
        return ""  # no shell

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its session is its own: what it started goes with it
            self._process.wait()
        if not self._stderr.closed:
            self.stderr()
            self._stderr.close()
            self._selector.close()
            for pipe in (self._process.stdin, self._process.stdout):
                try:
                    if pipe:
                        pipe.close()
                except BrokenPipeError:
                    pass  # the command did not read all; it is gone anyway


def is_this_machine(host: str, port: int | None) -> bool:
    """Whether `host` names this very machine, asked of the kernel: only an own address can be bound.

    A port other than sshd's usual one on an own address may be forwarded into a container or another machine, so it
    is taken as somewhere else.
    """
    if port not in (None, 22):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
