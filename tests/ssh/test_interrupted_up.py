"""Ctrl-C in each phase of `up`: exit code 130, and on no node a process, a half environment or a lock is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from commands import LocalStack
from jobs import script
from labs import Lab, loopback_inventory, whole_wheels
from running import Running
from sshd import SshdNode, SshdNodes
from test_interrupted_provision import complete_environments, is_building, large_is_under_way, unfinished

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
GONE_LIMIT_S = 3.0
STUBBORN = """
import signal, time
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print("begun", flush=True)
time.sleep(300)
"""


SAVES = """
import os, signal, sys, time
def save(*_):
    os.makedirs("out", exist_ok=True)
    with open("out/saved-" + os.environ["RANK"], "w") as out:
        out.truncate(int(sys.argv[1]))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(300)
"""
Start = Callable[..., Running]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Start]:
    """Starts `up`s, and ends those that are left."""
    made: list[Running] = []

    def make(inventory: Path, *job: str, options: Sequence[str] = (), settings: dict[str, str] | None = None) -> Running:
        made.append(Running(tmp_path, "up", inventory, *options, "--", *job, settings=settings))
        return made[-1]

    yield make
    for started in made:
        started.close()


def interrupt(running: Running, is_time: Callable[[], bool]) -> None:
    """Press Ctrl-C as soon as it is time."""
    running.wait_for(is_time)
    running.interrupt()


def assert_nothing_is_left(nodes: list[SshdNode], root: Path) -> None:
    """Not on any node, at the latest a moment after."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while left := [process.argv for node in nodes for process in node.processes() if str(root) in " ".join(process.argv)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [path for node in nodes for path in (node.home / "locks").glob("*.json")] == []


@pytest.mark.parametrize("phase", ["connecting", "probing", "resolving", "copying", "installing"])
def test_before_the_start(lab: Lab, up: Start, tmp_path: Path, phase: str) -> None:
    """Whatever is being done for the run on any node is given up; an installer takes away what is half made."""
    root, (node,) = tmp_path / "root", lab.nodes
    log_size = node.log.stat().st_size
    inventory = lab.inventory(tmp_path / "lab.yml", root, "large")
    fresh = tmp_path / "cache"  # nothing is resolved yet
    settings = {**lab.settings, "XDG_CACHE_HOME": str(fresh)} if phase == "resolving" else lab.settings
    running = up(inventory, script(tmp_path, ""), settings=settings)
    moments: dict[str, Callable[[], bool]] = {
        "connecting": lambda: node.log.stat().st_size > log_size,
        "probing": lambda: any((node.home / "locks").glob("*.json")),
        "resolving": lambda: "resolving" in running.text,
        "copying": lambda: large_is_under_way(root),
        "installing": lambda: is_building(root),
    }
    interrupt(running, moments[phase])
    assert running.process.wait(LIMIT_S) == 130, running.text
    assert "Traceback" not in running.text
    assert_nothing_is_left([node], root)
    complete_environments(root)  # each that can be seen is whole
    whole_wheels(root)
    assert unfinished(root) == []
    if phase in ("copying", "installing"):
        assert complete_environments(root) == 0
        assert lab.provision(inventory).exit_code == 0 and complete_environments(root) == 1


@pytest.fixture
def two(sshd_factory: SshdNodes) -> list[SshdNode]:
    return sshd_factory(2)


@pytest.fixture
def whole_inventory(two: list[SshdNode], tmp_path: Path, local_stack: LocalStack) -> Path:
    """Two nodes with the real stack."""
    return loopback_inventory(tmp_path, local_stack.borrowed(tmp_path / "root"), two, ppn=2, grace_s=60)


@pytest.mark.parametrize("phase", ["starting", "running"])
def test_from_the_start_on(two: list[SshdNode], up: Start, whole_inventory: Path, tmp_path: Path, phase: str) -> None:
    """While it starts, and while it runs: ranks that ignore every signal have a minute's grace, a second Ctrl-C ends them."""
    running = up(whole_inventory, script(tmp_path, STUBBORN))
    moments: dict[str, Callable[[], bool]] = {
        "starting": lambda: any((tmp_path / "root" / "runs").glob("*/run.json")),
        "running": lambda: "r3] begun" in running.text,
    }
    interrupt(running, moments[phase])
    interrupt(running, lambda: "Ctrl-C again" in running.text)
    assert running.process.wait(LIMIT_S) == 130, running.text
    assert "ending them at once" in running.text and "Traceback" not in running.text
    assert_nothing_is_left(two, tmp_path / "root")


@pytest.fixture
def fetching(two: list[SshdNode], tmp_path: Path, local_stack: LocalStack) -> Path:
    """The same, of a job whose outputs are brought back."""
    return loopback_inventory(tmp_path, local_stack.borrowed(tmp_path / "root"), two, ppn=1, grace_s=60, fetch=["out"])


def outputs(tmp_path: Path) -> dict[str, int]:
    """The files that were brought back into the record, and their sizes."""
    (record,) = (tmp_path / "state" / "cluster-train" / "runs").iterdir()
    return {path.name: path.stat().st_size for path in (record / "out").glob("*")} if (record / "out").exists() else {}


def test_what_was_saved_comes_back(two: list[SshdNode], up: Start, fetching: Path, tmp_path: Path) -> None:
    """Ctrl-C: the ranks save in their grace, and `job.fetch` is brought back with the last lines and the verdict."""
    running = up(fetching, script(tmp_path, SAVES), "1000")
    interrupt(running, lambda: running.text.count("] begun") == 2)
    ran = running.ended()
    assert ran.exit_code == 130 and "fetched " in ran.stdout and "was stopped" in ran.stdout, ran.stdout
    assert outputs(tmp_path)["saved-0"] == 1000
    (verdict,) = (tmp_path / "state" / "cluster-train" / "runs").glob("*/verdict.json")
    assert json.loads(verdict.read_text())["state"] == "stopped"
    assert_nothing_is_left(two, tmp_path / "root")


def test_a_second_ctrl_c_fetches_nothing(two: list[SshdNode], up: Start, fetching: Path, tmp_path: Path) -> None:
    """Outputs of gigabytes: it is said where they are, and no half a file is here."""
    running = up(fetching, script(tmp_path, SAVES), str(20 << 30))
    interrupt(running, lambda: running.text.count("] begun") == 2)
    interrupt(running, lambda: "Ctrl-C again leaves it on node0" in running.text)
    ran = running.ended()
    assert ran.exit_code == 130 and "job.fetch: left on node0, in " in ran.stdout, ran.stdout
    assert "Traceback" not in ran.stdout and outputs(tmp_path) == {}
    assert_nothing_is_left(two, tmp_path / "root")


def test_detaching(two: list[SshdNode], up: Start, whole_inventory: Path, tmp_path: Path) -> None:
    """Ctrl-C before `up --detach` has returned: there is no run that goes on by itself."""
    running = up(whole_inventory, script(tmp_path, STUBBORN), options=["--detach"])
    interrupt(running, lambda: "MASTER_ADDR=" in running.text)
    assert running.ended().exit_code == 130, running.text
    assert_nothing_is_left(two, tmp_path / "root")
