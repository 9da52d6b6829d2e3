"""Who has this machine: locks that die with their holders, first come first served, and nobody else's files followed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreters import every_interpreter
from supervised import LIMIT_S, REMOTE, Node, until

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"  # one that every user may run


class Holder:
    """A `locks.py hold` that was asked for by some command."""

    def __init__(
        self, python: Path | str, root: Path, run_id: str, user: int | None = None, remote: Path = REMOTE, **owner: Any
    ) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [str(python), str(remote / "locks.py"), "hold"], start_new_session=True, user=user, **pipes
        )
        self.said: list[dict[str, Any]] = []
        self.tell(json.dumps({"run_id": run_id, "root": str(root), "cluster": "here", **owner}))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                self.said.append(json.loads(line))

    def tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def until(self, what: str) -> Any:
        return until(lambda: next((said[what] for said in self.said if said.get(what)), None), f"{what} from {self.said}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        self.process.stdin.close()
        self._reader.join()

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("CLUSTER_TRAIN_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def hold(directory: Path, tmp_path: Path, node: Node) -> Iterator[Callable[..., Holder]]:
    """Starts holders, and ends those that are left."""
    made: list[Holder] = []

    def make(run_id: str, python: Path | str = sys.executable, **owner: Any) -> Holder:
        made.append(Holder(python, owner.pop("root", node.root), run_id, **owner))
        return made[-1]

    yield make
    for holder in made:
        holder.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "root")


def listed(node: Node) -> list[str]:
    return [lock["run_id"] for lock in node.call("locks.py", "list")[1]["locks"]]


@every_interpreter
def test_one_holds_and_the_next_waits(hold: Callable[..., Holder], interpreter: Path, directory: Path) -> None:
    """The second is told who is there since when, and gets the machine when the first lets go; then no file is left."""
    first = hold("first", interpreter, script="train.py")
    assert first.until("held") is True
    second = hold("second", interpreter)
    (lock,) = second.until("busy")
    assert (lock["run_id"], lock["script"], lock["cluster"], lock["is_own"]) == ("first", "train.py", "here", True)
    first.end()
    assert second.until("held") is True
    second.end()
    assert list(directory.iterdir()) == [] and stat.S_IMODE(directory.stat().st_mode) == 0o1777


def test_a_killed_holder_counts_for_nothing(hold: Callable[..., Holder], directory: Path, node: Node) -> None:
    """kill -9: its file is still there, and is replaced."""
    first = hold("first")
    first.until("held")
    first.process.kill()
    first.process.wait()
    assert (directory / "first.json").exists() and listed(node) == []
    hold("second").until("held")
    assert listed(node) == ["second"] and not (directory / "first.json").exists()


def test_first_come_first_served(hold: Callable[..., Holder], node: Node) -> None:
    """Five wait; each gets it alone and in the order of asking."""
    holders = [hold("0")]
    holders[0].until("held")
    for number in range(1, 6):
        holders.append(hold(str(number)))
        holders[-1].until("busy")
    assert listed(node) == list("012345")
    for number in range(5):
        holders[number].end()
        holders[number + 1].until("held")
        assert not any(said.get("held") for later in holders[number + 2 :] for said in later.said)


def test_sharing_asks_nobody(hold: Callable[..., Holder]) -> None:
    """With `share` a run is told who is there, and is then in the way of those that do not share."""
    hold("first").until("held")
    shared = hold("second", share=True)
    shared.until("held")
    assert [lock["run_id"] for lock in shared.until("beside")] == ["first"]
    assert [lock["run_id"] for lock in hold("third").until("busy")] == ["first", "second"]


def test_a_run_keeps_what_its_command_took(hold: Callable[..., Holder], node: Node, directory: Path) -> None:
    """The supervisor and the ranks hold the machine after the command that asked for it was killed, until they end."""
    run_id = "kept"
    holder = hold(run_id)
    holder.until("held")
    node.start_alone(node.launch(run_id, "import time; time.sleep(300)", size=1))
    until(lambda: (node.run_dir(run_id) / "rank-0.json").exists(), "the rank")
    holder.process.kill()
    holder.process.wait()
    assert listed(node) == [run_id]
    assert [lock["run_id"] for lock in hold("other").until("busy")] == [run_id]
    os.kill(node.status(run_id)["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: listed(node) == ["other"], "the end of the lock")


def test_a_lock_is_kept_until_the_ranks_are_there(hold: Callable[..., Holder], node: Node) -> None:
    """`keep`: whoever asked may go before the ranks have started on this machine."""
    holder = hold("kept")
    holder.until("held")
    holder.tell("keep")
    assert holder.process.stdin
    holder.process.stdin.close()
    assert listed(node) == ["kept"]
    node.start_alone(node.launch("kept", "import time; time.sleep(300)", size=1))
    assert holder.process.wait(LIMIT_S) == 0
    assert listed(node) == ["kept"]
    node.stop("kept", "--now")
    assert listed(node) == []


def test_runs_that_have_not_begun_are_listed(hold: Callable[..., Holder], node: Node) -> None:
    """The head shows who is provisioning and who waits, before the runs that have a directory; another root's are not shown."""
    node.start_alone(node.launch("begun", "", size=1))
    node.until_final("begun")
    hold("first").until("held")
    hold("second").until("busy")
    hold("third", root=node.root.parent / "another").until("busy")

    def states(*options: str) -> list[tuple[str, str]]:
        found = node.call("supervise.py", "status", "--root", str(node.root), *options)[1]["runs"]
        return [(run["run_id"], run["state"]) for run in found]

    assert states() == [("second", "waiting"), ("first", "provisioning"), ("begun", "succeeded")]
    assert states("--run", "first") == [("first", "provisioning")] and states("--run", "begun") == [("begun", "succeeded")]


