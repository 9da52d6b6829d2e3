"""Ask every node what it is and what it already holds."""

from __future__ import annotations

from orchestrator.actions import agent
from orchestrator.errors import InventoryError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.ports import master_ports
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory


def interpreter(inventory: Inventory) -> str:
    """The command that is Python on the nodes: `stack.python` as a path, a name or a version, else python3."""
    wanted = inventory.stack.python
    if wanted is None:
        return "python3"
    return f"python{wanted}" if wanted[:1].isdigit() else wanted


def probe(fleet: Fleet, inventory: Inventory) -> tuple[NodeFacts, ...]:
    """The facts of every node, in the inventory's order.

    Raises FleetError naming every node that did not answer, and InventoryError when `root` is not one path on all of them.
    """
    found = probe_each(fleet, inventory)
    check_root(inventory, found)
    return found


def probe_each(fleet: Fleet, inventory: Inventory) -> tuple[NodeFacts, ...]:
    """The same, wherever `root` lies on each of them."""
    python = interpreter(inventory)
    wanted = master_ports(inventory.network.ports)
    ports = ["--ports", "{}-{}".format(*wanted)] if wanted else []

    def probe_one(transport: Transport) -> NodeFacts:
        document = agent.call(transport, inventory.root, python, "probe.py", ["--root", inventory.root, *ports])
        return NodeFacts.from_json(transport.node, document)

    return tuple(fleet.each(probe_one).values())


def check_root(inventory: Inventory, nodes: tuple[NodeFacts, ...]) -> None:
    """Raise InventoryError unless `root` is one path on all nodes.

    mpirun looks for its helper, and ranks for their environment, at the head's path on every node.
    """
    roots = {node.name: node.root for node in nodes}
    if len(set(roots.values())) > 1:
        listed = ", ".join(f"{name} {root}" for name, root in roots.items())
        raise InventoryError(
            f"root: {inventory.root} is not the same path on all nodes: {listed}",
            advice="name a directory that all nodes have and you may write to, such as `root: /var/tmp/cluster-train-$USER` "
            "with the user's name written out",
        )
