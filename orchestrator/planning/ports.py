"""How a range of ports that a firewall leaves open is shared out among those who listen in it. Pure.

They must not meet: the launcher listens before the ranks do, and would take MASTER_PORT. gloo's ports cannot be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

Ports = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortShares:
    """First and last port of each share.

    Args:
        launcher: mpirun on the head, and its daemons.
        library: the ranks, where they use MPI or oneCCL themselves.
        master: MASTER_PORT, and what the supervisor listens on, on the head.
    """

    launcher: Ports
    library: Ports
    master: Ports


def shares(ports: Ports) -> PortShares:
    """A quarter for the launcher, half for the ranks, a quarter for MASTER_PORT."""
    first, last = ports
    quarter = (last - first + 1) // 4
    return PortShares(
        launcher=(first, first + quarter - 1),
        library=(first + quarter, last - quarter),
        master=(last - quarter + 1, last),
    )


def master_ports(ports: Ports | None) -> Ports | None:
    """Where free ports for MASTER_PORT are looked for; None leaves it to the probe."""
    return shares(ports).master if ports else None
