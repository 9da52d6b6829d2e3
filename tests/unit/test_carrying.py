"""Who sends wheels to whom, and which roots are one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.planning.carrying import LEAST_FED_BYTES, cluster_speed, feeding_pays, is_sampled, plan_carrying
from orchestrator.planning.roots import distinct_roots, perhaps_shared
from orchestrator.specs.facts import InterfaceFacts, MachineId, NodeFacts
from orchestrator.specs.run import Endpoint

FACTS = Path(__file__).resolve().parents[1] / "data" / "facts" / "x86_64-epyc_7451.json"
STACK_BYTES = 600_000_000


def node(name: str, boot_id: str, root: str = "/root", inode: str = "0:1") -> NodeFacts:
    facts = NodeFacts.from_json(name, json.loads(FACTS.read_text()))
    state = replace(facts.state, nonce_dir_id=inode)
    return replace(facts, root=root, machine=MachineId(boot_id=boot_id, mount_namespace="mnt"), state=state)


def card(kind: str, speed_mbps: int | None) -> InterfaceFacts:
    return InterfaceFacts(name="eth0", addresses=(), up=True, loopback=False, speed_mbps=speed_mbps, kind=kind)  # type: ignore[arg-type]


def test_the_head_comes_first_and_may_feed_the_others() -> None:
    """Where the head can feed, every other node that lacks much may have to wait for it."""
    plan = plan_carrying({"a": STACK_BYTES, "b": STACK_BYTES, "c": 0, "d": LEAST_FED_BYTES - 1}, "a", head_can_feed=True)
    assert (plan.direct, plan.perhaps_fed) == (("a", "c", "d"), ("b",))


def test_where_the_head_cannot_feed_all_comes_from_here() -> None:
    """We sit on the head, or it lacks wheels itself: nobody waits."""
    plan = plan_carrying({"a": STACK_BYTES, "b": STACK_BYTES}, "a", head_can_feed=False)
    assert (plan.direct, plan.perhaps_fed) == (("a", "b"), ())


@pytest.mark.parametrize(
    ("uplink_mb_s", "cluster_mbps", "pays"),
    [(1.2, 1000, True), (50, 1000, True), (70, 1000, False), (11, 100, False), (2, 100, True), (110, 10_000, True)],
    ids=["home uplink", "wireless", "same gigabit", "same 100 Mbit", "slow even for 100 Mbit", "10 gigabit between nodes"],
)
def test_feeding_is_for_links_slower_than_the_clusters(uplink_mb_s: float, cluster_mbps: int, pays: bool) -> None:
    """The detour over the head is made where its network is at least twice as quick as our link."""
    assert feeding_pays(uplink_mb_s * 1e6, cluster_mbps) is pays


def test_a_rate_is_known_after_a_second_or_enough_bytes() -> None:
    """A slow link is not waited for, a quick one is known at once."""
    assert is_sampled(1_000_000, 1.0) and is_sampled(24_000_000, 0.1) and not is_sampled(1_000_000, 0.5)


@pytest.mark.parametrize(
    ("kind", "speed", "counts"), [("physical", 100, 100), ("physical", None, 1000), ("virtual", 10_000, 1000)]
)
def test_the_slowest_card_decides(kind: str, speed: int | None, counts: int) -> None:
    """One slow card holds the cluster's network back; what does not know its speed counts as gigabit."""
    nodes = [
        replace(node("a", "1"), interfaces=(card("physical", 10_000),)),
        replace(node("b", "2"), interfaces=(card(kind, speed),)),
    ]
    endpoints = [Endpoint(node=name, address="10.0.0.1", interface="eth0") for name in "ab"]
    assert cluster_speed(nodes, endpoints) == counts


def test_nodes_of_one_machine_have_one_root() -> None:
    """Two addresses of one machine are one root; the same path on two machines is two."""
    nodes = [node("a", "1"), node("b", "1"), node("c", "2"), node("d", "2", root="/other")]
    assert [found.name for found in distinct_roots(nodes)] == ["a", "c", "d"]


def test_a_shared_root_stands_for_all_that_see_it() -> None:
    """What was found to be one root over NFS is worked on once, whichever node is named first."""
    nodes = [node("a", "1"), node("b", "2"), node("c", "3")]
    assert [found.name for found in distinct_roots(nodes, {"c": "a"})] == ["a", "b"]


def test_only_equal_inodes_are_worth_a_question() -> None:
    """Machines whose roots have one inode number may share them; one machine's two addresses and other paths are not asked."""
    nodes = [
        node("a", "1", inode="40:7"),
        node("b", "2", inode="52:7"),
        node("c", "3", inode="40:8"),
        node("d", "1", inode="40:7"),
    ]
    assert [[found.name for found in group] for group in perhaps_shared(nodes)] == [["a", "b"]]
    assert perhaps_shared([node("a", "1", inode="40:7"), node("b", "2", "/other", inode="40:7")]) == []
