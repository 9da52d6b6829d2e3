"""A run on one node: it starts, ends or is ended as a whole, says so, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import INTERPRETERS, LIMIT_S, MpiNode, Node, exits, processes, records, tagged, until

# A rank that lives until it is ended, beside a daemon of its own that carries neither the run's tag nor its session.
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    print('daemon', os.getpid())\n"
    "    os.execve('/bin/sleep', ['sleep', '60'], {})\n"
    "os.wait()\n"
    "time.sleep(60)\n"
)
# A rank that speaks MPI itself, as mpi4py or oneCCL would.
SPEAK_MPI = (
    "import ctypes, os, sys, time\n"
    "mpi = ctypes.CDLL(os.path.join(sys.prefix, 'lib', 'libmpi.so.12'), ctypes.RTLD_GLOBAL)\n"
    "assert mpi.MPI_Init(None, None) == 0\n"
    "world = 0x44000000\n"
    "mpi.MPI_Barrier(world)\n"
    "print('met')\n"
    "mpi.MPI_Barrier(world)\n"  # all have said so before one fails
    "if sys.argv[1] == 'fail' and os.environ['RANK'] == '1': os._exit(3)\n"
    "mpi.MPI_Barrier(world)\n"
    "mpi.MPI_Finalize()\n"
)


@pytest.fixture
def mpi_node(tmp_path: Path, training_python: Path) -> Iterator[MpiNode]:
    """A node with an MPI; what a test leaves running there is ended after it."""
    node = MpiNode(tmp_path / "root", str(training_python))
    yield node
    end_all(node)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "root")
    yield node
    end_all(node)


def end_all(node: Node) -> None:
    for run_dir in node.root.glob("runs/*"):
        node.stop(run_dir.name, "--now")
        node.sweep(run_dir.name, "--patience-s", "0")


def daemons(node: Node, run_id: str, size: int = 4) -> list[dict[str, int]]:
    """The identities of the daemons that the ranks of DAEMON have started."""
    node.until_all_say(run_id, "daemon", size)
    return [processes.identity(int(node.output(run_id, rank).split()[1])) for rank in range(size)]


def left_of(run_id: str, others: list[dict[str, int]]) -> list[Any]:
    return tagged(run_id) + [who for who in others if processes.is_alive(who)]


@pytest.mark.stack
def test_a_good_run_is_on_record(mpi_node: MpiNode) -> None:
    """Four ranks meet, each writes its own file, the state is `succeeded`, and everything is private to its owner."""
    source = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE']); print('err', file=sys.stderr)"
    status = mpi_node.run("good", source)
    assert (status["state"], status["reason"], status["mpirun_exit"], status["mpirun_signal"]) == (
        "succeeded",
        None,
        0,
        None,
    )
    assert status["label"] == {"cluster": "here"}
    assert status["started_unix_s"] < status["ended_unix_s"]
    assert [mpi_node.output("good", rank) for rank in range(4)] == [f"rank {rank} of 4\n" for rank in range(4)]
    assert [mpi_node.output("good", rank, "err") for rank in range(4)] == ["err\n"] * 4
    assert exits(status) == [(0, None, None)] * 4
    run_dir = mpi_node.run_dir("good")
    assert run_dir.stat().st_mode & 0o777 == 0o700
    for path in run_dir.iterdir():
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o600, path.name
    assert json.loads((run_dir / "run.json").read_text())["launch"]["run_id"] == "good"
    assert (run_dir / "hostfile").read_text() == "127.0.0.1:4\n"
    assert (run_dir / "supervise.log").read_text() == ""
    assert tagged("good") == []


@pytest.mark.stack
def test_a_failed_rank_ends_the_others(mpi_node: MpiNode) -> None:
    """Intel MPI would let them run on for ever: within seconds they are gone, and the records tell who failed first."""
    fail = "import os, sys, time\n"
    fail += "while os.environ['RANK'] == '2':\n    if os.path.exists('go'): sys.exit(3)\n    time.sleep(0.02)\n"
    mpi_node.start_mpi(mpi_node.launch("failed", "print('ready')\n" + fail + DAEMON))
    mpi_node.until_all_say("failed", "ready")
    (mpi_node.run_dir("failed") / "work" / "go").touch()
    status = mpi_node.until_final("failed")
    assert (status["state"], status["mpirun_exit"]) == ("failed", 3)
    assert status["reason"] == status["verdict"]["summary"] == "rank 2 on node0 ended with exit code 3"
    assert [(other["rank"], other["summary"]) for other in status["verdict"]["others"]] == [
        (rank, "ended with the others") for rank in (0, 1, 3)
    ]
    assert exits(status)[2] == (3, None, None)
    assert [end[2] for end in exits(status)] == ["abort", "abort", None, "abort"]
    assert [rank["exit"]["stopped"] for rank in status["ranks"]] == [True, True, False, True]
    first = status["ranks"][2]["exit"]["ended_unix_s"]
    assert all(rank["exit"]["ended_unix_s"] - first < 3 for rank in status["ranks"])
    assert tagged("failed") == []


@pytest.mark.stack
@pytest.mark.parametrize(("how", "state", "code"), [("end", "succeeded", 0), ("fail", "failed", 3)])
def test_a_script_may_speak_mpi_itself(mpi_node: MpiNode, how: str, state: str, code: int) -> None:
    """rank.py stands between it and mpirun without being in the way, at a good end and at a bad one."""
    status = mpi_node.run("speaks", SPEAK_MPI, how, size=3, env={"I_MPI_FABRICS": "shm"})
    assert (status["state"], status["mpirun_exit"]) == (state, code), mpi_node.output("speaks", 0, "err")
    assert [mpi_node.output("speaks", rank) for rank in range(3)] == ["met\n"] * 3
    assert exits(status)[1] == (code, None, None)


@pytest.mark.stack
@pytest.mark.parametrize("victim", ["rank.py", "keeper", "script", "mpirun", "supervisor"])
def test_a_killed_process_takes_the_run_with_it(mpi_node: MpiNode, victim: str) -> None:
    """Whichever process of a run is killed, all others end within seconds, daemons of ranks too, and it is on record."""
    mpi_node.start_mpi(mpi_node.launch("killed", DAEMON))
    others = daemons(mpi_node, "killed")
    status = mpi_node.status("killed")
    assert status["state"] == "running"
    rank = status["ranks"][2]
    pids = {"rank.py": rank, "keeper": rank["keeper"], "script": rank["child"]}
    os.kill(pids[victim]["pid"] if victim in pids else status[victim]["pid"], signal.SIGKILL)

    until(lambda: not left_of("killed", others), "the end of all processes", limit_s=8)
    if victim == "supervisor":
        assert mpi_node.status("killed")["state"] == "lost"
        code, answer = mpi_node.stop("killed")
        assert (code, answer["state"], answer["reason"]) == (
            0,
            "failed",
            "its supervisor on the head was killed, and with it mpirun",
        )
    status = mpi_node.until_final("killed")
    assert status["state"] == "failed"
    assert [bool(rank["exit"]) for rank in status["ranks"]] == [True] * 4
    expected = {
        "rank.py": (None, "SIGTERM", "orphaned"),
        "keeper": (None, "SIGKILL", None),
        "script": (None, "SIGKILL", None),
        "mpirun": (None, "SIGTERM", "orphaned"),
        "supervisor": (None, "SIGTERM", "orphaned"),
    }
    found = exits(status)[2]
    if victim in ("mpirun", "supervisor") and found[2] == "abort":  # its helper has asked the ranks to end, and not gone before
        found = (*found[:2], "orphaned")
    assert found == expected[victim]
    if victim == "mpirun":
        assert (status["mpirun_exit"], status["mpirun_signal"]) == (None, "SIGKILL")


@pytest.mark.stack
def test_a_stop_lets_every_rank_save(mpi_node: MpiNode) -> None:
    """SIGTERM reaches each script; those that are quick do not cost the slow one its time; the state is `stopped`."""
    source = (
        "import os, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def save(*_):\n"
        "    time.sleep(0.8 * (rank == 0)); open('saved-%d' % rank, 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready'); time.sleep(60)\n"
    )
    mpi_node.start_mpi(mpi_node.launch("stopped", source))
    mpi_node.until_all_say("stopped", "ready")
    code, status = mpi_node.stop("stopped")
    assert (code, status["state"], status["mpirun_exit"]) == (0, "stopped", 0)
    assert exits(mpi_node.status("stopped")) == [(0, None, "stop")] * 4
    assert len(list((mpi_node.run_dir("stopped") / "work").glob("saved-*"))) == 4
    assert mpi_node.stop("stopped") == (0, status), "stopping a second time changes nothing"


@pytest.mark.stack
def test_a_script_that_ignores_the_stop_is_killed_after_its_grace(mpi_node: MpiNode) -> None:
    """SIGKILL after `grace_s`, with all that it started; no other run of the same person is touched."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DAEMON
    mpi_node.start_mpi(mpi_node.launch("deaf", deaf, grace_s=0.7))
    mpi_node.start_mpi(mpi_node.launch("other", DAEMON, size=1))
    others, spared = daemons(mpi_node, "deaf"), daemons(mpi_node, "other", 1)
    before = time.monotonic()
    code, status = mpi_node.stop("deaf")
    assert (code, status["state"]) == (0, "stopped")
    assert 0.7 < time.monotonic() - before < 0.7 + 4
    assert exits(mpi_node.status("deaf")) == [(None, "SIGKILL", "stop")] * 4
    assert left_of("deaf", others) == []
    assert mpi_node.status("other")["state"] == "running"
    assert all(map(processes.is_alive, spared))


