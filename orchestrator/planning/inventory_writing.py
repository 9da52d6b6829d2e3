"""An inventory as text, with what was found on the machines: values where they matter, the rest as comments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import chain, count
from typing import Any

from orchestrator.errors import PreflightError
from orchestrator.planning.launch import BF16_FLAGS
from orchestrator.planning.network import NetworkChoice
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Node
from orchestrator.specs.run import Endpoint

FIELDS = ("host", "port", "user", "key", "via", "slots")


def named(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """The nodes as an inventory holds them: each under its host's name, those known by addresses as node0, node1, …

    No two have one name, whatever the hosts are called: what is taken gets the next number.
    """
    hosts = {node.name.lower() for node in nodes if not _is_address(node)}
    used: set[str] = set()
    rows = []
    for index, node in enumerate(nodes):
        choices: Iterator[str]
        if _is_address(node):
            choices = (name for number in count(index) if (name := f"node{number}") not in hosts)
        else:
            choices = chain((node.name,), (f"{node.name}-{number}" for number in count(2)))
        name = next(name for name in choices if name.lower() not in used)
        used.add(name.lower())
        rows.append({"name": name, **{field: value for field in FIELDS if (value := getattr(node, field)) is not None}})
    return rows


def written_inventory(
    nodes: Sequence[Mapping[str, Any]],
    ssh: Mapping[str, Any],
    facts: Sequence[NodeFacts],
    network: NetworkChoice | PreflightError,
) -> str:
    """The text of an inventory of nodes that were looked at.

    Args:
        nodes: as `named` makes them.
        ssh: what is said for all of them; empty for nothing.
        facts: in the nodes' order.
        network: the chosen one, or why none can be.
    """
    lines = ["# Written by `cluster-train init` from what it found; every key that is missing has a default.", "cluster: lab", ""]
    lines += _root(facts)
    lines += [f"ssh: {_flow(ssh)}", ""] if ssh else []
    lines += _network(network)
    lines += ["# The first node is where mpirun starts.", "nodes:"]
    endpoints = network.endpoints if isinstance(network, NetworkChoice) else [None] * len(nodes)
    for node, fact, endpoint in zip(nodes, facts, endpoints, strict=True):
        lines += [f"  # {_described(fact)}", f"  # {_connected(fact, endpoint)}", f"  - {_flow(node)}"]
    lines += ["", "stack:", "  extra_index: [https://download.pytorch.org/whl/cpu]   # CPU builds of torch", ""]
    return "\n".join([*lines, *_job(facts)]) + "\n"


def _root(facts: Sequence[NodeFacts]) -> list[str]:
    """A root of its own where the homes differ: it must be the same path on all nodes."""
    if len({fact.root for fact in facts}) == 1:
        return []
    user = re.sub(r"[^A-Za-z0-9._-]", "-", facts[0].user)
    return ["# The homes are not the same path on all nodes, and `root` must be.", f"root: /var/tmp/cluster-train-{user}", ""]


def _job(facts: Sequence[NodeFacts]) -> list[str]:
    ranks = sum(_count(fact, "socket") for fact in facts)
    without = [fact.name for fact in facts if not BF16_FLAGS & set(fact.cpu.flags)]
    bf16 = "every node computes bfloat16 in hardware" if not without else f"not on {', '.join(without)}, which lacks AVX512_BF16"
    return [
        "job:",
        "  script: train.py",
        f"  # ppn: auto        # one rank per socket: {ranks} here",
        f"  # bf16: {'true ' if not without else 'false'}       # {bf16}",
    ]


def _described(fact: NodeFacts) -> str:
    sockets, cores, numa = _count(fact, "socket"), _count(fact, "core"), _count(fact, "numa")
    parts = [
        re.sub(r"[^ -~]", "?", fact.cpu.model) or fact.arch,
        f"{sockets} socket{'s' * (sockets > 1)}, {cores} cores, {numa} NUMA node{'s' * (numa > 1)}",
        f"{fact.memory.total_bytes / 1e9:.0f} GB",
        f"Python {fact.python.version}",
    ]
    return ", ".join(parts)


def _connected(fact: NodeFacts, endpoint: Endpoint | None) -> str:
    shown = f"calls itself {re.sub(r'[^ -~]', '?', fact.hostname)}"
    if endpoint is None:
        return shown
    speed = next((one.speed_mbps for one in fact.interfaces if one.name == endpoint.interface), None)
    return f"{shown}; {endpoint.address} on {endpoint.interface}" + (f", {speed / 1000:g} Gbit/s" if speed else "")


def _network(found: NetworkChoice | PreflightError) -> list[str]:
    """The choice and its reason, or as comments what stands against one."""
    if isinstance(found, PreflightError):
        return [*(f"# {line}" for line in (found.message + "\n" + found.advice).splitlines()), "# network: 10.0.0.0/24", ""]
    reason = f"# {found.reason[:1].upper()}{found.reason[1:]}."
    return [reason, *([f"network: {found.network}"] if _is_real(found) else []), ""]


def _is_real(choice: NetworkChoice) -> bool:
    """Whether the network is worth a line: loopback is chosen by itself, and routed nodes have none."""
    return bool(choice.network) and not ip_address(choice.network.partition("/")[0]).is_loopback


def _count(fact: NodeFacts, what: str) -> int:
    return len({getattr(cpu, what) for cpu in fact.cpu.logical})


def _is_address(node: Node) -> bool:
    try:
        ip_address(node.host.partition("%")[0])
    except ValueError:
        return False
    return True


def _flow(values: Mapping[str, Any]) -> str:
    """A YAML mapping in one line; words that mean nothing else in YAML stand without quotes."""
    words = (f"{key}: {value if _is_plain(value) else json.dumps(value)}" for key, value in values.items())
    return "{" + ", ".join(words) + "}"


def _is_plain(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[A-Za-z/~][A-Za-z0-9._/~-]*", value) is not None)
