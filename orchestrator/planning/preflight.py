"""What makes provisioning impossible, told from facts before anything is copied: for every node at once, with figure and remedy.

Pure. `doctor` shows the same findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from packaging.version import Version

from orchestrator.errors import ProvisionError
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.lock import Lock, LockedWheel

Severity = Literal["error", "warning", "note"]

NAMES_HANDLED = "handled: ranks are given interfaces and addresses, never names; scripts of yours must do so too"
LARGEST_SKEW_S = 86_400.0  # beyond that certificates count as expired, and new files look old
UNPACKED_RATIO = 3.5  # wheels to what is in them, measured on torch 2.13's stack: 428 MB to 1.5 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found on one node: an error makes `up` fail, a warning makes it slow or odd, a note is worth knowing."""

    severity: Severity
    node: str
    what: str
    evidence: str
    remedy: str


def unfit(nodes: Sequence[NodeFacts], now_unix_s: float) -> tuple[Finding, ...]:
    """Everything that rules out provisioning these nodes whatever the stack.

    Args:
        now_unix_s: the orchestrator's clock.
    """
    found = [finding for node in nodes for finding in _unfit(node, now_unix_s)]
    return (*found, *disagreements(nodes))


def disagreements(nodes: Sequence[NodeFacts]) -> tuple[Finding, ...]:
    """Nodes that one set of wheels cannot serve: architectures or interpreters differ."""
    machines = {node.name: node.arch for node in nodes}
    pythons = {node.name: "Python " + ".".join(node.python.version.split(".")[:2]) for node in nodes}
    return (
        *_unequal("architectures differ", machines, "leave some out: one set of wheels must serve all"),
        *_unequal(
            "interpreters differ",
            pythons,
            f"wheels and pickles must match: {_one_python(nodes)}",
        ),
    )


def _one_python(nodes: Sequence[NodeFacts]) -> str:
    common = sorted(set.intersection(*(set(node.python.others) for node in nodes)), key=Version)
    if not common:
        return "install the same Python on all nodes"
    return f'all nodes have Python {", ".join(common)}: name one, as in `stack: {{python: "{common[-1]}"}}`'


def unfit_for(lock: Lock, nodes: Iterable[NodeFacts], size_bytes: Callable[[LockedWheel], int]) -> tuple[Finding, ...]:
    """What rules out installing a lock on nodes that lack it: no room, or no module `venv` where pip has to serve."""
    return tuple(finding for node in nodes for finding in _unfit_for(lock, node, size_bytes))


def needed_bytes(lock: Lock, node: NodeFacts, size_bytes: Callable[[LockedWheel], int]) -> int:
    """The disk space that an environment takes on a node: the wheels that it lacks, and all of them unpacked."""
    here = set(node.state.wheels)
    missing = sum(size_bytes(wheel) for wheel in lock.all_wheels if wheel.sha256 not in here)
    return missing + int(UNPACKED_RATIO * sum(size_bytes(wheel) for wheel in lock.all_wheels))


def refuse(found: Iterable[Finding]) -> None:
    """Raise one ProvisionError that holds all the errors among findings, each with its nodes and figures."""
    errors = sorted((finding for finding in found if finding.severity == "error"), key=lambda finding: finding.what)
    if not errors:
        return
    lines: list[str] = []
    advice: list[str] = []
    for what, group in groupby(errors, key=lambda finding: finding.what):
        same = list(group)
        lines.append(f"{what}: " + ", ".join(f"{finding.node} {finding.evidence}" for finding in same))
        advice += dict.fromkeys(finding.remedy for finding in same)
    raise ProvisionError(
        "nothing was copied, these nodes cannot be used as they are:\n    " + "\n    ".join(lines), advice="\n".join(advice)
    )


def error(node: NodeFacts, what: str, evidence: str, remedy: str) -> Finding:
    """A finding that makes `up` fail."""
    return Finding(severity="error", node=node.name, what=what, evidence=evidence, remedy=remedy)


def warning(node: NodeFacts, what: str, evidence: str, remedy: str) -> Finding:
    """A finding that makes `up` slow or odd."""
    return Finding(severity="warning", node=node.name, what=what, evidence=evidence, remedy=remedy)


def note(node: NodeFacts, what: str, evidence: str, remedy: str) -> Finding:
    """A finding that is worth knowing, and does no harm."""
    return Finding(severity="note", node=node.name, what=what, evidence=evidence, remedy=remedy)


def _unfit(node: NodeFacts, now_unix_s: float) -> Iterator[Finding]:
    if not node.disk.writable:
        shown = f"{node.root} as {node.user}"
        yield error(node, "root cannot be written", shown, "name another `root`, or make this one writable")
    if node.libc[0] != "glibc":
        shown = " ".join(node.libc).strip() or "unknown"
        yield error(node, "no glibc", shown, "torch's wheels need a glibc-based system")
    skew_s = node.time_unix_s - now_unix_s
    if abs(skew_s) > LARGEST_SKEW_S:
        yield error(node, "clock is wrong", f"by {skew_s / 86_400:+.1f} days", "set it: timedatectl set-ntp true")


def _unfit_for(lock: Lock, node: NodeFacts, size_bytes: Callable[[LockedWheel], int]) -> Iterator[Finding]:
    needed = needed_bytes(lock, node, size_bytes)
    if node.disk.free_bytes < needed:
        shown = f"{node.root} has {node.disk.free_bytes / 1e9:.1f} GB free, about {needed / 1e9:.1f} GB are needed"
        yield error(node, "too little disk space", shown, "free some space there, or name another `root`")
    if lock.installer is None and not node.python.has_venv:
        shown = f"Python {node.python.version} lacks venv or ensurepip, and is too old for uv"
        yield error(node, "no module venv", shown, "install it (Debian: apt-get install python3-venv), or a Python from 3.8 on")


def _unequal(what: str, values: Mapping[str, str], remedy: str) -> Iterator[Finding]:
    if len(set(values.values())) > 1:
        for node, value in values.items():
            yield Finding(severity="error", node=node, what=what, evidence=value, remedy=remedy)
