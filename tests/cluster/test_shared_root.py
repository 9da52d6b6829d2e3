"""A root that two machines have in common: two containers that mount one Docker volume, as two clients mount one export.

(The kernel of a test machine need not know NFS; a volume is one file system below two machines all the same.)
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import standins
from commands import COMMAND, COMMAND_LIMIT_S, REPOSITORY, ClusterTrain, Ran
from containers import PLACE, ContainerCluster

pytestmark = pytest.mark.stack

ROOT = f"{PLACE}/root"


@pytest.fixture
def inventory(pair: ContainerCluster, small_stack: Path, tmp_path: Path) -> Path:
    """Both containers, their root on the volume, and the small stack."""
    return pair.inventory(tmp_path, root=ROOT, stack={"torch": "2.13.0", "mpi": "system", "find_links": [str(small_stack)]})


def job(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text("print('hello')\n")
    return path


def said(ran: Ran, text: str) -> list[str]:
    """The nodes that told of a step whose text holds this."""
    return [event["node"] for event in ran.events if event["event"] == "step" and text in event["text"]]


def test_a_common_root_is_filled_once_and_emptied_once(
    cluster_train: ClusterTrain, pair: ContainerCluster, inventory: Path, tmp_path: Path
) -> None:
    """One installer, one copy of the job's files, both nodes verified; pruning asks both; teardown leaves nothing on either."""
    homes = {node.name: pair.below(node.name, f"/home/{pair.user}", "/tmp", "/dev/shm") for node in pair.nodes}
    keys = {node.name: pair.exec(node.name, ("cat", f"/home/{pair.user}/.ssh/authorized_keys")) for node in pair.nodes}

    made = cluster_train("provision", inventory, "--json", "--", job(tmp_path))
    assert made.exit_code == 0, made.stdout + made.stderr
    assert made.result["installed_on"] == ["node0"]
    assert said(made, "install: ") == ["node0"] and said(made, "files sent") == ["node0"]
    assert said(made, "has its root in common with node0") == ["node1"]
    checked = cluster_train("provision", inventory, "--check", "--json").result
    assert {node["state"] for node in checked["nodes"].values()} == {"complete"}
    assert all(node["modules"]["torch"]["version"] == "2.13.0+cpu" for node in checked["nodes"].values())
    again = cluster_train("provision", inventory, "--json", "--", job(tmp_path))
    assert again.result["installed_on"] == [] and said(again, "files sent") == [], again.stdout

    removed = cluster_train("teardown", inventory, "--yes", "--json")
    assert removed.exit_code == 0, removed.stdout + removed.stderr
    assert removed.result["removed"]["node0"] and removed.result["removed"]["node1"] == []
    for node in pair.nodes:
        assert pair.below(node.name, PLACE) == []
        assert pair.below(node.name, f"/home/{pair.user}", "/tmp", "/dev/shm") == homes[node.name]
        assert pair.exec(node.name, ("cat", f"/home/{pair.user}/.ssh/authorized_keys")) == keys[node.name]


def test_two_at_once_make_one_environment(
    cluster_train: ClusterTrain, pair: ContainerCluster, inventory: Path, tmp_path: Path
) -> None:
    """Two people provision one common root at once, from caches of their own: both end well, nothing is left half-made."""
    command = [COMMAND, "provision", inventory, "--json", "--", job(tmp_path)]
    both = [
        subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_CACHE_HOME": f"{tmp_path}/{name}"}
        )
        for name in ("one", "two")
    ]
    told = [process.communicate(timeout=COMMAND_LIMIT_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert pair.exec("node1", ("sh", "-c", f"ls -d {ROOT}/envs/*/complete.json | wc -l")).strip() == "1"
    unfinished = pair.exec("node1", ("find", ROOT, "-name", "*.part", "-o", "-name", "*.building*")).split()
    assert unfinished == []
    checked = cluster_train("provision", inventory, "--check", "--json").result
    assert [drift["kind"] for drift in checked["drift"]] == ["machine", "machine"], checked["drift"]  # they have no MPI


def test_what_the_other_machine_works_in_is_neither_pruned_nor_repaired(
    cluster_train: ClusterTrain, pair: ContainerCluster, inventory: Path, small_stack: Path
) -> None:
    """node1 runs in the environment, which node0's process list cannot show: it stays, and is named; afterwards it goes."""
    assert cluster_train("provision", inventory).exit_code == 0
    digest = cluster_train("provision", inventory, "--json").result["stack"]
    program = f"{ROOT}/envs/{digest}/bin/python"
    site = pair.exec("node0", ("sh", "-c", f"echo {ROOT}/envs/{digest}/lib/python3*/site-packages")).strip()
    content = inventory.read_text()
    waiting = (pair.docker, "exec", "--interactive", "--user", pair.user, pair.container("node1"), program)
    with subprocess.Popen(
        [*waiting, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        pair.exec("node0", ("rm", f"{site}/accelerate/__init__.py"))
        refused = cluster_train("provision", inventory, "--repair")
        assert refused.exit_code == 5 and "node1" in refused.stderr and "is in use" in refused.stderr, refused.stderr
        standins.build(standins.package("extra", "1.0"), small_stack)
        inventory.write_text(content.replace("mpi: system", "mpi: system\n  extra: [extra]"))
        assert cluster_train("provision", inventory).exit_code == 0
        pruned = cluster_train("provision", inventory, "--prune", "--yes")
        assert pruned.exit_code == 0 and f"node1: {digest} (environments) is in use, and stays" in pruned.stderr, pruned.stderr
        assert digest in pair.exec("node0", ("ls", f"{ROOT}/envs"))
        process.communicate(b"\n", timeout=COMMAND_LIMIT_S)
    assert cluster_train("provision", inventory, "--prune", "--yes").exit_code == 0
    assert digest not in pair.exec("node0", ("ls", f"{ROOT}/envs"))
