"""Why a run failed is said where the system knows it: exceptions, memory, disks, time limits; a stall is told with its stacks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import Node, tagged, until

import reasons  # isort: skip  (remote/ is on the path since supervised was imported)
import stalls  # isort: skip
import verdicts  # isort: skip

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
RAISES = """
def deepest(value):
    raise ValueError("no such %s" % value)
print("before")
try:
    {}["key"]
except KeyError:
    deepest("thing")
"""
TORCH_TIMEOUT = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(tensor)
RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete
"""
TORCH_PEER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(tensor)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:24612
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "root")
    yield made
    for run_dir in made.root.glob("runs/*"):
        made.stop(run_dir.name, "--now")
        made.sweep(run_dir.name, "--patience-s", "0")


def verdict_of(node: Node, source: str, **changes: Any) -> dict[str, Any]:
    """The verdict on a run of one rank with this source."""
    node.start_alone(node.launch("one", source, size=1, **changes))
    status = node.until_final("one")
    assert status["state"] == "failed"
    verdict: dict[str, Any] = status["verdict"]
    return verdict


def test_an_exception_is_told_with_its_last_frame(node: Node) -> None:
    """The one that ended the script, not those before it; with the last lines of stderr."""
    verdict = verdict_of(node, RAISES)
    assert (verdict["kind"], verdict["rank"], verdict["exit_code"]) == ("exception", 0, 1)
    assert verdict["reason"]["text"] == "ValueError: no such thing (script.py:3 in deepest)"
    assert verdict["summary"] == f"rank 0 on node0 ended with exit code 1: {verdict['reason']['text']}"
    assert verdict["tail"][-1] == "ValueError: no such thing" and verdict["tail_of"] == "err"


def test_the_last_lines_are_told(node: Node) -> None:
    """Twenty of them; of stdout where stderr is empty; of a progress bar what it showed last; of broken bytes no error."""
    source = "import os, sys\nfor n in range(50): print('line', n)\n"
    source += "os.write(1, b'10%\\r50%\\r99%\\n\\xff\\xfe' + b'x' * 5000 + b'\\n'); sys.exit(7)"
    verdict = verdict_of(node, source)
    assert (verdict["kind"], verdict["reason"], verdict["tail_of"]) == ("exit", None, "out")
    assert len(verdict["tail"]) == 20
    assert verdict["tail"][:2] == ["line 32", "line 33"] and verdict["tail"][-2] == "99%" and len(verdict["tail"][-1]) == 500


def test_a_rank_that_was_killed_is_told_with_its_signal(node: Node) -> None:
    """Without a reason where there is none on record."""
    verdict = verdict_of(node, "import os; os.kill(os.getpid(), 9)")
    assert (verdict["kind"], verdict["signal"], verdict["reason"]) == ("signal", "SIGKILL", None)
    assert verdict["summary"] == "rank 0 on node0 was killed by SIGKILL"


