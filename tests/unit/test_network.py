"""Which network is chosen, and when none is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import InventoryError, PreflightError
from orchestrator.planning.network import NetworkNode, choose_network
from orchestrator.specs.facts import InterfaceFacts, InterfaceKind, MachineId, NodeFacts, SshConnection
from orchestrator.specs.run import Endpoint

KEPT_FACTS = Path(__file__).resolve().parents[1] / "data" / "facts"
BASE = NodeFacts.from_json("base", json.loads((KEPT_FACTS / "arm-A510-A710-A715-X3.json").read_text()))


def card(
    name: str, *addresses: str, speed: int | None = None, kind: InterfaceKind = "physical", up: bool = True
) -> InterfaceFacts:
    return InterfaceFacts(name=name, addresses=addresses, up=up, loopback=kind == "loopback", speed_mbps=speed, kind=kind)


LOOPBACK = card("lo", "127.0.0.1/8", "::1/128", kind="loopback")
DOCKER = card("docker0", "172.17.0.1/16", kind="bridge")


def node(
    name: str,
    host: str,
    cards: Sequence[InterfaceFacts],
    *,
    boot: str | None = None,
    namespace: str = "mnt:[1]",
    ssh: str = "",
) -> NetworkNode:
    """A node on a machine of its own, unless `boot` says which."""
    connection = SshConnection(client="10.9.9.9", client_port=50022, server=ssh, server_port=22) if ssh else None
    facts = replace(
        BASE,
        name=name,
        machine=MachineId(boot_id=boot or f"boot of {name}", mount_namespace=namespace),
        interfaces=(LOOPBACK, *cards),
        ssh_connection=connection,
    )
    return NetworkNode(name=name, facts=facts, host=host)


def pair(first: Sequence[InterfaceFacts], second: Sequence[InterfaceFacts]) -> list[NetworkNode]:
    """Two machines, known to the inventory by names."""
    return [node("node0", "node0.lab", first), node("node1", "node1.lab", second)]


def chosen(nodes: Sequence[NetworkNode], wanted: str | None = None) -> list[tuple[str, str]]:
    return [(endpoint.address, endpoint.interface) for endpoint in choose_network(nodes, wanted).endpoints]


# ---------------------------------------------------------------------------------------------------------------------
# One machine


def test_one_node_talks_over_loopback() -> None:
    """One node needs no network, even where its machine is not identified or the inventory names one."""
    alone = node("node0", "10.0.0.10", [card("eth0", "10.0.0.10/24")])
    for wanted in (None, "10.0.0.0/24"):
        choice = choose_network([alone], wanted)
        assert choice.network == "127.0.0.0/8"
        assert choice.endpoints == (Endpoint(node="node0", address="127.0.0.1", interface="lo"),)
        assert choice.reason == "there is one node, so its ranks talk over loopback (127.0.0.0/8)"


def test_nodes_that_are_one_machine_keep_their_loopback_addresses() -> None:
    """127.0.0.2 and 127.0.0.3 on this machine stay what the inventory calls them."""
    nodes = [node(f"node{index}", f"127.0.0.{index + 2}", [card("eth0", "10.0.0.10/24")], boot="b") for index in range(2)]
    choice = choose_network(nodes, None)
    assert [endpoint.address for endpoint in choice.endpoints] == ["127.0.0.2", "127.0.0.3"]
    assert "all nodes are one machine" in choice.reason


def test_ipv6_loopback_is_kept() -> None:
    """::1 in the inventory is a loopback address too, in brackets or not."""
    choice = choose_network([node("node0", "[::1]", [])], None)
    assert (choice.network, choice.endpoints[0].address) == ("::1/128", "::1")


def test_one_machine_listed_twice_is_refused() -> None:
    """Two names for one machine would be one line of the hostfile twice."""
    nodes = [node(name, host, [], boot="b") for name, host in (("node0", "localhost"), ("node1", "127.0.0.1"))]
    with pytest.raises(PreflightError, match=r"node0 and node1 have the same address, 127\.0\.0\.1") as caught:
        choose_network(nodes, None)
    assert "slots:" in caught.value.advice


def test_containers_of_one_machine_are_different_machines() -> None:
    """They share the boot id but not the files: they talk over their own network, where their cards are virtual."""
    cards = [[card("eth0", f"172.20.0.{index + 2}/16", speed=10000, kind="virtual")] for index in range(2)]
    nodes = [
        node("node0", "127.0.0.1", cards[0], boot="b", namespace="mnt:[1]"),
        node("node1", "127.0.0.1", cards[1], boot="b", namespace="mnt:[2]"),
    ]
    assert chosen(nodes) == [("172.20.0.2", "eth0"), ("172.20.0.3", "eth0")]


def test_machines_that_tell_nothing_of_themselves_are_different() -> None:
    """Empty identities are equal but identify nothing."""
    nodes = pair([card("eth0", "10.0.0.10/24")], [card("eth0", "10.0.0.11/24")])
    unknown = MachineId(boot_id="", mount_namespace="")
    nodes = [replace(each, facts=replace(each.facts, machine=unknown)) for each in nodes]
    assert chosen(nodes) == [("10.0.0.10", "eth0"), ("10.0.0.11", "eth0")]


# ---------------------------------------------------------------------------------------------------------------------
# Different machines


def test_the_only_common_network_is_taken_with_each_nodes_own_card() -> None:
    """Card names differ from node to node; a network that only one has does not matter."""
    nodes = pair(
        [card("eth0", "10.0.0.10/24"), card("eth1", "192.168.5.1/24"), DOCKER],
        [card("enp3s0", "10.0.0.11/24"), DOCKER],
    )
    choice = choose_network(nodes, None)
    assert choice.network == "10.0.0.0/24"
    assert choice.endpoints == (
        Endpoint(node="node0", address="10.0.0.10", interface="eth0"),
        Endpoint(node="node1", address="10.0.0.11", interface="enp3s0"),
    )
    assert choice.reason == "ranks talk over 10.0.0.0/24, the only network in which every node has an address"


def test_the_fastest_network_wins_over_the_inventorys_own() -> None:
    """People write the addresses they log in at, often those of a slow network for administration; what is faster is taken, and
    the sentence says what it was taken for, and how to have the other."""
    nodes = [
        node("node0", "10.0.0.10", [card("ib0", "10.1.0.10/24", speed=100000), card("eth0", "10.0.0.10/24", speed=1000)]),
        node("node1", "10.0.0.11", [card("ib0", "10.1.0.11/24", speed=100000), card("eth0", "10.0.0.11/24", speed=1000)]),
    ]
    choice = choose_network(nodes, None)
    assert [(endpoint.address, endpoint.interface) for endpoint in choice.endpoints] == [
        ("10.1.0.10", "ib0"),
        ("10.1.0.11", "ib0"),
    ]
    assert choice.reason == (
        "ranks talk over 10.1.0.0/24, the fastest network that all nodes share: 100 Gbit/s, where 10.0.0.0/24 has 1 "
        "(`network: 10.0.0.0/24` takes it)"
    )
    assert choose_network(nodes, "10.0.0.0/24").network == "10.0.0.0/24"


@pytest.mark.parametrize(("own", "other"), [(None, 100000), (1000, None), (1000, 1000), (10000, 1000)])
def test_the_inventorys_own_network_stays_where_no_other_is_known_to_be_faster(own: int | None, other: int | None) -> None:
    """Cards of virtual machines tell no speed."""
    nodes = [
        node(f"node{n}", f"10.0.0.{n}", [card("a", f"10.1.0.{n}/24", speed=other), card("b", f"10.0.0.{n}/24", speed=own)])
        for n in (1, 2)
    ]
    choice = choose_network(nodes, None)
    assert choice.reason == "ranks talk over 10.0.0.0/24, where the inventory reaches the nodes"


def test_a_tunnel_does_not_pass_for_fast() -> None:
    """Virtual cards claim any speed."""
    nodes = [
        node(
            f"node{n}",
            f"10.0.0.{n}",
            [card("wg0", f"10.8.0.{n}/24", speed=100000, kind="virtual"), card("eth0", f"10.0.0.{n}/24", speed=1000)],
        )
        for n in (1, 2)
    ]
    assert choose_network(nodes, None).network == "10.0.0.0/24"


def test_the_address_that_ssh_arrived_at_counts_for_a_name_or_a_forwarded_address() -> None:
    """Names, and addresses that some router in front of the node has, say nothing; where sshd was reached does."""
    cards = [[card("eth1", f"10.1.0.{index}/24", speed=100), card("eth0", f"10.2.0.{index}/24")] for index in (1, 2)]
    nodes = [node("node0", "node0.lab", cards[0], ssh="10.2.0.1"), node("node1", "203.0.113.7", cards[1], ssh="10.2.0.2")]
    assert chosen(nodes) == [("10.2.0.1", "eth0"), ("10.2.0.2", "eth0")]


def test_the_fastest_slowest_link_wins() -> None:
    """A network is as fast as its slowest card."""
    nodes = pair(
        [card("eth0", "10.0.0.1/24", speed=100000), card("eth1", "10.1.0.1/24", speed=10000)],
        [card("eth0", "10.0.0.2/24", speed=1000), card("eth1", "10.1.0.2/24", speed=10000)],
    )
    choice = choose_network(nodes, None)
    assert choice.network == "10.1.0.0/24"
    assert "best of the 2 networks" in choice.reason


def test_real_cards_are_better_than_virtual_ones() -> None:
    """A tunnel between the nodes claims any speed."""
    nodes = pair(
        [card("wg0", "10.8.0.1/24", speed=100000, kind="virtual"), card("eth0", "10.9.0.1/24")],
        [card("wg0", "10.8.0.2/24", speed=100000, kind="virtual"), card("eth0", "10.9.0.2/24")],
    )
    assert chosen(nodes) == [("10.9.0.1", "eth0"), ("10.9.0.2", "eth0")]


def test_ipv4_then_the_lowest_network_decides() -> None:
    """Equal networks are told apart the same way every time."""
    cards = [[card("eth0", f"10.1.0.{n}/24", f"fd00::{n}/64"), card("eth1", f"10.0.0.{n}/24")] for n in (1, 2)]
    assert chosen(pair(*cards)) == [("10.0.0.1", "eth1"), ("10.0.0.2", "eth1")]
    assert chosen(pair(*(own[::-1] for own in cards))) == chosen(pair(*cards))


def test_ipv6_alone_serves() -> None:
    """Nodes with IPv6 addresses only; their link-local ones are not taken."""
    nodes = pair([card("eth0", "fe80::1/64", "fd00:1::10/64")], [card("eth0", "fe80::2/64", "fd00:1::11/64")])
    assert choose_network(nodes, None).network == "fd00:1::/64"
    assert chosen(nodes) == [("fd00:1::10", "eth0"), ("fd00:1::11", "eth0")]


def test_a_mistyped_netmask_does_not_part_the_nodes() -> None:
    """One node believes in a /24, the other in a /25 of it: the /24 has both addresses."""
    nodes = pair([card("eth0", "10.0.0.10/24")], [card("eth0", "10.0.0.11/25")])
    assert chosen(nodes) == [("10.0.0.10", "eth0"), ("10.0.0.11", "eth0")]


def test_the_inventorys_address_is_taken_among_several_in_one_network() -> None:
    """A floating second address beside the node's own is not what the person meant."""
    nodes = [
        node("node0", "10.0.0.10", [card("eth0", "10.0.0.5/24", "10.0.0.10/24")]),
        node("node1", "10.0.0.11", [card("eth0", "10.0.0.11/24")]),
    ]
    assert chosen(nodes) == [("10.0.0.10", "eth0"), ("10.0.0.11", "eth0")]


