"""Provisioning that is cut short anywhere, or done twice at once, over real sshd's with real pip and real uv.

Whatever was killed: no half environment and no half wheel can be seen, and the next `cluster-train provision` completes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from labs import LIMIT_S, Lab, ended, large_is_under_way, wait_for, whole_wheels
from sshd import NodeProcess, SshdNode, SshdNodes, can_mount

from orchestrator.actions.inventory_file import load_inventory
from orchestrator.actions.probe import probe
from orchestrator.actions.provision import provision
from orchestrator.engine.reach import connected
from orchestrator.errors import FleetError

pytestmark = pytest.mark.stack


def unfinished(root: Path) -> list[str]:
    """What is still being made, or was left half-made, anywhere below the root."""
    return [str(path.relative_to(root)) for path in root.rglob(".*") if path.name.endswith((".part", ".building", ".txt"))]


def complete_environments(root: Path) -> int:
    """How many environments can be seen; each must be complete and import its torch."""
    found = list((root / "envs").glob("[!.]*"))
    for environment in found:
        assert (environment / "complete.json").exists()
        subprocess.run([environment / "bin" / "python", "-c", "import torch, large"], check=True, timeout=LIMIT_S)
    return len(found)


def has_ended(process: subprocess.Popen[str]) -> Callable[[], bool]:
    return lambda: process.poll() is not None


def is_building(root: Path) -> bool:
    return any(root.glob("envs/.*.building/bin/python"))


def on_node(node: SshdNode, *words: str) -> NodeProcess:
    """The process on a node whose command line holds all the words."""
    (found,) = [process for process in node.processes() if all(word in " ".join(process.argv) for word in words)]
    return found


def test_the_orchestrator_is_killed_while_it_sends(lab: Lab, tmp_path: Path) -> None:
    """kill -9: the node notices that nothing comes any more, keeps the wheels that are whole, and the next run goes on."""
    root, inventory = tmp_path / "root", lab.inventory(tmp_path / "lab.yml", tmp_path / "root", "large")
    process = lab.start(inventory)
    wait_for(lambda: large_is_under_way(root), has_ended(process))
    process.kill()
    ended(process)
    assert whole_wheels(root) == ["accelerate", "datasets"]
    assert not (root / "envs").exists()
    again = lab.provision(inventory)
    assert again.exit_code == 0, again.stderr
    assert "sending 4 wheels" in again.stderr  # of six
    assert complete_environments(root) == 1 and unfinished(root) == []


@pytest.mark.parametrize(
    ("victim", "moment"),
    [("unpack.py", large_is_under_way), ("@notty", large_is_under_way), ("install.py", is_building), ("@notty", is_building)],
    ids=["unpack", "link-while-sending", "install", "link-while-installing"],
)
def test_something_is_killed_on_the_node(lab: Lab, tmp_path: Path, victim: str, moment: Callable[[Path], bool]) -> None:
    """Exit code 4 and the node's name; whatever was left half-made is cleared and made whole by the next run."""
    (node,) = lab.nodes
    root, inventory = tmp_path / "root", lab.inventory(tmp_path / "lab.yml", tmp_path / "root", "large")
    process = lab.start(inventory)
    wait_for(lambda: moment(root), has_ended(process))
    os.kill(on_node(node, victim).pid, signal.SIGKILL)
    failed = ended(process)
    assert failed.exit_code == 4 and "node0" in failed.stderr, failed.stderr
    assert complete_environments(root) == 0 or victim == "@notty"  # an installer that lost its link finishes
    whole_wheels(root)
    assert unfinished(root) or victim == "@notty"
    again = lab.provision(inventory)
    assert again.exit_code == 0, again.stderr
    assert complete_environments(root) == 1 and unfinished(root) == []


def test_three_at_once(lab: Lab, tmp_path: Path) -> None:
    """Two provisions of one stack and one of another, at once on one node: both environments come to be, every wheel whole."""
    root = tmp_path / "root"
    one, other = (
        lab.inventory(tmp_path / f"{name}.yml", root, *extra) for name, extra in [("a", ["large"]), ("b", ["large", "small"])]
    )
    processes = [lab.start(inventory) for inventory in (one, one, other)]
    for done in [ended(process) for process in processes]:
        assert done.exit_code == 0, done.stderr
    assert complete_environments(root) == 2
    assert whole_wheels(root) == ["accelerate", "datasets", "large", "small", "torch", "transformers", "uv"]
    assert unfinished(root) == []


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    """The place where each node sees a disk of its own."""
    if not can_mount():
        pytest.skip("nodes with disks of their own need mount namespaces, which only root may make")
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def three(sshd_factory: SshdNodes, disks: Path, lab: Lab) -> Lab:
    return Lab(nodes=sshd_factory(3, disk=disks), wheels=lab.wheels, cache=lab.cache)


def test_a_node_vanishes_while_it_is_sent_to(
    three: Lab, sshd_factory: SshdNodes, disks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two others are finished; the error names the one that went, which holds whole wheels only, and exits with 4."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in three.settings.items():
        monkeypatch.setenv(name, value)
    inventory = load_inventory(str(three.inventory(tmp_path / "lab.yml", disks / "root", "large")))
    gone = three.nodes[1]
    with connected(inventory) as fleet, ThreadPoolExecutor(1) as pool:
        nodes = probe(fleet, inventory)
        provisioning = pool.submit(provision, fleet, inventory, nodes, lambda event: None)
        wait_for(lambda: large_is_under_way(gone.disk / "root"), provisioning.done)
        sshd_factory.stop(gone)
        with pytest.raises(FleetError) as failed:
            provisioning.result(LIMIT_S)
    assert failed.value.exit_code == 4 and list(failed.value.failures) == ["node1"] and "node1" in failed.value.message
    for node in (three.nodes[0], three.nodes[2]):
        assert [path.name for path in (node.disk / "root" / "envs").glob("[!.]*/complete.json")] == ["complete.json"]
    whole_wheels(gone.disk / "root")
    assert not (gone.disk / "root" / "envs").exists()
