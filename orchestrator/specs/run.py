"""The plan of one run: who runs where, with which cores and environment, and the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's place.

    Args:
        rank: global rank, 0-based; ranks of one node are consecutive.
        local_rank: rank within the node, 0-based.
        local_world_size: number of ranks on this node.
        node: the node's name in the inventory.
        cores: logical CPU numbers the rank is bound to, ascending.
        comm_cores: the logical CPUs among `cores` left to communication threads; may overlap compute where cores are short.
        omp_num_threads: value of OMP_NUM_THREADS.
        env: variables of this rank alone (they win over `LaunchPlan.env`).
    """

    rank: int
    local_rank: int
    local_world_size: int
    node: str
    cores: tuple[int, ...]
    comm_cores: tuple[int, ...]
    omp_num_threads: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How the ranks' network sees one node.

    Args:
        node: the node's name in the inventory.
        address: its address on the cluster network (IPv4 or IPv6, no prefix length).
        interface: the name of the network card that carries `address` on that node.
    """

    node: str
    address: str
    interface: str
