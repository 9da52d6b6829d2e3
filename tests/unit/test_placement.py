"""Golden plans of real machines, and what holds on every machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.network import NetworkNode, choose_network
from orchestrator.planning.placement import PlacementNode, place, ranks_per_node
from orchestrator.specs.facts import LogicalCpu, NodeFacts, NumaNode
from orchestrator.specs.run import RankPlan

KEPT_FACTS = Path(__file__).resolve().parents[1] / "data" / "facts"
GIB = 1 << 30


def real_machine(kept: str, name: str = "node0") -> NodeFacts:
    return NodeFacts.from_json(name, json.loads((KEPT_FACTS / f"{kept}.json").read_text()))


def epyc(name: str = "node0") -> NodeFacts:
    """A dual-socket machine, 24 cores per socket, two threads per core: thread 0 of core n is CPU n, thread 1 CPU n + 48."""
    return real_machine("x86_64-epyc_7451", name)


def machine(
    cpus: Sequence[tuple[int, int, int, int]],
    *,
    memory: Sequence[int] = (GIB,) * 8,
    quota: float | None = None,
    name: str = "node0",
) -> NodeFacts:
    """A node with the given CPUs (cpu, socket, core, NUMA node), and memory per NUMA node."""
    logical = tuple(LogicalCpu(cpu=cpu, socket=socket, core=core, numa=numa) for cpu, socket, core, numa in cpus)
    base = epyc(name)
    numa = tuple(
        NumaNode(node=node, cpus=tuple(cpu.cpu for cpu in logical if cpu.numa == node), memory_bytes=size)
        for node, size in enumerate(memory)
    )
    return replace(base, numa=numa, cpu=replace(base.cpu, logical=logical, online=len(logical), cgroup_cpu_limit=quota))


def with_cpus(facts: NodeFacts, allowed: Sequence[int], quota: float | None = None) -> NodeFacts:
    """The same machine where only these CPUs are allowed."""
    logical = tuple(cpu for cpu in facts.cpu.logical if cpu.cpu in allowed)
    return replace(facts, cpu=replace(facts.cpu, logical=logical, cgroup_cpu_limit=quota))


def plan(
    *nodes: NodeFacts,
    ppn: Literal["auto", "numa"] | int = "auto",
    omp_threads: Literal["auto"] | int = "auto",
    ccl_workers: int = 1,
    slots: int | None = None,
) -> tuple[RankPlan, ...]:
    return place([PlacementNode(facts=node, slots=slots) for node in nodes], ppn, omp_threads, ccl_workers)


# ---------------------------------------------------------------------------------------------------------------------
# Golden plans


def test_two_dual_socket_machines_get_the_guides_plan() -> None:
    """-n 4 -ppn 2, OMP_NUM_THREADS=23: each rank has a socket's first threads and leaves the last core to communication."""
    ranks = plan(epyc("node0"), epyc("node1"))
    assert [(rank.rank, rank.local_rank, rank.local_world_size, rank.node) for rank in ranks] == [
        (0, 0, 2, "node0"),
        (1, 1, 2, "node0"),
        (2, 0, 2, "node1"),
        (3, 1, 2, "node1"),
    ]
    first, second = tuple(range(24)), tuple(range(24, 48))
    assert [rank.cores for rank in ranks] == [first, second, first, second]
    assert [rank.comm_cores for rank in ranks] == [(23,), (47,), (23,), (47,)]
    assert {rank.omp_num_threads for rank in ranks} == {23}
    assert ranks_per_node(ranks) == {"node0": 2, "node1": 2}


def test_one_dual_socket_machine_runs_two_ranks_over_loopback() -> None:
    """-n 2, and MASTER_ADDR is 127.0.0.1."""
    facts = epyc()
    assert [(rank.rank, rank.node) for rank in plan(facts)] == [(0, "node0"), (1, "node0")]
    choice = choose_network([NetworkNode(name="node0", facts=facts, host="10.0.0.10")], None)
    assert [endpoint.address for endpoint in choice.endpoints] == ["127.0.0.1"]


