"""The nodes of an inventory, reached and asked what they are: what all use cases begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.actions.probe import probe
from orchestrator.nodes.fleet import Fleet, connect
from orchestrator.nodes.passwords import Passwords
from orchestrator.nodes.ssh_config import unread_config
from orchestrator.nodes.transport import Transport
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory


@contextmanager
def connected(
    inventory: Inventory,
    *,
    head_only: bool = False,
    needs_all: bool = True,
    greet: Callable[[Transport], None] | None = None,
    passwords: Passwords | None = None,
) -> Iterator[Fleet]:
    """The inventory's nodes, connected, and dropped at the end; without `needs_all` those that answer, the head at least.

    With `passwords` the person is asked for those of nodes that take no key.
    """
    nodes = inventory.nodes[:1] if head_only else None
    fleet = connect(inventory, nodes, needs_all=needs_all, greet=greet, passwords=passwords)
    try:
        yield fleet
    finally:
        fleet.close()


def probed(fleet: Fleet, inventory: Inventory, emit: Emit) -> tuple[NodeFacts, ...]:
    """Ask every node what it is, and tell. Raises FleetError naming those that do not answer."""
    if lost := unread_config(inventory.ssh):
        emit(Notice(text=lost))
    nodes = probe(fleet, inventory)
    tell(fleet, nodes, emit)
    return nodes


def tell(fleet: Fleet, nodes: Sequence[NodeFacts], emit: Emit) -> None:
    """Tell what the nodes are, one line each."""
    for node in nodes:
        cores = len({cpu.core for cpu in node.cpu.logical})
        sockets = len({cpu.socket for cpu in node.cpu.logical})
        way = "this machine" if fleet.transports[node.name].is_local else "over SSH"
        emit(
            Step(
                node=node.name,
                text=f"{node.hostname}, {sockets} sockets, {cores} cores, Python {node.python.version}, {way}",
            )
        )
