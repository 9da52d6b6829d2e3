"""Which ranks run on which node, on which cores, with how many threads.

A rank gets whole physical cores, named by the lowest CPU of each; the second hardware threads stay idle, as the guides
for CPU training have it. What binds a rank to its cores is `remote/rank.py`; this module only decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, TypeAlias

from orchestrator.specs.facts import LogicalCpu, NodeFacts
from orchestrator.specs.run import RankPlan

Ppn: TypeAlias = "Literal['auto', 'numa'] | int"
OmpThreads: TypeAlias = "Literal['auto'] | int"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementNode:
    """One node to place ranks on; `slots` is the inventory's own number of ranks for it, which wins over `ppn`."""

    facts: NodeFacts
    slots: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """One physical core: its allowed hardware threads, ascending, and where it sits."""

    cpus: tuple[int, ...]
    socket: int
    numa: int


def place(nodes: Sequence[PlacementNode], ppn: Ppn, omp_threads: OmpThreads, ccl_workers: int) -> tuple[RankPlan, ...]:
    """The place of every rank, numbered node by node in the given order.

    Args:
        nodes: in the inventory's order.
        ppn: "auto" is one rank per socket, "numa" one per NUMA node, a number that many on every node. Only CPUs that
            are allowed to us count. More ranks than cores share them.
        omp_threads: "auto" is the rank's cores less those of its communication threads, at least one.
        ccl_workers: communication threads per rank. They get the last cores; a rank with one core shares it, and a rank
            with too few cores for all of them keeps one for computing.
    """
    plans: list[RankPlan] = []
    for node in nodes:
        groups = _cores_of_ranks(node, ppn)
        for local_rank, cores in enumerate(groups):
            computing = max(1, len(cores) - ccl_workers)
            plans.append(
                RankPlan(
                    rank=len(plans),
                    local_rank=local_rank,
                    local_world_size=len(groups),
                    node=node.facts.name,
                    cores=cores,
                    comm_cores=(cores[computing:] or cores[-1:]) if ccl_workers else (),
                    omp_num_threads=computing if omp_threads == "auto" else omp_threads,
                    env={},
                )
            )
    return tuple(plans)


def ranks_per_node(plan: Sequence[RankPlan]) -> dict[str, int]:
    """How many ranks each node has, in the plan's order: the counts of a hostfile."""
    return dict(Counter(rank.node for rank in plan))


def _cores_of_ranks(node: PlacementNode, ppn: Ppn) -> list[tuple[int, ...]]:
    """The CPUs of each rank on one node, ascending."""
    cores = _physical_cores(node.facts)
    wanted = node.slots or ppn
    if wanted == "auto":
        groups = _by(cores, _socket) if _has_real_sockets(node.facts, cores) else [cores]
    elif wanted == "numa":
        groups = _by(_at_memory(node.facts, cores), _numa)
    elif wanted <= len(cores):
        groups = _divide(cores, wanted, (_socket, _numa))
    else:
        return _shared(cores, wanted)
    limited = _within_quota(groups, node.facts.cpu.cgroup_cpu_limit)
    return [tuple(sorted(core.cpus[0] for core in group)) for group in limited]


def _physical_cores(facts: NodeFacts) -> list[_Core]:
    """The cores of which at least one thread is allowed, neighbours beside each other: by socket, NUMA node, number."""
    threads: dict[tuple[int, int], list[LogicalCpu]] = {}
    for cpu in facts.cpu.logical:
        threads.setdefault((cpu.socket, cpu.core), []).append(cpu)
    cores = [
        _Core(cpus=tuple(sorted(cpu.cpu for cpu in group)), socket=group[0].socket, numa=group[0].numa)
        for group in threads.values()
    ]
    return sorted(cores, key=lambda core: (core.socket, core.numa, core.cpus))


def _socket(core: _Core) -> int:
    return core.socket


def _numa(core: _Core) -> int:
    return core.numa


def _by(cores: Sequence[_Core], level: Callable[[_Core], int]) -> list[list[_Core]]:
    """The cores of each socket, or of each NUMA node, by its number."""
    return [list(group) for _, group in groupby(sorted(cores, key=level), level)]


def _has_real_sockets(facts: NodeFacts, cores: Sequence[_Core]) -> bool:
    """Hypervisors like to show every CPU as a socket of its own: one core per socket on one NUMA node is one socket."""
    return len({core.numa for core in cores}) > 1 or len({core.socket for core in cores}) < len(cores)


def _at_memory(facts: NodeFacts, cores: Sequence[_Core]) -> list[_Core]:
    """The cores, those of NUMA nodes without memory given to one that has some: on their own socket if possible.

    Where no node's memory is known, all stay where they are.
    """
    with_memory = {node.node for node in facts.numa if node.memory_bytes}
    homes = [core for core in cores if core.numa in with_memory]
    if not homes:
        return list(cores)
    moved = []
    for core in cores:
        nearest = next((home for home in homes if home.socket == core.socket), homes[0])
        numa = core.numa if core.numa in with_memory else nearest.numa
        moved.append(_Core(cpus=core.cpus, socket=core.socket, numa=numa))
    return moved


def _divide(cores: list[_Core], parts: int, levels: Sequence[Callable[[_Core], int]]) -> list[list[_Core]]:
    """`parts` runs of neighbouring cores, as equal as can be.

    No run crosses a border between sockets, then between NUMA nodes (`levels`), where there are enough parts for that.
    """
    if not levels:
        return _equal_runs(cores, parts)
    regions = _by(cores, levels[0])
    if parts < len(regions):
        return _equal_runs(cores, parts)
    shares = [1] * len(regions)
    for _ in range(parts - len(regions)):
        roomiest = max(range(len(regions)), key=lambda index: (len(regions[index]) / shares[index], -index))
        shares[roomiest] += 1
    return [run for region, share in zip(regions, shares, strict=True) for run in _divide(region, share, levels[1:])]


def _equal_runs(cores: list[_Core], parts: int) -> list[list[_Core]]:
    """Runs of neighbouring cores whose lengths differ by one at most, the longer first."""
    length, longer = divmod(len(cores), parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return [cores[start:end] for start, end in pairwise(starts)]


def _within_quota(groups: list[list[_Core]], limit: float | None) -> list[list[_Core]]:
    """The groups, the largest shortened until they have no more cores than the control group grants CPU time for.

    With more threads than that, all are halted together for the rest of each period. Every rank keeps one core.
    """
    sizes = [len(group) for group in groups]
    granted = sum(sizes) if limit is None else max(len(groups), int(limit))
    while sum(sizes) > granted:
        largest = max(range(len(sizes)), key=lambda index: (sizes[index], index))
        sizes[largest] -= 1
    return [group[:size] for group, size in zip(groups, sizes, strict=True)]


def _shared(cores: Sequence[_Core], ranks: int) -> list[tuple[int, ...]]:
    """One CPU for each of more ranks than cores: round-robin over the cores, then over the threads of each core."""
    places = [divmod(rank, len(cores)) for rank in range(ranks)]
    return [(cores[core].cpus[turn % len(cores[core].cpus)],) for turn, core in places]
