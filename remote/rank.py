"""The parent of one rank, started by mpirun: environment, cores, log files, signals, exit record, no orphans.

Two processes stand between mpirun and the script, so that killing any one of them ends the rank, its record included:

    mpirun -> guard -> keeper -> script (and what it starts)

The guard is what mpirun knows: it hands every signal on. The keeper starts the script in a session of its own, waits
for it, ends what it left behind and writes `rank-<n>.exit.json` (`keeper.py`). Each is a subreaper and dies with its parent, so
nothing that the script starts can get away from both. The script is run by `bootstrap.py`.

What a signal means: SIGTERM (or the launch document's `stop_signal`): stop, with `grace_s` to save; SIGINT: the same,
a second one kills; SIGHUP, or the death of the parent: the job is lost, end at once; SIGUSR1, SIGUSR2: for the script.
In the launch, I_MPI_JOB_ABORT_SIGNAL=1 makes Intel MPI's own clean-up that SIGHUP. The supervisor speaks to the keeper as
well (`pulse.py`): it may say that the job is lost, and a rank that has lost it for too long ends itself.

PMI is never spoken at the start: the script may use MPI itself. Only a failing rank writes one line, `cmd=abort`, which
ends the other ranks on Intel MPI and MPICH, whether or not anybody has spoken PMI before. Open MPI does so unasked.
"""

import os
import select
import signal
import sys

import children
import ending
import keeper
import place
import records

REFUSED = 97  # exit code: this rank is not where the plan wants it, or cannot start


class Orphaned(place.Refused):
    """mpirun has gone before this rank began."""


def main() -> int:
    """Run this rank to its end; its exit code."""
    launcher = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, keeper.WATCHED)
    children.die_with(launcher, signal.SIGHUP)
    number, rank = None, None
    try:
        launch = records.decode_launch(os.environ.get(records.LAUNCH_VARIABLE, ""))
        told = place.find_place(os.environ)
        number = told[0]
        rank = place.Rank(launch, number, launcher)
        place.check_place(rank, told)
        command, environment = rank.command(), place.script_environment(rank, os.environb)
        place.prepare_directories(rank)
        place.bind(rank.plan["cores"])
        check_launcher(launcher)
    except (place.Refused, ValueError, OSError) as error:
        return refuse(rank, number, error)
    return guard(rank, command, environment)


def check_launcher(launcher_pid: int) -> None:
    """Raise Orphaned where mpirun died while this interpreter was starting: too early for a signal from the kernel."""
    is_orphan = launcher_pid == 1 and not ending.is_mpi_daemon(launcher_pid)
    if "PMI_FD" in os.environ:
        poll = select.poll()
        poll.register(int(os.environ["PMI_FD"]), 0)
        is_orphan = bool(poll.poll(0))  # hydra's end is closed
    if is_orphan:
        raise Orphaned("mpirun has gone already")


def refuse(rank: place.Rank, number: int, error: Exception) -> int:
    """Say why this rank does not run, record it, and end the job; its exit code."""
    message = "rank %s on %s: %s" % ("?" if number is None else number, os.uname().nodename, error)
    records.complain("cluster-train: " + message)
    if rank:
        # Who lost mpirun before it began has not failed by itself: what ended mpirun is the reason, as for every other orphan.
        why = {"ended_by": "orphaned"} if isinstance(error, Orphaned) else {"error": message}
        record = ending.exit_record(rank, exit_code=REFUSED, **why)
        ending.put(rank, "exit.json", record)
        connection = ending.connect(rank)
        ending.tell_end(connection, record)
        connection.part(ending.PART_S)
    ending.abort_job(REFUSED)
    return REFUSED


def guard(rank: place.Rank, command: list, environment: dict) -> int:
    """The outer process: hands signals to the keeper, and stands in for it should it be killed; the exit code."""
    children.adopt_orphans()
    inner = children.Child(fork_keeper(rank, command, environment))
    while inner.status is None:
        signum = signal.sigwaitinfo(keeper.WATCHED).si_signo
        if signum == signal.SIGCHLD:
            inner.reap()
        else:
            os.kill(inner.pid, signum)
    if inner.exit_code is None or (inner.exit_code == ending.BROKEN and not os.path.exists(rank.file("exit.json"))):
        return stand_in(rank, inner)
    return inner.exit_code


def fork_keeper(rank: place.Rank, command: list, environment: dict) -> int:
    """The keeper's pid; the keeper itself never returns from here."""
    me, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        try:
            os._exit(keeper.keep(rank, command, environment, me))
        except (children.StartError, OSError) as error:
            os._exit(refuse(rank, rank.number, error))
    except BaseException:  # whatever it is, a second guard must not go on
        sys.excepthook(*sys.exc_info())
    os._exit(ending.BROKEN)


def stand_in(rank: place.Rank, inner: children.Child) -> int:
    """Do what a lost keeper could not: end the script's processes, record the end, end the job."""
    connection = ending.connect(rank)
    ending.kill_tree(rank, inner)
    error = "the process that watched this rank ended with %s" % (inner.signal or "code %d" % inner.exit_code)
    record = ending.exit_record(rank, inner, signal="SIGKILL", exit_code=None, pid=None, error=error)
    ending.put(rank, "exit.json", record)
    ending.tell_end(connection, record)
    connection.part(ending.PART_S)
    ending.abort_job(inner.shell_code or ending.BROKEN)
    return inner.shell_code or ending.BROKEN


if __name__ == "__main__":
    sys.exit(main())
