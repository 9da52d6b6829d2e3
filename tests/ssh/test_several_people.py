"""Several `up`s over the same nodes: one has them, the others are told, wait, or share; what crashed runs left is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import REPOSITORY, ClusterTrain, LocalStack
from jobs import script
from running import Running
from sshd import SshdNode, SshdNodes

pytestmark = pytest.mark.stack

LIMIT_S = 120.0

UNTIL_TOLD = """
import os, pathlib, sys, time
print("begun", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
print("told")
"""


TELLS_WHEN = """
import os, time
print("begin", os.environ["CLUSTER_TRAIN_NODE"], time.time())
time.sleep(0.5)
print("end", time.time())
"""


class Lab:
    """Three sshd's, and inventories over some of them, each with records of its own as from several machines."""

    def __init__(self, nodes: list[SshdNode], root: Path, directory: Path) -> None:
        self.nodes, self.root, self.directory = nodes, root, directory
        self.started: list[Running] = []

    def inventory(self, name: str, *numbers: int, **job: Any) -> Path:
        local = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())
        node = self.nodes[0]
        content = {
            "cluster": name,
            "root": str(self.root),
            "ssh": {"key": str(node.key), "known_hosts": str(node.known_hosts), "port": node.port},
            "nodes": [{"name": f"node{number}", "host": self.nodes[number].host} for number in numbers],
            "stack": local["stack"],
            "job": {"ppn": 1, "grace_s": 3, **job},
        }
        path = self.directory / f"{name}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    def start(self, *arguments: str | Path, stdin: int = subprocess.DEVNULL) -> Running:
        self.started.append(Running(self.directory, *arguments, stdin=stdin))
        return self.started[-1]

    def locks(self) -> list[str]:
        return [path.name for node in self.nodes for path in (node.home / "locks").glob("*.json")]

    def left(self) -> list[str]:
        """What lives on the nodes and has to do with this root."""
        found = [" ".join(process.argv) for node in self.nodes for process in node.processes()]
        return [argv for argv in found if str(self.root) in argv]


@pytest.fixture
def lab(sshd_factory: SshdNodes, tmp_path: Path, local_stack: LocalStack) -> Iterator[Lab]:
    made = Lab(sshd_factory(3), local_stack.borrowed(tmp_path / "root"), tmp_path)
    yield made
    for started in made.started:
        started.close()