@pytest.mark.skipif(not os.access(MEMORY_CGROUPS, os.W_OK), reason="no control groups (version 1) that may be written here")
def test_out_of_memory_is_told(node: Node, tmp_path: Path) -> None:
    """The kernel kills the script in a control group with a limit: its counter says why, the signal alone does not."""
    group = MEMORY_CGROUPS / f"test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 * 2**20))
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        rank = f"import os, sys; {join}; os.execv(sys.argv[1], sys.argv[1:])"
        launch = node.launch("one", "data = []\nwhile True: data.append(bytearray(2**20))", size=1)
        env = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        argv = [node.python, "-c", rank, node.python, str(node.agent_dir / "rank.py")]
        assert node.start(launch, argv, **env)[0] == 0
        verdict = node.until_final("one")["verdict"]
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of its processes")
        group.rmdir()
    assert (verdict["kind"], verdict["signal"]) == ("out_of_memory", "SIGKILL")
    assert "was killed by SIGKILL: out of memory: the kernel killed it" in verdict["summary"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_told_and_recorded(small_disk: Path) -> None:
    """Logs fill the disk of the run: the rank cannot even write its traceback, its record or its status, and still it is said."""
    node = Node(small_disk / "root")
    verdict = verdict_of(node, "while True: print('x' * 1000)")
    assert (verdict["kind"], verdict["rank"]) == ("disk_full", 0)
    assert str(node.run_dir("one")) in verdict["summary"] or "No space left" in verdict["summary"]
    assert tagged("one") == []


def test_what_torch_says_of_time_limits_and_lost_peers_is_known() -> None:
    """The texts of gloo, as torch 2.13 shows them; an exception is read from the last traceback."""
    assert reasons.OUT_OF_TIME.search(TORCH_TIMEOUT) and not reasons.PEER_LOST.search(TORCH_TIMEOUT)
    assert reasons.PEER_LOST.search(TORCH_PEER) and not reasons.OUT_OF_TIME.search(TORCH_PEER)
    found = reasons.exception("Traceback (most recent call last):\n  nothing\n" + TORCH_PEER)
    assert (found["type"], found["line"], found["function"]) == ("RuntimeError", 9, "<module>")
    prefixed = "".join(f"[rank12]: {line}\n" for line in TORCH_PEER.splitlines())
    assert reasons.exception(prefixed) == found


def evidence(rank: int, node: str, at_s: float | None, missing_s: float | None = None, **record: Any) -> verdicts.Evidence:
    if at_s is None:
        return verdicts.Evidence(rank, node, None, None, missing_s)
    full = {"exit_code": 0, "signal": None, "ended_by": None, "reason": None, **record}
    return verdicts.Evidence(rank, node, full, at_s, missing_s)


PEER = {"exit_code": 1, "reason": {"kind": "peer_lost", "text": "Connection closed by peer"}}
GOOD_MPIRUN = {"exit_code": 0, "signal": None, "is_ours": False}


def judged(*ends: verdicts.Evidence, **mpirun: Any) -> tuple[Any, ...]:
    """(kind, rank, node) of the verdict."""
    verdict = verdicts.judge(list(ends), {**GOOD_MPIRUN, **mpirun}, None)
    return (verdict["kind"], verdict["rank"], verdict["node"]) if verdict else ()


def test_what_was_heard_first_failed_first() -> None:
    """Not what a clock of some node says; and who only lost a peer comes after whoever may be that peer."""
    first, second = evidence(3, "n1", 1.0, exit_code=3, ended_unix_s=900.0), evidence(0, "n0", 2.0, exit_code=1, ended_unix_s=1.0)
    assert judged(second, first) == ("exit", 3, "n1")
    assert judged(evidence(0, "n0", 1.0, **PEER), evidence(3, "n1", 2.0, exit_code=3)) == ("exit", 3, "n1")
    assert judged(evidence(0, "n0", 1.0, **PEER), evidence(2, "n1", None, missing_s=1.5)) == ("node_lost", None, "n1")
    assert judged(evidence(0, "n0", 1.0, **PEER), evidence(3, "n1", 2.0, **PEER)) == ("peer_lost", 0, "n0")


def test_a_lost_node_is_told_from_a_lost_rank() -> None:
    """A node is lost when nothing of it was heard after its ranks fell silent; with a 0 from mpirun as well (Open MPI)."""
    gone = [evidence(rank, "n1", None, missing_s=5.0) for rank in (2, 3)]
    ended = evidence(0, "n0", 6.0, signal="SIGTERM", exit_code=None, ended_by="abort")
    assert judged(ended, *gone) == ("node_lost", None, "n1")
    assert judged(ended, gone[0], evidence(3, "n1", 6.0, signal="SIGTERM", exit_code=None, ended_by="abort")) == (
        "vanished",
        2,
        "n1",
    )
    assert judged(evidence(0, "n0", 1.0), evidence(1, "n0", None)) == ("vanished", 1, "n0")


def test_a_rank_that_was_silent_and_ran_is_named() -> None:
    """Also where nobody else is on its node; what it failed with by itself before tells more."""
    ended = {"signal": "SIGTERM", "exit_code": None, "ended_by": "abort"}
    silent, other = evidence(2, "n1", 66.0, missing_s=5.0, **ended), evidence(0, "n0", 65.5, **ended)
    assert judged(other, silent) == judged(other, silent, evidence(3, "n1", 65.4, **ended)) == ("silent", 2, "n1")
    assert "rank 2 on n1 was not heard of for 61 s" in verdicts.judge([other, silent], GOOD_MPIRUN, None)["summary"]
    assert judged(other, evidence(2, "n1", 66.0, missing_s=5.0, exit_code=3)) == ("exit", 2, "n1")


def test_mpirun_is_blamed_last() -> None:
    """Killed by somebody it is named; its exit code counts where no rank says why; a good end has no verdict."""
    orphan = evidence(0, "n0", 1.0, signal="SIGTERM", exit_code=None, ended_by="orphaned")
    assert judged(orphan, signal="SIGKILL", exit_code=None) == ("mpirun", None, None)
    assert judged(orphan, signal="SIGKILL", exit_code=None, is_ours=True) == ("orphaned", 0, "n0")
    assert judged(evidence(0, "n0", 1.0), exit_code=255) == ("mpirun", None, None)
    assert judged(evidence(0, "n0", 1.0), evidence(1, "n0", 2.0)) == ()


def test_a_rank_that_never_began_is_blamed_before_what_followed() -> None:
    """Orphans, ranks that were ended, and peers that waited for it in vain come after it; another rank's own failure first."""
    unbegun = verdicts.Evidence(2, "n1", None, None, None, has_begun=False)
    orphan = evidence(0, "n0", 1.0, signal="SIGTERM", exit_code=None, ended_by="orphaned")
    told = verdicts.Killed([2], "SIGKILL")
    for others in ([orphan], [evidence(0, "n0", 1.0, **PEER)], [evidence(0, "n0", 1.0)]):
        assert judged(*others, unbegun, exit_code=255) == ("vanished", 2, "n1")
        assert judged(*others, unbegun, exit_code=255, killed=told) == ("vanished", 2, "n1")
    assert judged(evidence(0, "n0", 1.0, exit_code=3), unbegun, exit_code=255, killed=told) == ("exit", 0, "n0")
    assert judged(orphan, unbegun, unbegun._replace(rank=3), exit_code=255) == (
        "vanished",
        None,
        "n1",
    )  # as MPICH's helper there is killed
    assert judged(unbegun, exit_code=255) == ("mpirun", None, None)  # nobody has begun: mpirun has not worked
    assert judged(evidence(0, "n0", 1.0), unbegun) == ()  # without heartbeats' word, a good end of mpirun is a good end


def test_who_mpirun_says_was_killed_is_the_orphan_that_counts() -> None:
    """The others lose their parents at the same moment; of several that it may have been, all are named."""
    orphans = [evidence(rank, "n0", 1.0 + rank, exit_code=None, signal="SIGTERM", ended_by="orphaned") for rank in (0, 1)]
    assert judged(*orphans, exit_code=9) == ("orphaned", 0, "n0")
    assert judged(*orphans, exit_code=9, killed=verdicts.Killed([1], "SIGKILL")) == ("orphaned", 1, "n0")
    unbegun = [verdicts.Evidence(rank, f"n{rank // 2}", None, None, None, has_begun=False) for rank in (1, 2)]
    verdict = verdicts.judge(unbegun, {**GOOD_MPIRUN, "exit_code": 9, "killed": verdicts.Killed([1, 2], "SIGKILL")}, None)
    assert verdict["summary"] == "one of ranks 1 on n0, 2 on n1 was killed by SIGKILL before it had begun"


def test_a_run_has_its_time(node: Node) -> None:
    """After `run_timeout_s` it is stopped with its grace, and that is the verdict."""
    node.limits = {"run_timeout_s": 2.0}
    save = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved'), sys.exit(0)))\ntime.sleep(60)"
    verdict = verdict_of(node, save)
    assert (verdict["kind"], verdict["summary"]) == ("run_timeout", "it ran longer than job.run_timeout_s (2 s)")
    assert node.output("one", 0) == "saved\n"


def test_every_rank_must_have_started_in_time(node: Node) -> None:
    """mpirun that starts nothing, or not all: the ranks that did not come are named, and mpirun is ended."""
    node.limits = {"start_timeout_s": 1.5}
    assert node.start(node.launch("late", "", size=2), ["/bin/sleep", "60"])[0] == 0
    status = node.until_final("late")
    assert (status["state"], status["verdict"]["kind"], status["verdict"]["rank"]) == ("failed", "start_timeout", 0)
    assert status["reason"] == "rank 0 on node0, rank 1 on node0 did not start within 1.5 s"


WAITS_SILENTLY = """
import os, time
def wait_for_a_file():
    while not os.path.exists("go"):
        time.sleep(0.05)
wait_for_a_file()
print("going on")
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_a_stall_is_told_with_stacks_and_passes(node: Node) -> None:
    """No output for the limit: `stalled`, with the very line that the script waits in; with output it is `running` again."""
    node.limits = {"stall_timeout_s": 3.0}
    node.start_alone(node.launch("one", WAITS_SILENTLY, size=1))
    until(lambda: (node.status("one")["stall"] or {"ranks": [{"by": None}]})["ranks"][0]["by"], "the stacks")
    status = node.status("one")
    (rank,) = status["stall"]["ranks"]
    assert (status["state"], rank["rank"], rank["by"], rank["is_waiting"]) == ("stalled", 0, "faulthandler", False)
    assert 'script.py", line 5 in wait_for_a_file' in rank["stacks"]
    (node.run_dir("one") / "work" / "go").touch()
    until(lambda: node.status("one")["state"] == "running", "the end of the stall")
    assert node.status("one")["stall"] is None
    (node.run_dir("one") / "work" / "end").touch()
    assert node.until_final("one")["state"] == "succeeded"


LISTENS_LATE = """
import faulthandler, os, signal, time
number = signal.SIGRTMIN + 7
faulthandler.unregister(number)
while not os.path.exists("listen"):
    time.sleep(0.05)
faulthandler.register(number, open(os.environ["CLUSTER_TRAIN_STACKS"], "w"))
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_a_rank_that_could_not_tell_its_stacks_is_asked_again(node: Node) -> None:
    """A script may take longer to begin than the limit of a stall."""
    node.limits = {"stall_timeout_s": 1.0}
    node.start_alone(node.launch("one", LISTENS_LATE, size=1))

    def told() -> dict[str, Any]:
        ranks: list[dict[str, Any]] = (node.status("one")["stall"] or {"ranks": [{"by": None, "stacks": None}]})["ranks"]
        return ranks[0]

    assert until(lambda: told()["stacks"], "that there are none") == "the script does not answer the signal"
    (node.run_dir("one") / "work" / "listen").touch()
    assert until(lambda: told()["by"], "the stacks") == "faulthandler"
    (node.run_dir("one") / "work" / "end").touch()
    assert node.until_final("one")["state"] == "succeeded"


IN_A_COLLECTIVE = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/env/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "train.py", line 12 in main
"""
IN_ITS_DATA = """Process 7: python -u bootstrap.py train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (active): "MainThread"
    read (data.py:7)
    main (train.py:12)
Thread 9 (idle): "worker"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
"""


def test_who_waits_for_others_is_told_from_whom_they_wait_for() -> None:
    """By the innermost frames of the main thread, as faulthandler and py-spy write them."""
    assert stalls.is_waiting("faulthandler", IN_A_COLLECTIVE) and not stalls.is_waiting("py-spy", IN_ITS_DATA)
    assert not stalls.is_waiting("faulthandler", "")


def test_a_stall_ends_the_run_only_where_it_is_asked_to(node: Node) -> None:
    """`stall_action: stop`; also where the script has taken the signal for itself, which then is its own."""
    node.limits = {"stall_timeout_s": 3.0, "stall_action": "stop"}
    own = "import signal, time\nsignal.signal(signal.SIGRTMIN + 7, lambda *_: None)\nwhile True: time.sleep(0.1)"
    verdict = verdict_of(node, own)
    assert (verdict["kind"], verdict["summary"]) == ("stalled", "no rank has written anything for 3 s")
    stall = node.status("one")["stall"]
    assert stall["ranks"][0]["by"] is None and "does not answer" in stall["ranks"][0]["stacks"]


def test_the_signal_for_stacks_never_ends_a_program(node: Node, tmp_path: Path) -> None:
    """A script that has become another program, which does not know the signal, is left alone."""
    node.limits = {"stall_timeout_s": 2.0}
    node.start_alone(node.launch("one", "import os; os.execv('/bin/sleep', ['sleep', '60'])", size=1))
    until(lambda: (node.status("one")["stall"] or {"ranks": [{"stacks": None}]})["ranks"][0]["stacks"], "the answer")
    status = node.status("one")
    assert status["state"] == "stalled" and Path(f"/proc/{status['ranks'][0]['child']['pid']}").exists()


def test_a_start_that_took_its_time_is_not_a_stall(node: Node) -> None:
    """The clock of a stall begins when a rank has started."""
    node.limits = {"stall_timeout_s": 60.0}
    node.start_alone(node.launch("one", "import time; time.sleep(1)", size=1))
    assert node.until_final("one")["stall"] is None


@pytest.mark.stack
def test_collectives_get_the_time_limit_of_the_job(node: Node, training_python: Path) -> None:
    """A rank that waits for one that never comes ends after `ddp_timeout_s`; the verdict says that it was a time limit."""
    waits = MpiPair(node.root.parent / "ddp", str(training_python))
    source = (
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "if os.environ['RANK'] == '1': time.sleep(600)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    started_s = time.monotonic()
    verdict = waits.verdict(source)
    assert time.monotonic() - started_s < 300
    assert (verdict["kind"], verdict["rank"]) == ("collective_timeout", 0)
    assert "Timed out waiting 4000ms" in verdict["summary"]


class MpiPair(Node):
    """Two ranks without an MPI: what hydra would tell them stands in their environment."""

    def verdict(self, source: str) -> dict[str, Any]:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "lo"}
        launch = self.launch("ddp", source, size=2, env=env, bootstrap={"backend": "gloo", "ddp_timeout_s": 4.0})
        rank = f"MPI_LOCALNRANKS=2 PMI_SIZE=2 {self.python} {self.agent_dir}/rank.py"
        start = f"PMI_RANK=0 MPI_LOCALRANKID=0 {rank} & PMI_RANK=1 MPI_LOCALRANKID=1 {rank} & wait"
        assert self.start(launch, ["/bin/sh", "-c", start])[0] == 0
        try:
            until(lambda: self.status("ddp")["state"] == "failed", "the end", limit_s=250)
            found: dict[str, Any] = self.status("ddp")["verdict"]
            return found
        finally:
            self.stop("ddp", "--now")
            assert tagged("ddp") == []
