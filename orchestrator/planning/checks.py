"""What a node's facts foretell: findings that would make a run fail or crawl, each with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from orchestrator.specs.facts import NodeFacts

Severity = Literal["error", "warning"]

SMALLEST_SHM_BYTES = 1 << 29
SMALLEST_FREE_BYTES = 4 << 30  # the stack of torch 2.13 takes about 2 GB with its wheels
FEWEST_OPEN_FILES = 1024
LARGEST_SKEW_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: an error makes `up` fail, a warning makes it slow or odd."""

    severity: Severity
    node: str
    what: str
    evidence: str
    remedy: str


def findings(nodes: Sequence[NodeFacts], now_unix_s: float) -> tuple[Finding, ...]:
    """Everything that the facts of the nodes foretell, errors first."""
    found = [finding for node in nodes for finding in _node(node)]
    found += _clocks(nodes, now_unix_s)
    found += _same_python(nodes)
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def _node(node: NodeFacts) -> Iterator[Finding]:
    if not node.disk.writable:
        yield _error(node, "root cannot be written", node.root, "name another `root`, or make this one writable")
    if node.disk.free_bytes < SMALLEST_FREE_BYTES and not node.state.envs:
        yield _error(
            node, "too little disk space", f"{node.disk.free_bytes / 1e9:.1f} GB free", "free some, or name another `root`"
        )
    if node.libc[0] != "glibc":
        yield _error(node, "no glibc", str(node.libc), "torch's wheels need a glibc-based system")
    if node.shm_bytes < SMALLEST_SHM_BYTES:
        shown = f"/dev/shm has {node.shm_bytes / 1e6:.0f} MB"
        yield _warning(node, "little shared memory", shown, "containers: --shm-size=1g; else mount -o remount,size=1g /dev/shm")
    if node.open_files_limit < FEWEST_OPEN_FILES:
        yield _warning(node, "few open files allowed", str(node.open_files_limit), "raise `nofile` in /etc/security/limits.conf")
    cores = len({cpu.core for cpu in node.cpu.logical})
    if node.load_1m > cores / 2 + 1:
        yield _warning(node, "others use this node", f"load {node.load_1m:.1f} on {cores} cores", "see who: uptime; top")
    if any(ip_address(address).is_loopback for address in node.hostname_resolves_to):
        shown = f"{node.hostname} is {', '.join(node.hostname_resolves_to)}"
        yield _warning(
            node,
            "its name means itself only",
            shown,
            "handled: ranks are given interfaces and addresses, never names; scripts of yours must do so too",
        )


def _clocks(nodes: Sequence[NodeFacts], now_unix_s: float) -> Iterable[Finding]:
    for node in nodes:
        skew_s = node.time_unix_s - now_unix_s
        if abs(skew_s) > LARGEST_SKEW_S:
            yield _warning(node, "clock differs", f"{skew_s:+.0f} s", "start a time service there: timedatectl set-ntp true")


def _same_python(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    versions = {node.name: ".".join(node.python.version.split(".")[:2]) for node in nodes}
    if len(set(versions.values())) > 1:
        for node in nodes:
            yield _error(node, "interpreters differ", f"Python {versions[node.name]}", "`stack.python` names one that all have")


def _error(node: NodeFacts, what: str, evidence: str, remedy: str) -> Finding:
    return Finding(severity="error", node=node.name, what=what, evidence=evidence, remedy=remedy)


def _warning(node: NodeFacts, what: str, evidence: str, remedy: str) -> Finding:
    return Finding(severity="warning", node=node.name, what=what, evidence=evidence, remedy=remedy)
