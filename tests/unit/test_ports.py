"""A range of open ports: who gets which, and what each launcher is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mpirun import REQUEST

from orchestrator.planning.mpirun import Flavour, mpi_command
from orchestrator.planning.ports import master_ports, shares
from orchestrator.specs.inventory_values import FEWEST_PORTS

PORTS = shares((29500, 29599))


@given(st.integers(1024, 65535 - FEWEST_PORTS), st.integers(FEWEST_PORTS, 3000))
def test_the_shares_are_the_range_and_do_not_overlap(first: int, count: int) -> None:
    """The launcher listens before MASTER_PORT does, and must not take it."""
    made = shares((first, first + count - 1))
    numbers = [port for low, high in (made.launcher, made.library, made.master) for port in range(low, high + 1)]
    assert numbers == list(range(first, first + count))
    assert all(high - low >= 7 for low, high in (made.launcher, made.library, made.master))


def test_where_nothing_is_said_the_probe_chooses() -> None:
    """Without a range nobody is restricted."""
    assert master_ports(None) is None and master_ports((29500, 29599)) == (29575, 29599)
    assert "PORT" not in " ".join(mpi_command(REQUEST).argv).replace("MASTER_PORT", "")


@pytest.mark.parametrize(
    ("flavour", "env", "words"),
    [
        ("impi", {"I_MPI_PORT_RANGE": "29500:29524"}, ["FI_TCP_PORT_LOW_RANGE 29525", "FI_TCP_PORT_HIGH_RANGE 29574"]),
        ("mpich", {"MPIEXEC_PORT_RANGE": "29500:29524"}, ["UCX_TCP_PORT_RANGE 29525-29574"]),
        (
            "openmpi",
            {},
            ["btl_tcp_port_min_v4=29525", "btl_tcp_port_range_v4=50"],
        ),
    ],
)
def test_each_launcher_is_told_in_its_own_words(flavour: Flavour, env: dict[str, str], words: list[str]) -> None:
    """The names were found by looking at the ports in use: see tests/ssh/test_port_range.py."""
    made = mpi_command(replace(REQUEST, flavour=flavour, program="/r/envs/e/bin/mpirun", ports=PORTS))
    assert env.items() <= made.env.items() and all(word in " ".join(made.argv) for word in words)


def test_open_mpis_launcher_does_not_take_all() -> None:
    """It listens on every port that it is given: each run gets a few, within the launcher's share."""
    windows = set()
    for run in range(50):
        argv = mpi_command(
            replace(REQUEST, flavour="openmpi", program="/e/bin/mpirun", ports=PORTS, run_dir=f"/r/runs/{run}")
        ).argv
        first, last = map(int, argv[argv.index("oob_tcp_dynamic_ipv4_ports") + 1].split("-"))
        assert PORTS.launcher[0] <= first and last <= PORTS.launcher[1] and last - first == 3
        windows.add(first)
    assert len(windows) > 3


def test_what_the_person_sets_wins() -> None:
    """A variable of job.env comes after ours under the same name."""
    variables = {**REQUEST.variables, "FI_TCP_PORT_LOW_RANGE": "40000"}
    made = mpi_command(replace(REQUEST, ports=PORTS, variables=variables))
    assert made.argv.count("FI_TCP_PORT_LOW_RANGE") == 1 and "40000" in made.argv
