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

import json
import os
import signal
import sys
import time

import children
import processes
import records

REFUSED = 97  # exit code: this rank is not where the plan wants it, or cannot start
BROKEN = 98  # exit code: this program itself failed
ABORT_GRACE_S = 1.0  # between SIGTERM and SIGKILL when the job is lost anyway
LOST = {signal.SIGHUP, signal.SIGTERM}
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}

# How each MPI tells a rank who it is: rank, size, local rank, local size.
MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_RANK", None, None, None),
)
# Parents worth remembering: on other nodes mpirun's own daemons do not carry the run's tag.
MPI_DAEMONS = ("hydra_", "mpiexec", "mpirun", "prte", "orted")


class Refused(Exception):
    """This rank cannot run here as planned."""


class Rank:
    """One rank's part of the launch document, with the paths as this machine writes them."""

    def __init__(self, launch: dict, number: int, launcher_pid: int) -> None:
        self.launch = launch
        self.number = number
        self.launcher_pid = launcher_pid
        self.plan = next((plan for plan in launch["ranks"] if plan["rank"] == number), {})
        self.run_dir = records.to_path(launch["run_dir"])
        self.job_dir = records.to_path(launch["job_dir"]) if launch["job_dir"] else None
        self.work_dir = os.path.join(self.run_dir, "work")
        self.started_unix_s = time.time()
        self.tag = {records.RUN_VARIABLE: launch["run_id"], records.RANK_VARIABLE: str(number)}
        self.stop_signal = getattr(signal, launch.get("stop_signal", "SIGTERM"))

    def file(self, suffix: str) -> str:
        """The path of one of this rank's files."""
        return records.rank_file(self.run_dir, self.number, suffix)

    def who(self) -> dict:
        """What every record of this rank begins with."""
        return {
            "schema": 1,
            "rank": self.number,
            "node": self.plan.get("node"),
            "hostname": os.uname().nodename,
            "machine": processes.machine(),
            "started_unix_s": self.started_unix_s,
        }

    def command(self) -> list:
        """The script's command line."""
        script = records.to_path(self.launch["argv"][0])
        if self.job_dir:
            script = os.path.realpath(os.path.join(self.job_dir, script))
        bootstrap = os.path.join(records.to_path(self.launch["agent_dir"]), "bootstrap.py")
        for needed in (bootstrap, script):
            if not os.path.isfile(needed):
                raise Refused("there is no %s on this node: copy the job to it again" % needed)
        python = records.to_path(self.launch["python"])
        arguments = [records.to_bytes(word) for word in self.launch["argv"][1:]]
        return [os.fsencode(word) for word in (python, "-u", bootstrap, script)] + arguments


def main() -> int:
    """Run this rank to its end; its exit code."""
    launcher = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    children.die_with(launcher, signal.SIGHUP)
    number, rank = None, None
    try:
        launch = records.decode_launch(os.environ.get(records.LAUNCH_VARIABLE, ""))
        place = find_place(os.environ)
        number = place[0]
        rank = Rank(launch, number, launcher)
        check_place(rank, place)
        command, environment = rank.command(), script_environment(rank, os.environb)
        prepare_directories(rank)
        bind(rank.plan["cores"])
    except (Refused, ValueError, OSError) as error:
        return refuse(rank, number, error)
    return guard(rank, command, environment)


def find_place(environ: dict) -> tuple:
    """Rank, size, local rank and local size as MPI tells them; None for what it does not tell."""
    for names in MPI_VARIABLES:
        told = [name and environ.get(name) for name in names]
        if told[0] is not None and all(value is None or value.isdigit() for value in told):
            return tuple(value if value is None else int(value) for value in told)
        if told[0] is not None:
            raise Refused("MPI's variables %s are no numbers: %s" % (names, told))
    raise Refused("no MPI tells this process its rank (no PMI_RANK, OMPI_COMM_WORLD_RANK or PMIX_RANK): use mpirun")


def check_place(rank: Rank, place: tuple) -> None:
    """Raise Refused where mpirun did not do as planned, for example put two ranks on the wrong node."""
    _, size, local_rank, local_size = place
    plan, hostname = rank.plan, os.uname().nodename
    checks = (
        ("ranks in all", size, rank.launch["world_size"]),
        ("host", hostname if plan.get("hostname") else None, plan.get("hostname")),
        ("local rank", local_rank, plan.get("local_rank")),
        ("ranks on this node", local_size, plan.get("local_world_size")),
    )
    wrong = ["%s: %s instead of %s" % check for check in checks if check[1] is not None and check[1] != check[2]]
    if not plan:
        wrong = ["it has no such rank"]
    if wrong:
        raise Refused("mpirun did not follow the plan (%s)" % "; ".join(wrong))


