"""Look at every node and try every way between them that a launch will use, whatever fails on the way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from orchestrator.actions import trust
from orchestrator.actions.dialogue import Dialogue
from orchestrator.actions.model import parameter_count
from orchestrator.actions.probe import check_root, interpreter
from orchestrator.errors import ClusterTrainError, PreflightError, UnreachableError
from orchestrator.nodes.fleet import Fleet, connect_each, on_all
from orchestrator.nodes.transport import Channel, Transport, failure_of
from orchestrator.planning.checks import SESSIONS, by_severity, findings, health_findings, unreached
from orchestrator.planning.costs import StepCost, cost_findings, memory_findings, step_cost
from orchestrator.planning.hops import hops_from_head, known_hosts, ssh_config
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.planning.placement import PlacementNode, place
from orchestrator.planning.ports import master_ports, shares
from orchestrator.planning.preflight import Finding
from orchestrator.planning.ways import (
    GLOO,
    LAUNCHER,
    MASTER,
    WAIT_S,
    gloo_pairs,
    name_findings,
    ring_pairs,
    ssh_findings,
    way_findings,
)
from orchestrator.specs.events import Emit, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth, SshWay, Way
from orchestrator.specs.inventory import Inventory

T = TypeVar("T")

SAMPLE_BYTES = 4 << 20
SSH_WAIT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found, errors first, and what was measured.

    Args:
        nodes, health: of those nodes that answered.
        network: None where none could be chosen.
    """

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    health: Mapping[str, NodeHealth]
    network: NetworkChoice | None
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
    choice = _choice(inventory, nodes, found)
    if choice is None or len(nodes) == 1:
        if choice:
            emit(Step(text=choice.reason))
        return Diagnosis(findings=by_severity(found), nodes=nodes, health=health, network=choice)
    emit(Step(text=choice.reason))
    dialogues = {name: patient.dialogue for name, patient in patients.items()}
    names = sorted({node.hostname for node in nodes})
    found += name_findings(nodes, _with_all(lambda _, dialogue: dict(dialogue.ask("resolve", names=names)), dialogues, found))
    ways = _ways(inventory, dialogues, nodes, choice, found)
    ssh = _ssh(inventory, transports, dialogues, nodes, choice, found)
    found += way_findings(ways, choice, inventory.network)
    found += ssh_findings(nodes[0].name, ssh, choice)
    cost = step_cost(nodes, ways, parameter_count(inventory.job.args), inventory.job.args)
    found += cost_findings(nodes[0], cost)
    return Diagnosis(
        findings=by_severity(found), nodes=nodes, health=health, network=choice, ways=tuple(ways), ssh=tuple(ssh), cost=cost
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


# ---------------------------------------------------------------------------------------------------------------------
# From node to node


def _ways(
    inventory: Inventory,
    dialogues: Mapping[str, Dialogue],
    nodes: Sequence[NodeFacts],
    choice: NetworkChoice,
    found: list[Finding],
) -> list[Way]:
    """Every way that a launch will use, tried at once; then the ring again with some bytes, as an all-reduce does."""
    addresses = {endpoint.node: endpoint.address for endpoint in choice.endpoints}
    head, token, names = nodes[0], secrets.token_hex(16), list(dialogues)
    wanted = {name: [(GLOO, 0)] for name in names}
    wanted[head.name] += _ports_of_head(inventory, head, found)

    def listen(node: str, dialogue: Dialogue) -> dict[str, int]:
        ports = [port for _, port in wanted[node]]
        got = dialogue.ask("listen", address=addresses[node], ports=ports, token=token)["ports"]
        return {use: port for (use, _), port in zip(wanted[node], got, strict=True) if port is not None}

    listening = _with_all(listen, dialogues, found)
    pairs = [(source, target, GLOO) for source, target in gloo_pairs(names)]
    pairs += [(name, head.name, use) for use in (MASTER, LAUNCHER) for name in names[1:]]
    uses = [(*pair, listening[pair[1]][pair[2]]) for pair in pairs if pair[2] in listening.get(pair[1], {})]
    ways = _tried(dialogues, addresses, token, uses, 0, found)
    is_open = {(way.source, way.target) for way in ways if way.use == GLOO and way.state == "open"}
    ring = [use for use in uses if use[2] == GLOO and use[:2] in is_open.intersection(ring_pairs(names))]
    sampled = _tried(dialogues, addresses, token, ring, SAMPLE_BYTES, found)
    again = {(way.source, way.target): way for way in sampled}
    return [_with_sample(way, again.get((way.source, way.target))) if way.use == GLOO else way for way in ways]


def _with_sample(way: Way, again: Way | None) -> Way:
    """A way with the speed that its second try showed, or shut after all where that failed."""
    if again is None or again.state == "open":
        return replace(way, bytes_per_s=again.bytes_per_s if again else None)
    return replace(way, state=again.state, error=again.error)


def _ports_of_head(inventory: Inventory, head: NodeFacts, found: list[Finding]) -> list[tuple[str, int]]:
    """What node0 listens on in a run: MASTER_PORT, and the launcher, which takes any port unless the inventory names some."""
    ports = inventory.network.ports
    launcher = (LAUNCHER, shares(ports).launcher[0] if ports else 0)
    if head.free_ports:
        return [(MASTER, head.free_ports[0]), launcher]
    first, last = master_ports(ports) or (29500, 29999)
    remedy = "see what listens there: ss -ltnp; or name others with `network.ports`"
    shown = f"all of {first}-{last} are taken"
    found.append(Finding(severity="error", node=head.name, what="no free port", evidence=shown, remedy=remedy))
    return [launcher]


def _tried(
    dialogues: Mapping[str, Dialogue],
    addresses: Mapping[str, str],
    token: str,
    uses: Sequence[tuple[str, str, str, int]],
    size_bytes: int,
    found: list[Finding],
) -> list[Way]:
    by_source: dict[str, list[tuple[str, str, str, int]]] = {}
    for use in uses:
        by_source.setdefault(use[0], []).append(use)

    def meet(node: str, dialogue: Dialogue) -> list[Way]:
        mine = by_source[node]
        targets = [{"address": addresses[target], "port": port, "bytes": size_bytes} for _, target, _, port in mine]
        answers = dialogue.ask("meet", targets=targets, token=token, limit_s=WAIT_S)
        return [
            Way(
                source=node,
                target=target,
                use=use,
                port=port,
                state=answer["state"],
                error=answer["error"],
                latency_s=answer["latency_s"],
                bytes_per_s=answer["bytes_per_s"],
                seen_as=answer["seen_as"],
            )
            for (_, target, use, port), answer in zip(mine, answers, strict=True)
        ]

    chosen = {node: dialogues[node] for node in by_source}
    return [way for ways in _with_all(meet, chosen, found).values() for way in ways]


def _ssh(
    inventory: Inventory,
    transports: Mapping[str, Transport],
    dialogues: Mapping[str, Dialogue],
    nodes: Sequence[NodeFacts],
    choice: NetworkChoice,
    found: list[Finding],
) -> list[SshWay]:
    """The head's SSH to every other node, with the very files that mpirun would use; none where the head did not answer."""
    head = nodes[0]
    if head.name != inventory.nodes[0].name:
        return []
    fleet = Fleet({node.name: transports[node.name] for node in nodes}, inventory.parallel)
    keys = {name: transport.host_key for name, transport in fleet.transports.items()}
    lacking = trust.unauthorized(fleet, nodes, choice.endpoints)
    try:
        hops = hops_from_head(inventory, nodes, choice.endpoints, keys, trust.planned_identity(fleet, inventory, nodes))
    except PreflightError as error:
        found.append(
            Finding(severity="error", node=head.name, what="no SSH from node0", evidence=error.message, remedy=error.advice)
        )
        return []
    config = ssh_config(hops, "{directory}", choice.endpoints[0].address, min(inventory.ssh.connect_timeout, WAIT_S))
    files = {"ssh_config": config, "known_hosts": known_hosts(hops)}
    commands = [["ssh", "-F", "{directory}/ssh_config", hop.address, "true"] for hop in hops]
    answers = dialogues[head.name].ask("run", files=files, commands=commands, limit_s=SSH_WAIT_S)
    return [
        SshWay(
            target=hop.node,
            code=answer["code"] if answer else None,
            stderr=answer["stderr"] if answer else "",
            seconds=answer["seconds"] if answer else SSH_WAIT_S,
            is_authorized=hop.node not in lacking,
        )
        for hop, answer in zip(hops, answers, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# All at once


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


def _with_all(action: Callable[[str, Dialogue], T], dialogues: Mapping[str, Dialogue], found: list[Finding]) -> dict[str, T]:
    """The results of those nodes that still answer; the others are findings."""

    def caught(name: str, dialogue: Dialogue) -> T | ClusterTrainError:
        try:
            return action(name, dialogue)
        except Exception as error:
            return failure_of(name, error)

    if not dialogues:
        return {}
    # Each in a thread of its own, whatever `parallel` says: they wait for each other.
    results = on_all({name: partial(caught, name, dialogue) for name, dialogue in dialogues.items()}, len(dialogues))
    found += [unreached(name, result) for name, result in results.items() if isinstance(result, ClusterTrainError)]
    return {name: result for name, result in results.items() if not isinstance(result, ClusterTrainError)}
