"""Free the nodes of what no recent run uses: environments, wheels, jobs, older installers and versions of our own scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions import agent
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.roots import distinct_roots
from orchestrator.planning.wheels import unpacked_installer
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.lock import Lock

RECENT_RUNS = 10
PRUNE_TIMEOUT_S = 600  # a hundred thousand files on a slow disk
KINDS = {
    "envs": "environments",
    "wheels": "wheels",
    "jobs": "jobs",
    "agents": "versions of our scripts",
    "installers": "installers",
}

Keep = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """What one node holds and no recent run uses.

    Args:
        sizes: kind (of KINDS) to (name, size in bytes) of each.
        freed_bytes: what the disk gets back, which is less where files are linked to what stays.
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    freed_bytes: int

    @property
    def count(self) -> int:
        """How many things there are."""
        return sum(len(items) for items in self.sizes.values())


def to_keep(fleet: Fleet, nodes: Sequence[NodeFacts], lock: Lock, job: str | None) -> Keep:
    """What must stay on every node: what this inventory asks for, and what the newest runs and those going on use.

    A run is known to the node where its mpirun started, so all nodes are asked, and all keep what any of them tells.
    """

    def ask(transport: Transport) -> dict[str, Any]:
        return _call(transport, nodes, ["used", str(RECENT_RUNS)])

    used = fleet.each(ask, [node.name for node in distinct_roots(nodes)]).values()
    kept = {kind: {name for answer in used for name in answer[kind]} for kind in ("envs", "jobs", "agents")}
    kept["envs"].add(lock.digest)
    kept["agents"].add(agent.digest())
    kept["jobs"].update([job] if job else [])
    kept["wheels"] = {wheel.sha256 for wheel in lock.all_wheels}
    kept["installers"] = {unpacked_installer(lock)} if lock.installer else set()
    return {kind: sorted(names) for kind, names in kept.items()}


def survey(fleet: Fleet, roots: Sequence[Sequence[NodeFacts]], keep: Keep) -> dict[str, Unused]:
    """What each root could be freed of, under the name of its first node. Changes nothing."""
    firsts = [first for first, *_ in roots]

    def ask(transport: Transport) -> Unused:
        found = _call(transport, firsts, ["survey"], keep)
        sizes = {kind: tuple((item["name"], item["size_bytes"]) for item in found[kind]) for kind in KINDS}
        return Unused(sizes=sizes, freed_bytes=found["freed_bytes"])

    return fleet.each(ask, [node.name for node in firsts])


def remove(fleet: Fleet, roots: Sequence[Sequence[NodeFacts]], keep: Keep, emit: Emit) -> dict[str, list[str]]:
    """Free every root of what is not kept; per first node the paths that are gone. What a process works in stays, and is told.

    Each looks at the processes of its own machine: of a root in common the other machines are asked before.
    """
    firsts = [first for first, *_ in roots]
    keep = _kept_by_sharers(fleet, [node for _, *others in roots for node in others], keep, emit)

    def remove_on(transport: Transport) -> list[str]:
        answer = _call(transport, firsts, ["remove"], keep)
        for path in answer["in_use"]:
            emit(Notice(text=f"{transport.node}: {path} is in use, and stays"))
        emit(Step(node=transport.node, text=f"removed {len(answer['removed'])} paths"))
        removed: list[str] = answer["removed"]
        return removed

    return fleet.each(remove_on, [node.name for node in firsts])


def _kept_by_sharers(fleet: Fleet, sharers: Sequence[NodeFacts], keep: Keep, emit: Emit) -> Keep:
    """What is to be kept, and besides it what processes work in on machines where nothing will be removed."""
    names = [node.name for node in sharers]
    kept = {kind: set(kept) for kind, kept in keep.items()}
    for node, busy in fleet.each(lambda transport: _call(transport, sharers, ["busy"], keep), names).items():
        for kind, used in busy.items():
            kept[kind].update(used)
            for name in used:
                emit(Notice(text=f"{node}: {name} ({KINDS[kind]}) is in use, and stays"))
    return {kind: sorted(names) for kind, names in kept.items()}


def _call(transport: Transport, nodes: Sequence[NodeFacts], arguments: list[str], keep: Keep | None = None) -> dict[str, Any]:
    node = next(node for node in nodes if node.name == transport.node)
    return agent.call(
        transport,
        node.root,
        node.python.executable,
        "prune.py",
        [arguments[0], node.root, *arguments[1:]],
        stdin=json.dumps(keep).encode() if keep is not None else b"",
        idle_timeout_s=PRUNE_TIMEOUT_S,
    )
