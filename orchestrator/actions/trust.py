"""SSH from the head to the other nodes: which private key it uses, and that the others accept it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator.actions import agent
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.specs.events import Emit, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.run import Endpoint


def planned_identity(fleet: Fleet, nodes: Sequence[NodeFacts]) -> str | None:
    """The private key file that the head uses for the other nodes; None where it is alone."""
    if len(nodes) == 1:
        return None
    return _key_that_served(fleet) or f"{nodes[0].root}/ssh/id_ed25519"


def authorize_head(fleet: Fleet, nodes: Sequence[NodeFacts], endpoints: Sequence[Endpoint], emit: Emit) -> None:
    """Let the head in on the other nodes, where it has no key for them: with one made there, accepted from its address only.

    No private key ever travels. Nodes that accept it already are left alone.
    """
    lacking = unauthorized(fleet, nodes, endpoints)
    if not lacking:
        return
    head, address = nodes[0], endpoints[0].address
    public = head.cluster_key or _make_key(fleet.head, head)
    comment = _comment(public, address)

    def allow(transport: Transport) -> None:
        node = lacking[transport.node]
        arguments = ["allow", comment, address]
        agent.call(transport, node.root, node.python.executable, "authorize.py", arguments, stdin=public.encode())
        emit(Step(node=node.name, text=f"accepts the cluster's key from {head.name} ({address})"))

    fleet.each(allow, lacking)


def unauthorized(fleet: Fleet, nodes: Sequence[NodeFacts], endpoints: Sequence[Endpoint]) -> dict[str, NodeFacts]:
    """The nodes that do not let the head in yet; none where the head is alone, or has a key for them already."""
    if len(nodes) == 1 or _key_that_served(fleet):
        return {}
    public = nodes[0].cluster_key
    comment = _comment(public, endpoints[0].address) if public else None
    return {node.name: node for node in nodes[1:] if comment not in node.authorized}


def _key_that_served(fleet: Fleet) -> str | None:
    """Where we sit on the head: the one private key file that let us in everywhere just now, if it serves without a person."""
    files = {transport.key_file for transport in fleet.transports.values() if not transport.is_local}
    file = files.pop() if fleet.head.is_local and len(files) == 1 else None
    return str(Path(file).resolve()) if file else None


def _comment(public: str, address: str) -> str:
    """What stands beside the head's key in authorized_keys: which key it is, and from where it is accepted."""
    return f"cluster-train:{hashlib.sha256(public.encode()).hexdigest()[:16]}:{address}"


def _make_key(transport: Transport, head: NodeFacts) -> str:
    made = agent.call(transport, head.root, head.python.executable, "authorize.py", ["key", head.root])
    return str(made["public"])
