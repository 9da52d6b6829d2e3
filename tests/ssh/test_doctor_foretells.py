"""`doctor` exits with 5 where `up` fails, and only there: both are asked about the same trouble, each kind of it once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import REPOSITORY, LocalStack, Ran
from netlab import Machine, NetworkLab, can_isolate
from small_stack import make_wheels, offline, stack

pytestmark = [
    pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and iptables"),
    pytest.mark.stack,
]
PORTS = "30100-30199"  # of which 30100 to 30124 are the launcher's, 30175 to 30199 MASTER_PORT's
CARDS = ({"eth0": "10.77.0.10/24"}, {"ens3": "10.77.0.11/24"})
# What gloo does, without the seconds that torch takes to import: ranks meet at MASTER_PORT, then call each other at random ports.
CALLS_LIKE_GLOO = """
import os, socket, threading, time
socket.setdefaulttimeout(6)
place, deadline = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), time.monotonic() + 6
if os.environ["RANK"] == "0":
    store = socket.create_server(place).accept()[0]
while os.environ["RANK"] == "1":
    try:
        store = socket.create_connection(place)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline, "refused"
own = socket.create_server((store.getsockname()[0], 0))
store.sendall(b"%05d" % own.getsockname()[1])
call = socket.create_connection((store.getpeername()[0], int(store.recv(5))))
threading.Thread(target=call.sendall, args=(bytes(1 << 20),), daemon=True).start()
answer, got = own.accept()[0], 0
while got < 1 << 20:
    got += len(answer.recv(1 << 16))
store.sendall(b"done")
assert store.recv(4) == b"done"
"""
WAITS = "import time; time.sleep(300)"
Trouble = Callable[[NetworkLab], Any]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, local_stack: LocalStack) -> Iterator[NetworkLab]:
    """Two machines with the stack; what a test does to them it takes back."""
    lab = NetworkLab(tmp_path_factory.mktemp("lab"), [Machine(cards=cards) for cards in CARDS])
    try:
        yield with_stack(lab, local_stack)
    finally:
        lab.close()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MPIs, with stand-ins for what no rank of these tests imports."""
    directory = tmp_path_factory.mktemp("small") / "wheels"
    directory.mkdir()
    return make_wheels(directory)


def with_stack(lab: NetworkLab, local_stack: LocalStack) -> NetworkLab:
    for name in lab.machines:
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    for name, text in (("calls", CALLS_LIKE_GLOO), ("waits", WAITS)):
        (lab.directory / f"{name}.py").write_text(text)
    return lab


def both(lab: NetworkLab, script: str = "calls", **overrides: Any) -> tuple[Ran, Ran]:
    """What `doctor` says, and then what becomes of `up`."""
    usual = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    job = {"script": str(lab.directory / f"{script}.py"), "grace_s": 1, "start_timeout_s": 30}
    inventory = lab.inventory(**{"network": {"ports": PORTS}, "stack": usual, "job": job, **overrides})
    told = lab.cluster_train("doctor", inventory, "--json")
    assert told.exit_code in (0, 5), told.stdout + told.stderr
    return told, lab.cluster_train("up", inventory)


def errors(told: Ran) -> set[tuple[str, str]]:
    return {(one["node"], one["what"]) for one in told.result["findings"] if one["severity"] == "error"}


def shut(ports: str, *, node: str = "node0", source: str = "0.0.0.0/0", more: tuple[str, ...] = ()) -> Trouble:
    """A firewall that drops what comes to these ports of a node; `more` narrows that, and spares not even answers."""
    answers = ("iptables", "-w", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")

    @contextmanager
    def trouble(lab: NetworkLab) -> Iterator[None]:
        rule = ("iptables", "-w", "-A", "INPUT", "-p", "tcp", "-s", source, "--dport", ports, *more, "-j", "DROP")
        for one in (rule,) if more else (answers, rule):
            lab.on(node, *one)
        yield
        lab.on(node, "iptables", "-w", "-F", "INPUT")

    return trouble


def done(node: str, command: str, back: str) -> Trouble:
    """Shell commands of root on a node, before and after."""

    @contextmanager
    def trouble(lab: NetworkLab) -> Iterator[None]:
        lab.on(node, "sh", "-c", command)
        try:
            yield
        finally:
            lab.on(node, "sh", "-c", back)

    return trouble


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        pytest.param(done("node1", "true", "true"), set(), id="nothing"),
        pytest.param(
            done(
                "node1",
                "echo echo Welcome > /srv/.bashrc; mount -o remount,size=64m /dev/shm; echo 127.0.1.1 node1 >> /etc/hosts",
                "echo > /srv/.bashrc; mount -o remount,size=1g /dev/shm; echo 127.0.0.1 localhost > /etc/hosts",
            ),
            set(),
            id="warnings and notes",
        ),
        pytest.param(shut("32768:65535"), {("node0", "a firewall drops random ports (gloo)")}, id="gloo"),
        pytest.param(shut("30175:30199"), {("node0", "a firewall drops MASTER_PORT")}, id="MASTER_PORT"),
        pytest.param(shut("30100:30124"), {("node0", "a firewall drops the launcher's port")}, id="launcher"),
        pytest.param(
            shut("22", node="node1", source="10.77.0.10"), {("node1", "a firewall drops node0's SSH there")}, id="node0's SSH"
        ),
        pytest.param(
            shut("32768:65535", node="node1", more=("-m", "length", "--length", "1200:65535")),
            {("node1", "large packets are lost")},
            id="large packets",
        ),
        pytest.param(
            done("node1", "mount -o remount,bind,ro /srv", "mount -o remount,bind,rw /srv"),
            {("node1", "root cannot be written")},
            id="root",
        ),
    ],
)
def test_trouble_of_machines_and_networks(machines: NetworkLab, trouble: Trouble, expected: set[tuple[str, str]]) -> None:
    """Of a machine that had all it needs."""
    with trouble(machines):
        told, ran = both(machines)
    assert errors(told) == expected, told.stdout
    assert told.exit_code == (5 if expected else 0)
    assert bool(ran.exit_code) == bool(expected), ran.stdout + ran.stderr


