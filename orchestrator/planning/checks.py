"""What a node's facts foretell: findings that would make a run fail or crawl, each with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from orchestrator.planning.preflight import LARGEST_SKEW_S, Finding, error, unfit, warning
from orchestrator.specs.facts import NodeFacts

SMALLEST_SHM_BYTES = 1 << 29
SMALLEST_FREE_BYTES = 4 << 30  # the stack of torch 2.13 takes about 2 GB with its wheels
FEWEST_OPEN_FILES = 1024
SMALLEST_SKEW_S = 5.0


def findings(nodes: Sequence[NodeFacts], now_unix_s: float) -> tuple[Finding, ...]:
    """Everything that the facts of the nodes foretell, errors first."""
    found = [*unfit(nodes, now_unix_s), *(finding for node in nodes for finding in _node(node, now_unix_s))]
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def _node(node: NodeFacts, now_unix_s: float) -> Iterator[Finding]:
    skew_s = node.time_unix_s - now_unix_s
    if SMALLEST_SKEW_S < abs(skew_s) <= LARGEST_SKEW_S:
        yield warning(node, "clock differs", f"{skew_s:+.0f} s", "start a time service there: timedatectl set-ntp true")
    if node.disk.free_bytes < SMALLEST_FREE_BYTES and not node.state.envs:
        yield error(
            node, "too little disk space", f"{node.disk.free_bytes / 1e9:.1f} GB free", "free some, or name another `root`"
        )
    if node.shm_bytes < SMALLEST_SHM_BYTES:
        shown = f"/dev/shm has {node.shm_bytes / 1e6:.0f} MB"
        yield warning(node, "little shared memory", shown, "containers: --shm-size=1g; else mount -o remount,size=1g /dev/shm")
    if node.open_files_limit < FEWEST_OPEN_FILES:
        yield warning(node, "few open files allowed", str(node.open_files_limit), "raise `nofile` in /etc/security/limits.conf")
    cores = len({cpu.core for cpu in node.cpu.logical})
    if node.load_1m > cores / 2 + 1:
        yield warning(node, "others use this node", f"load {node.load_1m:.1f} on {cores} cores", "see who: uptime; top")
    if any(ip_address(address).is_loopback for address in node.hostname_resolves_to):
        shown = f"{node.hostname} is {', '.join(node.hostname_resolves_to)}"
        yield warning(
            node,
            "its name means itself only",
            shown,
            "handled: ranks are given interfaces and addresses, never names; scripts of yours must do so too",
        )
