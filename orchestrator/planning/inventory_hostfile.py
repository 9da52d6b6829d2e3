"""A plain hostfile -> `Source`: the same nodes that mpirun or DeepSpeed would read from it.

node0                        # a host; its number of ranks is left to the job
trainer@node1:2              # hydra (Intel MPI, MPICH): two ranks; here ":2" is a count, not a port
node2 slots=2 max_slots=4    # Open MPI, DeepSpeed
[fe80::1]:2                  # an IPv6 address needs brackets before a count
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from orchestrator.planning.inventory_source import Data, KeyPath, Problem, Source, shown
from orchestrator.specs.inventory_values import parse_address

# What can begin a YAML inventory but not a hostfile: a marker, a flow mapping, a list item, or a key with its colon.
_YAML_START = re.compile(r"---|%|\{|-\s|&|!|['\"]|\?\s|[^\s:]+\s*:(\s|$)")
_OPTION = re.compile(r"(slots|max_slots|max-slots)=([1-9][0-9]{0,4})")
_FORMS = "expected `host`, `user@host`, `host:2` or `host slots=2 max_slots=4`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    line: int
    user: str | None
    host: str
    slots: int | None


def is_hostfile(text: str) -> bool:
    """Whether the first line that says something names a host and is no piece of YAML."""
    first = next(filter(None, map(_meaning, text.split("\n"))), "")
    return bool(first) and not _YAML_START.match(first)


def read_hostfile(text: str) -> Source:
    """Read a hostfile; a host on several lines is one node with the sum of their slots."""
    hosts: dict[str, _Host] = {}
    problems: list[Problem] = []
    for number, row in enumerate(text.split("\n"), start=1):
        try:
            if _meaning(row):
                host = _read_line(number, _meaning(row))
                key = host.host.lower()
                hosts[key] = _joined(hosts[key], host) if key in hosts else host
        except ValueError as error:
            problems.append(Problem(line=number, text=str(error)))
    nodes: list[Data] = [
        {"host": host.host, "user": host.user, "slots": str(host.slots) if host.slots else None} for host in hosts.values()
    ]
    lines: dict[KeyPath, int] = {("nodes", index): host.line for index, host in enumerate(hosts.values())}
    return Source(data={"nodes": nodes}, lines=lines, problems=tuple(problems))


def _meaning(row: str) -> str:
    return row.partition("#")[0].strip()


def _read_line(number: int, text: str) -> _Host:
    word, *options = re.sub(r"\s*=\s*", "=", text).split()
    try:
        address = parse_address(word)
    except ValueError:
        raise ValueError(f"{_FORMS}, got {shown(word)}") from None
    counts = _counts(options)
    if address.port and "slots" in counts:
        raise ValueError(f"the slots of {address.host} are given twice in one line")
    most = counts.get("max_slots")
    slots = address.port or counts.get("slots", most)
    if most and slots and slots > most:
        raise ValueError(f"{slots} slots are more than max_slots={most}")
    return _Host(line=number, user=address.user, host=address.host, slots=slots)


def _counts(options: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ValueError(f"{_FORMS}, got {shown(option)}")
        name = match[1].replace("-", "_")
        if name in counts:
            raise ValueError(f"{name} is given twice in one line")
        counts[name] = int(match[2])
    return counts


def _joined(first: _Host, again: _Host) -> _Host:
    if first.user != again.user and None not in (first.user, again.user):
        raise ValueError(f"{again.host} has another user on line {first.line}")
    # As mpirun counts: a line without a number is one slot, once there are several.
    slots = (first.slots or 1) + (again.slots or 1)
    return replace(first, user=first.user or again.user, slots=slots)
