"""A rank whose outermost process is killed before it could say a word: mpirun's words name it, or that the others have begun."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervised import MpiNode, records, tagged, until

from orchestrator.planning.mpirun import Flavour

import evidence  # isort: skip  (remote/ is on the path since supervised was imported)
import terminations  # isort: skip
import verdicts  # isort: skip

FLAVOURS: tuple[Flavour, ...] = ("impi", "mpich", "openmpi")
VICTIM = 2

# What mpirun starts instead of rank.py: rank 2 dies before Python begins, once the others have said something, or at once.
DIES = """#!/bin/sh
rank=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}
if [ "$rank" = 2 ]; then
    for other in %s; do
        until [ -s "$CLUSTER_TRAIN_TEST_DIR/rank-$other.out" ]; do sleep 0.05; done
    done
    kill -9 $$
fi
exec "$@"
"""
# The others need nobody: with Intel MPI, which does not notice, they run to their end.
SCRIPT = "import time; print('begun'); time.sleep(2)"
KILLED = "rank 2 on node0 was killed by SIGKILL before it had begun"
UNHEARD = "rank 2 on node0 never began: nothing was ever heard of it"

INTEL = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 2 PID 29742 RUNNING AT 10.0.0.2
=   KILLED BY SIGNAL: 9 (Killed)
===================================================================================
"""
MPICH = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 29742 RUNNING AT 10.0.0.2
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
"""
OPEN_MPI = """--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 29742 on node 10.0.0.2 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""


@pytest.fixture
def mpi_node(
    flavour: Flavour, tmp_path: Path, training_python: Path, mpi_program: Callable[[Flavour], Path]
) -> Iterator[MpiNode]:
    node = MpiNode(tmp_path / "root", str(training_python), flavour, None if flavour == "impi" else mpi_program(flavour))
    yield node
    for run_dir in node.root.glob("runs/*"):
        node.stop(run_dir.name, "--now")
        node.sweep(run_dir.name, "--patience-s", "0")


def dies_after(node: MpiNode, *others: int) -> None:
    """Have rank 2 killed before it begins: at once, or when these ranks have written something."""
    program = node.root / "dies.sh"
    program.write_text(DIES % " ".join(map(str, others)))
    program.chmod(0o700)
    node.before = (str(program),)


@pytest.mark.stack
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_it_is_named_when_the_others_have_begun(mpi_node: MpiNode) -> None:
    """Also by MPICH, which tells its process only, or nothing where a rank that lost its parent is faster to end the job."""
    launch = mpi_node.launch("mute", SCRIPT)
    dies_after(mpi_node, 0, 1, 3)
    mpi_node.start_mpi(launch, CLUSTER_TRAIN_TEST_DIR=str(mpi_node.run_dir("mute")))
    status = mpi_node.until_final("mute")
    verdict = status["verdict"]
    assert (status["state"], verdict["kind"], verdict["rank"], verdict["node"]) == ("failed", "vanished", VICTIM, "node0"), status
    if mpi_node.flavour != "mpich" or status["reason"] != UNHEARD:
        assert (status["reason"], verdict["signal"]) == (KILLED, "SIGKILL")
        assert "signal" in "\n".join(verdict["tail"]).lower()
    assert tagged("mute") == []


@pytest.mark.stack
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_nobody_waits_for_it(mpi_node: MpiNode) -> None:
    """Intel MPI does not end the others, who wait for it: they see that MPI's daemon has a process less than there are ranks."""
    launch = mpi_node.launch("waits", "import time; print('begun', flush=True); time.sleep(600)")
    dies_after(mpi_node, 0, 1, 3)
    mpi_node.start_mpi(launch, CLUSTER_TRAIN_TEST_DIR=str(mpi_node.run_dir("waits")))
    status = mpi_node.until_final("waits")
    assert (status["state"], status["verdict"]["kind"], status["verdict"]["rank"]) == ("failed", "vanished", VICTIM), status
    assert status["reason"] in (KILLED, UNHEARD)
    assert tagged("waits") == []


@pytest.mark.stack
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_it_is_named_as_far_as_can_be_known_when_nobody_has_begun(mpi_node: MpiNode) -> None:
    """MPICH ends the others before they have begun as well, or half of them, and tells no rank: it is one of those."""
    launch = mpi_node.launch("none", "print('begun')")
    dies_after(mpi_node)
    mpi_node.start_mpi(launch)
    status = mpi_node.until_final("none")
    assert (status["state"], status["verdict"]["kind"], status["verdict"]["node"]) == ("failed", "vanished", "node0"), status
    if mpi_node.flavour == "mpich":
        assert "2 on node0" in status["reason"] and re.search("SIGKILL before|never began", status["reason"])
    else:
        assert (status["reason"], status["verdict"]["rank"]) == (KILLED, VICTIM)
    assert tagged("none") == []


