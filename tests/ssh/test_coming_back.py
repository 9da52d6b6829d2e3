"""A run is found again: from another machine, after a broken link, line by line; and its logs are searched."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from commands import ClusterTrain, LocalStack
from jobs import script
from labs import loopback_inventory
from running import Running
from sshd import SSHD, SshdNode, SshdNodes

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
TICKS = """
import os, pathlib, sys, time
for tick in range(int(sys.argv[2])):
    print("tick", tick, flush=True)
    time.sleep(0.05)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
print("the end", flush=True)
"""
TRAINS = """
import os, pathlib, sys, time
print("{'loss': '1.5', 'epoch': '0.25'}", flush=True)
sys.stderr.write(" 12%|#2        | 12/96 [00:10<04:10,  1.15it/s]\\r")
sys.stderr.flush()
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.fixture
def nodes(sshd_factory: SshdNodes) -> list[SshdNode]:
    return sshd_factory(2)


@pytest.fixture
def root(tmp_path: Path, local_stack: LocalStack) -> Path:
    return local_stack.borrowed(tmp_path / "root")


@pytest.fixture
def inventory(tmp_path: Path, root: Path, nodes: list[SshdNode]) -> Path:
    return loopback_inventory(tmp_path, root, nodes, ppn=1, grace_s=3)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(*arguments: str | Path) -> Running:
        made.append(Running(tmp_path, *arguments))
        return made[-1]

    yield make
    for started in made:
        started.close()


def ticks(text: str, rank: int) -> list[str]:
    return [line.split("] ", 1)[1] for line in text.splitlines() if f"r{rank}] " in line]


def whole(count: int) -> list[str]:
    return [*(f"tick {tick}" for tick in range(count)), "the end"]


def connections(node: SshdNode) -> list[int]:
    """sshd's processes for open logins on a node: killing one breaks that login's connection and nothing else."""
    return [process.pid for process in node.processes() if process.parent == node.pid and "sshd" in process.argv[0]]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_broken_link_is_made_again(
    start: Callable[..., Running], inventory: Path, tmp_path: Path, nodes: list[SshdNode], victim: int
) -> None:
    """The connection to either node is cut while `up` follows: it says so, comes back, and shows every line once and in order."""
    go = tmp_path / "go"
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(go), "100")
    up.until("r1] tick 10")
    # node1 holds two logins: ours and that of node0's mpirun, which must stay.
    (ours,) = [pid for pid in connections(nodes[victim]) if any("tail.py" in " ".join(p.argv) for p in below(nodes[victim], pid))]
    os.kill(ours, signal.SIGKILL)
    up.until(f"node{victim}: connected again")
    go.touch()
    assert up.ended().exit_code == 0, up.text
    assert f"node{victim}: the connection was lost" in up.text
    for rank in range(2):
        assert ticks(up.text, rank) == whole(100)


def test_a_login_that_stands_still(start: Callable[..., Running], inventory: Path, tmp_path: Path, nodes: list[SshdNode]) -> None:
    """sshd of our login on node1 is frozen: TCP sees nothing wrong, both ends do, and `up` logs in anew."""
    go = tmp_path / "go"
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(go), "50")
    up.until("r1] tick 10")
    (ours,) = [pid for pid in connections(nodes[1]) if any("tail.py" in " ".join(p.argv) for p in below(nodes[1], pid))]
    (tail,) = [process.pid for process in below(nodes[1], ours) if "tail.py" in " ".join(process.argv)]
    frozen = [ours, *(process.pid for process in below(nodes[1], ours) if "sshd" in process.argv[0])]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        up.until("node1: the connection was lost (nothing was heard from node1 for 30 s)")
        up.until("node1: connected again")
        up.wait_for(lambda: tail not in [process.pid for process in nodes[1].processes()])
        go.touch()
        assert up.ended().exit_code == 0, up.text
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)
    for rank in range(2):
        assert ticks(up.text, rank) == whole(50)


