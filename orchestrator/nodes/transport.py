"""The one seam to a machine: open a command there, write its stdin, read its stdout.

Copying goes through the same door: a command on the node reads a stream from stdin and renames what is complete, so a
broken copy never leaves half a file. There is no other way to touch a node.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.errors import ClusterTrainError, CommandError

CHUNK_BYTES = 1 << 18


class Channel(Protocol):
    """A command that runs on a node."""

    def write(self, data: bytes) -> None:
        """Send `data` to the command's stdin; raises TimeoutError when it does not take it in time, OSError when it is gone."""

    def close_stdin(self) -> None:
        """Let the command read end of file."""

    def read(self, timeout_s: float) -> bytes:
        """Some bytes of stdout, b"" at its end; raises TimeoutError after `timeout_s` without any, OSError for a lost link."""

    def wait(self, timeout_s: float) -> int:
        """The exit code (128 + signal number for a signal); raises TimeoutError, or OSError when the link is lost."""

    def stderr(self) -> str:
        """What the command wrote to stderr; to be called after `wait`."""

    def preamble(self) -> str:
        """What the login shell's start-up files printed before the command began; known once something was read."""

    def close(self) -> None:
        """Give the command up: it reads end of file or is killed (local twin)."""


class Transport(Protocol):
    """A connected node. `open` may be called from several threads at once."""

    @property
    def node(self) -> str:
        """The node's name in the inventory."""

    @property
    def is_local(self) -> bool:
        """Whether this is the very machine that we run on, reached without SSH."""

    @property
    def host_key(self) -> str | None:
        """The verified host key as `TYPE BASE64`, or None where no SSH was used."""

    @property
    def key_file(self) -> str | None:
        """The private key file that logged us in, None where it needs a passphrase, or it was the agent, or no SSH was used."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command in the login's home directory; relative paths are relative to that. Raises NodeError."""

    def close(self) -> None:
        """Drop the connection; commands that run are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The outcome of a command that ended."""

    exit_code: int
    stdout: bytes
    stderr: str


def run(
    transport: Transport,
    argv: Sequence[str],
    *,
    stdin: bytes | Iterable[bytes] = b"",
    idle_timeout_s: float,
    on_line: Callable[[bytes], None] | None = None,
) -> Completed:
    """Run a command to its end, whatever its exit code.

    Args:
        stdin: what the command reads; an iterable is sent as it is produced, and what it raises is raised here.
        idle_timeout_s: how long nothing may move, neither input taken nor output made, before it is given up.
        on_line: called with each line of stdout (without its newline) as it comes; stdout is then not collected.

    Raises:
        CommandError: nothing moved for `idle_timeout_s`, or the connection was lost.
    """
    channel = transport.open(argv)
    sender = _Sender(channel, stdin)
    try:
        sender.start()
        stdout = _read_all(channel, idle_timeout_s, on_line, sender)
        exit_code = channel.wait(idle_timeout_s)
        sender.join()
    except TimeoutError:
        raise CommandError(
            f"{transport.node}: no sign of life for {idle_timeout_s:g} s from: {_shown(argv)}",
            node=transport.node,
            command=_shown(argv),
            advice="look at the node's load and network, then run the same command again: what is done stays done",
        ) from None
    except (OSError, EOFError) as error:
        raise CommandError(
            f"{transport.node}: the connection was lost during: {_shown(argv)} ({error})",
            node=transport.node,
            command=_shown(argv),
            advice="run the same command again: what is done stays done",
        ) from error
    finally:
        channel.close()
    if sender.source_failure is not None:
        raise failure_of(transport.node, sender.source_failure)
    if sender.failure is not None and exit_code == 0:
        raise CommandError(f"{transport.node}: could not send the input of: {_shown(argv)}", node=transport.node)
    return Completed(exit_code=exit_code, stdout=stdout, stderr=channel.stderr())


def check(transport: Transport, argv: Sequence[str], completed: Completed) -> Completed:
    """The same `completed` if its exit code is 0; raises CommandError with the end of its stderr otherwise."""
    if completed.exit_code == 0:
        return completed
    last = completed.stderr.strip().splitlines()[-5:]
    raise CommandError(
        f"{transport.node}: exit code {completed.exit_code} from: {_shown(argv)}" + "".join(f"\n    {line}" for line in last),
        node=transport.node,
        command=_shown(argv),
        stderr=completed.stderr,
    )


def parse_json(transport: Transport, argv: Sequence[str], data: bytes) -> dict[str, Any]:
    """The JSON object that a node's script printed; raises CommandError for anything else (a shell's greeting, say)."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise CommandError(
            f"{transport.node}: {_shown(argv)} answered something that is not JSON: {data[:200]!r}",
            node=transport.node,
            command=_shown(argv),
            advice="start-up files of a non-interactive shell must print nothing (see `ssh HOST true`)",
        )
    return document


def failure_of(node: str, error: Exception) -> ClusterTrainError:
    """Any exception of a node's thread as one of ours that names the node."""
    if isinstance(error, ClusterTrainError):
        return error
    return CommandError(f"{node}: {type(error).__name__}: {error}", node=node)


class _Sender(threading.Thread):
    """Feeds a command's stdin while its output is being read, so that neither side waits for the other for ever."""

    def __init__(self, channel: Channel, data: bytes | Iterable[bytes]) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self._chunks = _chunks(data) if isinstance(data, bytes) else data
        self.failure: Exception | None = None
        self.source_failure: Exception | None = None  # of what is sent: it could not be produced to its end
        self.moved = 0

    def run(self) -> None:
        try:
            for chunk in self._produced():
                self._channel.write(chunk)
                self.moved += 1
            self._channel.close_stdin()
        except (OSError, EOFError, ValueError) as error:
            # The command ended without reading all: its exit code and stderr tell more than this does.
            self.failure = error

    def _produced(self) -> Iterator[bytes]:
        """The chunks as far as there are any: the command then reads the end of a stream that lacks its own."""
        try:
            yield from self._chunks
        except GeneratorExit:
            raise
        except Exception as error:
            self.source_failure = error


def _read_all(channel: Channel, idle_timeout_s: float, on_line: Callable[[bytes], None] | None, sender: _Sender) -> bytes:
    collected = bytearray()
    rest = b""
    while True:
        moved = sender.moved
        try:
            data = channel.read(idle_timeout_s)
        except TimeoutError:
            if sender.moved == moved:
                raise
            continue
        if not data:
            break
        if on_line is None:
            collected += data
        else:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                on_line(line)
    if rest and on_line is not None:
        on_line(rest)
    return bytes(collected)


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _shown(argv: Sequence[str]) -> str:
    text = " ".join(argument if len(argument) < 100 else argument[:40] + "…" for argument in argv)
    return text.replace("\n", " ")
