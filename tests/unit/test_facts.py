"""Reading the probe's document: what it holds arrives unchanged, and what it should not hold is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import CommandError
from orchestrator.specs.facts import DiskFacts, InterfaceFacts, LogicalCpu, NodeFacts, SshConnection

KEPT_FACTS = Path(__file__).resolve().parents[1] / "data" / "facts"


def document() -> dict[str, Any]:
    """A document with every optional fact present."""
    found: dict[str, Any] = json.loads((KEPT_FACTS / "x86_64-epyc_7451.json").read_text())
    card = {
        "name": "eth0",
        "addresses": ["10.0.0.10/24"],
        "up": True,
        "loopback": False,
        "speed_mbps": 1000,
        "kind": "physical",
    }
    found["interfaces"] = [card, {**card, "name": "docker0", "speed_mbps": None, "kind": "bridge"}]
    found["ssh_connection"] = {"client": "10.0.0.1", "client_port": 50022, "server": "10.0.0.10", "server_port": 22}
    found["libc"] = ["glibc", "2.36"]
    found["cpu"]["cgroup_cpu_limit"] = 4
    found["state"]["envs"] = ["e1", "e2"]
    return found


def test_facts_arrive_unchanged() -> None:
    """Each part of the document becomes its record, and the node is called what the inventory calls it."""
    facts = NodeFacts.from_json("node0", document())
    assert facts.name == "node0"
    assert facts.libc == ("glibc", "2.36")
    assert facts.cpu.logical[95] == LogicalCpu(cpu=95, socket=1, core=47, numa=7)
    assert facts.cpu.cgroup_cpu_limit == 4.0
    assert facts.interfaces[0] == InterfaceFacts(
        name="eth0", addresses=("10.0.0.10/24",), up=True, loopback=False, speed_mbps=1000, kind="physical"
    )
    assert facts.interfaces[1].speed_mbps is None
    assert facts.ssh_connection == SshConnection(client="10.0.0.1", client_port=50022, server="10.0.0.10", server_port=22)
    assert facts.disk == DiskFacts(free_bytes=0, writable=False)
    assert facts.state.envs == ("e1", "e2")
    assert facts.memory.cgroup_limit_bytes is None


@pytest.mark.parametrize("kept", sorted(KEPT_FACTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_documents_are_facts(kept: Path) -> None:
    """What the probe reads from another machine's files is a document like any other, but identifies no machine."""
    facts = NodeFacts.from_json("node0", json.loads(kept.read_text()))
    assert len(facts.cpu.logical) == facts.cpu.online
    assert not facts.machine.identifies


def set_at(*path: str | int, value: object) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (set_at("schema", value=2), "schema should be 1, but is 2"),
        (set_at("schema", value=True), "schema should be a whole number, but is True"),
        (lambda found: found.pop("root"), "root should be text, but is None"),
        (set_at("root", value=None), "root should be text, but is None"),
        (set_at("cpu", "logical", 3, "core", value="x"), "cpu.logical[3].core should be a whole number, but is 'x'"),
        (set_at("cpu", "logical", value=[]), "cpu.logical should be a list of at least one CPU"),
        (set_at("cpu", "logical", value=[1]), "cpu.logical should be a list of objects"),
        (set_at("cpu", "cgroup_cpu_limit", value="2"), "cpu.cgroup_cpu_limit should be a number, but is '2'"),
        (lambda found: found["cpu"].pop("cgroup_cpu_limit"), "cpu.cgroup_cpu_limit should be a number, but is None"),
        (set_at("numa", 0, "cpus", value=[0, "1"]), "numa[0].cpus should be a list of whole numbers"),
        (
            set_at("interfaces", 1, "kind", value="ether"),
            "interfaces[1].kind should be physical or bridge or virtual or loopback",
        ),
        (set_at("interfaces", 0, "up", value=1), "interfaces[0].up should be true or false, but is 1"),
        (set_at("libc", value=["glibc"]), "libc should be a kind and a version, but is ['glibc']"),
        (set_at("python", value=[]), "python should be an object"),
        (set_at("python", "markers", value={"os_name": 1}), "python.markers.os_name should be text, but is 1"),
        (set_at("state", "envs", value="e1"), "state.envs should be a list of texts, but is 'e1'"),
    ],
)
def test_a_wrong_document_is_refused_by_node_and_field(change: Callable[[Any], None], complaint: str) -> None:
    """The error names the node, the field, what it should be and what it is, and says what to do."""
    found = document()
    change(found)
    with pytest.raises(CommandError) as caught:
        NodeFacts.from_json("node1", found)
    assert caught.value.node == "node1"
    assert caught.value.message.startswith("node1: ")
    assert complaint in caught.value.message
    assert "remove `agent/`" in caught.value.advice
