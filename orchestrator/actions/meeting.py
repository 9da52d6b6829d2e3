"""Try the ways between nodes that a launch will use: ports of one called by another, and the head's SSH."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from orchestrator.actions import trust
from orchestrator.actions.dialogue import Dialogue
from orchestrator.errors import ClusterTrainError, PreflightError
from orchestrator.nodes.fleet import Fleet, on_all
from orchestrator.nodes.transport import Transport, failure_of
from orchestrator.planning.checks import unreached
from orchestrator.planning.hops import hops_from_head, known_hosts, ssh_config
from orchestrator.planning.network import NetworkChoice
from orchestrator.planning.ports import master_ports, shares
from orchestrator.planning.preflight import Finding
from orchestrator.planning.ways import GLOO, LAUNCHER, MASTER, WAIT_S, gloo_pairs, ring_pairs
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import SshWay, Way
from orchestrator.specs.inventory import Inventory

T = TypeVar("T")

SAMPLE_BYTES = 4 << 20
SSH_WAIT_S = 8.0


def try_ways(
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

    listening = with_all(listen, dialogues, found)
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
    return [way for ways in with_all(meet, chosen, found).values() for way in ways]


def try_ssh(
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
        hops = hops_from_head(inventory, nodes, choice.endpoints, keys, trust.planned_identity(fleet, nodes))
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


def with_all(action: Callable[[str, Dialogue], T], dialogues: Mapping[str, Dialogue], found: list[Finding]) -> dict[str, T]:
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
