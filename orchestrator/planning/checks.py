"""What a node's facts foretell: findings that would make a run fail or crawl, each with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address

from orchestrator.errors import AuthenticationError, ClusterTrainError, HostKeyError, UnreachableError
from orchestrator.planning.launch import BF16_FLAGS
from orchestrator.planning.preflight import LARGEST_SKEW_S, NAMES_HANDLED, Finding, error, note, unfit, warning
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth
from orchestrator.specs.inventory import Inventory

SMALLEST_SHM_BYTES = 1 << 29
FREE_BYTES = 2_000_000_000  # that the stack of torch 2.13 takes with its wheels, where what is needed is not known better
FEWEST_INODES = 34_000  # its files and directories
FEWEST_OPEN_FILES = 1024
FEWEST_PROCESSES = 1024  # threads count: every rank has one per core and some more
SMALLEST_SKEW_S = 5.0
SMALLEST_LOCKED_BYTES = 1 << 26
FEWEST_SESSIONS = 2  # at once on one connection: one holds the node, in the other all else is done
SESSIONS = 3  # that `up` uses: it follows, looks and stops at the same time
SLOW_GOVERNORS = ("powersave", "conservative")
PROXIES = ("hydra_bstrap_proxy", "hydra_pmi_proxy", "orted", "prted")
ORDER = {"error": 0, "warning": 1, "note": 2}

OPEN_FILES_REMEDY = "raise `nofile` in /etc/security/limits.conf"


def findings(
    nodes: Sequence[NodeFacts], now_unix_s: float, health: Mapping[str, NodeHealth] | None = None
) -> tuple[Finding, ...]:
    """Everything that the facts of the nodes foretell, errors first.

    Args:
        now_unix_s: the orchestrator's clock.
        health: by node; where a node has none, only its facts are looked at.
    """
    known = health or {}
    found = list(unfit(nodes, now_unix_s))
    for node in nodes:
        skew_s = known[node.name].skew_s if node.name in known else node.time_unix_s - now_unix_s
        found += [*_clock(node, skew_s, known.get(node.name)), *_machine(node, known.get(node.name)), *_names(node)]
    return by_severity(found)


def by_severity(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then notes; otherwise in the given order, and each once."""
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: ORDER[finding.severity]))


def unreached(node: str, failure: ClusterTrainError) -> Finding:
    """The finding of a node that could not be connected to, or not be asked."""
    kinds = {HostKeyError: "host key not trusted", AuthenticationError: "login refused", UnreachableError: "cannot be reached"}
    what = next((words for kind, words in kinds.items() if isinstance(failure, kind)), "cannot be asked")
    if isinstance(failure, HostKeyError) and "CHANGED" in failure.message:
        what = "host key has changed"
    evidence = failure.message.removeprefix(f"{node}: ")
    return Finding(severity="error", node=node, what=what, evidence=evidence, remedy=failure.advice)


def health_findings(node: NodeFacts, health: NodeHealth, inventory: Inventory) -> Iterator[Finding]:
    """What a closer look at one node tells, beside its facts."""
    yield from _places(node, health, inventory)
    yield from _processors(node, health, inventory)
    yield from _limits(node, health)
    yield from _keys(node, health)


def room_findings(nodes: Sequence[NodeFacts], health: Mapping[str, NodeHealth]) -> Iterator[Finding]:
    """Where an environment would not fit, as far as its size can be guessed; of nodes that have none."""
    for node in nodes:
        free_inodes = health[node.name].free_inodes
        if node.disk.free_bytes < FREE_BYTES:
            shown = f"{node.root} has {node.disk.free_bytes / 1e9:.1f} GB free, about {FREE_BYTES / 1e9:.1f} GB are needed"
            yield error(node, "too little disk space", shown, "free some space there, or name another `root`")
        if free_inodes is not None and free_inodes < FEWEST_INODES:
            shown = f"{free_inodes} more files fit on {health[node.name].root.path}"
            yield error(node, "too few files fit", shown, "remove many small files there, or name another `root`")