@pytest.mark.stack
def test_a_stop_at_once_waits_for_nobody(mpi_node: MpiNode) -> None:
    """`--now`, also during a stop that waits: mpirun is forced, and everything ends within seconds."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    mpi_node.start_mpi(mpi_node.launch("now", deaf + DAEMON, grace_s=60.0))
    others = daemons(mpi_node, "now")
    waiting = subprocess.Popen(
        [mpi_node.python, mpi_node.agent_dir / "supervise.py", "stop", "--root", mpi_node.root, "--run", "now"],
        stdout=subprocess.PIPE,
    )
    until(lambda: mpi_node.status("now")["state"] == "stopping", "the first stop")
    before = time.monotonic()
    code, status = mpi_node.stop("now", "--now")
    assert (code, status["state"]) == (0, "stopped")
    assert time.monotonic() - before < 8
    assert json.loads(waiting.communicate(timeout=LIMIT_S)[0]) == status
    assert left_of("now", others) == []


def test_the_caller_may_go(node: Node) -> None:
    """`start` lets go of its connection at once, and losing it, or a hang-up, does not end the run."""
    source = "import time\nwhile not open('../go', 'a') or not open('../go').read(): time.sleep(0.05)\n"
    node.start_alone(node.launch("alone", source, size=1))  # returned: nobody holds its stdout open any more
    supervisor = node.status("alone")["supervisor"]
    assert os.getsid(supervisor["pid"]) != os.getsid(0)
    os.kill(supervisor["pid"], signal.SIGHUP)
    assert node.status("alone")["state"] == "running"
    (node.run_dir("alone") / "go").write_text("go")
    assert node.until_final("alone")["state"] == "succeeded"


def test_a_run_is_not_good_because_mpirun_says_so(node: Node) -> None:
    """Open MPI ends with 0 where a node was lost: a rank without a good record makes the run a failed one."""
    launch = node.launch("hidden", "import sys; sys.exit(4)", size=1)
    hide = f"{sys.executable} {node.agent_dir}/rank.py; exit 0"
    env = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert node.start(launch, ["/bin/sh", "-c", hide], **env)[0] == 0
    status = node.until_final("hidden")
    assert (status["state"], status["mpirun_exit"], status["reason"]) == ("failed", 0, "rank 0 on node0 ended with exit code 4")


def test_mpirun_that_cannot_start_is_told_at_once(node: Node) -> None:
    """`start` names the program and the reason, and the run is on record as failed."""
    code, answer = node.start(node.launch("missing", "", size=1), ["/nowhere/mpiexec.hydra", "-n", "1"])
    assert code == 1
    assert answer["error"].startswith("/nowhere/mpiexec.hydra could not be started: ")
    status = node.status("missing")
    assert (status["state"], status["reason"], status["ranks"]) == ("failed", answer["error"], [])


def test_a_run_directory_is_used_once(node: Node) -> None:
    """A second run of the same name is refused, and the first is not touched."""
    launch = node.launch("once", "", size=1)
    node.start_alone(launch)
    status = node.until_final("once")
    code, answer = node.start(launch, ["true"])
    assert (code, answer) == (1, {"error": f"there is a run in {node.run_dir('once')} already (succeeded)"})
    assert node.status("once") == status


def test_what_stands_in_the_way_of_a_run_is_named(node: Node) -> None:
    """A file in the place of the run or of all runs, and a directory that no start has finished, are no run; all stay."""
    run_dir = node.run_dir("way")
    launch = node.launch("way", "", size=1)
    run_dir.mkdir(parents=True)
    code, answer = node.start(launch, ["true"])
    assert code == 1 and answer["error"].startswith(f"{run_dir} is there already, without a status: another start is making it")
    run_dir.rmdir()
    run_dir.write_text("mine")
    code, answer = node.start(launch, ["true"])
    assert (code, answer) == (1, {"error": f"{run_dir} is there already and is no directory: move it away"})
    assert run_dir.read_text() == "mine"
    run_dir.unlink()
    run_dir.parent.rmdir()
    run_dir.parent.write_text("mine")
    code, answer = node.start(launch, ["true"])
    assert code == 1 and answer["error"].startswith(f"{run_dir.parent} is no directory, so no run can be kept below it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch": {}}, "is no launch document of schema 1"),
        ({"mpirun": {"argv": [], "env": {}}}, "mpirun has no command line"),
        ({"files": {"../x": {"text": "", "mode": 0o600}}}, r"no file can be called ['../x']"),
        ({"grace_s": "soon"}, "could not convert string to float"),
        ({"launch": None}, "is no launch document of schema 1"),
        ({"launch": {"schema": 1}}, "CLUSTER_TRAIN_LAUNCH lacks agent_dir, argv, "),
    ],
)
def test_a_start_document_that_is_none_is_refused(node: Node, change: dict[str, Any], message: str) -> None:
    """What is wrong with it is said, and no directory is left."""
    launch = node.launch("bad", "", size=1)
    order = {"launch": launch, "mpirun": {"argv": ["true"], "env": {}}, "grace_s": 1, **change}
    code, answer = node.call("supervise.py", "start", stdin=json.dumps(order))
    assert code == 1
    assert message in answer["error"]
    assert not node.run_dir("bad").exists()


def test_runs_are_listed_newest_first(node: Node) -> None:
    """`status` has them all, or so many, or one; a directory that only holds ranks has no state."""
    for run_id in ("b", "a", "c"):
        node.start_alone(node.launch(run_id, "", size=1))
        node.until_final(run_id)
    ranks_only = node.run_dir("ranks-only")
    ranks_only.mkdir()
    os.utime(ranks_only, (0, 0))

    def listed(*options: str) -> list[str]:
        _, answer = node.call("supervise.py", "status", "--root", str(node.root), *options)
        return [run["run_id"] for run in answer["runs"]]

    assert listed() == ["c", "a", "b", "ranks-only"]
    assert listed("--limit", "2") == ["c", "a"]
    assert listed("--run", "a") == ["a"]
    assert listed("--run", "none") == []
    assert node.status("ranks-only")["state"] is None
    ranks_only.rmdir()
    unread = node.run_dir("unread")
    unread.mkdir()
    (unread / "status.json").symlink_to("status.json")  # whoever opens it fails
    os.utime(unread, (0, 0))
    assert listed("--limit", "3") == ["c", "a", "b"]
    shutil.rmtree(unread)


def test_a_root_may_begin_in_the_home_directory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inventory writes `~/.cluster-train`; the node knows where that is."""
    monkeypatch.setenv("HOME", str(node.root.parent))
    node.start_alone(node.launch("home", "", size=1))
    node.until_final("home")
    _, answer = node.call("supervise.py", "status", "--root", "~/root", "--run", "home")
    assert answer["runs"][0]["state"] == "succeeded"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_run_name_cannot_leave_the_directory(node: Node, name: str) -> None:
    """`stop` and `sweep` take names, not paths."""
    code, answer = node.call("supervise.py", "sweep", "--root", str(node.root), f"--run={name}")
    assert (code, answer) == (1, {"error": f"{name!r} is no name of a run"})