def is_refused(node: SshdNode) -> bool:
    try:
        socket.create_connection((node.host, node.port), LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sshd_of_the_head_is_killed_and_started_again(
    start: Callable[..., Running], inventory: Path, tmp_path: Path, nodes: list[SshdNode]
) -> None:
    """No login is possible for a while: it tries again and again, and goes on where it was."""
    go, head = tmp_path / "go", nodes[0]
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(go), "100")
    up.until("r0] tick 10")
    logins = connections(head)
    for pid in (head.pid, *logins):
        os.kill(pid, signal.SIGKILL)
    up.until("node0: the connection was lost")
    up.wait_for(lambda: is_refused(head))  # a login that was just beginning has the listening socket too
    time.sleep(2)  # the first tries fail
    assert up.process.poll() is None and "connected again" not in up.text
    settings = head.known_hosts.parent / "sshd_config0"
    with subprocess.Popen([str(SSHD), "-D", "-f", settings, "-E", head.log], start_new_session=True) as again:
        try:
            up.until("node0: connected again")
            go.touch()
            assert up.ended().exit_code == 0, up.text
        finally:
            again.terminate()
    for rank in range(2):
        assert ticks(up.text, rank) == whole(100)


def test_ctrl_c_while_the_head_cannot_be_reached(
    start: Callable[..., Running], cluster_train: ClusterTrain, inventory: Path, tmp_path: Path, nodes: list[SshdNode]
) -> None:
    """It is not claimed that the run was stopped: the second Ctrl-C returns, says so, and how to stop it later, which works."""
    head = nodes[0]
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(tmp_path / "never"), "100")
    up.until("r0] tick 10")
    for pid in (head.pid, *connections(head)):
        os.kill(pid, signal.SIGKILL)
    up.until("node0: the connection was lost")
    up.interrupt()
    up.until("Ctrl-C again")
    up.interrupt()
    assert up.ended().exit_code == 130
    assert "could NOT be stopped and may go on" in up.text and f"cluster-train stop {inventory} --run" in up.text
    with subprocess.Popen([str(SSHD), "-D", "-f", head.known_hosts.parent / "sshd_config0", "-E", head.log]) as again:
        try:
            while (stopped := cluster_train("stop", inventory)).exit_code == 3:
                time.sleep(0.1)  # until sshd listens
            assert stopped.exit_code == 0 and "nothing of it is left" in stopped.stdout, stopped.stderr
        finally:
            again.terminate()


def test_the_head_dies(
    start: Callable[..., Running], inventory: Path, tmp_path: Path, nodes: list[SshdNode], sshd_factory: SshdNodes
) -> None:
    """All of node0 is gone at once: the ranks on node1 end without it, and `up` says that the run is lost, and does not wait."""
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(tmp_path / "never"), "100")
    up.until("r1] tick 10")
    sshd_factory.stop(nodes[0])
    assert up.ended().exit_code == 1, up.text
    assert "lost: node0 cannot be reached, and the ranks on the other nodes ended because they had lost it too" in up.text
    assert "node0: could not be asked what is left" in up.text and "Traceback" not in up.text


def below(node: SshdNode, pid: int) -> list[Any]:
    """The processes that live below one of a node's."""
    found, parents = [], [pid]
    while parents:
        parent = parents.pop()
        children = [process for process in node.processes() if process.parent == parent]
        found += children
        parents += [child.pid for child in children]
    return found


def test_logs_go_on_where_up_was_killed(
    start: Callable[..., Running], cluster_train: ClusterTrain, inventory: Path, tmp_path: Path
) -> None:
    """kill -9 of `up`: the run goes on; `logs -f` from here shows the rest, from elsewhere all, both to the same verdict."""
    go = tmp_path / "go"
    up = start("up", inventory, "--", script(tmp_path, TICKS), str(go), "60")
    up.until("r1] tick 10")
    up.process.kill()
    up.ended()
    go.touch()
    here = cluster_train("logs", inventory, "-f")
    assert here.exit_code == 0 and "going on behind" in here.stderr and "succeeded" in here.stdout
    for rank in range(2):
        assert ticks(up.text + here.stdout, rank) == whole(60)
    elsewhere = cluster_train("logs", inventory, "-f", env={"XDG_STATE_HOME": str(tmp_path / "elsewhere")})
    assert elsewhere.exit_code == 0 and [ticks(elsewhere.stdout, rank) for rank in range(2)] == [whole(60)] * 2
    assert ticks(cluster_train("logs", inventory, "-f").stdout, 0) == []
    assert ticks(cluster_train("logs", inventory).stdout, 0) == whole(60)


