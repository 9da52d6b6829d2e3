"""One attempt at a run: start mpirun, watch it, see its ranks off, and judge how it ended. Used by `supervise.py`.

It returns an outcome as a value; whether there is another attempt is not decided here.
"""

import collections
import os
import signal
import time

import children
import processes
import records
import runs

WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
STOP_MARGIN_S = 5.0  # beyond the ranks' grace, before mpirun is forced
# How mpirun is forced, and what each step is given: a second SIGINT makes hydra clean up on all nodes.
FORCE = ((signal.SIGINT, 0.5), (signal.SIGINT, 2.0), (signal.SIGKILL, 60.0))
SETTLE_S = 5.0  # for ranks to record their end after mpirun has gone
KEPT_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TMPDIR", "TZ")


class Outcome(collections.namedtuple("Outcome", "state reason mpirun_exit mpirun_signal")):
    """How an attempt ended: succeeded, failed, or stopped (because somebody asked for it)."""

    def status(self) -> dict:
        """The outcome as part of the run's status."""
        return dict(self._asdict())


def attempt(run: runs.Run, order: dict, tell) -> Outcome:
    """Start mpirun as the order says and see it to its end; how that was.

    tell: called with what `start` answers, as soon as mpirun runs or cannot be started.
    """
    command = [records.to_bytes(word) for word in order["mpirun"]["argv"]]
    logs = [os.path.join(run.run_dir, name) for name in ("mpirun.out", "mpirun.err")]
    try:
        # hydra goes to mpirun's directory on every node: it must be one that is everywhere. Without a supervisor nobody
        # would see a stop through: mpirun's death is what ends all ranks for certain.
        mpirun = children.start(command, mpirun_environment(order), logs, "/", signal.SIGKILL)
    except children.StartError as error:
        tell({"error": str(error)})
        return Outcome("failed", str(error), None, None)
    run.set(state="running", mpirun=processes.identity(mpirun.pid))
    tell({"run_id": run.status["run_id"], "supervisor": run.status["supervisor"]})
    is_asked = watch(run, mpirun, order)
    runs.settle(run, order["grace_s"] if is_asked else SETTLE_S)
    return judge(mpirun, run.ranks_here(), is_asked)


def mpirun_environment(order: dict) -> dict:
    """mpirun's environment as bytes: what a login has, what the plan gives, and what rank.py counts on."""
    try:
        launch = records.encode_launch(order["launch"])
        records.decode_launch(launch)
    except (KeyError, ValueError) as error:
        raise runs.Problem(str(error))
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables.update(order["mpirun"]["env"])
    # Intel MPI's own clean-up comes to rank.py as SIGHUP, which it can tell from a stop (and survive to record it).
    variables["I_MPI_JOB_ABORT_SIGNAL"] = str(int(signal.SIGHUP))
    variables.update({records.LAUNCH_VARIABLE: launch, records.RUN_VARIABLE: order["launch"]["run_id"]})
    return {records.to_bytes(name): records.to_bytes(value) for name, value in variables.items()}


def watch(run: runs.Run, mpirun: children.Child, order: dict) -> bool:
    """Wait for mpirun's end, and stop it when told to; whether it was."""
    force, deadline = list(FORCE), None
    while mpirun.status is None:
        left_s = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        event = signal.sigtimedwait(WATCHED, left_s)
        if event is None and deadline is not None:
            signum, patience_s = force.pop(0) if force else FORCE[-1]
            os.kill(mpirun.pid, signum)
            deadline = time.monotonic() + patience_s
        elif event is not None and event.si_signo == signal.SIGCHLD:
            mpirun.reap()
        elif event is not None:
            if deadline is None:
                run.set(state="stopping")
                os.kill(mpirun.pid, records.stop_signal(order["launch"]))
                deadline = time.monotonic() + order["grace_s"] + STOP_MARGIN_S
            if event.si_signo == signal.SIGINT:
                deadline = time.monotonic()
    return deadline is not None


def judge(mpirun: children.Child, ranks: list, is_asked: bool) -> Outcome:
    """How the attempt ended."""
    reasons = why_failed(mpirun, ranks)
    state = "stopped" if is_asked else "failed" if reasons else "succeeded"
    return Outcome(state, "; ".join(reasons) or None, mpirun.exit_code, mpirun.signal)


def why_failed(mpirun: children.Child, ranks: list) -> list:
    """What was not good about the end. mpirun's word alone is not enough: Open MPI says 0 where a node was lost."""
    reasons, consequences = [], []
    if mpirun.shell_code:
        reasons.append("mpirun ended with %s" % (mpirun.signal or "exit code %d" % mpirun.exit_code))
    for rank in ranks:
        end = rank["exit"]
        if end is None:
            reasons.append("rank %d left no record of its end" % rank["rank"])
        elif end["ended_by"]:
            consequences.append("rank %d was ended (%s)" % (rank["rank"], end["ended_by"]))
        elif end["exit_code"] != 0:
            reasons.append("rank %d ended with %s" % (rank["rank"], end["signal"] or "exit code %d" % end["exit_code"]))
    return reasons or consequences
