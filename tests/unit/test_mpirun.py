"""The mpirun line of every flavour, word by word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import PreflightError
from orchestrator.planning.mpirun import MpiRequest, mpi_command

REQUEST = MpiRequest(
    flavour="impi",
    program="/r/envs/e/bin/mpiexec.hydra",
    hosts=(("10.0.0.10", 2), ("10.0.0.11", 2)),
    run_dir="/r/runs/1",
    uses_ssh=True,
    interface="eth0",
    variables={"MASTER_ADDR": "10.0.0.10", "OMP_NUM_THREADS": "23"},
    command=("/r/envs/e/bin/python", "/r/agent/a/rank.py"),
)


def test_intel_mpi_with_equal_nodes_is_the_guides_line() -> None:
    """-f hostfile -n N -ppn P, the head's card, our ssh, the environment, the command."""
    made = mpi_command(REQUEST)
    assert made.hostfile == "10.0.0.10:2\n10.0.0.11:2\n"
    assert made.argv == (
        *("/r/envs/e/bin/mpiexec.hydra", "-f", "/r/runs/1/hostfile", "-n", "4", "-ppn", "2"),
        *("-iface", "eth0", "-launcher", "ssh", "-launcher-exec", "/r/runs/1/ssh"),
        *("-genv", "MASTER_ADDR", "10.0.0.10", "-genv", "OMP_NUM_THREADS", "23"),
        *("/r/envs/e/bin/python", "/r/agent/a/rank.py"),
    )
    assert made.env == {"I_MPI_PIN": "0", "I_MPI_JOB_ABORT_SIGNAL": "1"}
    assert made.proxy_env == {"CLUSTER_TRAIN_RUN_ID": "1"}


def test_unequal_nodes_take_their_counts_from_the_hostfile() -> None:
    """Intel MPI believes a file's counts only as -machinefile and without -ppn."""
    made = mpi_command(replace(REQUEST, hosts=(("10.0.0.10", 1), ("10.0.0.11", 2))))
    assert made.hostfile == "10.0.0.10:1\n10.0.0.11:2\n"
    assert made.argv[1:5] == ("-machinefile", "/r/runs/1/hostfile", "-n", "3")
    assert "-ppn" not in made.argv


def test_intel_mpi_with_ipv6() -> None:
    """It must be told, takes addresses without brackets, and no count beside one: a host is repeated where counts matter."""
    made = mpi_command(replace(REQUEST, hosts=(("fd77::10", 2), ("fd77::11", 2))))
    assert made.hostfile == "fd77::10\nfd77::11\n"
    assert made.argv[1:7] == ("-f", "/r/runs/1/hostfile", "-n", "4", "-ppn", "2") and "-v6" in made.argv
    unequal = mpi_command(replace(REQUEST, hosts=(("fd77::10", 2), ("fd77::11", 1))))
    assert unequal.hostfile == "fd77::10\nfd77::10\nfd77::11\n"
    assert unequal.argv[1] == "-machinefile" and "-ppn" not in unequal.argv


def test_mpich_with_ipv6_is_refused() -> None:
    """Its mpirun cuts an address at the first colon."""
    with pytest.raises(PreflightError, match="knows no IPv6 address"):
        mpi_command(replace(REQUEST, flavour="mpich", hosts=(("fd77::10", 2), ("fd77::11", 2))))


def test_mpich_reads_unequal_counts_from_its_own_option() -> None:
    """MPICH's -f holds the counts; it has no binding to switch off."""
    made = mpi_command(replace(REQUEST, flavour="mpich", hosts=(("a", 1), ("b", 2))))
    assert made.argv[1:5] == ("-f", "/r/runs/1/hostfile", "-n", "3")
    assert "-ppn" not in made.argv
    topology = {"HWLOC_XMLFILE": "/dev/shm/cluster-train-1/none.xml"}
    assert made.env == {"UCX_POSIX_DIR": "/dev/shm/cluster-train-1", **topology}
    assert made.proxy_env == {"CLUSTER_TRAIN_RUN_ID": "1", **topology}


def test_one_machine_needs_no_ssh() -> None:
    """Without other nodes there is no launcher option."""
    made = mpi_command(replace(REQUEST, hosts=(("127.0.0.1", 2),), uses_ssh=False))
    assert "-launcher-exec" not in made.argv and "-iface" not in made.argv


def test_open_mpi_cannot_have_blanks_in_its_path() -> None:
    """It splits its ssh command at blanks, so a root with one is refused before anything starts."""
    with pytest.raises(PreflightError, match="blank"):
        mpi_command(replace(REQUEST, flavour="openmpi", run_dir="/my root/runs/1"))


def test_open_mpi_cannot_take_a_loopback_address_for_its_own() -> None:
    """It would reach the head by SSH, where no port and no key are meant for that; hydra can, and so can a run on one machine."""
    hosts = (("127.0.0.2", 2), ("127.0.0.3", 2))
    with pytest.raises(PreflightError, match=r"127\.0\.0\.2, the head"):
        mpi_command(replace(REQUEST, flavour="openmpi", hosts=hosts))
    assert mpi_command(replace(REQUEST, flavour="mpich", hosts=hosts)).hostfile == "127.0.0.2:2\n127.0.0.3:2\n"
    assert mpi_command(replace(REQUEST, flavour="openmpi", hosts=hosts[:1], uses_ssh=False)).hostfile == "127.0.0.2 slots=2\n"


def test_open_mpi_speaks_its_own_dialect() -> None:
    """slots= in the hostfile, -x for the environment, binding off, its install prefix for the other nodes."""
    made = mpi_command(replace(REQUEST, flavour="openmpi", program="/r/envs/e/bin/mpirun"))
    assert made.hostfile == "10.0.0.10 slots=2\n10.0.0.11 slots=2\n"
    assert made.argv == (
        *("/r/envs/e/bin/mpirun", "--hostfile", "/r/runs/1/hostfile", "-n", "4", "--map-by", "slot", "--bind-to", "none"),
        *("--prefix", "/r/envs/e", "--prtemca", "plm_ssh_agent", "ssh -F /r/runs/1/ssh_config"),
        *("--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "prte_tmpdir_base", "/dev/shm/cluster-train-1"),
        *("-x", "OMPI_MCA_btl_sm_backing_directory=/dev/shm/cluster-train-1"),
        *("-x", "OMPI_MCA_osc_sm_backing_directory=/dev/shm/cluster-train-1"),
        *("-x", "OMPI_MCA_osc_rdma_backing_directory=/dev/shm/cluster-train-1"),
        *("-x", "MASTER_ADDR=10.0.0.10", "-x", "OMP_NUM_THREADS=23", "-x", "CLUSTER_TRAIN_LAUNCH"),
        *("/r/envs/e/bin/python", "/r/agent/a/rank.py"),
    )