def test_unequal_machines_get_unequal_counts() -> None:
    """One socket beside two: the hostfile's counts are 1 and 2, and each rank's threads are its own node's."""
    small = machine([(cpu, 0, cpu, 0) for cpu in range(16)], name="node0")
    ranks = plan(small, epyc("node1"))
    assert ranks_per_node(ranks) == {"node0": 1, "node1": 2}
    assert [(rank.local_world_size, rank.omp_num_threads) for rank in ranks] == [(1, 15), (2, 23), (2, 23)]
    assert ranks[0].cores == tuple(range(16))


def test_interleaved_numbers_are_followed() -> None:
    """The four-socket Xeon numbers its CPUs across the sockets, sockets 1 and 2 swapped: four ranks of eight cores."""
    ranks = plan(real_machine("x86_64-64cpu"))
    assert [rank.cores for rank in ranks] == [
        tuple(range(0, 32, 4)),
        tuple(range(2, 32, 4)),
        tuple(range(1, 32, 4)),
        tuple(range(3, 32, 4)),
    ]
    assert [rank.comm_cores for rank in ranks] == [(28,), (30,), (29,), (31,)]
    assert {rank.omp_num_threads for rank in ranks} == {7}


def test_numa_mode_makes_one_rank_per_numa_node() -> None:
    """The four-socket Xeon has three NUMA nodes, one of them with two sockets; the EPYC has four in each socket."""
    assert [rank.cores for rank in plan(real_machine("x86_64-64cpu"), ppn="numa")] == [
        tuple(range(0, 32, 2)),
        tuple(range(1, 32, 4)),
        tuple(range(3, 32, 4)),
    ]
    ranks = plan(epyc(), ppn="numa")
    assert [rank.cores for rank in ranks] == [tuple(range(first, first + 6)) for first in range(0, 48, 6)]
    assert {rank.omp_num_threads for rank in ranks} == {5}


def test_unequal_cores_of_one_chip_are_one_rank() -> None:
    """Eight cores of four types are one socket: one rank, seven threads."""
    (rank,) = plan(real_machine("arm-A510-A710-A715-X3"))
    assert (rank.cores, rank.comm_cores, rank.omp_num_threads) == (tuple(range(8)), (7,), 7)


# ---------------------------------------------------------------------------------------------------------------------
# A number of ranks