def test_the_second_is_told_who_is_there(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """Two inventories with different heads and one node in common: the second `up` names the first run and exits with 5."""
    job, go = script(tmp_path, UNTIL_TOLD), tmp_path / "go"
    first = lab.start("up", lab.inventory("one", 0, 1), "--", job, str(go))
    first.until("r1] begun")
    second = cluster_train("up", lab.inventory("two", 2, 1), "--", job, str(go))
    assert second.exit_code == 5, second.stderr
    assert "node1: run " in second.stderr and "(one, " in second.stderr and "there since 20" in second.stderr
    assert "--wait" in second.stderr and "--share" in second.stderr
    assert lab.locks() and not any("two" in name for name in lab.locks())
    go.touch()
    assert first.ended().exit_code == 0
    assert lab.locks() == [] and lab.left() == []
    assert cluster_train("up", lab.inventory("two", 2, 1), "--", job, str(go)).exit_code == 0


def test_waiting_in_the_order_of_asking(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """Two wait for one; they start one after the other, never both at once; a third gives up by Ctrl-C and leaves nothing."""
    job = script(tmp_path, UNTIL_TOLD)
    inventory = lab.inventory("one", 0, 1)
    goes = [tmp_path / f"go{number}" for number in range(3)]
    first = lab.start("up", inventory, "--", job, str(goes[0]))
    first.until("r1] begun")
    waiters = []
    for go in goes[1:]:
        waiters.append(lab.start("up", inventory, "--wait", "--", job, str(go)))
        waiters[-1].until("waiting: node")
    third = lab.start("up", inventory, "--wait", "--", job, str(goes[0]))
    third.until("waiting: node")
    states = [run["state"] for run in cluster_train("runs", inventory, "--json").result["runs"]]
    assert states == ["waiting", "waiting", "waiting", "running"]
    assert cluster_train("stop", inventory, "--json", "--run", waiting_runs(lab)[0]).exit_code == 2
    third.interrupt()
    assert third.ended().exit_code == 130
    goes[0].touch()
    assert first.ended().exit_code == 0
    waiters[0].until("r1] begun")
    assert "begun" not in waiters[1].text
    goes[1].touch()
    assert waiters[0].ended().exit_code == 0
    waiters[1].until("r1] begun")
    goes[2].touch()
    assert waiters[1].ended().exit_code == 0
    assert lab.locks() == [] and lab.left() == []


def waiting_runs(lab: Lab) -> list[str]:
    locks = [path for node in lab.nodes for path in (node.home / "locks").glob("*.json")]
    return [path.stem for path in locks if json.loads(path.read_text())["state"] == "waiting"]


def test_many_at_the_same_moment(lab: Lab, tmp_path: Path) -> None:
    """Overlapping node sets in every order, all waiting: each gets its turn, and no two have a node at once."""
    job = script(tmp_path, TELLS_WHEN)
    sets = [(0, 1), (1, 0), (1, 2), (2, 0)]
    processes = [lab.start("up", lab.inventory(f"set{i}", *numbers), "--wait", "--", job) for i, numbers in enumerate(sets)]
    spans: dict[str, list[tuple[float, float]]] = {}
    for process in processes:
        ran = process.ended()
        assert ran.exit_code == 0, ran.stdout
        lines = [line.split() for line in ran.stdout.splitlines() if "] begin" in line or "] end" in line]
        for rank in ("r0]", "r1]"):
            (begin,) = [words for words in lines if words[1:3] == [rank, "begin"]]
            (end,) = [words for words in lines if words[1:3] == [rank, "end"]]
            spans.setdefault(begin[3], []).append((float(begin[4]), float(end[3])))
    for times in spans.values():
        ordered = sorted(times)
        assert all(earlier[1] < later[0] for earlier, later in pairwise(ordered)), spans
    assert lab.locks() == []


def test_sharing_and_stopping_one_of_two(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """Two runs of one person on the same nodes; one is stopped, the other's output is complete."""
    text = "import time\nfor tick in range(100):\n    print('tick', tick, flush=True)\n    time.sleep(0.1)"
    job, inventory = script(tmp_path, text), lab.inventory("one", 0, 1)
    first = lab.start("up", inventory, "--", job)
    first.until("r1] tick 1")
    second = cluster_train("up", inventory, "--share", "--detach", "--json", "--", job)
    assert second.exit_code == 0 and any("sharing" in event.get("text", "") for event in second.events)
    (run_id,) = {path.name.removesuffix(".json") for path in (lab.nodes[0].home / "locks").glob("*.json")} - {
        path.name for path in (tmp_path / "state/cluster-train/runs").iterdir() if (path / "rank-0.out").exists()
    }
    stopped = cluster_train("stop", inventory, "--run", run_id, "--json")
    assert stopped.exit_code == 0 and stopped.result["state"] == "stopped"
    ran = first.ended()
    assert ran.exit_code == 0
    for rank in range(2):
        assert [line for line in ran.stdout.splitlines() if f"r{rank}]" in line] == [
            f"[node{rank} r{rank}] tick {tick}" for tick in range(100)
        ]
    assert lab.locks() == [] and lab.left() == []


def test_remains_of_a_crashed_run(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """All that watched over a run was killed, its script lives on: the next `up` names it and refuses; --clean ends it."""
    inventory, run_dir, stray = crashed(lab, tmp_path)
    refused = cluster_train("up", inventory, "--", script(tmp_path, "print('next')"))
    assert refused.exit_code == 5, refused.stderr
    assert run_dir.name in refused.stderr and str(stray) in refused.stderr and "--clean" in refused.stderr
    assert any(process.pid == stray for node in lab.nodes for process in node.processes())
    cleaned = cluster_train("up", inventory, "--clean", "--", str(tmp_path / "train.py"))
    assert cleaned.exit_code == 0 and f"ended what run {run_dir.name} had left" in cleaned.stderr, cleaned.stderr
    assert not any(process.pid == stray for node in lab.nodes for process in node.processes())
    states = {run["run_id"]: run["state"] for run in cluster_train("runs", inventory, "--json").result["runs"]}
    assert states[run_dir.name] == "failed"


def test_a_person_at_the_terminal_is_asked(lab: Lab, tmp_path: Path) -> None:
    """ "n" refuses and ends nothing; "y" ends what was named, and the run starts."""
    inventory, _, stray = crashed(lab, tmp_path)
    job = script(tmp_path, "print('next')")
    for answer, exit_code in ((b"n\n", 5), (b"y\n", 0)):
        ours, theirs = os.openpty()
        up = lab.start("up", inventory, "--", job, stdin=theirs)
        up.until("Nobody watches over these any more. End them? [y/N]")
        assert str(stray) in up.text
        os.write(ours, answer)
        assert up.ended().exit_code == exit_code, up.text
        os.close(ours)
        os.close(theirs)
        lives = any(process.pid == stray for node in lab.nodes for process in node.processes())
        assert lives == (exit_code == 5), up.text


def crashed(lab: Lab, tmp_path: Path) -> tuple[Path, Path, int]:
    """Kill a run's `up` and supervisor, and leave a process with the run's tag on node1, as a script that got away would be.

    Returns the inventory, the run's directory, and the process's number.
    """
    job, inventory = script(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(300)"), lab.inventory("one", 0, 1)
    first = lab.start("up", inventory, "--", job)
    first.until("r1] begun")
    first.process.kill()
    (run_dir,) = (lab.root / "runs").iterdir()
    os.kill(json.loads((run_dir / "status.json").read_text())["supervisor"]["pid"], signal.SIGKILL)
    command = f"CLUSTER_TRAIN_RUN_ID={run_dir.name} setsid sleep 300 >/dev/null 2>&1 </dev/null & echo $!"
    started = subprocess.run(lab.nodes[1].ssh(command), capture_output=True, text=True, check=True, timeout=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while lab.left():
        assert time.monotonic() < deadline, lab.left()
        time.sleep(0.05)
    return inventory, run_dir, int(started.stdout)


FAILS_UNTIL = """
import pathlib, sys
sys.exit(0 if pathlib.Path(sys.argv[1]).exists() else 3)
"""


def test_nobody_comes_between_two_attempts(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """A run that was left to itself fails and waits: no process of it is on node1 then, and yet node1 is its own."""
    job, go = script(tmp_path, FAILS_UNTIL), tmp_path / "go"
    inventory = lab.inventory("one", 0, 1, restarts=6)
    assert cluster_train("up", inventory, "--detach", "--", job, str(go)).exit_code == 0
    (run_dir,) = (lab.root / "runs").iterdir()
    agent = next((lab.root / "agent").iterdir())

    def state() -> tuple[str, int]:
        status = json.loads((run_dir / "status.json").read_text())
        return status["state"], len(status.get("attempts", []))

    locked: list[list[str]] = []
    deadline = time.monotonic() + LIMIT_S
    while len(locked) < 3:
        assert time.monotonic() < deadline and state()[0] not in ("failed", "succeeded"), state()
        before = state()
        command = lab.nodes[1].ssh(f"python3 {agent}/locks.py list")
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
        if before[0] == "restarting" and state() == before:
            locked.append([lock["run_id"] for lock in json.loads(told)["locks"]])
    assert locked == [[run_dir.name]] * 3
    refused = cluster_train("up", lab.inventory("two", 2, 1), "--", job, str(go))
    assert refused.exit_code == 5 and f"node1: run {run_dir.name} of " in refused.stderr, refused.stderr
    go.touch()
    while state()[0] != "succeeded":
        assert time.monotonic() < deadline and state()[0] != "failed", state()
        time.sleep(0.05)
    assert lab.locks() == []
    assert lab.left() == []


def test_the_keeper_of_the_locks_is_killed(lab: Lab, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """kill -9 of what holds node1's lock from node0: before the next attempt it is held again; of the supervisor: it is free."""
    job, go = script(tmp_path, FAILS_UNTIL), tmp_path / "go"
    assert cluster_train("up", lab.inventory("one", 0, 1, restarts=6), "--detach", "--", job, str(go)).exit_code == 0
    (run_dir,) = (lab.root / "runs").iterdir()

    def holders() -> list[int]:
        return [process.pid for node in lab.nodes for process in node.processes() if "holding.py" in " ".join(process.argv)]

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, (run_dir / "status.json").read_text()
            time.sleep(0.02)

    until(lambda: len(holders()) == 1)
    (first,) = holders()
    os.kill(first, signal.SIGKILL)
    until(lambda: bool(holders()) and first not in holders())
    os.kill(json.loads((run_dir / "status.json").read_text())["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: lab.left() == [])
    assert cluster_train("up", lab.inventory("two", 2, 1), "--", script(tmp_path, "")).exit_code == 0


FAILS_WHEN_TOLD = """
import pathlib, sys, time
fail, go = map(pathlib.Path, sys.argv[1:])
print("begun", flush=True)
while not fail.exists():
    time.sleep(0.05)
sys.exit(0 if go.exists() else 3)
"""


def test_a_node_that_another_has_by_now_is_not_taken(lab: Lab, tmp_path: Path) -> None:
    """The locks were lost while somebody was sharing node1: no attempt begins there before that run has ended."""
    fail, go, told = tmp_path / "fail", tmp_path / "go", tmp_path / "told"
    job = script(tmp_path, FAILS_WHEN_TOLD)
    first = lab.start("up", lab.inventory("one", 0, 1, restarts=8), "--", job, str(fail), str(go))
    first.until("r1] begun")
    other = tmp_path / "other.py"
    other.write_text(UNTIL_TOLD)
    sharing = lab.start("up", lab.inventory("two", 2, 1), "--share", "--", str(other), str(told))
    sharing.until("r1] begun")
    # What a cut network, or kill -9, takes away: all that holds node1 for the run while no rank of it is there.
    for process in [process for node in lab.nodes[:2] for process in node.processes()]:
        if any(name in " ".join(process.argv) for name in ("holding.py", "locks.py")):
            with suppress(ProcessLookupError):  # one ends with the other
                os.kill(process.pid, signal.SIGKILL)
    fail.touch()
    first.until("could not begin: node1 is in use: run ")
    go.touch()
    told.touch()
    assert sharing.ended().exit_code == 0
    ran = first.ended()
    assert ran.exit_code == 0, ran.stdout
    assert lab.locks() == [] and lab.left() == []
