"""What `up` refuses before it starts anything, as findings: the job's files, the stack, room for it, who has the nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from orchestrator.actions.backend import as_known, as_loaded
from orchestrator.actions.claim import SETTLING_LOOKS, UNUSABLE
from orchestrator.actions.dialogue import Dialogue
from orchestrator.actions.meeting import with_all
from orchestrator.actions.resolve import known_lock, wheel_path
from orchestrator.actions.sync import sources
from orchestrator.errors import ClusterTrainError
from orchestrator.planning.checks import helpers_beside, mpi_findings, room_findings
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.mpirun import refuse_head
from orchestrator.planning.network import NetworkChoice
from orchestrator.planning.occupancy import find_remains, occupancy_findings
from orchestrator.planning.preflight import Finding, disagreements, note, unfit_for
from orchestrator.planning.wheels import StackRequest, plan_stack
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock

T = TypeVar("T")

NOTE_ADVICE = "nothing need be done; `stack.backend` says what you want"
SETTLING_S = 0.5  # a run that has just ended needs a moment, which `up` gives it too


def refusals(
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
    health: Mapping[str, NodeHealth],
    dialogues: Mapping[str, Dialogue],
    found: list[Finding],
) -> StackChoice | None:
    """Add to the findings what `up` would refuse these nodes for; the head is the first of them. What the stack would be."""
    head = nodes[0].name
    if inventory.job.script is not None:
        job = inventory.job
        _caught("the job's files are not there", head, lambda: sources(job), found)
    choice = _stack(inventory, nodes, health, found)
    if inventory.stack.mpi == "system":
        program = health[head].programs.get("mpirun")
        helpers = helpers_beside(program) if program else []
        runnable = with_all(lambda _, dialogue: list(dialogue.ask("runnable", paths=helpers)), dialogues, found)
        found += mpi_findings(head, health, runnable)
    _occupancy(inventory, head, health, dialogues, found)
    return choice


def head_refusals(inventory: Inventory, choice: NetworkChoice, found: list[Finding]) -> None:
    """Add to the findings that the MPI cannot start ranks on other nodes from the head's address."""
    head, mpi = choice.endpoints[0], inventory.stack.mpi
    if mpi != "system":
        _caught("the MPI cannot start there", head.node, lambda: refuse_head(mpi, head.address), found)


def _stack(
    inventory: Inventory, nodes: Sequence[NodeFacts], health: Mapping[str, NodeHealth], found: list[Finding]
) -> StackChoice | None:
    """Whether the stack can be had, as far as that shows without asking an index, and fits on the nodes that lack it."""
    if disagreements(nodes):
        return None  # which are findings already
    request = _caught("the stack cannot be had", nodes[0].name, lambda: as_known(plan_stack(inventory.stack, nodes)), found)
    lock = known_lock(request) if request else None
    if lock is None:
        found += room_findings([node for node in nodes if not node.state.envs], health)
    else:
        lacking = [node for node in nodes if lock.digest not in node.state.envs]
        found += unfit_for(lock, lacking, lambda wheel: wheel_path(wheel).stat().st_size)
    return _choice(request, lock, nodes, found) if request else None


def _choice(request: StackRequest, lock: Lock | None, nodes: Sequence[NodeFacts], found: list[Finding]) -> StackChoice | None:
    """What the stack comes to on these nodes, with a finding where that is not what one might expect."""
    digest = lock.digest if lock else ""
    choice = _caught("oneCCL does not load", nodes[0].name, lambda: as_loaded(request.choice, digest, nodes), found)
    if choice:
        found += [note(nodes[0], "the stack is not as asked", text, NOTE_ADVICE) for text in choice.notes]
    return choice


def _occupancy(
    inventory: Inventory,
    head: str,
    health: Mapping[str, NodeHealth],
    dialogues: Mapping[str, Dialogue],
    found: list[Finding],
) -> None:
    for attempt in range(SETTLING_LOOKS):
        looks = with_all(lambda _, dialogue: dict(dialogue.ask("occupied")), dialogues, found)
        bad = {node: look.pop("problem") for node, look in looks.items() if "problem" in look}
        looks = {node: look for node, look in looks.items() if look}
        if head not in looks or not find_remains(looks):
            break
        if attempt < SETTLING_LOOKS - 1:
            time.sleep(SETTLING_S)
    for node, problem in bad.items():
        found.append(Finding(severity="error", node=node, what="cannot be locked", evidence=problem, remedy=UNUSABLE))
    if head in looks:
        found += occupancy_findings(looks, {name: one.processes for name, one in health.items()})


def _caught(what: str, head: str, action: Callable[[], T], found: list[Finding]) -> T | None:
    """The result of what `up` does first; where it fails that is a finding."""
    try:
        return action()
    except ClusterTrainError as error:
        found.append(Finding(severity="error", node=head, what=what, evidence=error.message, remedy=error.advice))
        return None