CONNECTION = """
import subprocess, sys
other = subprocess.Popen(["sleep", "300"], start_new_session=True)
holder = subprocess.Popen([sys.executable, sys.argv[1], "hold"], start_new_session=True)
print(other.wait(), flush=True)
holder.wait()
"""


def test_cancel_ends_what_the_same_connection_started(directory: Path, tmp_path: Path) -> None:
    """Two commands of one parent, as under one sshd: the holder ends the other one, and nothing beyond the parent."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as bystander:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        connection = subprocess.Popen([sys.executable, "-c", CONNECTION, REMOTE / "locks.py"], **pipes)
        assert connection.stdin
        connection.stdin.write(json.dumps({"run_id": "r", "root": str(tmp_path)}).encode() + b"\ncancel\n")
        said, _ = connection.communicate(timeout=LIMIT_S)
        assert b'{"ended": ["sleep 300"]}' in said.splitlines() and b"-2" in said.splitlines()  # by SIGINT
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="a second person can only be played by root")
@pytest.mark.skipif(sys.version_info < (3, 9), reason="Popen(user=...)")
def test_the_directory_goes_when_nobody_needs_it(hold: Callable[..., Holder], directory: Path, node: Node) -> None:
    """It stays while there is a lock in it; whoever comes while it is being removed makes a new one."""
    removal = [sys.executable, "-c", "import locks; print(locks.remove_directory())"]
    environment = {**os.environ, "PYTHONPATH": str(REMOTE)}

    def remove() -> str:
        return subprocess.run(removal, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    holder = hold("first")
    holder.until("held")
    assert remove() == "None" and directory.is_dir()
    holder.end()
    assert remove() == str(directory) and not directory.exists()
    hold("second").until("held")
    assert listed(node) == ["second"]


def test_two_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's lock is seen with that user's name, is in the way, and cannot be taken for one's own."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        place = Path(name)
        shutil.copytree(REMOTE, place / "remote")
        place.chmod(0o1777)
        monkeypatch.setenv("CLUSTER_TRAIN_LOCKS", str(place / "locks"))
        holders = [Holder(SYSTEM_PYTHON, place / "root", "theirs", user=NOBODY, remote=place / "remote")]
        try:
            holders[0].until("held")
            holders.append(Holder(sys.executable, place / "root", "mine"))
            (lock,) = holders[1].until("busy")
            assert (lock["run_id"], lock["user"], lock["is_own"]) == ("theirs", "nobody", False)
            holders.append(Holder(sys.executable, place / "root", "theirs"))
            assert "is not ours" in holders[2].until("error")
        finally:
            for holder in holders:
                holder.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "garbage"])
def test_what_others_put_there_is_not_followed(
    hold: Callable[..., Holder], directory: Path, tmp_path: Path, kind: str, node: Node
) -> None:
    """A link to a file of ours harms nothing; a pipe hangs nobody; garbage is no lock."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    directory.mkdir()
    directory.chmod(0o1777)
    trap = directory / "run.json"
    if kind == "link":
        trap.symlink_to(precious)
    elif kind == "hard link":
        trap.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(trap)
    else:
        trap.write_bytes(b"\xff" * 1000)
    assert listed(node) == []
    holder = hold("run")
    if kind in ("garbage", "hard link"):  # removed as any dead lock
        holder.until("held")
    else:
        assert "is not ours" in holder.until("error")
    assert precious.read_text() == "mine"


def test_a_directory_that_others_may_tamper_with_is_refused(hold: Callable[..., Holder], directory: Path) -> None:
    """World-writable without the sticky bit: anybody could put a file in the place of ours."""
    directory.mkdir()
    directory.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
        assert "not sticky" in hold("run").until("error")
    else:  # our own is mended
        hold("run").until("held")


def test_a_silent_caller_is_not_waited_for(hold: Callable[..., Holder], node: Node) -> None:
    """Whoever promised a word now and then and says none has gone, whatever TCP thinks: the machine is free for the next."""
    silent = hold("silent", silence_s=1.0)
    silent.until("held")
    speaking = hold("speaking", share=True, silence_s=1.0)
    speaking.until("held")

    def is_over() -> bool:
        speaking.tell("alive")
        return silent.process.poll() is not None

    until(is_over, "the end of the silent one")
    assert silent.process.returncode == 75
    assert speaking.process.poll() is None and listed(node) == ["speaking"]
    speaking.end()
    assert listed(node) == []


def test_a_machine_that_slept_does_not_blame_its_caller(hold: Callable[..., Holder], node: Node) -> None:
    """Stopped for longer than the limit: what the caller said meanwhile is read first."""
    holder = hold("slept", silence_s=1.0)
    holder.until("held")
    os.kill(holder.process.pid, signal.SIGSTOP)
    holder.tell("alive")
    time.sleep(1.5)  # the alarm goes off meanwhile
    os.kill(holder.process.pid, signal.SIGCONT)
    for _ in range(5):
        time.sleep(0.3)
        holder.tell("alive")
    assert holder.process.poll() is None and listed(node) == ["slept"]


def test_a_run_joins_its_own_lock_before_those_who_wait(hold: Callable[..., Holder], node: Node) -> None:
    """A second holder of the same run is not behind somebody who waits for that very run."""
    first = hold("mine")
    first.until("held")
    other = hold("other")
    other.until("busy")
    again = hold("mine")
    assert again.until("held") is True
    first.end()
    assert sorted(listed(node)) == ["mine", "other"]
    again.end()
    other.until("held")
