"""Which network the ranks talk over: one address and one network card per node.

Decides from the addresses that the nodes have; whether packets pass between them is for the doctor to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_interface,
    ip_network,
)
from itertools import combinations
from typing import TypeAlias

from orchestrator.errors import InventoryError, PreflightError
from orchestrator.specs.facts import InterfaceFacts, NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.run import Endpoint

_Address: TypeAlias = IPv4Address | IPv6Address
_Network: TypeAlias = IPv4Network | IPv6Network

_DEFAULT_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNode:
    """One node to connect; `host` is the address or name under which the inventory reaches it."""

    name: str
    facts: NodeFacts
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """The chosen network.

    Args:
        network: in CIDR notation; empty where the nodes share none and reach each other through routers.
        endpoints: one per node, in the given order.
        reason: one sentence for the person: which network, and why.
    """

    network: str
    endpoints: tuple[Endpoint, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One address under which other machines could reach a node.

    Args:
        network: the network it belongs to, by its prefix length.
        card: the network card that carries it.
        in_use: the inventory (or else the SSH connection to the node) goes to this very address.
    """

    node: str
    address: _Address
    network: _Network
    card: InterfaceFacts
    in_use: bool

    @property
    def rank(self) -> tuple[int, ...]:
        """Sorts the places of one node in one network, the best first."""
        return (not self.in_use, self.card.kind != "physical", -(self.card.speed_mbps or 0), int(self.address))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A network, and each node's best place in it."""

    network: _Network
    places: tuple[_Place, ...]

    @property
    def slowest_mbps(self) -> int:
        """The slowest link's speed; 0 where a card does not tell."""
        return min(place.card.speed_mbps or 0 for place in self.places)

    @property
    def rank(self) -> tuple[int, ...]:
        """Sorts networks, the best first: in use by the inventory, real cards, fast, IPv4, narrow, lowest."""
        return (
            -sum(place.in_use for place in self.places),
            sum(place.card.kind != "physical" for place in self.places),
            -self.slowest_mbps,
            self.network.version,
            -self.network.prefixlen,
            int(self.network.network_address),
        )


def network_of(inventory: Inventory, nodes: Sequence[NodeFacts]) -> NetworkChoice:
    """`choose_network` for the nodes of an inventory, which may name the network; raises as that does."""
    hosts = {node.name: inventory.login(node).host for node in inventory.nodes}
    return choose_network(
        [NetworkNode(name=node.name, facts=node, host=hosts[node.name]) for node in nodes], inventory.network.cidr
    )


def choose_network(nodes: Sequence[NetworkNode], wanted: str | None) -> NetworkChoice:
    """The network that carries the ranks' traffic.

    Nodes that are all one machine talk over loopback, whatever is wanted. Different machines never do: of the networks
    that every node has an address in, the one whose slowest card is fastest wins, where all cards are real and tell their
    speed; else the one with the inventory's own addresses, then real cards, then IPv4. Nodes without a common network are
    taken at the inventory's addresses where they have these.

    Args:
        nodes: in the inventory's order, at least one.
        wanted: the only network to consider, in CIDR notation; None for any.

    Raises InventoryError where `wanted` is no network, PreflightError where no choice is possible.
    """
    only = None if wanted is None else _parse_network(wanted)
    if _are_one_machine(nodes):
        return _over_loopback(nodes)
    places = [_places(node, only) for node in nodes]
    candidates = _candidates(places, only)
    if not candidates:
        return _over_routers(nodes, places, only)
    usable = [candidate for candidate in candidates if not _twins(_endpoints(candidate.places))]
    if not usable:
        raise _same_address(_twins(_endpoints(candidates[0].places)))
    first = min(usable, key=lambda candidate: candidate.rank)
    best = _fastest(first, usable)
    reason = _reason(best, len(usable), only) if best is first else _faster(best, first)
    return NetworkChoice(network=str(best.network), endpoints=_endpoints(best.places), reason=reason)