def test_a_run_that_is_not_there_cannot_be_stopped(node: Node) -> None:
    """`stop` says so."""
    assert node.stop("none") == (1, {"error": "there is no run none on this node"})


def test_a_directory_shared_with_another_machine_is_not_judged(node: Node) -> None:
    """On a shared disk, process numbers of another machine mean nothing here: not lost, not stopped, not swept."""
    node.start_alone(node.launch("far", "", size=1))
    status = node.until_final("far")
    del status["ranks"]
    me = processes.identity(os.getpid())
    far = {**status, "state": "running", "machine": "another", "supervisor": {"pid": 1, "start_ticks": 1}, "mpirun": me}
    records.write_record(str(node.run_dir("far") / "status.json"), far)
    rank = records.read_record(str(node.run_dir("far") / "rank-0.json"))
    records.write_record(str(node.run_dir("far") / "rank-0.json"), {**rank, "machine": "another", "keeper": me})
    assert node.status("far")["state"] == "running"
    assert node.stop("far") == (1, {"error": "run far was started on another node: stop it there"})
    assert node.sweep("far") == {"killed": [], "left": []}
    records.write_record(str(node.run_dir("far") / "status.json"), status)


def test_a_run_that_was_going_on_at_a_reboot_is_lost(node: Node) -> None:
    """The same machine after another boot: its old process numbers mean nothing, nobody supervises the run, `stop` ends it."""
    node.start_alone(node.launch("old", "", size=1))
    status = node.until_final("old")
    del status["ranks"]
    me = processes.identity(os.getpid())
    old = {**status, "state": "running", "boot": "another", "supervisor": me, "mpirun": me}
    records.write_record(str(node.run_dir("old") / "status.json"), old)
    rank = records.read_record(str(node.run_dir("old") / "rank-0.json"))
    records.write_record(str(node.run_dir("old") / "rank-0.json"), {**rank, "boot": "another", "keeper": me})
    found = node.status("old")
    assert (found["state"], found["reason"]) == ("lost", "the head was started anew while it was going on")
    assert node.sweep("old") == {"killed": [], "left": []}
    code, final = node.stop("old")
    assert (code, final["state"], final["reason"]) == (0, "failed", "the head was started anew while it was going on")


