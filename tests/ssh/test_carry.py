"""Wheels on their way: from here, from the head to the others, and what happens when the head cannot."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from slow_link import SlowLink, SlowTransport
from sshd import SshdNode, SshdNodes

from orchestrator.actions import agent
from orchestrator.actions.carry import Cargo, Carrier, Delivery, cargo_of
from orchestrator.actions.resolve import wheel_path
from orchestrator.actions.shared_root import shared_roots
from orchestrator.actions.trust import authorize_head
from orchestrator.nodes.fleet import Fleet, connect
from orchestrator.nodes.transport import Transport
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.specs.events import Event, Notice
from orchestrator.specs.facts import MachineId, NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import LockedWheel
from orchestrator.specs.run import Endpoint

ROOT = "~/.cluster-train"
SLOW_BYTES_S = 20e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Three sshd's, each with a home and a root of its own, reached over a link of `SLOW_BYTES_S` in all."""

    fleet: Fleet
    inventory: Inventory
    nodes: list[SshdNode]

    def facts(self) -> list[NodeFacts]:
        def probe(transport: Transport) -> NodeFacts:
            return NodeFacts.from_json(transport.node, agent.call(transport, ROOT, "python3", "probe.py", ["--root", ROOT]))

        return list(self.fleet.each(probe).values())

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(node=f"node{index}", address=node.host, interface="lo") for index, node in enumerate(self.nodes)]

    def carry(self, cargo: dict[str, Cargo]) -> tuple[dict[str, Delivery], list[Event]]:
        events: list[Event] = []
        carrier = Carrier(self.fleet, self.inventory, self.facts(), self.endpoints(), cargo, events.append)
        return self.fleet.each(carrier.bring, cargo), events


@pytest.fixture
def link() -> SlowLink:
    return SlowLink(SLOW_BYTES_S)


@pytest.fixture
def cluster(sshd_factory: SshdNodes, link: SlowLink) -> Iterator[Cluster]:
    nodes = sshd_factory(3)
    first = nodes[0]
    document = {
        "ssh": {"key": str(first.key), "known_hosts": str(first.known_hosts), "port": first.port},
        "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
    }
    inventory = parse_inventory(json.dumps(document), file="test.yml", environment={})
    real = connect(inventory)
    fleet = Fleet({name: SlowTransport(transport, link) for name, transport in real.transports.items()}, 16)
    try:
        yield Cluster(fleet=fleet, inventory=inventory, nodes=nodes)
    finally:
        fleet.close()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LockedWheel]:
    """Two wheels in the cache, enough to be fed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [make_wheel("big", 30_000_000), make_wheel("small", 4_000_000)]


def make_wheel(name: str, size_bytes: int) -> LockedWheel:
    content = os.urandom(size_bytes)
    sha256 = hashlib.sha256(content).hexdigest()
    wheel = LockedWheel(name=name, version="1", filename=f"{name}-1-py3-none-any.whl", sha256=sha256, source="")
    wheel_path(wheel).parent.mkdir(parents=True)
    wheel_path(wheel).write_bytes(content)
    return wheel


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def test_behind_a_slow_link_the_head_feeds_the_others(cluster: Cluster, link: SlowLink, wheels: list[LockedWheel]) -> None:
    """The wheels cross our link once, arrive whole everywhere, and nothing of the feeding stays on the head."""
    facts = cluster.facts()
    authorize_head(cluster.fleet, facts, cluster.endpoints(), lambda event: None)
    delivered, events = cluster.carry({node.name: cargo_of(node, wheels) for node in facts})
    assert {name: delivery.sender for name, delivery in delivered.items()} == {"node0": "", "node1": "node0", "node2": "node0"}
    assert link.carried_bytes < 40_000_000 and notices(events) == []
    assert all(set(node.state.wheels) == {wheel.sha256 for wheel in wheels} for node in cluster.facts())
    left = {path.name for path in (cluster.nodes[0].home / ".cluster-train" / "ssh").iterdir()}
    assert left == {"id_ed25519", "id_ed25519.pub"}


def test_a_head_that_has_all_feeds_at_once(cluster: Cluster, link: SlowLink, wheels: list[LockedWheel]) -> None:
    """A node that is new to a cluster gets nothing over our link."""
    facts = cluster.facts()
    authorize_head(cluster.fleet, facts, cluster.endpoints(), lambda event: None)
    cluster.carry({"node0": cargo_of(facts[0], wheels)})
    before = link.carried_bytes
    delivered, _ = cluster.carry({"node2": cargo_of(facts[2], wheels)})
    assert delivered["node2"].sender == "node0" and link.carried_bytes - before < 100_000


def test_where_the_head_is_not_let_in_wheels_come_from_here(cluster: Cluster, wheels: list[LockedWheel]) -> None:
    """Feeding that fails is told in one line for each node, with ssh's own words, and made good."""
    facts = cluster.facts()
    authorize_head(cluster.fleet, facts[:2], cluster.endpoints(), lambda event: None)  # node2 does not know the head's key
    delivered, events = cluster.carry({node.name: cargo_of(node, wheels) for node in facts})
    assert {name: delivery.sender for name, delivery in delivered.items()} == {"node0": "", "node1": "node0", "node2": ""}
    (told,) = notices(events)
    assert told.startswith("node2: node0 could not send it the wheels") and "Permission denied" in told
    assert all(len(node.state.wheels) == len(wheels) for node in cluster.facts())


def test_a_head_that_gets_no_wheels_keeps_nobody_waiting(cluster: Cluster, wheels: list[LockedWheel]) -> None:
    """Where the head cannot be filled, the others are, from here; only the head's failure is raised."""
    facts = cluster.facts()
    (cluster.nodes[0].home / ".cluster-train" / "wheelhouse").write_text("a file in the way")
    with pytest.raises(Exception, match="node0"):
        cluster.carry({node.name: cargo_of(node, wheels) for node in facts})
    assert [len(node.state.wheels) for node in cluster.facts()] == [0, 2, 2]


def test_a_root_that_machines_share_is_found(cluster: Cluster) -> None:
    """What one machine writes below a shared root the others see; equal inode numbers alone are not believed."""
    first = cluster.nodes[0].home / ".cluster-train"
    facts = cluster.facts()

    def with_root(root: str) -> list[NodeFacts]:
        """The nodes as three machines, whose roots have one path and one inode number."""
        return [
            replace(
                node,
                root=root,
                machine=MachineId(boot_id=f"machine {index}", mount_namespace="mnt"),
                state=replace(node.state, nonce_dir_id=f"{index}:7"),
            )
            for index, node in enumerate(facts)
        ]

    assert shared_roots(cluster.fleet, with_root(str(first))) == {"node1": "node0", "node2": "node0"}
    assert shared_roots(cluster.fleet, with_root(ROOT)) == {}  # below each node's own home
    second = cluster.nodes[1].home / ".cluster-train"
    second.rename(second.with_name("old"))
    second.symlink_to(first)
    assert shared_roots(cluster.fleet, with_root(ROOT)) == {"node1": "node0"}
    assert not [path for path in first.iterdir() if path.name.startswith(".nonce")]
