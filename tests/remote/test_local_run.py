"""The local twin, whole: this machine, no SSH, a real mpirun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from commands import BORROWED, REPOSITORY, ClusterTrain, LocalStack

pytestmark = pytest.mark.stack

HELLO = "import os; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sorted(os.sched_getaffinity(0)))"


@pytest.fixture
def inventory(tmp_path: Path, local_stack: LocalStack) -> Path:
    """This machine with a root of this test's own, in which the installed stack is found."""
    root = local_stack.borrowed(tmp_path / "root")
    content = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())
    path = tmp_path / "local.yml"
    path.write_text(yaml.safe_dump({**content, "root": str(root), "job": {"ppn": 2}}))
    return path


def test_two_ranks_on_this_machine(cluster_train: ClusterTrain, inventory: Path, tmp_path: Path) -> None:
    """Both ranks run, each on cores of its own where there are two; nothing is installed."""
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    ran = cluster_train("up", inventory, "--", script)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    said = sorted(line.split("] ", 1)[1] for line in ran.stdout.splitlines() if line.startswith("[this-machine r"))
    assert [line.split(" [")[0] for line in said] == ["hello from 0 of 2", "hello from 1 of 2"]
    if len(os.sched_getaffinity(0)) >= 2:
        assert said[0].split("[")[1] != said[1].split("[")[1]
    assert "nothing to install" in ran.stderr and "this machine" in ran.stderr


def test_a_damaged_environment_is_recognised(
    cluster_train: ClusterTrain, inventory: Path, tmp_path: Path, local_stack: LocalStack
) -> None:
    """It is complete by its record, and fails at the import: the end of the run says what mends it."""
    with_a_torch_of_its_own(tmp_path / "root" / "envs", local_stack, "raise ImportError('undefined symbol: xyz')")
    script = tmp_path / "train.py"
    script.write_text("import torch")
    ran = cluster_train("up", inventory, "--json", "--", script)
    assert ran.exit_code == 1 and "undefined symbol: xyz" in ran.result["summary"], ran.stdout + ran.stderr
    assert "cluster-train provision --repair" in ran.result["advice"]
    assert "cluster-train provision --repair" in cluster_train("up", inventory, "--", script).stdout


def with_a_torch_of_its_own(envs: Path, stack: LocalStack, source: str) -> None:
    """Environments of which one looks like the stack's, through links, but for its torch."""
    envs.unlink()
    whole = stack.root / "envs" / stack.digest
    site = envs / stack.digest / next(whole.glob("lib/python*")).relative_to(whole) / "site-packages"
    site.mkdir(parents=True)
    for place in (whole, whole / site.relative_to(envs / stack.digest)):
        for path in place.iterdir():
            target = envs / stack.digest / path.relative_to(whole)
            if path.name not in ("lib", "torch"):
                target.symlink_to(path)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(source)


def test_doctor_and_teardown(cluster_train: ClusterTrain, inventory: Path, tmp_path: Path, local_stack: LocalStack) -> None:
    """doctor finds no error on a machine that just trained; teardown removes what is below the root, through no link."""
    assert cluster_train("doctor", inventory, "--json").exit_code == 0
    root = tmp_path / "root"
    for name in BORROWED:
        (root / name).unlink()
    assert (root / "agent").is_dir()
    assert cluster_train("teardown", inventory, "--yes").exit_code == 0
    assert not root.exists() and local_stack.python.exists()


def test_init_writes_an_inventory_that_works(cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """The written file loads, and its nodes were seen."""
    path = tmp_path / "new" / "lab.yml"
    ran = cluster_train("init", "127.0.0.1", "-o", path, env={"HOME": str(tmp_path)})
    assert ran.exit_code == 0, ran.stderr
    assert yaml.safe_load(path.read_text())["nodes"] == [{"name": "node0", "host": "127.0.0.1"}]
    assert cluster_train("doctor", path, env={"HOME": str(tmp_path)}).exit_code in (0, 5)