def _parse_network(text: str) -> _Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise InventoryError(
            f"network: {text} is not a network", advice="write it in CIDR notation, such as `network: 10.0.0.0/24`"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# One machine


def _are_one_machine(nodes: Sequence[NetworkNode]) -> bool:
    machines = {node.facts.machine for node in nodes}
    return len(nodes) == 1 or (len(machines) == 1 and all(machine.identifies for machine in machines))


def _over_loopback(nodes: Sequence[NetworkNode]) -> NetworkChoice:
    """Each node at the loopback address that the inventory gives it, else at 127.0.0.1."""
    endpoints = tuple(
        Endpoint(node=node.name, address=_loopback_address(node.host), interface=_loopback_card(node.facts)) for node in nodes
    )
    if twins := _twins(endpoints):
        raise _same_address(twins)
    network = "127.0.0.0/8" if ip_address(endpoints[0].address).version == 4 else "::1/128"
    subject = "there is one node" if len(nodes) == 1 else "all nodes are one machine"
    return NetworkChoice(network=network, endpoints=endpoints, reason=f"{subject}, so its ranks talk over loopback ({network})")


def _loopback_address(host: str) -> str:
    address = _literal(host)
    return str(address) if address is not None and address.is_loopback else _DEFAULT_LOOPBACK


def _loopback_card(facts: NodeFacts) -> str:
    return next((card.name for card in facts.interfaces if card.loopback), "lo")


# ---------------------------------------------------------------------------------------------------------------------
# Different machines


def _places(node: NetworkNode, only: _Network | None) -> tuple[_Place, ...]:
    """The addresses of a node that other machines could reach; those of a bridge only in a network that is wanted."""
    in_use = _address_in_use(node)
    return tuple(
        _Place(node=node.name, address=address, network=network, card=card, in_use=address == in_use)
        for card, address, network in _addresses(node.facts)
        if card.up
        and not (card.loopback or address.is_loopback or address.is_link_local)
        and (card.kind != "bridge" if only is None else address in only)
    )


def _addresses(facts: NodeFacts) -> list[tuple[InterfaceFacts, _Address, _Network]]:
    found: list[tuple[InterfaceFacts, _Address, _Network]] = []
    for card in facts.interfaces:
        for text in card.addresses:
            interface = ip_interface(text)
            found.append((card, interface.ip, interface.network))
    return found


def _address_in_use(node: NetworkNode) -> _Address | None:
    """The inventory's address where it is the node's own; else the one to which the SSH connection came."""
    address = _literal(node.host)
    if any(address == own for _, own, _ in _addresses(node.facts)):
        return address
    connection = node.facts.ssh_connection
    return None if connection is None else _literal(connection.server)


def _literal(host: str) -> _Address | None:
    """The address that a host is, or None for a name."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None


def _candidates(places: Sequence[Sequence[_Place]], only: _Network | None) -> list[_Candidate]:
    """The networks in which every node has a place.

    A network is looked for by what it contains, not by equal prefixes: those differ where someone mistyped a netmask.
    """
    networks = {place.network for own in places for place in own} if only is None else {only}
    candidates = []
    for network in networks:
        inside = [[place for place in own if place.address in network] for own in places]
        if all(inside):
            best = tuple(min(own, key=lambda place: place.rank) for own in inside)
            candidates.append(_Candidate(network=network, places=best))
    return sorted(candidates, key=lambda candidate: candidate.rank)


def _fastest(first: _Candidate, usable: Sequence[_Candidate]) -> _Candidate:
    """The network whose slowest card is faster than that of the first choice; the first where a speed is not known.

    Only real cards count: a tunnel claims any speed, and what all containers of a machine share is its own.
    """
    real = [one for one in usable if all(place.card.kind == "physical" for place in one.places) and one.slowest_mbps]
    if first not in real:
        return first
    return max(real, key=lambda one: (one.slowest_mbps, one is first))


def _faster(best: _Candidate, first: _Candidate) -> str:
    """Why the inventory's own network is not taken, and how to get it after all."""
    speeds = f"{best.slowest_mbps / 1000:g} Gbit/s, where {first.network} has {first.slowest_mbps / 1000:g}"
    why = f"the fastest network that all nodes share: {speeds} (`network: {first.network}` takes it)"
    return f"ranks talk over {best.network}, {why}"


def _over_routers(nodes: Sequence[NetworkNode], places: Sequence[Sequence[_Place]], only: _Network | None) -> NetworkChoice:
    """Every node at the address that the inventory uses for it: clouds give each machine a network of its own (/32)."""
    in_use = [place for own in places for place in own if place.in_use]
    if only is not None or len(in_use) < len(nodes):
        raise _no_network(nodes, only)
    endpoints = _endpoints(in_use)
    if twins := _twins(endpoints):
        raise _same_address(twins)
    return NetworkChoice(
        network="",
        endpoints=endpoints,
        reason="the nodes share no network, so ranks talk between the addresses that the inventory reaches them at",
    )


def _endpoints(places: Sequence[_Place]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(node=place.node, address=str(place.address), interface=place.card.name) for place in places)


def _reason(best: _Candidate, choices: int, only: _Network | None) -> str:
    if only is not None:
        why = "as the inventory asks"
    elif choices == 1:
        why = "the only network in which every node has an address"
    elif all(place.in_use for place in best.places):
        why = "where the inventory reaches the nodes"
    else:
        why = f"the best of the {choices} networks that all nodes share"
    return f"ranks talk over {best.network}, {why}"


# ---------------------------------------------------------------------------------------------------------------------
# No choice


def _twins(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Two nodes with one address; empty where all differ."""
    pairs = combinations(endpoints, 2)
    return next((pair for pair in pairs if pair[0].address == pair[1].address), ())


def _same_address(twins: Sequence[Endpoint]) -> PreflightError:
    first, second = twins
    return PreflightError(
        f"{first.node} and {second.node} have the same address, {first.address}: ranks could not tell them apart",
        advice="list one machine once, with `slots:` for its number of ranks; for two machines name another network "
        "that both are in with `network:` in the inventory",
    )


def _no_network(nodes: Sequence[NetworkNode], only: _Network | None) -> PreflightError:
    what = "the nodes share no network" if only is None else f"not every node has an address in `network: {only}`"
    listed = "\n".join(f"  {node.name}: {_listed_addresses(node.facts)}" for node in nodes)
    return PreflightError(
        f"{what}:\n{listed}",
        advice="name a network that every node is in with `network:` in the inventory, such as `network: 10.0.0.0/24`, "
        "or give the nodes' own addresses as `host:`",
    )


def _listed_addresses(facts: NodeFacts) -> str:
    shown = [
        f"{address}/{network.prefixlen} ({', '.join(_traits(card))})"
        for card, address, network in _addresses(facts)
        if not (address.is_loopback or address.is_link_local)
    ]
    return ", ".join(shown) or "no address but its own loopback"


def _traits(card: InterfaceFacts) -> list[str]:
    return [card.name] + ["a bridge"] * (card.kind == "bridge") + ["down"] * (not card.up)