def mpi_findings(head: str, health: Mapping[str, NodeHealth], runnable: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """An mpirun of the nodes' own that is not found on the head, or whose helper is not at the head's place on other nodes.

    Args:
        runnable: by node, those of `helpers_beside` the head's launcher that are there.
    """
    program = health[head].programs.get("mpirun")
    for node, found in health.items():
        if program is None and "mpirun" not in found.programs:
            remedy = "set PATH where non-interactive shells read it (~/.bashrc before its `return`, or ~/.ssh/environment), or "
            yield Finding(
                severity="error",
                node=node,
                what="mpirun not found",
                evidence=f"PATH is {found.path}",
                remedy=f"{remedy}`mpi: impi`",
            )
        elif program is not None and not runnable.get(node, ["unknown"]):
            shown = f"none of {', '.join(PROXIES)} in {program.rpartition('/')[0]}, where {head} has its mpirun"
            remedy = "install the same MPI at the same place on all nodes, or `mpi: impi`"
            yield Finding(severity="error", node=node, what="MPI's helper not found", evidence=shown, remedy=remedy)


def helpers_beside(program: str) -> list[str]:
    """One of these is started on every node by a launcher, which looks for it at its own place."""
    return [f"{program.rpartition('/')[0]}/{name}" for name in PROXIES]


def _clock(node: NodeFacts, skew_s: float, health: NodeHealth | None) -> Iterator[Finding]:
    doubt_s = health.skew_error_s if health else 0.0
    if SMALLEST_SKEW_S + doubt_s < abs(skew_s) <= LARGEST_SKEW_S:
        shown = f"{skew_s:+.0f} s" + (" from node0's" if health else "")
        yield warning(node, "clock differs", shown, "start a time service there: timedatectl set-ntp true")


def _machine(node: NodeFacts, health: NodeHealth | None) -> Iterator[Finding]:
    if node.shm_bytes < SMALLEST_SHM_BYTES:
        shown = f"/dev/shm has {node.shm_bytes / 1e6:.0f} MB free"
        yield warning(node, "little shared memory", shown, "containers: --shm-size=1g; else mount -o remount,size=1g /dev/shm")
    if node.open_files_limit < FEWEST_OPEN_FILES:
        yield warning(node, "few open files allowed", str(node.open_files_limit), OPEN_FILES_REMEDY)
    cores = len({cpu.core for cpu in node.cpu.logical})
    if node.load_1m > cores / 2 + 1:
        busiest = f", most of all {health.busiest[:60]}" if health and health.busiest else ""
        yield warning(node, "others use this node", f"load {node.load_1m:.1f} on {cores} cores{busiest}", "see who: uptime; top")


def _names(node: NodeFacts) -> Iterator[Finding]:
    if not node.hostname_resolves_to:
        yield note(node, "its name does not resolve", node.hostname, NAMES_HANDLED)
    elif any(ip_address(address.partition("%")[0]).is_loopback for address in node.hostname_resolves_to):
        shown = f"{node.hostname} is {', '.join(node.hostname_resolves_to)}"
        yield note(node, "its name means itself only", shown, NAMES_HANDLED)


def _places(node: NodeFacts, health: NodeHealth, inventory: Inventory) -> Iterator[Finding]:
    if health.root_error and node.disk.writable:  # rights allow it: told by `unfit` where they do not
        shown = f"{health.root.path}: {health.root_error}"
        yield error(node, "root cannot be written", shown, "free some space there, or name another `root`")
    if health.shm_error:  # Open MPI's daemons need it; others and DataLoader's workers only if they pass things on in memory
        kind = error if inventory.stack.mpi == "openmpi" else warning
        yield kind(node, "/dev/shm cannot be written", health.shm_error, "mount it: mount -t tmpfs -o size=1g tmpfs /dev/shm")
    if health.home.is_remote:
        shown = f"{health.home.path} is {health.home.filesystem}"
        yield note(node, "home on a network disk", shown, "a root in common is filled once; a local `root` imports faster")
    if health.noise:
        shown = f"prints {health.noise!r}"
        remedy = "print only in interactive shells: put `case $- in *i*) ;; *) return;; esac` first in ~/.bashrc there"
        yield warning(node, "shell start-up is noisy", shown, remedy)


def _processors(node: NodeFacts, health: NodeHealth, inventory: Inventory) -> Iterator[Finding]:
    cores, allowed = len({cpu.core for cpu in node.cpu.logical}), len(node.cpu.logical)
    limit = node.cpu.cgroup_cpu_limit
    if limit is not None and limit < cores:
        shown = f"time of {limit:g} CPUs for {cores} cores"
        remedy = "raise the container's limit (docker: --cpus), or set job.omp_threads and job.ppn to fit it"
        yield warning(node, "processor time is limited", shown, remedy)
    if allowed < node.cpu.online:
        shown = f"{allowed} of {node.cpu.online} CPUs may be used"
        yield note(node, "some CPUs are not ours", shown, "handled: ranks are bound to allowed cores only")
    if slow := [governor for governor in health.governors if governor in SLOW_GOVERNORS]:
        yield warning(node, "processors are throttled", f"governor {', '.join(slow)}", "cpupower frequency-set -g performance")
    flags, wants_bf16 = set(node.cpu.flags), inventory.job.bf16 is True or "--bf16" in inventory.job.args
    if "avx2" not in flags and node.arch == "x86_64":
        yield warning(node, "processor is slow for training", f"{node.cpu.model}: no AVX2", "leave this node out")
    if wants_bf16 and not flags & BF16_FLAGS:
        shown = f"{node.cpu.model}: neither AVX512_BF16 nor AMX"
        yield warning(node, "bf16 does not pay here", shown, "bf16: false   under `job:`, or leave this node out")
    elif not wants_bf16 and flags & BF16_FLAGS and inventory.job.script:
        shown = f"has {', '.join(sorted(flags & BF16_FLAGS))}"
        yield note(node, "bf16 would pay here", shown, "bf16: true   under `job:`, where all nodes have it")


def _limits(node: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    processes, locked = health.limits.get("processes"), health.limits.get("locked_bytes")
    if processes is not None and processes < FEWEST_PROCESSES:
        remedy = "raise `nproc` in /etc/security/limits.conf"
        yield warning(node, "few processes allowed", str(processes), remedy)
    if health.has_rdma and locked is not None and locked < SMALLEST_LOCKED_BYTES:
        shown = f"{locked / 1e6:.1f} MB, with an InfiniBand card"
        yield warning(node, "little memory may be locked", shown, "raise `memlock` in /etc/security/limits.conf to unlimited")
    if health.sessions is not None and health.sessions < SESSIONS:
        shown = f"{health.sessions} at once on one connection"
        kind = error if health.sessions < FEWEST_SESSIONS else warning
        yield kind(node, "sshd allows few sessions", shown, "MaxSessions 10   in /etc/ssh/sshd_config there, then reload sshd")


def _keys(node: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    for key in health.keys:
        shown = f"{key.comment}, from {key.origin or 'anywhere'}"
        if key.is_persons:
            yield note(
                node, "a person's key may log in", f"{key.comment}, put there by `init`", "`cluster-train teardown` removes it"
            )
        elif key.is_restricted and key.origin:
            yield note(node, "a cluster key may log in", shown, "`cluster-train teardown` removes it")
        else:
            yield warning(node, "a cluster key is not restricted", shown, "remove its line from ~/.ssh/authorized_keys there")