@pytest.mark.parametrize(
    ("ppn", "sizes"),
    [
        (1, [48]),
        (2, [24] * 2),
        (4, [12] * 4),
        (6, [8] * 6),
        (8, [6] * 8),
        (16, [3] * 16),
        (3, [12, 12, 24]),
        (48, [1] * 48),
    ],
)
def test_a_number_divides_the_cores_within_sockets(ppn: int, sizes: list[int]) -> None:
    """Ranks get neighbouring cores of one socket, equally many wherever the number allows it."""
    ranks = plan(epyc(), ppn=ppn)
    assert [len(rank.cores) for rank in ranks] == sizes
    assert [cpu for rank in ranks for cpu in rank.cores] == list(range(48))
    if ppn > 1:
        assert all(len({cpu // 24 for cpu in rank.cores}) == 1 for rank in ranks)


def test_ranks_stay_within_numa_nodes_where_there_are_enough_of_them() -> None:
    """Five ranks on two sockets of two NUMA nodes: three on the first socket, two on the second, each in one NUMA node."""
    ranks = plan(machine([(cpu, cpu // 8, cpu, cpu // 4) for cpu in range(16)]), ppn=5)
    assert [rank.cores for rank in ranks] == [(0, 1), (2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_fewer_ranks_than_sockets_share_them_out_equally() -> None:
    """Two ranks on four sockets have two whole sockets each."""
    ranks = plan(real_machine("x86_64-64cpu"), ppn=2)
    assert [set(rank.cores) for rank in ranks] == [set(range(0, 32, 2)), set(range(1, 32, 2))]


def test_slots_win_over_ppn() -> None:
    """The inventory's number for a node holds for that node alone."""
    nodes = [PlacementNode(facts=epyc("node0"), slots=1), PlacementNode(facts=epyc("node1"), slots=None)]
    assert ranks_per_node(place(nodes, 4, "auto", 1)) == {"node0": 1, "node1": 4}


def test_more_ranks_than_cores_share_them() -> None:
    """Ranks take the cores in turn, then the second threads, then start again."""
    laptop = machine([(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 0, 0), (3, 0, 1, 0)])
    ranks = plan(laptop, ppn=5)
    assert [rank.cores for rank in ranks] == [(0,), (1,), (2,), (3,), (0,)]
    assert all(rank.comm_cores == rank.cores and rank.omp_num_threads == 1 for rank in ranks)


# ---------------------------------------------------------------------------------------------------------------------
# What is allowed


def test_only_allowed_cpus_are_used() -> None:
    """A core of which only the second thread is allowed is used by that thread; a socket without allowed CPUs has no rank."""
    (rank,) = plan(with_cpus(epyc(), [1, 2, 50, 51]))
    assert rank.cores == (1, 2, 51)


def test_a_cpu_quota_limits_the_cores() -> None:
    """Four CPUs' worth of time on 24 cores: one rank uses four cores, two ranks two each; fractions are not used."""
    one_socket = with_cpus(epyc(), range(24), quota=4.0)
    (rank,) = plan(one_socket)
    assert (rank.cores, rank.comm_cores, rank.omp_num_threads) == ((0, 1, 2, 3), (3,), 3)
    ranks = plan(replace(epyc(), cpu=replace(epyc().cpu, cgroup_cpu_limit=5.9)))
    assert [rank.cores for rank in ranks] == [(0, 1, 2), (24, 25)]


def test_every_rank_keeps_a_core_under_the_smallest_quota() -> None:
    """Half a CPU for four ranks still leaves each a core of its own."""
    ranks = plan(with_cpus(epyc(), range(24), quota=0.5), ppn=4)
    assert [len(rank.cores) for rank in ranks] == [1, 1, 1, 1]
    assert len({rank.cores for rank in ranks}) == 4


def test_a_quota_larger_than_the_machine_limits_nothing() -> None:
    """A container may be granted more time than there are CPUs."""
    assert [len(rank.cores) for rank in plan(with_cpus(epyc(), range(48), quota=500.0))] == [24, 24]


def test_numa_nodes_without_memory_start_no_rank() -> None:
    """Their cores join a node with memory, on their own socket where it has one."""
    cpus = [(cpu, cpu // 4, cpu, cpu // 2) for cpu in range(8)]
    ranks = plan(machine(cpus, memory=(GIB, 0, 0, GIB)), ppn="numa")
    assert [rank.cores for rank in ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    ranks = plan(machine(cpus, memory=(0, 0, GIB, GIB)), ppn="numa")
    assert [rank.cores for rank in ranks] == [(0, 1, 2, 3, 4, 5), (6, 7)]


def test_numa_nodes_without_cpus_start_no_rank() -> None:
    """Memory on an expander is a NUMA node with no CPU."""
    facts = machine([(0, 0, 0, 0), (1, 0, 1, 0)], memory=(GIB, GIB))
    assert [rank.cores for rank in plan(facts, ppn="numa")] == [(0, 1)]


def test_a_virtual_machine_that_shows_each_cpu_as_a_socket_is_one_socket() -> None:
    """Hypervisors' default of N sockets with one core does not make N ranks with one thread; real sockets have NUMA nodes."""
    assert [rank.cores for rank in plan(machine([(cpu, cpu, cpu, 0) for cpu in range(4)]))] == [(0, 1, 2, 3)]
    assert len(plan(machine([(cpu, cpu, cpu, cpu) for cpu in range(2)]))) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Threads


@pytest.mark.parametrize(
    ("cores", "workers", "comm_cores", "threads"),
    [
        (8, 0, (), 8),
        (8, 1, (7,), 7),
        (8, 2, (6, 7), 6),
        (2, 1, (1,), 1),
        (2, 4, (1,), 1),
        (1, 1, (0,), 1),
        (1, 0, (), 1),
    ],
)
def test_communication_gets_the_last_cores(cores: int, workers: int, comm_cores: tuple[int, ...], threads: int) -> None:
    """The rest compute; one core is always left for that, and a single core is shared."""
    (rank,) = plan(machine([(cpu, 0, cpu, 0) for cpu in range(cores)]), ppn=1, ccl_workers=workers)
    assert (rank.comm_cores, rank.omp_num_threads) == (comm_cores, threads)


def test_a_wanted_number_of_threads_is_kept() -> None:
    """omp_threads as a number wins; the cores stay as they are."""
    ranks = plan(epyc(), omp_threads=4)
    assert [(len(rank.cores), rank.omp_num_threads) for rank in ranks] == [(24, 4), (24, 4)]


# ---------------------------------------------------------------------------------------------------------------------
# On every machine


@st.composite
def machines(draw: st.DrawFn) -> NodeFacts:
    """Any machine: cores of one or two threads over up to four sockets and NUMA nodes, numbered in any order, some allowed."""
    cores = draw(st.integers(1, 24))
    threads = draw(st.lists(st.integers(1, 2), min_size=cores, max_size=cores))
    places = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=cores, max_size=cores))
    numbers = draw(st.permutations(range(sum(threads))))
    owners = [core for core, count in enumerate(threads) for _ in range(count)]
    first_cpu = {core: min(n for n, owner in zip(numbers, owners, strict=True) if owner == core) for core in range(cores)}
    cpus = [(n, places[owner][0], first_cpu[owner], places[owner][1]) for n, owner in zip(numbers, owners, strict=True)]
    allowed = draw(st.lists(st.sampled_from(sorted(cpus)), min_size=1, unique=True))
    memory = draw(st.lists(st.sampled_from([0, GIB]), min_size=4, max_size=4))
    quota = draw(st.none() | st.floats(0.1, 64.0))
    return machine(sorted(allowed), memory=memory, quota=quota)


ppns = st.sampled_from(["auto", "numa"]) | st.integers(1, 40)


@settings(deadline=None)  # a busy machine is no failure
@given(machines(), ppns, st.integers(0, 4))
def test_what_holds_on_every_machine(facts: NodeFacts, ppn: Literal["auto", "numa"] | int, ccl_workers: int) -> None:
    """Every rank has allowed cores, at least one; ranks share physical cores only where there are more ranks than cores."""
    ranks = plan(facts, ppn=ppn, ccl_workers=ccl_workers)
    core_of = {cpu.cpu: cpu.core for cpu in facts.cpu.logical}
    used = [core_of[cpu] for rank in ranks for cpu in rank.cores]  # KeyError: a CPU that is not allowed
    physical = set(core_of.values())
    assert all(rank.cores == tuple(sorted(set(rank.cores))) and rank.cores for rank in ranks)
    if len(ranks) <= len(physical):
        assert len(used) == len(set(used))
        limit = facts.cpu.cgroup_cpu_limit
        granted = len(physical) if limit is None else min(len(physical), max(len(ranks), int(limit)))
        assert len(used) == granted  # no core that may be used lies idle
    assert isinstance(ppn, str) or len(ranks) == ppn
    for rank in ranks:
        assert set(rank.comm_cores) <= set(rank.cores)
        assert bool(rank.comm_cores) == bool(ccl_workers)
        assert 1 <= rank.omp_num_threads <= len(rank.cores)
        assert rank.local_world_size == len(ranks)
    assert [rank.rank for rank in ranks] == [rank.local_rank for rank in ranks] == list(range(len(ranks)))


@settings(deadline=None)  # a busy machine is no failure
@given(machines(), ppns)
def test_the_plan_does_not_depend_on_the_order_of_the_facts(facts: NodeFacts, ppn: Literal["auto", "numa"] | int) -> None:
    """The same machine gives the same plan, in whatever order its CPUs are listed."""
    reordered = replace(facts, cpu=replace(facts.cpu, logical=facts.cpu.logical[::-1]), numa=facts.numa[::-1])
    assert plan(facts, ppn=ppn) == plan(facts, ppn=ppn) == plan(reordered, ppn=ppn)


@settings(deadline=None)  # a busy machine is no failure
@given(machines(), st.integers(1, 40))
def test_no_rank_spans_sockets_where_ranks_suffice(facts: NodeFacts, ppn: int) -> None:
    """With at least as many ranks as sockets, no rank has cores of two of them; with fewer, sizes differ by one at most."""
    socket_of = {cpu.cpu: cpu.socket for cpu in facts.cpu.logical}
    unlimited = replace(facts, cpu=replace(facts.cpu, cgroup_cpu_limit=None))
    ranks = plan(unlimited, ppn=ppn)
    if ppn >= len(set(socket_of.values())):
        assert all(len({socket_of[cpu] for cpu in rank.cores}) == 1 for rank in ranks)
    else:
        sizes = [len(rank.cores) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1
