"""The fault table, first part: what can befall a rank and our own processes. See `faulty`.

Each row: the verdict, the exit code, the seconds until `up` returns, that nothing is left on either node, and that every
line that a rank had written is in its log. The limits are for a machine that does much else at the same time.
"""

from __future__ import annotations

import signal

import pytest
from faulty import FLAVOURS, FaultLab, ticking, until

every_flavour = pytest.mark.parametrize("mpi", FLAVOURS)

DAEMON = 'broken(); subprocess.Popen(["sleep", "1000"], start_new_session=True)'


@every_flavour
def test_a_rank_exits_with_3(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking("if RANK == 2 and tick == 9: broken(); sys.exit(3)"), mpi).wait()
    up.check("failed", rank=2, node="node1", exit_code=3)


@every_flavour
def test_a_rank_is_killed(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking("if RANK == 1 and tick == 9: broken(); os.kill(os.getpid(), 9)"), mpi).wait()
    up.check("failed", rank=1, node="node0", signal="SIGKILL")


@every_flavour
def test_a_rank_aborts(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking("if RANK == 3 and tick == 9: broken(); os.abort()"), mpi).wait()
    up.check("failed", rank=3, node="node1", signal="SIGABRT")


@every_flavour
def test_ranks_that_ignore_sigterm_are_killed_after_their_grace(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)"), mpi).until_ticking()
    up.broken()
    stopped = fault_lab.call("stop", up.inventory, "--json")
    assert stopped.result["state"] == "stopped", stopped.stdout
    up.wait().check("stopped")


@every_flavour
@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_leaves_a_daemon(fault_lab: FaultLab, mpi: str, code: int) -> None:
    """One that called setsid, and whose parent ends at once."""
    do = f"if RANK == 2 and tick == 9: {DAEMON}; sys.exit({code})"
    up = fault_lab.up(ticking(do, ticks=20), mpi).wait()
    if code:
        up.check("failed", rank=2, exit_code=3)
    else:
        up.check("succeeded", code=0)


@every_flavour
def test_mpirun_is_killed(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(), mpi).until_ticking()
    up.broken()
    fault_lab.kill("node0", [up.status_record()["mpirun"]["pid"]])
    up.wait().check("failed")


@every_flavour
def test_the_supervisor_is_killed(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(), mpi).until_ticking()
    up.broken()
    fault_lab.kill("node0", [up.status_record()["supervisor"]["pid"]])
    up.wait().check("lost", rank=None)


@pytest.mark.parametrize("victim", ["guard", "keeper", "both"])
def test_rank_py_is_killed(fault_lab: FaultLab, victim: str) -> None:
    up = fault_lab.up(ticking()).until_ticking()
    record = up.rank_record(3)
    pids = {"guard": record["pid"], "keeper": record["keeper"]["pid"]}
    up.broken()
    fault_lab.kill("node1", list(pids.values()) if victim == "both" else [pids[victim]])
    up.wait().check("failed")


@every_flavour
def test_the_orchestrator_is_killed_and_the_run_goes_on(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(), mpi).until_ticking()
    seen = up.last_tick(3)
    up.process.kill()
    up.process.wait()
    until(lambda: up.on_node("node1", "rank-3.out")["rank-3.out"].count("\n") > seen + 20, "the run goes on")
    assert fault_lab.call("status", up.inventory, "--json").result["state"] == "running"
    assert fault_lab.call("stop", up.inventory, "--json").result["state"] == "stopped"
    followed = fault_lab.call("logs", "-f", up.inventory, "--json")
    assert followed.exit_code == 1 and followed.result["state"] == "stopped"
    up.check_nothing_left()
    up.check_logs()


@every_flavour
def test_ctrl_c_while_running(fault_lab: FaultLab, mpi: str) -> None:
    up = fault_lab.up(ticking(), mpi).until_ticking()
    up.broken()
    up.process.send_signal(signal.SIGINT)
    up.wait().check("stopped", code=130)
