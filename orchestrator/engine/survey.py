"""Looking at the machines themselves: what would go wrong, an inventory for them, and leaving them as they were."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.actions import agent, launch, trust
from orchestrator.actions.probe import interpreter, probe
from orchestrator.actions.shared_root import by_root
from orchestrator.engine.reach import connected, probed
from orchestrator.errors import PreflightError
from orchestrator.planning.checks import findings
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.network import network_of
from orchestrator.planning.preflight import Finding
from orchestrator.planning.verdict import FINAL_STATES
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.inventory import Inventory


def doctor(inventory: Inventory, emit: Emit) -> tuple[Finding, ...]:
    """Everything found that would make `up` fail or crawl, errors first. Changes nothing but our own scripts' directory."""
    with connected(inventory) as fleet:
        nodes = probed(fleet, inventory, emit)
        found = list(findings(nodes, time.time()))
        for node in nodes:
            for address in trust.accepted_from(node):
                text = f"accepts the key of {nodes[0].name} at {address}, until a `cluster-train teardown`"
                emit(Step(node=node.name, text=text))
        try:
            emit(Step(text=network_of(inventory, nodes).reason))
        except PreflightError as error:
            name = fleet.head.node
            problem = Finding(severity="error", node=name, what="no network", evidence=error.message, remedy=error.advice)
            found.insert(0, problem)
        return tuple(found)


def init(hosts: Sequence[str], ssh: Mapping[str, Any], emit: Emit) -> str:
    """The text of an inventory for machines that answer; raises FleetError naming those that do not."""
    cluster = {"cluster": "lab", "ssh": {key: value for key, value in ssh.items() if value}, "nodes": list(hosts)}
    inventory = parse_inventory(json.dumps(cluster), file="command line.yml", environment={})
    with connected(inventory) as fleet:
        probed(fleet, inventory, emit)
    lines = ["# Written by `cluster-train init`; every other key has a default.", "cluster: lab"]
    lines += [f"ssh: {json.dumps(cluster['ssh'])}"] if cluster["ssh"] else []
    lines += ["nodes:", *(f"  - {json.dumps({'name': f'node{i}', 'host': host})}" for i, host in enumerate(hosts))]
    lines += [
        "stack:",
        "  extra_index: [https://download.pytorch.org/whl/cpu]   # CPU builds of torch",
        "job:",
        "  script: train.py",
    ]
    return "\n".join(lines) + "\n"


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
            keys = len(here[node.name]["revoked"])
            emit(Step(node=node.name, text=f"removed {len(removed[node.name])} directories and {keys} keys"))
            for path in answer["left"]:
                emit(Notice(text=f"{node.name}: {path} is not ours, and stays"))
            for other in others:
                emit(Step(node=other.name, text=f"had its root in common with {node.name}"))
        return removed