def test_a_network_with_one_address_on_all_nodes_is_passed_over() -> None:
    """Virtual machines have the same address in the network that each is given for the outside."""
    nodes = pair(
        [card("eth0", "10.0.2.15/24", speed=1000), card("eth1", "192.168.56.10/24")],
        [card("eth0", "10.0.2.15/24", speed=1000), card("eth1", "192.168.56.11/24")],
    )
    assert chosen(nodes) == [("192.168.56.10", "eth1"), ("192.168.56.11", "eth1")]


# ---------------------------------------------------------------------------------------------------------------------
# The inventory names a network


def test_the_wanted_network_is_taken() -> None:
    """`network:` wins over addresses and speed, and its own prefix decides, not the cards'."""
    nodes = [
        node("node0", "10.0.0.1", [card("eth0", "10.0.0.1/24"), card("wg0", "10.8.1.1/32", kind="virtual")]),
        node("node1", "10.0.0.2", [card("eth0", "10.0.0.2/24"), card("wg0", "10.8.2.1/32", kind="virtual")]),
    ]
    choice = choose_network(nodes, "10.8.0.0/16")
    assert [endpoint.address for endpoint in choice.endpoints] == ["10.8.1.1", "10.8.2.1"]
    assert (choice.network, choice.reason) == ("10.8.0.0/16", "ranks talk over 10.8.0.0/16, as the inventory asks")


