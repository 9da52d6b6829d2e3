"""How a rank ends: its processes, its record, the word that ends the job. Used by `rank.py` and `keeper.py`."""

import os
import time

import children
import place
import processes
import pulse
import records

# Parents worth remembering: on other nodes Open MPI's daemons do not carry the run's tag.
MPI_DAEMONS = ("hydra_", "mpiexec", "mpirun", "prte", "orted")
BROKEN = 98  # exit code: rank.py itself failed
NOTICE_S = 0.5  # for mpirun to notice that a rank's outermost process was killed
PART_S = 2.0  # for the supervisor to note the end of a rank


def kill_tree(rank: place.Rank, child: children.Child) -> list:
    """SIGKILL all that this rank started, wherever it went; identities of what does not die."""

    def find():
        child.reap()
        below = processes.descendants(os.getpid())
        return below + [who for who in processes.tagged(rank.tag) if who not in below]

    return processes.kill_all(find)[1]


def is_mpi_daemon(pid: int) -> bool:
    """Whether this is MPI's own process, not a person's shell or the system's first process."""
    try:
        with open("/proc/%d/comm" % pid) as stream:
            return stream.read().startswith(MPI_DAEMONS)
    except (FileNotFoundError, ProcessLookupError):
        return False


def launcher(rank: place.Rank) -> dict:
    """The identity of MPI's daemon that started this rank; None where something else did."""
    return processes.identity(rank.launcher_pid) if is_mpi_daemon(rank.launcher_pid) else None


def exit_record(rank: place.Rank, child: children.Child = None, **facts: object) -> dict:
    """How this rank ended; `facts` win over what `child` tells."""
    record = dict(rank.who(), ended_unix_s=time.time(), ended_by=None, error=None, left=[], reason=None)
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
        records.complain("cluster-train: rank %d: %s could not be recorded: %s" % (rank.number, record, error))


def abort_job(code: int) -> None:
    """Have hydra end the other ranks: without this they run on (Intel MPI), or wait for this one until they time out."""
    descriptor = os.environ.get("PMI_FD")
    if descriptor is None:
        return  # Open MPI ends them by itself
    try:
        os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)
    except OSError as error:
        records.complain("cluster-train: mpirun could not be asked to end the job: %s" % error)


def is_ended_by_mpirun(launcher: dict) -> bool:
    """Whether MPI's daemon goes by itself, having seen who was killed: it tells of that only where nobody aborts the job first.

    MPICH does so within 0.1 s; Intel MPI never, so that the other ranks would run on.
    """
    deadline = time.monotonic() + NOTICE_S
    while processes.is_alive(launcher) and time.monotonic() < deadline:
        time.sleep(processes.POLL_S)
    return launcher is not None and not processes.is_alive(launcher)


def connect(rank: place.Rank) -> pulse.Pulse:
    """The rank's connection to the supervisor, which need not come about."""
    return pulse.Pulse(rank.launch.get("beat"), dict(rank.who(), guard_pid=rank.guard_pid))


def tell_end(connection: pulse.Pulse, record: dict) -> None:
    """Have the supervisor know this exit record as soon as it can be told."""
    connection.keep({"kind": "ended", "record": record})