def test_a_sweep_ends_one_run_only(node: Node) -> None:
    """On any node, with or without records: what carries the run's tag is ended and named, the rest is not touched."""
    started = {
        run_id: subprocess.Popen(["sleep", "60"], env={**os.environ, records.RUN_VARIABLE: run_id}, start_new_session=True)
        for run_id in ("swept", "swept-2", "other")
    }
    gone = processes.identity(started["swept"].pid)
    try:
        assert node.sweep("swept") == {"killed": [dict(gone, command="sleep 60")], "left": []}
        assert [process.poll() for process in started.values()] == [-signal.SIGTERM, None, None]
        assert node.sweep("swept") == {"killed": [], "left": []}
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_sweep_lets_a_living_rank_end_its_script(node: Node) -> None:
    """A rank whose head is gone is asked first: its script gets SIGTERM and its time."""
    source = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved'), sys.exit(0)))\n"
    source += "print('ready'); time.sleep(60)"
    node.start_alone(node.launch("left", source, size=1))
    node.until_all_say("left", "ready", size=1)
    ended = node.sweep("left", "--patience-s", "20")
    assert ended["left"] == []
    assert len(ended["killed"]) == 3, "rank.py (here in mpirun's place), its keeper, the script"
    assert node.output("left", 0) == "ready\nsaved\n"
    status = node.until_final("left")
    assert exits(status) == [(0, None, "stop")]
    assert (status["state"], status["reason"]) == (
        "failed",
        "rank 0 on node0 was stopped, and nobody had asked for that",
    )


