"""A network that is cut, which no machine is told: what waits at the end of a connection goes, and so does the node's lock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from commands import COMMAND, REPOSITORY, LocalStack
from jobs import script
from netlab import Machine, NetworkLab, can_isolate
from running import Running

pytestmark = [
    pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and cards"),
    pytest.mark.stack,
]
LIMIT_S = 120.0
HEARTBEAT_S = 5.0
OWN_LOCKS = {"SetEnv": "HOME=/srv CLUSTER_TRAIN_LOCKS=/srv/locks"}
UNTIL_TOLD = """
import os, pathlib, time
print("begun", flush=True)
while not pathlib.Path("/srv/go").exists():
    time.sleep(0.05)
print("told", flush=True)
"""


@pytest.fixture
def lab(tmp_path: Path, local_stack: LocalStack) -> Iterator[NetworkLab]:
    cards = [{"eth0": "10.77.0.10/24"}, {"eth0": "10.77.0.11/24"}]
    lab = NetworkLab(tmp_path, [Machine(cards=card, sshd=OWN_LOCKS) for card in cards])
    for name in lab.machines:
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    yield lab
    lab.close()


@pytest.fixture
def up(lab: NetworkLab) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(*options: str, **job: object) -> Running:
        stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
        inventory = lab.inventory(stack=stack, job={"ppn": 1, "grace_s": 3, "heartbeat_timeout_s": HEARTBEAT_S, **job})
        command = lab.into("switch", str(COMMAND))
        made.append(Running(lab.directory, "up", inventory, *options, "--", script(lab.directory, UNTIL_TOLD), command=command))
        return made[-1]

    yield make
    for started in made:
        started.close()


def cut(lab: NetworkLab) -> None:
    """Let nothing into node1 and nothing out of it, without a word to anybody."""
    for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o")):
        lab.on("node1", "iptables", "-w", "-A", chain, direction, "eth0", "-j", "DROP")


def mend(lab: NetworkLab) -> None:
    lab.on("node1", "iptables", "-w", "-F")


def ours(lab: NetworkLab, name: str) -> list[str]:
    """The command lines on a machine that have to do with our scripts."""
    listed = lab.on(name, "sh", "-c", "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file 2>/dev/null; echo; done")
    return [line for line in listed.splitlines() if ".cluster-train/" in line]


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def locks(lab: NetworkLab, name: str) -> list[str]:
    (agent,) = (lab.home(name) / ".cluster-train" / "agent").iterdir()
    program = f"/srv/.cluster-train/agent/{agent.name}/locks.py"
    told = lab.on(name, "env", "CLUSTER_TRAIN_LOCKS=/srv/locks", "python3", program, "list")
    return [lock["run_id"] for lock in json.loads(told)["locks"]]


@pytest.mark.parametrize("restarts", [0, 3])
def test_nothing_waits_for_a_head_that_is_cut_off(lab: NetworkLab, up: Callable[..., Running], restarts: int) -> None:
    """While node1 is still cut off, everything of the run ends there, its lock as well; the run itself says what was lost."""
    running = up(restarts=restarts, min_nodes=1)
    running.until("r1] begun")
    assert any("tail.py" in line for line in ours(lab, "node1")) and len(locks(lab, "node1")) == 1
    cut(lab)
    until(lambda: not ours(lab, "node1"), lambda: ours(lab, "node1"))
    assert locks(lab, "node1") == []
    if restarts:
        running.until("node1 cannot be reached from node0")
        running.until("1 instead of 2 ranks, on node0")
    (lab.home("node0") / "go").touch()
    ran = running.ended()
    assert ran.exit_code == (0 if restarts else 1), ran.stdout
    assert not ours(lab, "node0") and locks(lab, "node0") == []


def test_the_follower_notices_a_cut_by_itself(lab: NetworkLab, up: Callable[..., Running]) -> None:
    """The job is quiet and its ranks are patient: `up` comes back to a node that was cut off for longer than it waits."""
    running = up(heartbeat_timeout_s=600)
    running.until("r1] begun")
    cut(lab)
    running.until("node1: the connection was lost")
    until(lambda: not any("tail.py" in line for line in ours(lab, "node1")), lambda: ours(lab, "node1"))
    mend(lab)
    running.until("node1: connected again")
    for name in lab.machines:
        (lab.home(name) / "go").touch()
    ran = running.ended()
    assert ran.exit_code == 0, ran.stdout
    assert ran.stdout.count("r1] begun") == ran.stdout.count("r1] told") == 1
