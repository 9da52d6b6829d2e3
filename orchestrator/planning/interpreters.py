"""Whether the nodes' interpreter is one that the wanted torch has wheels for; told before anything is resolved. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.version import Version

from orchestrator.errors import ProvisionError
from orchestrator.planning.compat import admits, facts, pinned
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Stack

BUILDS_OF_THE_INDEX = ("cpu", "cu")  # local versions; any other is somebody's own build, for an interpreter of their own choice


def refuse_interpreter(stack: Stack, nodes: Sequence[NodeFacts]) -> None:
    """Raise ProvisionError where torch has no wheels for the nodes' Python; what would do is in its advice.

    Args:
        nodes: which have one minor version of Python.
    """
    python = minor(nodes[0].python.version)
    if _may_be_had(stack.torch, python):
        return
    wanted = [series for series in _series() if _admits_series(stack.torch, series)]
    oldest, newest = _series()[wanted[0]][0], _series()[wanted[-1]][1]
    have = ", ".join(f"{node.name} Python {node.python.version} {node.arch}" for node in nodes)
    raise ProvisionError(
        f"torch {stack.torch} has no wheels for Python {python}, only for {oldest} to {newest}; the nodes have {have}",
        advice=f"what works: {'; or '.join(_ways(stack.torch, python, nodes))}",
    )


def minor(version: str) -> str:
    """ "3.11" of "3.11.2"."""
    return ".".join(version.split(".")[:2])


def _may_be_had(torch: str, python: str) -> bool:
    """Whether the table has a series that fits, or cannot tell."""
    one = pinned(torch)
    if one and one.local and not one.local.startswith(BUILDS_OF_THE_INDEX):
        return True
    wanted = [series for series in _series() if _admits_series(torch, series)]
    newest = list(_series())[-1]
    is_beyond = Version(python) > Version(_series()[newest][1]) and _admits_later(torch, newest)
    return not wanted or is_beyond or any(_fits(series, python) for series in wanted)


def _ways(torch: str, python: str, nodes: Sequence[NodeFacts]) -> list[str]:
    """What would do, the least change first: another interpreter that all nodes have, or another torch."""
    common = set.intersection(*(set(node.python.others) for node in nodes))
    usable = sorted((other for other in common if _may_be_had(torch, other)), key=Version)
    ways = [f'`stack: {{python: "{usable[-1]}"}}`, which all nodes have'] if usable else []
    fitting = [series for series in _series() if _fits(series, python)]
    ways += [f"with Python {python} torch {fitting[0]} to {fitting[-1]}"] if fitting else []
    return ways if usable else [*ways, "a Python from that range, installed on all nodes and named in `stack.python`"]


def _series() -> Mapping[str, Sequence[str]]:
    table: Mapping[str, Sequence[str]] = facts()["torch_pythons"]
    return table


def _fits(series: str, python: str) -> bool:
    oldest, newest = _series()[series]
    return Version(oldest) <= Version(python) <= Version(newest)


def _admits_series(torch: str, series: str) -> bool:
    return any(admits(torch, Version(f"{series}.{patch}")) for patch in range(10))


def _admits_later(torch: str, newest: str) -> bool:
    major, last = map(int, newest.split("."))
    return any(admits(torch, Version(f"{major}.{later}.0")) for later in range(last + 1, last + 50))