@pytest.mark.stack
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_killed_helper_of_mpirun_is_not_taken_for_an_end_that_mpirun_wanted(mpi_node: MpiNode) -> None:
    """The ranks' outermost processes live on: that their own parent has gone tells it from mpirun's ending of a job."""
    mpi_node.start_mpi(mpi_node.launch("helper", "import time; print('begun'); time.sleep(600)"))
    mpi_node.until_all_say("helper", "begun")
    record = until(lambda: records.read_record(str(mpi_node.run_dir("helper") / "rank-2.json")), "the record of rank 2")
    os.kill(record["launcher"]["pid"], signal.SIGKILL)
    status = mpi_node.until_final("helper")
    assert (status["state"], status["verdict"]["kind"] in ("mpirun", "orphaned")) == ("failed", True), status
    assert tagged("helper") == []


def test_what_each_mpirun_says_is_understood() -> None:
    """Rank, process, machine and signal, among other lines; nothing is made of what tells of no signal."""
    for text, rank in ((INTEL, 2), (MPICH, None), (OPEN_MPI, 2)):
        told = {"rank": rank, "pid": 29742, "host": "10.0.0.2", "signal": "SIGKILL"}
        assert terminations.first("one\n" + text + "two\n" + text.replace("29742", "3")) == told
    for text in (
        "",
        INTEL.replace("KILLED BY SIGNAL: 9 (Killed)", "EXIT STATUS: 3"),
        "signal 9",
        os.urandom(99).decode("latin-1"),
    ):
        assert terminations.first(text) is None


LOST_HELPERS = {
    "intel-killed": "[mpiexec@vm] wait_proxies (a.c:558): downstream from host 10.0.0.2 was killed by signal 9 (Killed)\n",
    "intel-exited": "[mpiexec@vm] Error: Downstream from host 10.0.0.2 exited abnormally\n",
    "ssh": "Connection to 10.0.0.2 closed by remote host.\n",
    "openmpi-lost": "PRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [prterun-vm-24372@0,0] on node vm\n"
    "  Remote daemon: [prterun-vm-24372@0,1] on node vm\n",
    "openmpi-spawn": "-----\nA daemon failed to report back after being spawned. This could\nbe due to several factors\n\n"
    "  Local host:    vm\n  Remote host:   vm\n  Daemon exit status: 255\n",
}


@pytest.mark.parametrize("text", LOST_HELPERS.values(), ids=LOST_HELPERS)
def test_where_mpirun_lost_its_helper_is_understood(text: str) -> None:
    """That is the verdict where no rank has failed, before that ranks were ended by it, and not where all ended well."""
    ranks = [{"rank": number, "node": f"node{number // 2}", "hostname": "vm"} for number in range(4)]
    order = {"launch": {"ranks": ranks}, "files": {"hostfile": {"text": "10.0.0.1:2\n10.0.0.2:2\n"}}}
    assert evidence.lost_helper(order, text) == "node1"
    assert evidence.lost_helper(order, "nothing") is None
    assert evidence.lost_helper(order, "Connection to vm closed by remote host.") == ""  # which of the two is not told
    ended = {"exit_code": 0, "signal": None, "reason": None, "ended_by": "abort"}
    found = [verdicts.Evidence(0, "node0", ended, 1.0, None)]
    mpirun = {"exit_code": 255, "signal": None, "is_ours": False, "killed": None, "lost_helper": "node1"}
    assert verdicts.judge(found, mpirun, None)["node"] == "node1"
    assert verdicts.judge(found, mpirun, None)["summary"].startswith("mpirun lost its helper on node1: ")
    assert verdicts.judge(found, {**mpirun, "exit_code": 0}, None)["node"] == "node1"  # as Open MPI ends then
    own = verdicts.Evidence(1, "node0", {**ended, "ended_by": None, "exit_code": 3}, 2.0, None)
    assert verdicts.judge([*found, own], mpirun, None)["rank"] == 1
    assert verdicts.judge([], {**mpirun, "exit_code": 0}, None) is None


def test_the_machine_is_found_by_host_name_and_by_address() -> None:
    """As hydra and Open MPI write hostfiles, of every address family."""
    ranks = [{"rank": number, "node": f"node{number // 2}", "hostname": f"host{number // 2}"} for number in range(4)]
    for hostfile in ("10.0.0.1:2\n10.0.0.2:2\n", "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"):
        assert evidence.nodes_at("10.0.0.2", {"ranks": ranks}, hostfile) == ["node1"]
    assert evidence.nodes_at("fd00::2", {"ranks": ranks}, "fd00::1\nfd00::1\nfd00::2\nfd00::2\n") == ["node1"]
    assert evidence.nodes_at("fd00::2", {"ranks": ranks}, "fd00::1 slots=2\nfd00::2 slots=2\n") == ["node1"]
    assert evidence.nodes_at("host0", {"ranks": ranks}, "") == ["node0"]
    assert evidence.nodes_at("elsewhere", {"ranks": ranks}, "") == []