def test_what_up_refuses_before_it_starts_anything(machines: NetworkLab) -> None:
    """A script that is not there, a stack that does not exist, a disk that has too little room: each with `up`'s own words."""
    told, ran = both(machines, script="nowhere")
    assert errors(told) == {("node0", "the job's files are not there")} and (told.exit_code, ran.exit_code) == (5, 2)
    told, ran = both(machines, stack={"torch": "1.10.2"})
    assert errors(told) == {("node0", "the stack cannot be had")} and (told.exit_code, ran.exit_code) == (5, 4)
    with done("node1", "mount -t tmpfs -o size=300m tmpfs /mnt", "umount /mnt")(machines):
        machines.on("node0", "mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", "/mnt")
        told, ran = both(machines, root="/mnt/ct")
        machines.on("node0", "umount", "/mnt")
    assert errors(told) == {("node1", "too little disk space")} and (told.exit_code, ran.exit_code) == (5, 4)
    (one,) = [one for one in told.result["findings"] if one["severity"] == "error"]
    assert one["evidence"] in ran.stderr and " GB are needed" in one["evidence"]


@pytest.mark.parametrize("mpi", ["impi", "openmpi"])
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_shared_memory_that_cannot_be_written(
    machines: NetworkLab, wheels: Path, monkeypatch: pytest.MonkeyPatch, mpi: str, node: str
) -> None:
    """Open MPI's daemons do not start without, Intel MPI's do."""
    for name, value in offline(wheels.parent / "cache").items():
        monkeypatch.setenv(name, value)
    with done(node, "mount -o remount,ro /dev/shm", "mount -o remount,rw /dev/shm")(machines):
        told, ran = both(machines, root="/srv/small", stack=stack(wheels, mpi))
    kinds = {one["severity"] for one in told.result["findings"] if one["what"] == "/dev/shm cannot be written"}
    assert kinds == {"error" if mpi == "openmpi" else "warning"}
    assert bool(ran.exit_code) == (told.exit_code == 5) == (mpi == "openmpi"), ran.stdout + ran.stderr


def test_a_run_that_has_the_nodes(machines: NetworkLab) -> None:
    """While it goes on, and where it crashed and left processes; once those are gone all is well."""
    script = str(machines.directory / "waits.py")
    usual = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    inventory = machines.inventory(network={"ports": PORTS}, stack=usual, job={"script": script, "grace_s": 1})
    assert machines.cluster_train("up", inventory, "--detach").exit_code == 0
    told, ran = both(machines)
    assert errors(told) == {("node0", "a run is alive here"), ("node1", "a run is alive here")}
    one = next(one for one in told.result["findings"] if one["severity"] == "error")
    assert "waits.py" in one["evidence"] and "cluster-train stop --run" in one["remedy"]
    assert (told.exit_code, ran.exit_code) == (5, 5) and "in use" in ran.stderr
    stopped = machines.cluster_train("stop", inventory)
    assert stopped.exit_code == 0, stopped.stderr
    run_id = one["evidence"].split()[1]
    left = machines.start_on("node1", "sleep", "300", env={"CLUSTER_TRAIN_RUN_ID": run_id})
    told, ran = both(machines)
    (pid,) = re.findall(r"left process (\d+): sleep 300", ran.stderr)
    machines.on("node1", "kill", pid)
    left.wait(timeout=60)
    assert ("node1", "a crashed run left processes") in errors(told) and (told.exit_code, ran.exit_code) == (5, 5), told.stdout
    assert "up --clean" in ran.stderr
    told, ran = both(machines)
    assert errors(told) == set() and (told.exit_code, ran.exit_code) == (0, 0), ran.stdout + ran.stderr


@pytest.mark.parametrize("sessions", [1, 2, 3])
def test_few_sessions(make_lab: Callable[..., NetworkLab], local_stack: LocalStack, sessions: int) -> None:
    """sshd's MaxSessions on every node: as many as `up` needs, and fewer."""
    lab = with_stack(make_lab(*(Machine(cards=cards, sshd={"MaxSessions": str(sessions)}) for cards in CARDS)), local_stack)
    told, ran = both(lab)
    assert told.exit_code == (5 if ran.exit_code else 0), (told.stdout, ran.stderr)
