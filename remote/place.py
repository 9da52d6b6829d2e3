"""What the plan wants of one rank, checked against what MPI and this machine say, and made ready for the script."""

import json
import os
import time

import processes
import records
import scratch
import stacks

# How each MPI tells a rank who it is: rank, size, local rank, local size.
MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_RANK", None, None, None),
)


class Refused(Exception):
    """This rank cannot run here as planned."""


class Rank:
    """One rank's part of the launch document, with the paths as this machine writes them."""

    def __init__(self, launch: dict, number: int, launcher_pid: int) -> None:
        self.launch = launch
        self.number = number
        self.launcher_pid = launcher_pid
        self.guard_pid = os.getpid()
        self.plan = next((plan for plan in launch["ranks"] if plan["rank"] == number), {})
        self.attempt = launch.get("attempt", 1)
        self.log = self.plan.get("log", number)  # ranks of a later attempt keep their files, whatever their number
        self.run_dir = records.to_path(launch["run_dir"])
        self.job_dir = records.to_path(launch["job_dir"]) if launch["job_dir"] else None
        self.work_dir = os.path.join(self.run_dir, "work")
        self.started_unix_s = time.time()
        self.tag = {records.RUN_VARIABLE: launch["run_id"], records.RANK_VARIABLE: str(number)}
        self.stop_signal = records.stop_signal(launch)

    def file(self, suffix: str) -> str:
        """The path of one of this rank's files."""
        return records.rank_file(self.run_dir, self.log, suffix)

    def who(self) -> dict:
        """What every record of this rank begins with."""
        return {
            "schema": 1,
            "rank": self.number,
            "log": self.log,
            "attempt": self.attempt,
            "node": self.plan.get("node"),
            "hostname": os.uname().nodename,
            "machine": processes.machine(),
            "boot": processes.boot(),
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


def find_place(environ: dict) -> tuple:
    """Rank, size, local rank and local size as MPI tells them; None for what it does not tell."""
    for names in MPI_VARIABLES:
        told = [name and environ.get(name) for name in names]
        if told[0] is None:
            continue
        if not all(value is None or value.isdigit() for value in told):
            raise Refused("MPI's variables %s are no numbers: %s" % (names, told))
        return tuple(value if value is None else int(value) for value in told)
    raise Refused("no MPI tells this process its rank (no PMI_RANK, OMPI_COMM_WORLD_RANK or PMIX_RANK): use mpirun")


def check_place(rank: Rank, told: tuple) -> None:
    """Raise Refused where mpirun did not do as planned, for example put two ranks on the wrong node."""
    _, size, local_rank, local_size = told
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
    for name, directories in launch.get("prepend", {}).items():  # what a setvars.sh puts before the rank's own list
        own = records.to_text(environment.get(records.to_bytes(name), b""))
        put({name: directories + ":" + own if own else directories})
    put(plan["env"])
    python_bin = os.path.dirname(launch["python"])
    search = records.to_text(environment.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin"))
    put({"PATH": python_bin + ":" + search, "VIRTUAL_ENV": os.path.dirname(python_bin), "PYTHONUNBUFFERED": "1"})
    put({"RANK": str(rank.number), "WORLD_SIZE": str(launch["world_size"])})
    put({"LOCAL_RANK": str(plan["local_rank"]), "LOCAL_WORLD_SIZE": str(plan["local_world_size"])})
    put({"CLUSTER_TRAIN_ATTEMPT": str(rank.attempt)})
    put({"CLUSTER_TRAIN_RESUME": launch["resume"]} if launch.get("resume") else {})
    put({"CLUSTER_TRAIN_BOOTSTRAP": json.dumps(launch.get("bootstrap"))})
    put({stacks.VARIABLE: rank.file("stacks")})
    put(rank.tag)
    return environment


def prepare_directories(rank: Rank) -> None:
    """The run's directory and `work/`, where every entry of the job's directory is found by its relative path.

    The ranks of a node, or of all nodes on a shared disk, do this at the same time.
    """
    records.make_private_dir(rank.work_dir)
    if os.environ.get("UCX_POSIX_DIR") == scratch.path(rank.launch["run_id"]):
        scratch.make(rank.launch["run_id"])  # UCX does not; Open MPI does; Intel MPI needs none
    for suffix in ("json", "exit.json"):
        if os.path.exists(rank.file(suffix)):
            records.put_away(rank.file(suffix))  # of an earlier attempt: it must not speak for this one
    if rank.attempt > 1:
        begin_attempt(rank)
    for name in os.listdir(rank.job_dir) if rank.job_dir else ():
        try:
            os.symlink(os.path.join(rank.job_dir, name), os.path.join(rank.work_dir, name))
        except FileExistsError:
            pass  # another rank was faster


def begin_attempt(rank: Rank) -> None:
    """Mark in the rank's logs, which go on from attempt to attempt, where this one begins: on a line of its own."""
    source = rank.launch.get("resume")
    where = "from %s" % source.replace(rank.work_dir + "/", "") if source else "from the beginning"
    mark = "cluster-train: attempt %d, %s\n" % (rank.attempt, where)
    for suffix, text in (("out", ""), ("err", mark)):
        with open(rank.file(suffix), "a+b", opener=records.private) as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - 1))
            is_cut = log.read() not in (b"", b"\n")
            log.write((b"\n" if is_cut else b"") + records.to_bytes(text))


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
