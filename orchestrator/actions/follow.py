"""Every rank's output from every node at once, into the record and onto the terminal, until the run is over."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.actions.record import RunRecord
from orchestrator.actions.tailing import Back, End, Lost, NodeTail
from orchestrator.errors import NodeError, UnreachableError
from orchestrator.nodes.fleet import Fleet
from orchestrator.planning.loglines import LineSplitter, Piece
from orchestrator.planning.logview import LogView
from orchestrator.planning.verdict import FINAL_STATES
from orchestrator.specs.events import Emit, LogText, Notice

INTERRUPT = object()
TICK_S = 0.5
# Once the run is over: how long a node may say nothing before it is given up, and one that the head has lost too.
SILENT_LIMIT_S = 30.0
LOST_LIMIT_S = 2.0
HEAD_LIMIT_S = 3.0  # in which a head that lives has let us in again
HEADLESS = ("abort", "orphaned", "cut_off")  # how ranks end that lost mpirun or its supervisor


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
    """What was learnt: the head's last status, and by log the last exit record of every rank that left one.

    `unheard` are nodes that did not tell all, and why.
    """

    status: dict[str, Any]
    exits: dict[int, dict[str, Any]]
    unheard: dict[str, str] = field(default_factory=dict)


class Follower:
    """Follows one run.

    Args:
        record: takes all that is followed, and says from where to go on, unless `view` leaves something out.
        view: what is shown.

    `interrupts` is how often `interrupt` was called.
    """

    def __init__(self, fleet: Fleet, run: RunReference, record: RunRecord, emit: Emit, *, view: LogView = LogView()) -> None:  # noqa: B008  frozen
        self._fleet = fleet
        self._run = run
        self._head = next(iter(run.ranks))
        self._record = record
        self._emit = emit
        self._view = view
        # A SimpleQueue may be put to from a signal handler, also while the same thread is taking from it.
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._splitters: dict[tuple[str, str], LineSplitter] = {}
        self._known: dict[str, int] = {}
        self._tails: dict[str, NodeTail] = {}
        self._lost: dict[str, float] = {}  # since when, by the monotonic clock
        self._over_s: float | None = None
        self._numbers: dict[int, int] = {}  # a rank's log -> its number, which changes when a node is left out
        self._told_notices = 0
        self.interrupts = 0
        self.result = Followed(status={}, exits={})

    def start(self, *, live: bool = True, go_on: bool = False) -> int:
        """Begin to tail on every node that has ranks; with `live` until the run ends, else what is there now.

        With `go_on` it begins behind the last line that the record holds; how many bytes that leaves out.

        Raises NodeError where a node cannot be asked.
        """
        if go_on:
            self._known = self._record.line_ends()
        for node, ranks in self._run.ranks.items():
            wanted = [rank for rank in ranks if self._view.has(node, rank)]
            if node in self.result.unheard or (not wanted and node != self._head):
                continue
            if node in self._fleet.unreachable:
                self.result.unheard[node] = self._fleet.unreachable[node]
                self._emit(Notice(text=f"{self._fleet.unreachable[node]}: its lines are missing"))
                continue
            arguments = ["--run-dir", self._run.run_dir, "--ranks", ",".join(map(str, wanted)), *self._view.start_arguments()]
            arguments += ["--follow"] if live else []
            arguments += ["--head" if node == self._head else "--until-drained"]
            place = (self._run.root, self._run.python)
            self._tails[node] = NodeTail(self._fleet, node, place, arguments, self._known, self._put, is_live=live)
            self._tails[node].start()
        return sum(self._known.values())

    def interrupt(self) -> None:
        """Let `follow` know of a Ctrl-C; may be called from a signal handler."""
        self.interrupts += 1
        self._queue.put(("", INTERRUPT))

    def follow(self, on_interrupt: Callable[[int], bool] = lambda count: False) -> Followed:
        """Work until every node has told all. A connection that breaks is made again.

        Args:
            on_interrupt: called with 1, 2, … for every `interrupt`; whether to go on following.

        Raises:
            UnreachableError: a connection could not be made again; the run goes on.
        """
        interrupts = 0
        while self._tails:
            try:
                node, item = self._queue.get(timeout=TICK_S)
            except queue.Empty:
                self._conclude_without_head()
                self._give_up_the_silent()
                continue
            if item is INTERRUPT:
                interrupts += 1
                if not on_interrupt(interrupts):
                    self.close()
            elif isinstance(item, (Lost, Back, End)):
                self._connection(node, item)
            else:
                self._take(node, item)
        return self.result

    def finish(self, *, look_again: bool) -> None:
        """Show what has no line's end yet. With `look_again` ask once more: a rank may have written after the run was over."""
        if look_again:
            try:
                self.start(live=False)
                self.follow()
            except NodeError:
                pass  # what is there was told before
        for (node, name), splitter in self._splitters.items():
            self._show(node, name, splitter.finish())

    def close(self) -> None:
        """Give the tails up; the run is not touched."""
        while self._tails:
            self._tails.popitem()[1].close()

    def _put(self, node: str, item: object) -> None:
        self._queue.put((node, item))

    def _connection(self, node: str, item: Lost | Back | End) -> None:
        """What became of a node's connection."""
        if isinstance(item, Lost):
            self._lost[node] = time.monotonic()
            self._emit(Notice(text=f"{node}: the connection was lost ({item.why}): connecting again, the run does not need it"))
        elif isinstance(item, Back):
            self._lost.pop(node, None)
            self._emit(Notice(text=f"{node}: connected again after {item.after_s:.0f} s, going on where it was"))
        elif node in self._tails:
            self._tails.pop(node).close()
            if not item.why:
                return
            if node == self._head and self._over_s is None:
                self.close()
                raise UnreachableError(
                    f"{node}: the connection was lost while following, and with it the run's state; unless {node} is down the "
                    f"run goes on ({item.why})",
                    node=node,
                    advice=self._run.again,
                )
            self._give_up(node, item.why)
            self._emit(Notice(text=f"{node}: given up ({item.why}): its lines are missing from here on"))

    def _conclude_without_head(self) -> None:
        """Where the head is gone for its own ranks' fellows too, the run is over, and is not waited for."""
        others = [rank for node, ranks in self._run.ranks.items() if node != self._head for rank in ranks]
        ends = [self.result.exits[rank]["ended_by"] for rank in others if rank in self.result.exits]
        is_over = bool(others) and len(ends) == len(others) and any(end in HEADLESS for end in ends)
        lost_s = time.monotonic() - self._lost.get(self._head, float("inf"))
        if self._over_s is not None or lost_s < HEAD_LIMIT_S or not is_over:
            return
        reason = f"{self._head} cannot be reached, and the ranks on the other nodes ended because they had lost it too"
        self.result.status = {**self.result.status, "state": "lost", "reason": reason}
        self._record.write("status.json", self.result.status)
        self._tails.pop(self._head).close()
        self._give_up(self._head, "it cannot be reached")
        self._end()

    def _give_up(self, node: str, why: str) -> None:
        """A node that is not waited for, from now on and by nobody."""
        self.result.unheard[node] = self._fleet.unreachable[node] = why

    def _end(self) -> None:
        """The run is over: the nodes send what is there and end, however their ranks died."""
        self._over_s = time.monotonic()
        for tail in self._tails.values():
            tail.drain()

    def _give_up_the_silent(self) -> None:
        """When the run is over, a node that is gone is not waited for."""
        if self._over_s is None:
            return
        now = time.monotonic()
        states = self.result.status.get("nodes") or {}
        for node, tail in list(self._tails.items()):
            is_gone = node in self._lost or states.get(node) == "quiet"
            silent_s = now - max(tail.heard_s, self._over_s)
            if silent_s > (LOST_LIMIT_S if is_gone else SILENT_LIMIT_S):
                self._tails.pop(node).close()
                self._give_up(node, f"it said nothing for {silent_s:.0f} s")
                self._emit(Notice(text=f"{node}: no answer since the run is over: its last lines may be missing"))

    def _take(self, node: str, item: Mapping[str, Any]) -> None:
        if "data" in item:
            self._log(node, item["file"], item["offset"], item["data"].encode("latin-1"))
        elif "rank" in item:
            log = item["rank"].get("log", item["rank"]["rank"])
            self._numbers[log] = item["rank"]["rank"]
            self.result.exits.pop(log, None)  # of an earlier attempt; that of this one follows
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
            if item["status"]["state"] in FINAL_STATES and self._over_s is None:
                self._end()

    def _log(self, node: str, name: str, offset: int, data: bytes) -> None:
        known = self._known.get(name, 0)
        if offset + len(data) <= known:
            return
        self._known[name] = offset + len(data)
        if self._view.is_everything:
            self._record.append(name, offset, data)
        splitter = self._splitters.setdefault((node, name), LineSplitter())
        self._show(node, name, splitter.feed(data[max(0, known - offset) :]))

    def _show(self, node: str, name: str, pieces: Sequence[Piece]) -> None:
        rank, stream = _parsed(name)
        if not self._view.has(node, rank):
            return
        for piece in pieces:
            text = self._view.chosen(piece)
            if text is not None:
                number = None if rank is None else self._numbers.get(rank, rank)
                self._emit(LogText(node=node, rank=number, stream=stream, text=text, transient=piece.transient))


def _parsed(name: str) -> tuple[int | None, str]:
    """("rank-3.err") is (3, "err"); mpirun's own output has no rank."""
    stem, stream = name.rsplit(".", 1)
    return (int(stem.removeprefix("rank-")), stream) if stem.startswith("rank-") else (None, stream)
