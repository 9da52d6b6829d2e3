"""Look into the nodes' environments for real, and take away those that are damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.actions import agent, launch
from orchestrator.actions.probe import interpreter
from orchestrator.errors import CommandError, PreflightError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.drift import Comparison, Environment, compare, launcher
from orchestrator.planning.verdict import FINAL_STATES
from orchestrator.specs.events import Emit, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock

VERIFY_TIMEOUT_S = 400  # above the sum of verify.py's own limits: it says which module hangs
REPAIR_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The nodes against the lock, and per node all that it said."""

    lock: Lock
    choice: StackChoice
    comparison: Comparison
    reports: dict[str, dict[str, Any]]


def verify(fleet: Fleet, inventory: Inventory, nodes: Sequence[NodeFacts], lock: Lock, choice: StackChoice) -> Verified:
    """Import, read and ask on every node at once; changes nothing. Raises FleetError for nodes that do not answer."""
    order = {"digest": lock.digest, "modules": list(choice.modules), "mpi": launcher(inventory.stack.mpi)}
    roots = {node.name: node.root for node in nodes}

    def verify_one(transport: Transport) -> tuple[Environment, dict[str, Any]]:
        answer = _call(transport, roots[transport.node], inventory, "verify.py", order, VERIFY_TIMEOUT_S)
        try:
            return Environment.from_json(transport.node, answer), answer
        except (KeyError, TypeError, ValueError) as error:
            raise CommandError(
                f"{transport.node}: verify.py answered what is not known: {error!r}", node=transport.node
            ) from error

    found = fleet.each(verify_one, roots)
    comparison = compare(lock, choice, inventory.stack.mpi, [environment for environment, _ in found.values()])
    return Verified(
        lock=lock, choice=choice, comparison=comparison, reports={name: answer for name, (_, answer) in found.items()}
    )


def take_away(fleet: Fleet, inventory: Inventory, damaged: Sequence[Sequence[NodeFacts]], lock: Lock, emit: Emit) -> None:
    """Remove the lock's environment from roots where it is damaged, with all that could bring the damage back.

    Args:
        damaged: of each root directory the nodes that have it in common.

    Raises PreflightError, with nothing removed there, while a run uses it.
    """
    _refuse_while_running(fleet, inventory, [node for nodes in damaged for node in nodes], lock)
    roots = {node.name: node.root for nodes in damaged for node in nodes}
    order = {"digest": lock.digest, "wheels": [wheel.sha256 for wheel in lock.all_wheels]}

    def call(transport: Transport, *, only_look: bool) -> None:
        full_order = {**order, "only_look": only_look}
        answer = _call(transport, roots[transport.node], inventory, "repair.py", full_order, REPAIR_TIMEOUT_S)
        if answer["in_use"]:
            raise PreflightError(
                f"{transport.node}: environment {lock.digest} is in use: {answer['in_use'][0][:200]}",
                advice="let it end, or stop it: cluster-train stop",
            )
        if answer["removed"]:
            emit(Step(node=transport.node, text=f"removed {', '.join(answer['removed'])}"))

    # Each sees the processes of its own machine alone.
    fleet.each(partial(call, only_look=True), [node.name for _, *others in damaged for node in others])
    fleet.each(partial(call, only_look=False), [first.name for first, *_ in damaged])


def _refuse_while_running(fleet: Fleet, inventory: Inventory, damaged: Sequence[NodeFacts], lock: Lock) -> None:
    """The head knows the runs that were started from it; repair.py itself sees all processes of its own node."""
    names = {node.name for node in damaged}
    for run in launch.status(fleet.head, inventory.root, interpreter(inventory), None):
        label = run.get("label") or {}
        if (
            run["state"] not in (*FINAL_STATES, None)
            and label.get("stack") == lock.digest
            and names & set(label.get("ranks", ()))
        ):
            raise PreflightError(
                f"run {run['run_id']} is using environment {lock.digest} ({run['state']})",
                advice=f"let it end, or stop it: cluster-train stop --run {run['run_id']}",
            )


def _call(
    transport: Transport, root: str, inventory: Inventory, script: str, order: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    text = json.dumps(order).encode()
    return agent.call(transport, root, interpreter(inventory), script, [root], stdin=text, idle_timeout_s=timeout_s)
