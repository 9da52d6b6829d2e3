"""Roots that several machines share over a network file system, found by leaving a file on one and looking on the others."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from orchestrator.actions import agent
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.roots import distinct_roots, perhaps_shared
from orchestrator.specs.facts import NodeFacts


def by_root(fleet: Fleet, nodes: Sequence[NodeFacts]) -> list[tuple[NodeFacts, ...]]:
    """The nodes by root directory, one node for each machine that has it: what is done below a root, the first does for all."""
    shared = shared_roots(fleet, nodes)
    machines = distinct_roots(nodes)
    firsts = [node for node in machines if node.name not in shared]
    return [(first, *(node for node in machines if shared.get(node.name) == first.name)) for first in firsts]


def shared_roots(fleet: Fleet, nodes: Sequence[NodeFacts]) -> dict[str, str]:
    """Each node that sees another one's root as its own, to the first that has it. Asks only where the facts leave it open."""
    found: dict[str, str] = {}
    for group in perhaps_shared(nodes):
        rest = group
        while len(rest) > 1:
            first, others = rest[0], rest[1:]
            seeing = _seeing(fleet, first, others)
            found |= {node.name: first.name for node in others if node.name in seeing}
            rest = [node for node in others if node.name not in seeing]
    return found


def _seeing(fleet: Fleet, first: NodeFacts, others: Sequence[NodeFacts]) -> set[str]:
    """Those of `others` that see in their root what `first` wrote into its own."""
    name = secrets.token_hex(8)
    facts = {node.name: node for node in (first, *others)}

    def ask(transport: Transport, command: str) -> bool:
        node = facts[transport.node]
        answer = agent.call(transport, node.root, node.python.executable, "nonce.py", [command, node.root, name])
        return bool(answer["seen"])

    head = fleet.transports[first.name]
    ask(head, "write")
    try:
        looked = fleet.each(lambda transport: ask(transport, "look"), [node.name for node in others])
    finally:
        ask(head, "clear")
    return {node for node, seen in looked.items() if seen}
