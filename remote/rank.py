"""The parent of one rank, started by mpirun: environment, cores, log files, signals, exit record, no orphans.

Two processes stand between mpirun and the script, so that killing any one of them ends the rank, its record included:

    mpirun -> guard -> keeper -> script (and what it starts)

The guard is what mpirun knows: it hands every signal on. The keeper starts the script in a session of its own, waits
for it, ends what it left behind and writes `rank-<n>.exit.json`. Each is a subreaper and dies with its parent, so
nothing that the script starts can get away from both. The script is run by `bootstrap.py`.

What a signal means: SIGTERM (or the launch document's `stop_signal`): stop, with `grace_s` to save; SIGINT: the same,
a second one kills; SIGHUP, or the death of the parent: the job is lost, end at once; SIGUSR1, SIGUSR2: for the script.
In the launch, I_MPI_JOB_ABORT_SIGNAL=1 makes Intel MPI's own clean-up that SIGHUP.

PMI is never spoken at the start: the script may use MPI itself. Only a failing rank writes one line, `cmd=abort`, which
ends the other ranks on Intel MPI and MPICH, whether or not anybody has spoken PMI before. Open MPI does so unasked.
"""

import os
import select
import signal
import sys
import time

import children
import place
import processes
import records

REFUSED = 97  # exit code: this rank is not where the plan wants it, or cannot start
BROKEN = 98  # exit code: this program itself failed
ABORT_GRACE_S = 1.0  # between SIGTERM and SIGKILL when the job is lost anyway
LOST = {signal.SIGHUP, signal.SIGTERM}
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}

# Parents worth remembering: on other nodes mpirun's own daemons do not carry the run's tag.
MPI_DAEMONS = ("hydra_", "mpiexec", "mpirun", "prte", "orted")


def main() -> int:
    """Run this rank to its end; its exit code."""
    launcher = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
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
    """Raise Refused where mpirun died while this interpreter was starting: too early for a signal from the kernel."""
    is_orphan = launcher_pid == 1 and not is_mpi_daemon(launcher_pid)
    if "PMI_FD" in os.environ:
        poll = select.poll()
        poll.register(int(os.environ["PMI_FD"]), 0)
        is_orphan = bool(poll.poll(0))  # hydra's end is closed
    if is_orphan:
        raise place.Refused("mpirun has gone already")


def refuse(rank: place.Rank, number: int, error: Exception) -> int:
    """Say why this rank does not run, record it, and end the job; its exit code."""
    message = "rank %s on %s: %s" % ("?" if number is None else number, os.uname().nodename, error)
    sys.stderr.write("cluster-train: %s\n" % message)
    if rank:
        put(rank, "exit.json", exit_record(rank, exit_code=REFUSED, error=message))
    abort_job(REFUSED)
    return REFUSED


def guard(rank: place.Rank, command: list, environment: dict) -> int:
    """The outer process: hands signals to the keeper, and stands in for it should it be killed; the exit code."""
    children.adopt_orphans()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(keep(rank, command, environment, me))
        except BaseException:  # whatever it is, a second guard must not go on
            sys.excepthook(*sys.exc_info())
        os._exit(BROKEN)
    keeper = children.Child(pid)
    while keeper.status is None:
        signum = signal.sigwaitinfo(WATCHED).si_signo
        if signum == signal.SIGCHLD:
            keeper.reap()
        else:
            os.kill(pid, signum)
    if keeper.exit_code is None or not os.path.exists(rank.file("exit.json")):
        return stand_in(rank, keeper)
    return keeper.exit_code


def stand_in(rank: place.Rank, keeper: children.Child) -> int:
    """Do what a lost keeper could not: end the script's processes, record the end, end the job."""
    kill_tree(rank, keeper)
    error = "the process that watched this rank ended with %s" % (keeper.signal or "code %d" % keeper.exit_code)
    put(rank, "exit.json", exit_record(rank, keeper, signal="SIGKILL", exit_code=None, pid=None, error=error))
    abort_job(keeper.shell_code or BROKEN)
    return keeper.shell_code or BROKEN


