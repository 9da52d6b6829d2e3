"""A doctor's findings as text: one table, red first, and under each row what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.planning.network import NetworkChoice
from orchestrator.planning.preflight import Finding
from orchestrator.planning.tables import table
from orchestrator.planning.ways import GLOO
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth, Way

COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}
LONGEST_LIST = 4


def findings_text(found: Sequence[Finding], colored: Callable[[str, str], str]) -> str:
    """The table; what many nodes have in common stands in one row.

    Args:
        colored: (text, color) to the text as the terminal shows it.
    """
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.what, finding.evidence, finding.remedy), []).append(finding.node)
    rows = [
        (severity, _listed(nodes), what, evidence.replace("\n", " ")) for (severity, what, evidence, _), nodes in groups.items()
    ]
    heading, *lines = table([("", "node", "finding", "evidence"), *rows]).splitlines()
    shown = [heading]
    for line, (severity, _, _, remedy) in zip(lines, groups, strict=True):
        shown.append(colored(line, COLORS[severity]))
        shown += [f"    do: {row}" for row in remedy.splitlines()]
    return "\n".join(shown)


def nodes_text(nodes: Sequence[NodeFacts], health: Mapping[str, NodeHealth], choice: NetworkChoice | None) -> str:
    """What the nodes are, one row each."""
    endpoints = {endpoint.node: endpoint for endpoint in choice.endpoints} if choice else {}
    rows = [("node", "calls itself", "sockets", "cores", "NUMA", "SMT", "memory", "bf16", "Python", "address", "card", "Gbit/s")]
    for node in nodes:
        endpoint = endpoints.get(node.name)
        speed = next((card.speed_mbps for card in node.interfaces if endpoint and card.name == endpoint.interface), None)
        rows.append(
            (
                node.name,
                node.hostname,
                str(len({cpu.socket for cpu in node.cpu.logical})),
                str(len({cpu.core for cpu in node.cpu.logical})),
                str(len({cpu.numa for cpu in node.cpu.logical})),
                "on" if health[node.name].has_smt else "off",
                f"{node.memory.total_bytes / 1e9:.0f} GB",
                ", ".join(flag for flag in node.cpu.flags if flag.endswith("bf16")) or "no",
                node.python.version,
                endpoint.address if endpoint else "",
                endpoint.interface if endpoint else "",
                f"{speed / 1000:g}" if speed else "",
            )
        )
    return table(rows)


def ways_text(ways: Sequence[Way]) -> str:
    """How quick and how wide the ways between nodes are; empty where none was tried."""
    measured = [way for way in ways if way.use == GLOO and way.latency_s is not None]
    if not measured:
        return ""
    latencies = sorted(1e6 * (way.latency_s or 0) for way in measured)
    speeds = sorted((way.bytes_per_s, way.source, way.target) for way in measured if way.bytes_per_s)
    text = f"{len(ways)} ways tried between nodes; there and back {latencies[0]:.0f} to {latencies[-1]:.0f} us"
    if speeds:
        slowest = speeds[0]
        text += f"; slowest while all send along the ring: {8e-9 * slowest[0]:.2g} Gbit/s, {slowest[1]} -> {slowest[2]}"
    return text


def _listed(nodes: Sequence[str]) -> str:
    more = len(nodes) - LONGEST_LIST
    return ", ".join(nodes[:LONGEST_LIST]) + (f" and {more} more" if more > 0 else "")
