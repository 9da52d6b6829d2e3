"""Look at every node and try every way between them that a launch will use, whatever fails on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from orchestrator.actions.dialogue import Dialogue
from orchestrator.actions.meeting import try_ssh, try_ways, with_all
from orchestrator.actions.model import parameter_count
from orchestrator.actions.probe import check_root, interpreter
from orchestrator.actions.refusals import head_refusals, refusals
from orchestrator.errors import ClusterTrainError, PreflightError, UnreachableError
from orchestrator.nodes.fleet import connect_each, on_all
from orchestrator.nodes.transport import Channel, Transport, failure_of
from orchestrator.planning.checks import SESSIONS, by_severity, findings, health_findings, unreached
from orchestrator.planning.costs import StepCost, cost_findings, memory_findings, step_cost
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.planning.placement import PlacementNode, place
from orchestrator.planning.ports import master_ports
from orchestrator.planning.preflight import Finding
from orchestrator.planning.ways import (
    name_findings,
    ssh_findings,
    way_findings,
)
from orchestrator.specs.events import Emit, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth, SshWay, Way
from orchestrator.specs.inventory import Inventory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found, errors first, and what was measured.

    Args:
        nodes, health: of those nodes that answered.
        network: None where none could be chosen.
        backend: what the ranks would use; None where the stack cannot be had.
    """

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    health: Mapping[str, NodeHealth]
    network: NetworkChoice | None
    backend: str | None = None
    ways: tuple[Way, ...] = ()
    ssh: tuple[SshWay, ...] = ()
    cost: StepCost | None = None

    @property
    def is_fit(self) -> bool:
        """Whether nothing was found that makes `up` fail."""
        return all(finding.severity != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """A node that answers, and the conversation with it."""

    dialogue: Dialogue
    facts: NodeFacts
    health: NodeHealth


def diagnose(inventory: Inventory, emit: Emit) -> Diagnosis:
    """Everything that would make `up` fail or crawl. Changes nothing but our own scripts' directory.

    A node that cannot be reached or asked is a finding, and keeps no other from being examined.
    """
    transports, failures = connect_each(inventory)
    patients: dict[str, _Patient] = {}
    try:
        seen = _each(partial(_admit, inventory), transports, inventory.parallel)
        patients = {name: one for name, one in seen.items() if isinstance(one, _Patient)}
        failures |= {name: one for name, one in seen.items() if isinstance(one, ClusterTrainError)}
        found = [unreached(node.name, failures[node.name]) for node in inventory.nodes if node.name in failures]
        if not patients:
            return Diagnosis(findings=by_severity(found), nodes=(), health={}, network=None)
        return _examined(inventory, transports, _on_one_clock(patients), found, emit)
    finally:
        for patient in patients.values():
            patient.dialogue.close()
        for transport in transports.values():
            transport.close()


def _admit(inventory: Inventory, transport: Transport) -> _Patient:
    dialogue = Dialogue(transport, inventory.root, interpreter(inventory), master_ports(inventory.network.ports))
    ahead_s, error_s = dialogue.clock()
    told = dialogue.ask("facts")
    health = NodeHealth.from_json(transport.node, told["health"])
    return _Patient(
        dialogue=dialogue,
        facts=NodeFacts.from_json(transport.node, told["probe"]),
        health=replace(
            health, skew_s=ahead_s, skew_error_s=error_s, noise=dialogue.noise, sessions=_sessions(transport, already=1)
        ),
    )


def _sessions(transport: Transport, already: int) -> int | None:
    """How many channels can be open at once, up to those that `up` needs; None without SSH."""
    if transport.is_local:
        return None
    opened: list[Channel] = []
    try:
        while already + len(opened) < SESSIONS:
            opened.append(transport.open(["cat"]))
    except UnreachableError:
        pass  # that is the answer
    finally:
        for channel in opened:
            channel.close()
    return already + len(opened)


def _on_one_clock(patients: Mapping[str, _Patient]) -> dict[str, _Patient]:
    """Skews as differences from the first node's clock: ours may be the one that is wrong."""
    head = next(iter(patients.values())).health
    return {
        name: replace(
            patient,
            health=replace(
                patient.health,
                skew_s=patient.health.skew_s - head.skew_s,
                skew_error_s=patient.health.skew_error_s + head.skew_error_s,
            ),
        )
        for name, patient in patients.items()
    }


def _examined(
    inventory: Inventory, transports: Mapping[str, Transport], patients: Mapping[str, _Patient], found: list[Finding], emit: Emit
) -> Diagnosis:
    nodes = tuple(patient.facts for patient in patients.values())
    health = {name: patient.health for name, patient in patients.items()}
    found += findings(nodes, time.time(), health)
    for node in nodes:
        found += health_findings(node, health[node.name], inventory)
    found += _memory(inventory, nodes)
    dialogues = {name: patient.dialogue for name, patient in patients.items()}
    stack = refusals(inventory, nodes, health, dialogues, found)
    backend = stack.backend if stack else None
    if backend:
        emit(Step(text=f"backend {backend}"))
    choice = _choice(inventory, nodes, found)
    if choice is None or len(nodes) == 1:
        if choice:
            emit(Step(text=choice.reason))
        return Diagnosis(findings=by_severity(found), nodes=nodes, health=health, network=choice, backend=backend)
    emit(Step(text=choice.reason))
    head_refusals(inventory, choice, found)
    names = sorted({node.hostname for node in nodes})
    found += name_findings(nodes, with_all(lambda _, dialogue: dict(dialogue.ask("resolve", names=names)), dialogues, found))
    ways = try_ways(inventory, dialogues, nodes, choice, found)
    ssh = try_ssh(inventory, transports, dialogues, nodes, choice, found)
    found += way_findings(ways, choice, inventory.network)
    found += ssh_findings(nodes[0].name, ssh, choice)
    cost = step_cost(nodes, ways, parameter_count(inventory.job.args), inventory.job.args)
    found += cost_findings(nodes[0], cost)
    return Diagnosis(
        findings=by_severity(found),
        nodes=nodes,
        health=health,
        network=choice,
        backend=backend,
        ways=tuple(ways),
        ssh=tuple(ssh),
        cost=cost,
    )


def _choice(inventory: Inventory, nodes: Sequence[NodeFacts], found: list[Finding]) -> NetworkChoice | None:
    """The network, or None with a finding that says why there is none."""
    name = nodes[0].name
    try:
        check_root(inventory, tuple(nodes))
    except ClusterTrainError as error:
        found.append(Finding(severity="error", node=name, what="root differs", evidence=error.message, remedy=error.advice))
    try:
        return network_of(inventory, nodes)
    except PreflightError as error:
        found.append(Finding(severity="error", node=name, what="no network", evidence=error.message, remedy=error.advice))
        return None


def _memory(inventory: Inventory, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """What the model needs on each node, as many ranks as it will get."""
    parameters = parameter_count(inventory.job.args)
    slots = {node.name: node.slots for node in inventory.nodes}
    job = inventory.job
    placed = place(
        [PlacementNode(facts=node, slots=slots[node.name]) for node in nodes], job.ppn, job.omp_threads, job.ccl_workers
    )
    ranks = {node.name: sum(rank.node == node.name for rank in placed) for node in nodes}
    return [finding for node in nodes for finding in memory_findings(node, ranks[node.name], parameters)]


def _each(
    action: Callable[[Transport], T], transports: Mapping[str, Transport], parallel: int
) -> dict[str, T | ClusterTrainError]:
    """What came of an action on each node: its result, or its failure."""

    def caught(transport: Transport) -> T | ClusterTrainError:
        try:
            return action(transport)
        except Exception as error:
            return failure_of(transport.node, error)

    return on_all({name: partial(caught, transport) for name, transport in transports.items()}, parallel) if transports else {}