def keep(rank: place.Rank, command: list, environment: dict, guard_pid: int) -> int:
    """The inner process: starts the script, waits, cleans up after it, records its end; the exit code."""
    os.setsid()  # what mpirun sends to the rank's process group is for the guard, which hands it on
    children.adopt_orphans()
    children.die_with(guard_pid, signal.SIGHUP)
    logs = (rank.file("out"), rank.file("err"))
    try:
        script = children.start(command, environment, logs, rank.work_dir, signal.SIGKILL)
    except (children.StartError, OSError) as error:
        return refuse(rank, rank.number, error)
    put(rank, "json", rank_record(rank, script, guard_pid))
    ended_by = watch(rank, script, guard_pid)
    left = kill_tree(rank, script)
    put(rank, "exit.json", exit_record(rank, script, ended_by=ended_by, left=left))
    if ended_by == "orphaned" or (script.shell_code and not ended_by):
        abort_job(script.shell_code or BROKEN)
    return script.shell_code


def watch(rank: place.Rank, script: children.Child, guard_pid: int) -> str:
    """Wait for the script, passing signals on; what ended it: stop, interrupt, abort, orphaned, or None: itself."""
    ended_by, deadline = None, None
    grace_s = rank.launch["grace_s"]
    while script.status is None:
        left_s = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        event = signal.sigtimedwait(WATCHED, left_s)
        signum = event.si_signo if event else None
        if signum is None and deadline is not None:
            kill_tree(rank, script)
            deadline = None
        elif signum == signal.SIGCHLD:
            script.reap()
        elif signum == rank.stop_signal:
            script.send(signal.SIGTERM)
            ended_by, deadline = ended_by or "stop", deadline or time.monotonic() + grace_s
        elif signum == signal.SIGINT:
            script.send(signal.SIGINT)
            deadline = time.monotonic() + (0.0 if ended_by else grace_s)
            ended_by = ended_by or "interrupt"
        elif signum in LOST and ended_by != "stop":
            # After a stop MPI may clean up when the first rank leaves: one that still saves keeps its time.
            script.send(signal.SIGTERM)
            ended_by = ended_by or ("abort" if os.getppid() == guard_pid else "orphaned")
            deadline = time.monotonic() + ABORT_GRACE_S
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            script.send(signum)
    return ended_by


def kill_tree(rank: place.Rank, child: children.Child) -> list:
    """SIGKILL all that this rank started, wherever it went; identities of what does not die."""

    def find():
        child.reap()
        below = processes.descendants(os.getpid())
        return below + [who for who in processes.tagged(rank.tag) if who not in below]

    return processes.kill_all(find)[1]


def rank_record(rank: place.Rank, script: children.Child, guard_pid: int) -> dict:
    """Which processes are this rank."""
    guarding = processes.identity(guard_pid) or {"pid": guard_pid, "start_ticks": None}
    return dict(
        rank.who(),
        keeper=processes.identity(os.getpid()),
        child=processes.identity(script.pid),
        launcher=processes.identity(rank.launcher_pid) if is_mpi_daemon(rank.launcher_pid) else None,
        **guarding,
    )


def is_mpi_daemon(pid: int) -> bool:
    """Whether this is MPI's own process, not a person's shell or the system's first process."""
    try:
        with open("/proc/%d/comm" % pid) as stream:
            return stream.read().startswith(MPI_DAEMONS)
    except (FileNotFoundError, ProcessLookupError):
        return False


def exit_record(rank: place.Rank, child: children.Child = None, **facts: object) -> dict:
    """How this rank ended; `facts` win over what `child` tells."""
    record = dict(rank.who(), ended_unix_s=time.time(), ended_by=None, error=None, left=[])
    for field in ("pid", "exit_code", "signal"):
        record[field] = getattr(child, field, None)
    record["max_rss_bytes"] = child.max_rss_bytes if child else 0
    record["cpu_s"] = round(child.cpu_s, 3) if child else 0.0
    record.update(facts)
    record["stopped"] = record["ended_by"] is not None
    return record


def put(rank: place.Rank, suffix: str, record: dict) -> None:
    """Write a record; a full disk must not keep the job from ending."""
    try:
        records.make_private_dir(rank.run_dir)
        records.write_record(rank.file(suffix), record)
    except OSError as error:
        sys.stderr.write("cluster-train: rank %d: %s could not be recorded: %s\n" % (rank.number, record, error))


def abort_job(code: int) -> None:
    """Have hydra end the other ranks: without this they run on (Intel MPI), or wait for this one until they time out."""
    descriptor = os.environ.get("PMI_FD")
    if descriptor is None:
        return  # Open MPI ends them by itself
    try:
        os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)
    except OSError as error:
        sys.stderr.write("cluster-train: mpirun could not be asked to end the job: %s\n" % error)


if __name__ == "__main__":
    sys.exit(main())