def script_environment(rank: Rank, inherited: dict) -> dict:
    """The script's environment as bytes: MPI's own variables, the job's, this rank's, then what makes it a rank."""
    plan, launch = rank.plan, rank.launch
    environment = {name: value for name, value in inherited.items() if name != records.LAUNCH_VARIABLE.encode()}

    def put(variables):
        for name, value in variables.items():
            if not isinstance(value, str) or "\0" in name + value or "=" in name or not name:
                raise Refused("the environment variable %r cannot have the value %r" % (name, value))
            environment[records.to_bytes(name)] = records.to_bytes(value)

    put(launch["env"])
    put(plan["env"])
    python_bin = os.path.dirname(launch["python"])
    search = records.to_text(environment.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin"))
    put({"PATH": python_bin + ":" + search, "VIRTUAL_ENV": os.path.dirname(python_bin), "PYTHONUNBUFFERED": "1"})
    put({"RANK": str(rank.number), "WORLD_SIZE": str(launch["world_size"])})
    put({"LOCAL_RANK": str(plan["local_rank"]), "LOCAL_WORLD_SIZE": str(plan["local_world_size"])})
    put({"CLUSTER_TRAIN_BOOTSTRAP": json.dumps(launch.get("bootstrap"))})
    put(rank.tag)
    return environment


def prepare_directories(rank: Rank) -> None:
    """The run's directory and `work/`, where every entry of the job's directory is found by its relative path.

    The ranks of a node, or of all nodes on a shared disk, do this at the same time.
    """
    records.make_private_dir(rank.work_dir)
    for suffix in ("json", "exit.json"):
        if os.path.exists(rank.file(suffix)):
            os.unlink(rank.file(suffix))  # of an earlier start of the same command: it must not speak for this one
    for name in os.listdir(rank.job_dir) if rank.job_dir else ():
        try:
            os.symlink(os.path.join(rank.job_dir, name), os.path.join(rank.work_dir, name))
        except FileExistsError:
            pass  # another rank was faster


def bind(cores: list) -> None:
    """Bind this process, and all it starts, to these logical CPUs; Refused where one of them is not ours."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        pass  # none of them may be used: the comparison below says so
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise Refused("the plan binds this rank to CPUs %s, which it may not use here: plan again" % missing)


def refuse(rank: Rank, number: int, error: Exception) -> int:
    """Say why this rank does not run, record it, and end the job; its exit code."""
    message = "rank %s on %s: %s" % ("?" if number is None else number, os.uname().nodename, error)
    sys.stderr.write("cluster-train: %s\n" % message)
    if rank:
        records.make_private_dir(rank.run_dir)
        put(rank, "exit.json", exit_record(rank, exit_code=REFUSED, error=message))
    abort_job(REFUSED)
    return REFUSED


def guard(rank: Rank, command: list, environment: dict) -> int:
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


def stand_in(rank: Rank, keeper: children.Child) -> int:
    """Do what a lost keeper could not: end the script's processes, record the end, end the job."""
    kill_tree(rank, keeper)
    error = "the process that watched this rank ended with %s" % (keeper.signal or "code %d" % keeper.exit_code)
    put(rank, "exit.json", exit_record(rank, keeper, signal="SIGKILL", exit_code=None, pid=None, error=error))
    abort_job(keeper.shell_code or BROKEN)
    return keeper.shell_code or BROKEN


def keep(rank: Rank, command: list, environment: dict, guard_pid: int) -> int:
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


def watch(rank: Rank, script: children.Child, guard_pid: int) -> str:
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


def kill_tree(rank: Rank, child: children.Child) -> list:
    """SIGKILL all that this rank started, wherever it went; identities of what does not die."""

    def find():
        child.reap()
        below = processes.descendants(os.getpid())
        return below + [who for who in processes.tagged(rank.tag) if who not in below]

    return processes.kill_all(find)[1]


def rank_record(rank: Rank, script: children.Child, guard_pid: int) -> dict:
    """Which processes are this rank."""
    guarding = processes.identity(guard_pid) or {"pid": guard_pid, "start_ticks": None}
    return dict(
        rank.who(),
        keeper=processes.identity(os.getpid()),
        child=processes.identity(script.pid),
        launcher=launcher_identity(rank.launcher_pid),
        **guarding,
    )


def launcher_identity(pid: int) -> dict:
    """MPI's daemon that started this rank; None where the parent is something else, a person's shell for example."""
    try:
        with open("/proc/%d/comm" % pid) as stream:
            return processes.identity(pid) if stream.read().startswith(MPI_DAEMONS) else None
    except (FileNotFoundError, ProcessLookupError):
        return None


def exit_record(rank: Rank, child: children.Child = None, **facts: object) -> dict:
    """How this rank ended; `facts` win over what `child` tells."""
    record = dict(rank.who(), ended_unix_s=time.time(), ended_by=None, error=None, left=[])
    for field in ("pid", "exit_code", "signal"):
        record[field] = getattr(child, field, None)
    record["max_rss_bytes"] = child.max_rss_bytes if child else 0
    record["cpu_s"] = round(child.cpu_s, 3) if child else 0.0
    record.update(facts)
    record["stopped"] = record["ended_by"] is not None
    return record


def put(rank: Rank, suffix: str, record: dict) -> None:
    """Write a record; a full disk must not keep the job from ending."""
    try:
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
