"""The fault table, second part: what can befall nodes, their memory, disks and network, and the way to them. See `faulty`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from faulty import FLAVOURS, FaultLab, ticking, until

every_flavour = pytest.mark.parametrize("mpi", FLAVOURS)

HEARTBEAT_S, DEFAULT_HEARTBEAT_S = 6, 60
LATE_S = 30  # beyond the limit, on a machine that does much else
MEMORY_LIMIT = 500_000_000
SMALL_DISK = "/small-disk"  # see small-disk.yaml
HOGS_MEMORY = 'if RANK == 2 and tick == 9: broken(); hog = [b"x" * 50_000_000 for _ in range(100)]'
WRITES_MUCH = '[print("x" * 999) for _ in range(20_000)]'


def test_a_rank_takes_more_memory_than_its_container_has(fault_lab: FaultLab) -> None:
    with memory_limited(fault_lab, "node1", MEMORY_LIMIT):
        up = fault_lab.up(ticking(HOGS_MEMORY)).wait()
    up.check("failed", kind="out_of_memory", rank=2, node="node1", signal="SIGKILL")


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_the_disk_under_the_logs_is_full(fault_lab: FaultLab, node: str) -> None:
    """The rank that could not write is named; what it and the others had written is there."""
    rank = 2 * int(node[-1])
    with small_disk(fault_lab, node) as root:
        up = fault_lab.up(
            ticking(f"if RANK == {rank} and tick == 9: broken(); {WRITES_MUCH}"), inventory=fault_lab.inventory(root=root)
        )
        up.wait().check("failed", kind="disk_full", rank=rank, node=node)
        log = f"rank-{rank}.out"
        written = up.on_node(node, log)[log]
        assert written.startswith("tick 0\n") and len(written) > 1_000_000
        assert (up.record / log).read_text() == written


@every_flavour
def test_the_link_to_node0_is_cut_while_following(fault_lab: FaultLab, mpi: str) -> None:
    """`up` connects again and goes on where it was."""
    up = fault_lab.up(ticking(), mpi).until_ticking()
    fault_lab.kill("node0", connections(fault_lab, "node0"))
    up.until_ticking(up.last_tick(0) + 20)
    assert "connected again" in up.text()
    up.broken()
    assert fault_lab.call("stop", up.inventory, "--json").result["state"] == "stopped"
    up.wait().check("stopped")


@every_flavour
def test_the_worker_is_killed(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(), mpi).until_ticking()
    up.broken()
    with node_killed(fault_lab, "node1"):
        up.wait()
    up.check("failed", kind="node_lost", node="node1", dead="node1")


@every_flavour
def test_node0_is_killed(fault_lab: FaultLab, mpi: str) -> None:
    """Nobody is left who could say so: that the worker's ranks ended for want of it does."""
    up = fault_lab.up(ticking(), mpi, heartbeat_timeout_s=HEARTBEAT_S).until_ticking()
    up.broken()
    with node_killed(fault_lab, "node0"):
        up.wait()
    result = up.check("lost", dead="node0", limit_s=HEARTBEAT_S + LATE_S)
    assert "node0 cannot be reached" in result["summary"]


@every_flavour
def test_the_worker_is_paused_for_20_s_and_goes_on(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(ticks=200), mpi).until_ticking()
    container = fault_lab.cluster.container("node1")
    fault_lab.docker("pause", container)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            up.process.wait(20)
    finally:
        fault_lab.docker("unpause", container)
    up.wait().check("succeeded", code=0)


@every_flavour
def test_the_worker_is_paused_for_longer_than_its_heartbeat_may_fail(fault_lab: FaultLab, mpi: str) -> None:
    """The run is over while the worker still stands still; its ranks end by themselves when it goes on."""
    up = fault_lab.up(ticking(), mpi, heartbeat_timeout_s=HEARTBEAT_S).until_ticking()
    container = fault_lab.cluster.container("node1")
    up.broken()
    fault_lab.docker("pause", container)
    try:
        up.wait()
    finally:
        fault_lab.docker("unpause", container)
    up.check("failed", kind="node_lost", node="node1", dead="node1", limit_s=HEARTBEAT_S + LATE_S)


def test_the_worker_is_paused_for_longer_than_the_default_limit(fault_lab: FaultLab) -> None:
    """Without a word about it in the inventory a node may be silent for 60 s, neither less nor much more."""
    up = fault_lab.up(ticking()).until_ticking()
    container = fault_lab.cluster.container("node1")
    up.broken()
    fault_lab.docker("pause", container)
    try:
        up.wait(DEFAULT_HEARTBEAT_S + 2 * LATE_S)
    finally:
        fault_lab.docker("unpause", container)
    up.check("failed", kind="node_lost", node="node1", dead="node1", limit_s=DEFAULT_HEARTBEAT_S + LATE_S)
    assert up.seconds is not None and up.seconds > DEFAULT_HEARTBEAT_S - 2


