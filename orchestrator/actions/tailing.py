"""One node's `tail.py`, read in a thread: through broken connections it goes on where it was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions import agent
from orchestrator.errors import ClusterTrainError, NodeError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Channel

BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # the last one again and again
RECONNECT_LIMIT_S = 600.0
FRUITLESS_LIMIT = 3  # ends of `tail.py` without a word from it, while the connection stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The connection broke; it is being made again."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """The connection stands again."""

    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """There is nothing more to come; `why` says why not all was told."""

    why: str = ""


Put = Callable[[str, "Mapping[str, Any] | Lost | Back | End"], None]


class NodeTail:
    """Puts every message of one node, and what happens to the connection, until an `End`.

    Args:
        arguments: of tail.py, beside the offsets.
        offsets: by file, where to begin.
        is_live: whether a broken connection is made again.
    """

    def __init__(
        self,
        fleet: Fleet,
        node: str,
        place: tuple[str, str],
        arguments: Sequence[str],
        offsets: Mapping[str, int],
        put: Put,
        *,
        is_live: bool,
    ) -> None:
        self._fleet, self._node, self._put = fleet, node, put
        self._root, self._python = place
        self._arguments = [*arguments, *(("--silence-s", f"{agent.SILENCE_S:g}") if is_live else ())]
        self._offsets = dict(offsets)
        self._is_live = is_live
        self._channel: Channel | None = None
        self._is_draining = False
        self._beat_s = 0.0
        self._lock = threading.Lock()  # of the channel, against a drain while it is made anew
        self._has_to_end = threading.Event()
        self.heard_s = time.monotonic()

    def start(self) -> None:
        """Open the tail, whose failure is raised here (NodeError), and read it in a thread."""
        self._open()
        threading.Thread(target=self._run, daemon=True).start()

    def drain(self) -> None:
        """Have it tell what is there and end."""
        with self._lock:
            self._is_draining = True
            self._write_drain()

    def close(self) -> None:
        """Give it up; nothing more is put."""
        self._has_to_end.set()
        with self._lock:
            if self._channel:
                self._channel.close()

    def _run(self) -> None:
        fruitless = 0
        while not self._has_to_end.is_set():
            before = dict(self._offsets)
            why, is_link = self._pump()
            if not why:
                break
            fruitless = 0 if is_link or before != self._offsets else fruitless + 1
            if not self._is_live or fruitless >= FRUITLESS_LIMIT:
                return self._tell(End(why=why))
            if not self._again(why, is_link=is_link):
                return None
        return self._tell(End())

    def _pump(self) -> tuple[str, bool]:
        """Read to the channel's end: why it came before the time, empty for a good one, and whether the link is to blame."""
        channel, rest = self._channel, b""
        assert channel is not None
        try:
            while data := self._read(channel):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    self._take(json.loads(line))
            code = channel.wait(agent.BEAT_S)
            if code == agent.GIVEN_UP:
                raise ConnectionError(channel.stderr().strip())
            return ("" if code == 0 else channel.stderr().strip() or f"exit code {code} of tail.py"), False
        except (OSError, EOFError, ValueError) as error:
            return str(error) or type(error).__name__, True

    def _read(self, channel: Channel) -> bytes:
        """What the node sends next; meanwhile it hears from us. Raises ConnectionError where it says nothing at all."""
        deadline = time.monotonic() + agent.SILENCE_S
        while True:
            now = time.monotonic()
            if self._is_live and now >= self._beat_s:
                self._beat_s = now + agent.BEAT_S
                channel.write(agent.ALIVE)
            try:
                return channel.read(agent.BEAT_S)
            except TimeoutError:
                if self._is_live and now > deadline:
                    raise ConnectionError(f"nothing was heard from {self._node} for {agent.SILENCE_S:g} s") from None

    def _take(self, message: Mapping[str, Any]) -> None:
        if "alive" in message:
            return
        self.heard_s = time.monotonic()
        if "data" in message:
            self._offsets[message["file"]] = message["offset"] + len(message["data"])
        self._put(self._node, message)

    def _again(self, why: str, *, is_link: bool) -> bool:
        """Make the connection again, however long it takes, up to the limit; whether it stands."""
        self._tell(Lost(why=why))
        started = time.monotonic()
        for attempt in range(1_000_000):
            if self._has_to_end.wait(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)]):
                return False
            try:
                if is_link or attempt:
                    self._fleet.reconnect(self._node)
                self._open()
                self._tell(Back(after_s=time.monotonic() - started))
                return True
            except ClusterTrainError as error:
                why = error.message
            if time.monotonic() - started > RECONNECT_LIMIT_S:
                break
        self._tell(End(why=f"{why} (tried for {RECONNECT_LIMIT_S / 60:.0f} minutes)"))
        return False

    def _open(self) -> None:
        arguments = [*self._arguments, "--offsets", json.dumps(self._offsets)]
        argv = agent.command(self._root, self._python, "tail.py", arguments)
        channel = self._fleet.transports[self._node].open(argv)
        with self._lock:
            self._channel = channel
            if self._has_to_end.is_set():
                channel.close()
                raise NodeError(f"{self._node}: given up", node=self._node)
            if self._is_draining:
                self._write_drain()

    def _write_drain(self) -> None:
        try:
            if self._channel:
                self._channel.write(b"drain\n")
        except (OSError, ValueError, EOFError):
            pass  # it has ended already, or its thread will see why not

    def _tell(self, what: Lost | Back | End) -> None:
        if not self._has_to_end.is_set():
            self._put(self._node, what)
