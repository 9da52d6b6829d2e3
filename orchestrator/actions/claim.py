"""Have the nodes for one run: take every node's lock, or say who is there; find what crashed runs left there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.actions import agent, launch
from orchestrator.errors import ClusterTrainError, CommandError, PreflightError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Channel, Completed, Transport, parse_json
from orchestrator.planning.occupancy import Remains, busy_text, find_remains
from orchestrator.specs.events import Emit, Notice, Step

ANSWER_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 10.0
WAIT_READ_S = 1.0
UNUSABLE = "look whose directory that is, and have its owner or root remove it or `chmod 1777` it"
SETTLING_LOOKS = 4  # a run that has just ended needs a moment: what is gone by then was no remains


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How `up` deals with what it meets on the nodes.

    Args:
        wait: for the runs that are in the way, instead of refusing.
        share: take the nodes whoever is there.
        is_clearing_wanted: is shown what crashed runs left, and decides whether to end it; None refuses.
    """

    wait: bool = False
    share: bool = False
    is_clearing_wanted: Callable[[Sequence[Remains]], bool] | None = None


class Hold:
    """One node's `locks.py hold`: what it said last, and whether the node is ours."""

    def __init__(self, transport: Transport, root: str, python: str, owner: Mapping[str, Any]) -> None:
        self.transport = transport
        self.busy: list[dict[str, Any]] = []  # who is in the way
        self.beside: list[dict[str, Any]] = []  # who is there too
        self.is_held = False
        self._argv = agent.command(root, python, "locks.py", ["hold"])
        self._rest = b""
        self._channel = self._open(owner)
        try:
            first = self._line(ANSWER_TIMEOUT_S)
        except _NoAgent:
            self._channel.close()
            agent.ship(transport, root, python)
            self._channel = self._open(owner)
            first = self._line(ANSWER_TIMEOUT_S)
        self.look: dict[str, Any] = first
        self.hear(ANSWER_TIMEOUT_S)

    def hear(self, timeout_s: float) -> bool:
        """Take in what the node says within a time; whether it said anything."""
        try:
            said = self._line(timeout_s)
        except TimeoutError:
            return False
        self.is_held = bool(said.get("held"))
        self.busy, self.beside = said.get("busy", []), said.get("beside", [])
        return True

    def beat(self) -> None:
        """Let the node know that we are here."""
        try:
            self._channel.write(agent.ALIVE)
        except (OSError, EOFError, ValueError):
            pass  # it has ended or was let go

    def check(self) -> None:
        """Raise CommandError where the node has let go."""
        self.hear(0.0)

    def cancel(self) -> None:
        """End all that was started on the node over this connection."""
        self._channel.write(b"cancel\n")
        while "ended" not in self._line(CANCEL_TIMEOUT_S):
            pass

    def release(self, *, keep: bool = False, is_gone: bool = False) -> None:
        """Let go, and see it done unless the node is gone; with `keep` it holds the lock until the run's ranks there do."""
        try:
            if keep:
                self._channel.write(b"keep\n")
            self._channel.close_stdin()
            if not keep and not is_gone:
                self._channel.wait(CANCEL_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError, ValueError):
            pass  # the link is gone, and with it the node's reason to hold
        if not (keep and self.transport.is_local):  # a local process would be killed; the supervisor holds the lock by now
            self._channel.close()

    def _open(self, owner: Mapping[str, Any]) -> Channel:
        channel = self.transport.open(self._argv)
        try:
            channel.write(json.dumps({**owner, "silence_s": agent.SILENCE_S}).encode() + b"\n")
        except OSError:
            pass  # it has ended, and its exit code says why
        return channel

    def _line(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            try:
                data = self._channel.read(max(0.01, deadline - time.monotonic()))
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError):
                    raise
                raise self._failure(str(error)) from error
            if not data:
                self._raise_end()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        said = parse_json(self.transport, self._argv, line)
        if "error" in said:
            raise PreflightError(f"{self.transport.node}: {said['error']}", advice=UNUSABLE)
        return said

    def _raise_end(self) -> None:
        code = self._channel.wait(ANSWER_TIMEOUT_S)
        ended = Completed(exit_code=code, stdout=b"", stderr=self._channel.stderr())
        if agent.is_not_there(ended):
            raise _NoAgent
        last = ended.stderr.strip().splitlines()[-1:]
        raise self._failure(f"it ended with exit code {code}{': ' + last[0] if last else ''}")

    def _failure(self, why: str) -> CommandError:
        node = self.transport.node
        return CommandError(f"{node}: the node's lock could not be kept: {why}", node=node, command="locks.py")


class _NoAgent(Exception):
    """Our scripts are not on the node yet."""