def test_a_bridge_is_taken_when_asked_for() -> None:
    """A bridge that connects machines after all can be named."""
    nodes = pair([card("br0", "10.3.0.1/24", kind="bridge")], [card("br0", "10.3.0.2/24", kind="bridge")])
    assert chosen(nodes, "10.3.0.0/24") == [("10.3.0.1", "br0"), ("10.3.0.2", "br0")]


def test_a_wanted_network_that_a_node_is_not_in_is_refused() -> None:
    """The message lists every node's networks."""
    nodes = pair([card("eth0", "10.0.0.10/24")], [card("eth0", "10.0.0.11/24"), card("eth1", "10.5.0.11/24")])
    with pytest.raises(PreflightError) as caught:
        choose_network(nodes, "10.5.0.0/24")
    assert caught.value.message.splitlines() == [
        "not every node has an address in `network: 10.5.0.0/24`:",
        "  node0: 10.0.0.10/24 (eth0)",
        "  node1: 10.0.0.11/24 (eth0), 10.5.0.11/24 (eth1)",
    ]


def test_loopback_never_connects_machines() -> None:
    """Not even where the inventory asks for it."""
    with pytest.raises(PreflightError):
        choose_network(pair([card("eth0", "10.0.0.10/24")], [card("eth0", "10.0.0.11/24")]), "127.0.0.0/8")


