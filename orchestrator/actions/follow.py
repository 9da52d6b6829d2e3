"""Every rank's output from every node at once, into the record and onto the terminal, until the run is over."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions import agent
from orchestrator.actions.record import RunRecord
from orchestrator.errors import UnreachableError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Channel
from orchestrator.planning.loglines import LineSplitter
from orchestrator.specs.events import Emit, LogText, Notice

READ_TIMEOUT_S = 5.0
INTERRUPT = object()
FINAL_STATES = frozenset({"succeeded", "failed", "stopped", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReference:
    """Where a run is.

    Args:
        run_dir: its directory, the same path on every node.
        ranks: the ranks of each node, the head first.
        again: the command that follows it again, for advice.
    """

    run_id: str
    run_dir: str
    root: str
    python: str
    ranks: Mapping[str, tuple[int, ...]]
    again: str


@dataclass(slots=True)
class Followed:
    """What was learnt: the head's last status, and by log the last exit record of every rank that left one."""

    status: dict[str, Any]
    exits: dict[int, dict[str, Any]]


class Follower:
    """Follows one run; `follow` may be called again after an interruption and goes on where it was."""

    def __init__(
        self, fleet: Fleet, run: RunReference, record: RunRecord, emit: Emit, *, wanted: Sequence[int] | None = None
    ) -> None:
        self._run = run
        self._record = record
        self._emit = emit
        self._wanted = None if wanted is None else frozenset(wanted)
        # A SimpleQueue may be put to from a signal handler, also while the same thread is taking from it.
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._splitters: dict[tuple[str, str], LineSplitter] = {}
        self._known: dict[str, int] = {}
        self._open: dict[str, Channel] = {}
        self._fleet = fleet
        self._numbers: dict[int, int] = {}  # a rank's log -> its number, which changes when a node is left out
        self._told_notices = 0
        self.result = Followed(status={}, exits={})

    def start(self, *, live: bool = True) -> None:
        """Begin to tail on every node that has ranks; with `live` until the run ends, else what is there now."""
        head = next(iter(self._run.ranks))
        for node, ranks in self._run.ranks.items():
            arguments = ["--run-dir", self._run.run_dir, "--ranks", ",".join(map(str, ranks))]
            arguments += ["--follow"] if live else []
            arguments += ["--head" if node == head else "--until-drained"]
            argv = agent.command(self._run.root, self._run.python, "tail.py", arguments)
            channel = self._fleet.transports[node].open(argv)
            self._open[node] = channel
            threading.Thread(target=self._pump, args=(node, channel), daemon=True).start()

    def interrupt(self) -> None:
        """Let `follow` know of a Ctrl-C; may be called from a signal handler."""
        self._queue.put(("", INTERRUPT))

    def follow(self, on_interrupt: Callable[[int], bool] = lambda count: False) -> Followed:
        """Work until every node has told all.

        Args:
            on_interrupt: called with 1, 2, … for every `interrupt`; whether to go on following.

        Raises:
            UnreachableError: the connection to the head broke; the run goes on.
        """
        interrupts = 0
        head = next(iter(self._run.ranks))
        while self._open:
            node, item = self._queue.get()
            if item is INTERRUPT:
                interrupts += 1
                if not on_interrupt(interrupts):
                    self.close()
            elif item is None:
                self._open.pop(node).close()
            elif isinstance(item, Exception) and node != head:
                self._open.pop(node).close()
                text = f"{node}: the connection was lost while following ({str(item) or type(item).__name__})"
                self._emit(Notice(text=f"{text}; what its ranks write from now on is not shown"))
            elif isinstance(item, Exception):
                self.close()
                raise UnreachableError(
                    f"{node}: the connection was lost while following; the run goes on ({str(item) or type(item).__name__})",
                    node=node,
                    advice=self._run.again,
                ) from item
            else:
                self._take(node, item)
        for (node, name), splitter in self._splitters.items():
            self._show(node, name, splitter.finish())
        return self.result

    def close(self) -> None:
        """Give the tails up; the run is not touched."""
        for channel in self._open.values():
            channel.close()
        self._open.clear()

    def _pump(self, node: str, channel: Channel) -> None:
        """One node's thread: every JSON line it sends goes to the queue, then None, or the error that ended it."""
        rest = b""
        try:
            while True:
                try:
                    data = channel.read(READ_TIMEOUT_S)
                except TimeoutError:
                    continue  # a quiet job; a dead link makes `read` fail through keep-alive
                if not data:
                    break
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    self._queue.put((node, json.loads(line)))
            code = channel.wait(READ_TIMEOUT_S)
            self._queue.put((node, None if code == 0 else RuntimeError(channel.stderr().strip() or f"exit code {code}")))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self._queue.put((node, error))

    def _take(self, node: str, item: Mapping[str, Any]) -> None:
        if "data" in item:
            self._log(node, item["file"], item["offset"], item["data"].encode("latin-1"))
        elif "rank" in item:
            self._numbers[item["rank"].get("log", item["rank"]["rank"])] = item["rank"]["rank"]
        elif "exit" in item:
            log = item["exit"].get("log", item["exit"]["rank"])
            self.result.exits[log] = item["exit"]
            self._record.write(f"rank-{log}.exit.json", item["exit"])
        elif "status" in item:
            self.result.status = item["status"]
            self._record.write("status.json", item["status"])
            notices = item["status"].get("notices", [])
            for text in notices[self._told_notices :]:
                self._emit(Notice(text=text))
            self._told_notices = len(notices)
            if item["status"]["state"] in FINAL_STATES:
                self._drain()

    def _drain(self) -> None:
        """The head says that the run is over: the other nodes send what is there and end, however their ranks died."""
        for channel in self._open.values():
            try:
                channel.write(b"drain\n")
            except (OSError, ValueError, TimeoutError):
                pass  # it has ended already, or its thread will say why not

    def _log(self, node: str, name: str, offset: int, data: bytes) -> None:
        known = self._known.get(name, 0)
        if offset + len(data) <= known:
            return
        self._known[name] = offset + len(data)
        self._record.append(name, offset, data)
        splitter = self._splitters.setdefault((node, name), LineSplitter())
        self._show(node, name, splitter.feed(data[max(0, known - offset) :]))

    def _show(self, node: str, name: str, pieces: Sequence[Any]) -> None:
        rank, stream = _parsed(name)
        if self._wanted is not None and rank not in self._wanted:
            return
        for piece in pieces:
            number = None if rank is None else self._numbers.get(rank, rank)
            self._emit(LogText(node=node, rank=number, stream=stream, text=piece.text, transient=piece.transient))


def _parsed(name: str) -> tuple[int | None, str]:
    """("rank-3.err") is (3, "err"); mpirun's own output has no rank."""
    stem, stream = name.rsplit(".", 1)
    return (int(stem.removeprefix("rank-")), stream) if stem.startswith("rank-") else (None, stream)
