"""The connection below SSH: TCP, a jump host's channel or a ProxyCommand, and the greeting with which every sshd begins."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress

import paramiko

UNACKNOWLEDGED_LIMIT_S = 30  # after which the kernel calls a link dead whose far end says nothing to our keep-alives
POLL_S = 0.05
GREETING = b"SSH-"
# What sshd says instead of a greeting, where it says anything, when it drops a connection for a while.
DROPPING = (b"Exceeded MaxStartups", b"Not allowed at this time")


class Dropped(Exception):
    """The server took the connection and closed it before its greeting, as sshd does above its MaxStartups."""


class SaysNothing(Exception):
    """Something took the connection, but is no SSH server, or none that answers in time."""


class ProxyCommand:
    """A program that carries the connection over its stdin and stdout, run by the person's shell as OpenSSH runs it."""

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        with theirs:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,  # a Ctrl-C meant for us must not cut the connection with which we end the run
            )

    def close(self) -> str:
        """End the program; what it said at last."""
        self.socket.close()
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._stderr.closed:
            return ""
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        self._stderr.close()
        return said[-500:]


def dial(host: str, port: int, limit_s: float, before: paramiko.Transport | None) -> socket.socket | paramiko.Channel:
    """A connection to `host`, through the server `before` where there is one.

    Its addresses share the time limit: a machine that swallows packets costs it once. Raises OSError or SSHException.
    """
    if before is not None:
        return before.open_channel("direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=limit_s)
    deadline = time.monotonic() + limit_s
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for index, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.1, (deadline - time.monotonic()) / (len(found) - index)))
            sock.connect(address)
        except OSError:
            sock.close()
            if index == len(found) - 1:
                raise
            continue
        # SSH often sends two small packets and then waits: without this the second leaves only once the first is acknowledged,
        # which the far end may put off for 40 ms, as it does at every login.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # macOS knows none
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_LIMIT_S)
        return sock
    raise OSError(f"{host} has no address")


def await_greeting(sock: socket.socket | paramiko.Channel, limit_s: float) -> None:
    """Wait until an SSH server greets, without taking the greeting away. Raises Dropped or SaysNothing."""
    if not isinstance(sock, socket.socket):
        return  # a channel cannot be looked into; paramiko has the same time limit
    deadline = time.monotonic() + limit_s
    seen = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left_s)[0]:
            break
        try:
            seen = sock.recv(4096, socket.MSG_PEEK)
        except ConnectionResetError:
            raise Dropped("it takes connections and closes them at once") from None
        if not seen or any(words in seen for words in DROPPING):
            raise Dropped("it takes connections and closes them at once")
        if seen.startswith(GREETING) or b"\n" + GREETING in seen:
            return
        time.sleep(POLL_S)
    if seen:
        raise SaysNothing(f"something that is no SSH server answers there: {seen[:60]!r}")
    raise SaysNothing(f"it accepts the connection, but says nothing for {limit_s:g} s")