@every_flavour
def test_the_network_of_the_worker_is_cut(fault_lab: FaultLab, mpi: str) -> None:
    """The run is over within the limit; the worker's ranks, which nobody can reach, have ended by themselves."""
    up = fault_lab.up(ticking(), mpi, heartbeat_timeout_s=HEARTBEAT_S).until_ticking()
    up.broken()
    with network_cut(fault_lab, "node1"):
        up.wait()
        until(lambda: not fault_lab.left("node1"), lambda: fault_lab.left("node1"))
    up.check("failed", kind="node_lost", node="node1", dead="node1", limit_s=HEARTBEAT_S + LATE_S)


@every_flavour
def test_the_network_of_the_worker_is_cut_for_a_moment(fault_lab: FaultLab, mpi: str) -> None:
    """Less than the limit: the run goes on, and nothing of it is lost."""
    up = fault_lab.up(ticking(ticks=200), mpi, heartbeat_timeout_s=20).until_ticking()
    with network_cut(fault_lab, "node1"), pytest.raises(subprocess.TimeoutExpired):
        up.process.wait(3)
    up.wait().check("succeeded", code=0)


def test_the_worker_accepts_no_new_connections(fault_lab: FaultLab) -> None:
    """sshd's listener stands still: the run goes on to its end, and `up` needs no further connection."""
    up = fault_lab.up(ticking(ticks=100)).until_ticking()
    listener = [one.pid for one in fault_lab.cluster.processes("node1") if one.argv[0].startswith("sshd: /usr/sbin/sshd")]
    assert len(listener) == 1
    fault_lab.kill("node1", listener, "STOP")
    try:
        up.wait()
    finally:
        fault_lab.kill("node1", listener, "CONT")
    up.check("succeeded", code=0)


@every_flavour
def test_two_runs_at_once_and_one_is_stopped(fault_lab: FaultLab, mpi: str) -> None:
    first = fault_lab.up(ticking(ticks=160), mpi, name="first").until_ticking()
    second = fault_lab.up(ticking(), mpi, "--share", name="second").until_ticking()
    second.broken()
    stopped = fault_lab.call("stop", second.inventory, "--run", second.run_id, "--json")
    assert stopped.result["state"] == "stopped"
    second.wait()
    assert second.process.returncode == 1 and second.result["state"] == "stopped"
    assert first.process.poll() is None
    first.wait().check("succeeded", code=0)
    second.check_logs()


@contextmanager
def memory_limited(lab: FaultLab, node: str, limit_bytes: int) -> Iterator[None]:
    """A container that has this much memory and no swap."""
    container = lab.cluster.container(node)
    before = json.loads(lab.docker("inspect", "--format", "{{json .HostConfig}}", container))
    set_memory(lab, container, limit_bytes, limit_bytes)
    try:
        yield
    finally:
        set_memory(lab, container, before["Memory"], before["MemorySwap"])


def set_memory(lab: FaultLab, container: str, limit_bytes: int, with_swap_bytes: int) -> None:
    lab.docker("update", "--memory", str(limit_bytes), "--memory-swap", str(with_swap_bytes), container)


@contextmanager
def small_disk(lab: FaultLab, node: str) -> Iterator[str]:
    """A root on both nodes that has the installed stack, and whose runs lie, on this node, on the small disk."""
    root, user = f"/home/{lab.cluster.user}/small-disk", lab.cluster.user
    for each in lab.cluster.nodes:
        lab.cluster.exec(each.name, ("sh", "-euc", BORROW, "sh", root), user=user)
    runs = ("ln", "-sfn", SMALL_DISK, f"{root}/runs")
    lab.cluster.exec(node, runs, user=user)
    try:
        yield root
    finally:
        for each in lab.cluster.nodes:
            lab.sh(each.name, 'rm -rf "$1"/* "$2"', SMALL_DISK, root)


BORROW = """
for name in envs wheelhouse bin; do
    mkdir -p "$1" "$HOME/.cluster-train/$name"
    ln -sfn "$HOME/.cluster-train/$name" "$1/$name"
done
"""


@contextmanager
def node_killed(lab: FaultLab, node: str) -> Iterator[None]:
    """A container whose plug was pulled; it is started again at the end."""
    lab.docker("kill", lab.cluster.container(node))
    try:
        yield
    finally:
        lab.restart(node)


@contextmanager
def network_cut(lab: FaultLab, node: str) -> Iterator[None]:
    """A container whose cable was pulled; it gets its network and its address back at the end."""
    container = lab.cluster.container(node)
    (network,) = json.loads(lab.docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
    lab.docker("network", "disconnect", network, container)
    try:
        yield
    finally:
        lab.docker("network", "connect", network, container)
        lab.wait_for_ssh()


def connections(lab: FaultLab, node: str) -> list[int]:
    """The processes of sshd that hold the user's connections to a node."""
    return [one.pid for one in lab.cluster.processes(node) if one.argv[0].startswith(f"sshd: {lab.cluster.user}")]