def test_from_another_machine(cluster_train: ClusterTrain, inventory: Path, tmp_path: Path) -> None:
    """What `up --detach` started is seen, followed and stopped with the inventory alone."""
    go = tmp_path / "go"
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    assert cluster_train("up", inventory, "--detach", "--", script(tmp_path, TRAINS), str(go)).exit_code == 0
    deadline = time.monotonic() + LIMIT_S
    while (found := cluster_train("status", inventory, "--json", env=elsewhere).result).get("progress", {}).get("step") is None:
        assert time.monotonic() < deadline, found
    assert found["state"] == "running" and found["nodes_used"] == ["node0", "node1"] and found["stack"]
    assert found["progress"] == {"step": 12, "steps": 96, "epoch": 0.25, "loss": 1.5}
    said = cluster_train("status", inventory, env=elsewhere).stdout
    assert "step 12 of 96, epoch 0.25, loss 1.5" in said and "on node0, node1" in said
    assert "[node1 r1] {'loss': '1.5'" in cluster_train("logs", inventory, env=elsewhere).stdout
    stopped = cluster_train("stop", inventory, env=elsewhere)
    assert stopped.exit_code == 0 and "stopped; nothing of it is left on node0, node1" in stopped.stdout
    (run,) = cluster_train("runs", inventory, "--json", env=elsewhere).result["runs"]
    assert (run["state"], run["nodes_used"]) == ("stopped", ["node0", "node1"])
    (local,) = cluster_train("runs", "--local", "--json", env=elsewhere).result["runs"]
    assert local["run_id"] == run["run_id"]


def test_lines_are_chosen(cluster_train: ClusterTrain, inventory: Path, tmp_path: Path) -> None:
    """--rank, --node, --grep, --tail and --since, alone and together, with and without -f and --json."""
    text = (
        "import sys, time\nfor tick in range(20):\n    print('tick', tick, flush=True)\ntime.sleep(8)\nprint('late', flush=True)"
    )
    ran = cluster_train("up", inventory, "--json", "--", script(tmp_path, text))
    assert ran.exit_code == 0

    def lines(*options: str) -> list[str]:
        found = cluster_train("logs", inventory, *options)
        assert found.exit_code == 0, found.stderr
        return [line for line in found.stdout.splitlines() if line.startswith("[")]

    assert len(lines()) == 42 and all("r1]" in line for line in lines("--node", "node1"))
    assert lines("--rank", "0", "--grep", "^tick 1$") == ["[node0 r0] tick 1"]
    assert sorted(lines("--tail", "2")) == [f"[node{r} r{r}] {text}" for r in range(2) for text in ("late", "tick 19")]
    assert lines("--tail", "3", "--grep", "late", "--node", "node1", "-f") == ["[node1 r1] late"]
    before_late = datetime.fromtimestamp(rank_ended(ran.result["record"]) - 3).isoformat()
    assert lines("--since", before_late, "--rank", "1") == ["[node1 r1] late"]
    assert len(lines("--since", "1h30m", "--rank", "1")) == 21
    assert lines("--since", "2000-01-01", "--rank", "1", "--tail", "1") == ["[node1 r1] late"]
    assert lines("--since", "0s") == []
    events = cluster_train("logs", inventory, "--json", "--rank", "0", "--tail", "1").events
    assert [event["text"] for event in events if event["event"] == "logtext"] == ["late"]
    refused = cluster_train("logs", inventory, "--grep", "(", "--since", "never")
    assert refused.exit_code == 2 and cluster_train("logs", inventory, "--node", "nodeX").exit_code == 2


def rank_ended(record: str) -> float:
    ended: float = json.loads((Path(record) / "rank-1.exit.json").read_text())["ended_unix_s"]
    return ended
