"""network.ports with a real mpirun between two machines, whose firewalls let in these ports and no others."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from commands import REPOSITORY, LocalStack
from netlab import Machine, NetworkLab, can_isolate
from small_stack import make_wheels, offline, stack

from orchestrator.planning.hops import Hop, known_hosts, ssh_config, wrapper
from orchestrator.planning.mpirun import MpiCommand, MpiRequest, mpi_command
from orchestrator.planning.ports import PortShares, shares

pytestmark = [
    pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and iptables"),
    pytest.mark.stack,
]
PORTS = (30100, 30199)
INPUT = ("iptables", "-w", "-A", "INPUT", "-p", "tcp")
# Two ranks that meet at MASTER_PORT, then speak MPI with each other, and tell on which ports of theirs anybody listens to others.
SPEAKS_MPI = """
import ctypes, glob, os, socket, sys, time
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(place)
    server.accept()
else:
    while socket.socket().connect_ex(place):
        time.sleep(0.05)
(path,) = glob.glob(sys.prefix + "/lib/libmpi.so.??")
if os.path.exists(sys.prefix + "/lib/libfabric.so.1"):  # Intel MPI's own
    os.environ.update(I_MPI_ROOT=sys.prefix, FI_PROVIDER_PATH=sys.prefix + "/lib", FI_PROVIDER="tcp")
    ctypes.CDLL(sys.prefix + "/lib/libfabric.so.1", ctypes.RTLD_GLOBAL)
mpi = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
is_open = path.endswith("40")
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")) if is_open else 0x44000000
assert mpi.MPI_Init(None, None) == 0 and mpi.MPI_Barrier(world) == 0
rows = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name)]
ports = sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[1][:8] != "0100007F"})
print("rank", rank, "MASTER_PORT", place[1], "listening", ports, flush=True)
assert mpi.MPI_Barrier(world) == 0 and mpi.MPI_Finalize() == 0
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[NetworkLab]:
    lab = NetworkLab(tmp_path, [Machine(cards={"eth0": "10.77.0.10/24"}), Machine(cards={"ens3": "10.77.0.11/24"})])
    for node in ("node0", "node1"):
        lab.on(node, "iptables", "-w", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
        lab.on(node, "iptables", "-w", "-A", "INPUT", "-i", "lo", "-j", "ACCEPT")
        lab.on(node, *INPUT, "--dport", "22", "-j", "ACCEPT")
        lab.on(node, *INPUT, "--dport", "{}:{}".format(*PORTS), "-j", "ACCEPT")
        lab.on(node, *INPUT, "-j", "REJECT", "--reject-with", "tcp-reset")
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MPIs, with stand-ins for what no rank of these tests imports."""
    return make_wheels(tmp_path_factory.mktemp("wheels"))


def made(lab: NetworkLab, python: Path, ports: PortShares | None) -> MpiCommand:
    """The launch of two ranks that do nothing, with its files in place."""
    run_dir = lab.directory / "run"
    run_dir.mkdir(exist_ok=True)
    key = " ".join((lab.home("node1") / "host_key.pub").read_text().split()[:2])
    hop = Hop(node="node1", address="10.77.0.11", port=22, user="root", host_key=key, identity=str(lab.directory / "user_key"))
    command = mpi_command(
        MpiRequest(
            flavour="impi",
            program=str(python.with_name("mpiexec.hydra")),
            hosts=(("10.77.0.10", 1), ("10.77.0.11", 1)),
            run_dir=str(run_dir),
            uses_ssh=True,
            interface="eth0",
            variables={},
            command=("/bin/hostname",),
            ports=ports,
        )
    )
    (run_dir / "hostfile").write_text(command.hostfile)
    (run_dir / "ssh_config").write_text(ssh_config([hop], str(run_dir), "10.77.0.10", 5))
    (run_dir / "known_hosts").write_text(known_hosts([hop]))
    (run_dir / "ssh").write_text(wrapper(str(run_dir), "10.77.0.10"))
    (run_dir / "ssh").chmod(0o700)
    return command


def run(lab: NetworkLab, command: MpiCommand) -> subprocess.CompletedProcess[str]:
    words = ("env", "HOME=/srv", *(f"{name}={value}" for name, value in command.env.items()), *command.argv)
    return lab.run_on("node0", *words)


def test_the_launcher_keeps_to_the_ports_that_are_open(lab: NetworkLab, training_python: Path) -> None:
    """Without the range the other node cannot call back, and no rank starts there; with it both do."""
    without = run(lab, made(lab, training_python, None))
    assert without.returncode != 0 and "node1" not in without.stdout.splitlines()
    within = run(lab, made(lab, training_python, shares(PORTS)))
    assert within.returncode == 0 and sorted(within.stdout.split()) == ["node0", "node1"], within.stderr


def test_a_whole_run_behind_the_firewall(lab: NetworkLab, local_stack: LocalStack) -> None:
    """`up` with mpirun, MASTER_PORT and heartbeats in the open ports; the ranks of this script need no gloo."""
    for name in lab.machines:
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    script = lab.directory / "hello.py"
    script.write_text("import os; print('port', os.environ['MASTER_PORT'], 'of', os.environ['RANK'])\n")
    stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    inventory = lab.inventory(network={"ports": "{}-{}".format(*PORTS)}, stack=stack, job={"script": str(script)})
    ran = lab.cluster_train("up", inventory)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    found = re.findall(r"\[node[01] r[01]\] port (\d+) of ([01])", ran.stdout)
    low, high = shares(PORTS).master
    assert sorted(rank for _, rank in found) == ["0", "1"] and all(low <= int(port) <= high for port, _ in found)
    assert "no heartbeat" not in lab.cluster_train("status", inventory).stdout


@pytest.mark.parametrize("mpi", ["impi", "mpich", "openmpi"])
def test_each_mpi_keeps_to_the_range(
    lab: NetworkLab, wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, mpi: str
) -> None:
    """Launcher, daemons, MASTER_PORT, heartbeats and what the ranks' own MPI opens: while a run goes on, nothing listens on
    either machine outside of the range (but sshd), and what is inside reaches the other machine through its firewall."""
    for name, value in offline(tmp_path_factory.mktemp("cache")).items():
        monkeypatch.setenv(name, value)
    script = lab.directory / "speaks_mpi.py"
    script.write_text(SPEAKS_MPI)
    ports, job = "{}-{}".format(*PORTS), {"script": str(script), "start_timeout_s": 60}
    ran = lab.cluster_train("up", lab.inventory(network={"ports": ports}, stack=stack(wheels, mpi), job=job))
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    told = re.findall(r"\[node[01] r[01]\] rank (\d) MASTER_PORT (\d+) listening \[(.*)\]", ran.stdout)
    listening = {rank: {int(port) for port in ports.split(",")} - {22} for rank, _, ports in told}
    assert sorted(listening) == ["0", "1"] and int(told[0][1]) in listening["0"]
    assert all(PORTS[0] <= port <= PORTS[1] for ports in listening.values() for port in ports), listening
    low, high = shares(PORTS).launcher
    assert any(low <= port <= high for port in listening["0"])
    low, high = shares(PORTS).library
    assert all(any(low <= port <= high for port in ports) for ports in listening.values()), listening