@pytest.fixture(params=INTERPRETERS, ids=lambda path: Path(path).parent.parent.name)
def old_node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    """A node whose own Python is one of those on this machine."""
    node = Node(tmp_path / "root \u00e9", request.param)
    yield node
    end_all(node)


def test_every_python_can_own_a_run(old_node: Node) -> None:
    """The nodes' own Python may be as old as 3.6: start, rank, status, logs, stop and sweep work on each."""
    source = "import time; print('ready \u00e9'); time.sleep(60)"
    old_node.start_alone(old_node.launch("old", source, "\u00e9", size=1))
    old_node.until_all_say("old", "ready", size=1)
    assert old_node.status("old")["state"] == "running"
    code, status = old_node.stop("old")
    assert (code, status["state"]) == (0, "stopped")
    assert exits(old_node.status("old")) == [(None, "SIGTERM", "stop")]
    assert old_node.sweep("old") == {"killed": [], "left": []}
    argv = [old_node.python, old_node.agent_dir / "tail.py", "--run-dir", old_node.run_dir("old"), "--ranks", "0", "--head"]
    told = subprocess.run([*argv, "--follow"], input=b"drain\n", capture_output=True, timeout=LIMIT_S, check=True)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [next(iter(line)) for line in lines] == ["rank", "file", "exit", "status"]
    assert lines[1]["data"].encode("latin-1").decode() == "ready \u00e9\n"
