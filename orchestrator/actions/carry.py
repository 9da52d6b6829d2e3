"""Bring wheels to the nodes: from here, or from the head, once it is filled, over the cluster network."""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.actions import agent
from orchestrator.actions.resolve import wheel_path
from orchestrator.actions.trust import planned_identity
from orchestrator.errors import ClusterTrainError
from orchestrator.nodes.archive import Entry, archive
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport, check, run
from orchestrator.planning.carrying import BUFFERED_BYTES, cluster_speed, feeding_pays, is_sampled, plan_carrying
from orchestrator.planning.hops import hops_from_head, known_hosts, ssh_config
from orchestrator.specs.events import Emit, Notice, Step, Transfer
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import LockedWheel
from orchestrator.specs.run import Endpoint

COPY_IDLE_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """The wheels that one node lacks."""

    node: NodeFacts
    wheels: tuple[LockedWheel, ...]
    ends: tuple[int, ...]  # how many bytes are sent when each wheel is

    @property
    def size_bytes(self) -> int:
        """Of all wheels together."""
        return self.ends[-1] if self.ends else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How a node got its wheels; `sender` is empty where they came from here."""

    wheels: int
    size_bytes: int
    sender: str
    seconds: float


def cargo_of(node: NodeFacts, wheels: Sequence[LockedWheel]) -> Cargo:
    """The wheels for a node, all of which lie in the cache here."""
    ends = accumulate(wheel_path(wheel).stat().st_size for wheel in wheels)
    return Cargo(node=node, wheels=tuple(wheels), ends=tuple(ends))


class Carrier:
    """One round of deliveries. `bring` is to be called once for each node of `cargo`, the head's call not after the others'.

    Args:
        nodes: the facts of all nodes, the head first.
        endpoints: their addresses on the cluster network; without them the head feeds nobody.
        cargo: what is to be brought, by node.
    """

    def __init__(
        self,
        fleet: Fleet,
        inventory: Inventory,
        nodes: Sequence[NodeFacts],
        endpoints: Sequence[Endpoint],
        cargo: Mapping[str, Cargo],
        emit: Emit,
    ) -> None:
        self._fleet, self._inventory, self._nodes, self._endpoints = fleet, inventory, nodes, endpoints
        self._cargo = cargo
        self._emit = emit
        sizes = {name: load.size_bytes for name, load in cargo.items()}
        plan = plan_carrying(sizes, fleet.head.node, head_can_feed=self._head_can_feed())
        # Each holds None once the node is fed, else why it could not be; no reason: it is quicker from here.
        self._fed: dict[str, Future[str | None]] = {name: Future() for name in plan.perhaps_fed}
        self._is_decided = not self._fed
        self._started = time.monotonic()
        if self._fed and not sizes.get(fleet.head.node):
            self._start_feeding()

    def bring(self, transport: Transport) -> Delivery:
        """See that a node has its wheels; raises CommandError or NodeError where it could not be done."""
        load, head = self._cargo[transport.node], self._fleet.head.node
        sender = ""
        started = time.monotonic()
        refusal = self._fed[transport.node].result() if transport.node in self._fed else ""
        if refusal is None:
            sender, started = head, self._started
        elif load.wheels:
            if refusal:
                text = f"{transport.node}: {head} could not send it the wheels, they come from here: {refusal}"
                self._emit(Notice(text=text))
            self._send_first(transport, load) if transport.node == head else self._send(transport, load)
        seconds = time.monotonic() - started
        if load.wheels:
            rate = f"{load.size_bytes / 1e6 / max(seconds, 1e-3):.0f} MB/s"
            self._emit(Step(node=transport.node, text=f"{len(load.wheels)} wheels from {sender or 'here'} at {rate}"))
        return Delivery(wheels=len(load.wheels), size_bytes=load.size_bytes, sender=sender, seconds=seconds)

    def _send_first(self, transport: Transport, load: Cargo) -> None:
        """Fill the head; those that wait for it go on, whatever comes of it."""
        refusal = "it got none itself"
        try:
            self._send(transport, load)
            refusal = ""
        finally:
            if refusal:
                self._settle(refusal)
            elif any(not future.done() for future in self._fed.values()):
                self._start_feeding()

    def _decide(self, sent_bytes: int, elapsed_s: float) -> None:
        """Send the others on their way as soon as it is known that they need not wait for the head."""
        if self._is_decided or not is_sampled(sent_bytes, elapsed_s):
            return
        self._is_decided = True
        rate = sent_bytes / max(elapsed_s, 1e-3)
        if not feeding_pays(rate, cluster_speed(self._nodes, self._endpoints)):
            self._settle("")

    def _send(self, transport: Transport, load: Cargo) -> None:
        node = load.node
        self._emit(Step(node=node.name, text=f"sending {len(load.wheels)} wheels, {load.size_bytes / 1e6:.0f} MB"))
        argv = _unpack(node)

        def stream() -> Iterator[bytes]:
            sent, flowing_since = 0, 0.0
            for chunk in archive(map(_entry, load.wheels)):
                yield chunk
                sent += len(chunk)
                self._show(load, sent)
                flowing_since = flowing_since or (time.monotonic() if sent >= BUFFERED_BYTES else 0.0)
                if flowing_since and node.name == self._fleet.head.node:
                    self._decide(sent - BUFFERED_BYTES, time.monotonic() - flowing_since)

        check(transport, argv, run(transport, argv, stdin=stream(), idle_timeout_s=COPY_IDLE_TIMEOUT_S))
        self._show(load, load.size_bytes)

    def _show(self, load: Cargo, sent_bytes: int) -> None:
        sent = min(sent_bytes, load.size_bytes)
        self._emit(
            Transfer(
                node=load.node.name,
                what="wheels",
                sent_bytes=sent,
                total_bytes=load.size_bytes,
                sent_items=bisect_right(load.ends, sent),
                total_items=len(load.wheels),
            )
        )

    def _head_can_feed(self) -> bool:
        """The head is not us, has or gets every wheel, and reaches the others by SSH as we do."""
        head = self._fleet.head
        if head.is_local or not self._endpoints:
            return False
        there = {*self._nodes[0].state.wheels}
        if head.node in self._cargo:
            there |= {wheel.sha256 for wheel in self._cargo[head.node].wheels}
        others = [name for name in self._cargo if name != head.node]
        needed = {wheel.sha256 for name in others for wheel in self._cargo[name].wheels}
        return needed <= there and all(self._fleet.transports[name].host_key for name in others)

    def _start_feeding(self) -> None:
        self._started = time.monotonic()
        threading.Thread(target=self._feed, daemon=True).start()

    def _feed(self) -> None:
        """Let the head send to all that wait, and tell each of them how it went, whatever happens."""
        refusal = "it ended without a word"
        try:
            for name in self._fed:
                load = self._cargo[name]
                text = f"{len(load.wheels)} wheels, {load.size_bytes / 1e6:.0f} MB, come from {self._fleet.head.node}"
                self._emit(Step(node=name, text=text))
            head = self._nodes[0]
            argv = agent.command(head.root, head.python.executable, "feed.py", [])
            plan = json.dumps(self._feed_plan()).encode()
            done = run(self._fleet.head, argv, stdin=plan, idle_timeout_s=COPY_IDLE_TIMEOUT_S, on_line=self._follow)
            refusal = done.stderr.strip() or refusal
        except ClusterTrainError as error:
            refusal = error.message
        finally:
            self._settle(refusal)

    def _follow(self, line: bytes) -> None:
        said = json.loads(line)
        if "sent_bytes" in said:
            self._show(self._cargo[said["node"]], said["sent_bytes"])
            return
        if said["error"] is None:
            self._show(self._cargo[said["node"]], self._cargo[said["node"]].size_bytes)
        self._fed[said["node"]].set_result(said["error"])

    def _settle(self, refusal: str) -> None:
        """Nobody is left waiting."""
        for future in self._fed.values():
            if not future.done():
                future.set_result(refusal)

    def _feed_plan(self) -> dict[str, object]:
        """What remote/feed.py reads."""
        head = self._nodes[0]
        directory = f"{head.root}/ssh/feed-{secrets.token_hex(4)}"
        host_keys = {name: transport.host_key for name, transport in self._fleet.transports.items()}
        identity = planned_identity(self._fleet, self._nodes)
        hops = hops_from_head(self._inventory, self._nodes, self._endpoints, host_keys, identity)
        addresses = {hop.node: hop.address for hop in hops}
        config = ssh_config(hops, directory, self._endpoints[0].address, self._inventory.ssh.connect_timeout)
        return {
            "wheelhouse": f"{head.root}/wheelhouse",
            "directory": directory,
            "files": {"ssh_config": config, "known_hosts": known_hosts(hops)},
            "nodes": [
                {
                    "node": name,
                    "address": addresses[name],
                    "command": shlex.join(_unpack(self._cargo[name].node)),
                    "wheels": [[wheel.sha256, wheel.filename] for wheel in self._cargo[name].wheels],
                }
                for name in self._fed
            ],
        }


def _unpack(node: NodeFacts) -> list[str]:
    return agent.command(node.root, node.python.executable, "unpack.py", ["--sha256", f"{node.root}/wheelhouse"])


def _entry(wheel: LockedWheel) -> Entry:
    path = wheel_path(wheel)
    return Entry(name=f"{wheel.sha256}/{wheel.filename}", source=path, size_bytes=path.stat().st_size)