def test_a_network_that_is_none_is_the_inventorys_fault() -> None:
    """A card's name or a typing error is answered with what a network looks like."""
    with pytest.raises(InventoryError, match="network: eth0 is not a network") as caught:
        choose_network([node("node0", "10.0.0.10", [])], "eth0")
    assert "10.0.0.0/24" in caught.value.advice


# ---------------------------------------------------------------------------------------------------------------------
# No common network


def test_routed_nodes_talk_between_the_inventorys_addresses() -> None:
    """In clouds each machine has a /32: the inventory's addresses are the nodes' own, so routers must connect them."""
    nodes = [node(f"node{index}", f"10.{index}.0.1", [card("ens4", f"10.{index}.0.1/32"), DOCKER]) for index in (1, 2)]
    choice = choose_network(nodes, None)
    assert choice.network == ""
    assert [endpoint.address for endpoint in choice.endpoints] == ["10.1.0.1", "10.2.0.1"]
    assert "share no network" in choice.reason


@pytest.mark.parametrize(
    "cards",
    [
        [DOCKER],
        [card("virbr0", "192.168.122.1/24", kind="bridge")],
        [card("eth0", "169.254.3.4/16", "fe80::1/64")],
    ],
)
def test_networks_that_every_machine_has_for_itself_do_not_count(cards: list[InterfaceFacts]) -> None:
    """Bridges of containers and virtual machines, and link-local addresses, lead nowhere."""
    with pytest.raises(PreflightError, match="the nodes share no network"):
        choose_network(pair(cards, cards), None)


def test_cards_that_are_down_do_not_count() -> None:
    """A card without a carrier keeps its address; the message says why it was passed over."""
    nodes = pair([card("eth0", "10.0.0.10/24", up=False), DOCKER], [card("eth0", "10.0.0.11/24")])
    with pytest.raises(PreflightError) as caught:
        choose_network(nodes, None)
    assert caught.value.message.splitlines() == [
        "the nodes share no network:",
        "  node0: 10.0.0.10/24 (eth0, down), 172.17.0.1/16 (docker0, a bridge)",
        "  node1: 10.0.0.11/24 (eth0)",
    ]
    assert "`network:`" in caught.value.advice


def test_two_nodes_with_one_address_are_refused() -> None:
    """Both are named, whether they share a network or are reached through routers."""
    for prefix in (24, 32):
        same = [card("eth0", f"10.0.0.10/{prefix}")]
        nodes = [node("node0", "10.0.0.10", same), node("node1", "10.0.0.10", same)]
        with pytest.raises(PreflightError, match=r"node0 and node1 have the same address, 10\.0\.0\.10"):
            choose_network(nodes, None)
