"""Looking at the machines themselves: what would go wrong, an inventory for them, and leaving them as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.actions import agent, launch
from orchestrator.actions.copy_key import copy_key
from orchestrator.actions.doctor import Diagnosis, diagnose
from orchestrator.actions.hosts import nodes_named
from orchestrator.actions.probe import interpreter, probe, probe_each
from orchestrator.actions.shared_root import by_root
from orchestrator.engine.reach import connected, tell
from orchestrator.errors import PreflightError
from orchestrator.nodes.passwords import Passwords
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.inventory_writing import named, written_inventory
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.planning.verdict import FINAL_STATES
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.health import PERSONS
from orchestrator.specs.inventory import Inventory


def doctor(inventory: Inventory, emit: Emit) -> Diagnosis:
    """Everything found that would make `up` fail or crawl, errors first. Changes nothing but our own scripts' directory."""
    return diagnose(inventory, emit)


def init(hosts: Sequence[str], ssh: Mapping[str, Any], emit: Emit, copies_key: Callable[[str], bool]) -> str:
    """The text of an inventory for machines that answer; raises FleetError naming those that do not.

    Machines that take no key are asked for by password, on the terminal.

    Args:
        copies_key: asks whether the person's public key may be put on those; the question is its argument.
    """
    nodes, said = named(nodes_named(hosts)), {key: value for key, value in ssh.items() if value}
    cluster = json.dumps({"cluster": "lab", "ssh": said, "nodes": nodes})
    inventory = parse_inventory(cluster, file="command line.yml", environment={})
    passwords = Passwords()
    with connected(inventory, passwords=passwords) as fleet:
        facts = probe_each(fleet, inventory)
        tell(fleet, facts, emit)
        if without_key := passwords.used(fleet.transports):
            copy_key(fleet, inventory, without_key, interpreter(inventory), copies_key, emit)
    try:
        network: NetworkChoice | PreflightError = network_of(inventory, facts)
    except PreflightError as error:
        network = error  # whoever wrote the inventory can say which
    return written_inventory(nodes, said, facts, network)


def teardown(inventory: Inventory, emit: Emit) -> dict[str, list[str]]:
    """Remove from every node all that was put there; per node the paths that are gone.

    Raises PreflightError while a run is going on.
    """
    with connected(inventory) as fleet:
        python = interpreter(inventory)
        known = launch.status(fleet.head, inventory.root, python, None)  # other nodes hold ranks, but no run's state
        going = [run["run_id"] for run in known if run["state"] not in FINAL_STATES]
        if going:
            raise PreflightError(f"still going on: {', '.join(going)}", advice="cluster-train stop --run ID   first")
        nodes = probe(fleet, inventory)
        # On every node, for a root in common does not mean a home in common; and while our scripts are still there.
        here = fleet.each(lambda node: agent.call(node, inventory.root, python, "remove.py", ["machine", inventory.root]))
        removed: dict[str, list[str]] = {node: list(answer["removed"]) for node, answer in here.items()}
        for node, *others in by_root(fleet, nodes):
            answer = agent.call(fleet.transports[node.name], node.root, python, "remove.py", ["root", node.root])
            removed[node.name] += answer["removed"]
            keys = here[node.name]["revoked"]
            emit(Step(node=node.name, text=f"removed {len(removed[node.name])} directories and {len(keys)} keys"))
            for path in answer["left"]:
                emit(Notice(text=f"{node.name}: {path} is not ours, and stays"))
            for other in others:
                emit(Step(node=other.name, text=f"had its root in common with {node.name}"))
        own = [node for node, answer in here.items() if any(comment.endswith(PERSONS) for comment in answer["revoked"])]
        if own:
            emit(Notice(text=f"{', '.join(own)}: your own key, which `init` put there, is gone: logins need the password again"))
        return removed