class Claim:
    """The nodes' locks that one run has."""

    def __init__(self, fleet: Fleet, root: str, python: str, owner: Mapping[str, Any], emit: Emit) -> None:
        self._fleet, self._root, self._python, self._emit = fleet, root, python, emit
        self._owner = owner
        self._holds: dict[str, Hold] = {}
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def take(self, terms: Terms) -> None:
        """Every node's lock, or none: raises PreflightError that names who is there, or what is to be cleared first."""
        owner = {**self._owner, "share": terms.share}
        machines = self._ask_all(owner)
        self._clear(terms, owner)
        if all(hold.is_held for hold in self._holds.values()):
            self._tell_of_company()
            return
        seen = {node: hold.busy for node, hold in self._holds.items()}
        # Somebody is in the way, maybe one who asked at the same moment and has what we lack. All take one lock after the
        # other in the machines' order, which is the same for everybody: so one gets through, and nobody waits in a circle.
        self.release()
        for node in sorted(machines, key=lambda name: (machines[name], name)):
            hold = self._holds[node] = Hold(self._fleet.transports[node], self._root, self._python, owner)
            if not hold.is_held:
                self._wait(hold, terms, seen)

    def check(self) -> None:
        """That the nodes are still ours, before something is started on them; raises FleetError."""
        self._on_holds(Hold.check)

    def cancel(self) -> None:
        """After a Ctrl-C: end what was started on the nodes for us."""

        def cancel_one(hold: Hold) -> None:
            try:
                hold.cancel()
            except (OSError, EOFError, TimeoutError, ClusterTrainError):
                pass  # the link is gone: what it started sees that too

        self._on_holds(cancel_one)

    def release(self, nodes: Sequence[str] | None = None, *, keep: bool = False) -> None:
        """Let go of all nodes, or of those named."""
        chosen = list(self._holds if nodes is None else nodes)
        gone = self._fleet.unreachable
        self._on_holds(lambda hold: hold.release(keep=keep, is_gone=hold.transport.node in gone), chosen)
        for node in chosen:
            self._holds.pop(node, None)

    def end(self) -> None:
        """Let go of all nodes, for good."""
        self._is_over.set()
        self.release()

    def _beat(self) -> None:
        while not self._is_over.wait(agent.BEAT_S):
            for hold in list(self._holds.values()):
                hold.beat()

    def _ask_all(self, owner: Mapping[str, Any]) -> dict[str, str]:
        """Ask on all nodes at once; the machine that each node is."""

        def ask(transport: Transport) -> None:
            self._holds[transport.node] = Hold(transport, self._root, self._python, owner)

        self._fleet.each(ask)
        self._holds = {node: self._holds[node] for node in self._fleet.transports}
        return {node: hold.look["machine"] for node, hold in self._holds.items()}

    def _wait(self, hold: Hold, terms: Terms, seen: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Until the node is ours; without terms.wait: refuse. `seen`: who was on which node at first."""
        told: list[str] = []
        while not hold.is_held:
            here = {lock["run_id"] for lock in hold.busy}
            elsewhere = {node: [lock for lock in locks if lock["run_id"] in here] for node, locks in seen.items()}
            text = busy_text({**elsewhere, hold.transport.node: hold.busy})
            if not terms.wait:
                first = hold.busy[0]["run_id"]
                raise PreflightError(
                    f"in use:\n{text}",
                    advice=f"--wait waits for {first} to end; --share runs beside it and takes cores' time from it",
                )
            if text not in told[-1:]:
                self._emit(Step(text=f"waiting: {text}"))
                told.append(text)
            while not hold.hear(WAIT_READ_S):
                pass

    def _tell_of_company(self) -> None:
        company = {node: hold.beside for node, hold in self._holds.items() if hold.beside}
        if company:
            self._emit(Notice(text=f"sharing:\n{busy_text(company)}"))

    def _clear(self, terms: Terms, owner: Mapping[str, Any]) -> None:
        """End what crashed runs of ours left, if that is wanted."""
        for attempt in range(SETTLING_LOOKS):
            looks = {node: hold.look for node, hold in self._holds.items()}
            remains = find_remains(looks)
            if not remains:
                return
            if attempt < SETTLING_LOOKS - 1:
                self.release()
                time.sleep(0.5)
                self._ask_all(owner)
        text = "\n".join(found.text() for found in remains)
        if terms.is_clearing_wanted is None or not terms.is_clearing_wanted(remains):
            raise PreflightError(
                f"runs of yours that nobody watches over any more left processes behind:\n{text}",
                advice="cluster-train up --clean   ends them first",
            )
        self.release()
        for run_id in dict.fromkeys(found.run_id for found in remains):
            self._end(run_id, next(iter(looks.values()))["states"].get(run_id), remains)
        self._ask_all(owner)

    def _end(self, run_id: str, state: str | None, remains: Sequence[Remains]) -> None:
        nodes = [found.node for found in remains if found.run_id == run_id]
        if state == "lost":  # which also writes down that it is over
            launch.stop(self._fleet.head, self._root, self._python, run_id, 5.0)
        answers = self._fleet.each(lambda node: launch.sweep(node, self._root, self._python, run_id, 5.0), nodes)
        for node, found in answers.items():
            for process in found["left"]:
                self._emit(Notice(text=f"{node}: process {process['pid']} of run {run_id} COULD NOT BE ENDED"))
            self._emit(Step(node=node, text=f"ended what run {run_id} had left"))

    def _on_holds(self, action: Callable[[Hold], None], nodes: Sequence[str] | None = None) -> None:
        holds = [hold for node, hold in self._holds.items() if nodes is None or node in nodes]
        if holds:
            self._fleet.each(lambda transport: action(self._holds[transport.node]), [hold.transport.node for hold in holds])


@contextmanager
def claimed(fleet: Fleet, root: str, python: str, owner: Mapping[str, Any], terms: Terms, emit: Emit) -> Iterator[Claim]:
    """Have every node of the fleet for one run as long as the block lasts.

    A Ctrl-C in the block ends what was started on the nodes over these connections, before they are dropped.

    Args:
        owner: {"run_id", "root", "cluster", "script", "origin"}: what others are told.
    """
    claim = Claim(fleet, root, python, owner, emit)
    fleet.on_interrupt = claim.cancel
    try:
        claim.take(terms)
        yield claim
    finally:
        claim.end()
