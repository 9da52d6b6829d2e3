"""`provision --check`, `--repair`, `--lock` and `--locked` over real sshd's, with stand-in wheels, real pip and real uv.

Each node sees a directory of its own at the root's path, and a network card of its own, as two machines do. Nothing is sent over
that card: it only tells the nodes apart.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standins
import yaml
from commands import ClusterTrain, LocalStack, Ran
from labs import SESSION, can_have_cards
from sshd import SshdNode, SshdNodes

pytestmark = pytest.mark.stack

LIMIT_S = 60


class Lab:
    """Two nodes with roots of their own, an inventory for them, and the command."""

    def __init__(self, directory: Path, nodes: list[SshdNode], wheels: Path, cluster_train: ClusterTrain) -> None:
        self.directory, self.nodes, self.wheels = directory, nodes, wheels
        self._cluster_train = cluster_train

    def run(self, command: str, *arguments: str | Path, stack: dict[str, Any] | None = None) -> Ran:
        path = self.directory / "lab.yml"
        path.write_text(yaml.safe_dump(self._inventory(stack or {})))
        environment = {"XDG_CACHE_HOME": str(self.cache.parent), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
        return self._cluster_train(command, path, *arguments, env=environment)

    @property
    def cache(self) -> Path:
        return self.directory / "cache" / "cluster-train"

    def site(self, node: int) -> Path:
        """The site-packages of a node's environment, seen from outside."""
        (found,) = (self.nodes[node].disk / "envs").glob("*/lib/python*/site-packages")
        return found

    def _inventory(self, stack: dict[str, Any]) -> dict[str, Any]:
        return {
            "cluster": "lab",
            "root": str(self.directory / "root"),
            "ssh": {
                "key": str(self.nodes[0].key),
                "known_hosts": str(self.nodes[0].known_hosts),
                "port": self.nodes[0].port,
            },
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(self.nodes)],
            "stack": {"torch": "2.8.0", "transformers": "5.24.0", "find_links": [str(self.wheels)], **stack},
        }


@pytest.fixture
def lab(tmp_path: Path, sshd_factory: SshdNodes, local_stack: LocalStack, cluster_train: ClusterTrain) -> Lab:
    if not can_have_cards():
        pytest.skip("nodes with disks and cards of their own need namespaces, which this user may not make")
    wheels, root = tmp_path / "wheels", tmp_path / "root"
    standins.retired_stack(wheels, "2.8.0")
    if standins.borrow(local_stack.root / "wheelhouse", "uv", wheels) is None:
        pytest.skip("the wheelhouse of the installed stack lacks uv")
    root.mkdir()
    return Lab(tmp_path, sshd_factory(2, disk=root, ForceCommand=SESSION), wheels, cluster_train)


def test_drift_on_one_node_is_marked_told_and_repaired_there(lab: Lab) -> None:
    """Missing, then as the lock says, then damaged on node1 alone: exit codes 4, 0, 4; repair installs on node1 only."""
    before = lab.run("provision", "--check", "--json")
    assert before.exit_code == 4, before.stdout + before.stderr
    assert {(drift["node"], drift["kind"]) for drift in before.result["drift"]} == {("node0", "missing"), ("node1", "missing")}
    made = lab.run("provision", "--json")
    assert made.exit_code == 0 and made.result["installed_on"] == ["node0", "node1"], made.stdout + made.stderr
    good = lab.run("provision", "--check", "--json")
    assert good.exit_code == 0 and good.result["in_order"] and good.result["drift"] == [], good.stdout
    assert good.result["nodes"]["node1"]["modules"]["torch"] == {"version": "2.8.0+cpu", "error": None}
    assert good.result["nodes"]["node1"]["mpi"]["version"].startswith("Intel(R) MPI Library")

    installed = lab.site(1) / "torch" / "__init__.py"
    installed.write_text("raise ImportError('undefined symbol: xyz')\n")  # in place: uv's cache holds the same file
    told = lab.run("provision", "--check")
    assert told.exit_code == 4
    assert "node1: torch does not import: ImportError: undefined symbol: xyz" in told.stdout
    assert "node1: damaged: torch (1 of " in told.stdout and "cluster-train provision --repair" in told.stdout
    assert "1 of 2 nodes are not as the lock says" in told.stdout
    (row,) = [line.split() for line in told.stdout.splitlines() if line.startswith("torch ")]
    assert row == ["torch", "2.8.0+cpu", "2.8.0+cpu", "!", "2.8.0+cpu", "does", "not", "import"]

    untouched = (lab.site(0) / "torch" / "__init__.py").stat().st_ino
    repaired = lab.run("provision", "--repair", "--json")
    assert repaired.exit_code == 0 and repaired.result["installed_on"] == ["node1"], repaired.stdout + repaired.stderr
    assert (lab.site(0) / "torch" / "__init__.py").stat().st_ino == untouched
    assert lab.run("provision", "--check").exit_code == 0


def test_repair_waits_for_nobody_who_uses_the_environment(lab: Lab) -> None:
    """While a process on node1 runs in it, the damaged environment stays, exit code 5 names it; afterwards it is made anew."""
    assert lab.run("provision").exit_code == 0
    (lab.site(1) / "accelerate" / "__init__.py").unlink()
    program = f"{lab.directory}/root/{lab.site(1).parents[2].relative_to(lab.nodes[1].disk)}/bin/python"
    command = lab.nodes[1].ssh(f"{program} -c 'print(\"up\", flush=True); input()'")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        refused = lab.run("provision", "--repair")
        assert refused.exit_code == 5 and "node1" in refused.stderr and "is in use" in refused.stderr, refused.stderr
        assert "cluster-train stop" in refused.stderr and not (lab.site(1) / "accelerate" / "__init__.py").exists()
        process.communicate(b"\n", timeout=LIMIT_S)
    assert lab.run("provision", "--repair").exit_code == 0
    assert (lab.site(1) / "accelerate" / "__init__.py").exists()


def test_a_wheel_that_is_damaged_on_a_node_is_sent_again(lab: Lab) -> None:
    """An environment is lost and a wheel in the node's wheelhouse altered: repair finds it by its hash and sends that one."""
    assert lab.run("provision").exit_code == 0
    home = lab.nodes[1].disk
    (wheel,) = (home / "wheelhouse").glob("*/datasets-*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-10])
    (complete,) = (home / "envs").glob("*/complete.json")
    complete.unlink()
    repaired = lab.run("provision", "--repair", "--json")
    assert repaired.exit_code == 0 and repaired.result["installed_on"] == ["node1"], repaired.stdout + repaired.stderr
    assert f"{lab.directory}/root/wheelhouse/{wheel.parent.name}" in repaired.stdout
    assert lab.run("provision", "--check").exit_code == 0


@pytest.mark.parametrize("victim", ["datasets", "uv", "interpreter"])
def test_plain_provision_names_the_command_that_cures(lab: Lab, victim: str) -> None:
    """A wheel, uv's wheel, or the interpreter: exit code 4, node, path, and what to type, which helps."""
    assert lab.run("provision").exit_code == 0
    home = lab.nodes[1].disk
    (environment,) = (home / "envs").glob("[!.]*")
    damage(home, environment, victim)
    told = lab.run("provision")
    assert told.exit_code == 4 and "Traceback" not in told.stderr, told.stderr
    assert "node1: damaged: " in told.stderr and "node0: damaged" not in told.stderr
    assert f"do: cluster-train provision --repair {lab.directory}/lab.yml" in told.stderr
    assert lab.run("provision", "--repair").exit_code == 0
    assert lab.run("provision", "--check").exit_code == 0


def damage(home: Path, environment: Path, victim: str) -> None:
    """Spoil one thing on a node as a bad disk or a stray hand does."""
    if victim == "interpreter":
        (environment / "bin" / "python").unlink()
    else:
        (wheel,) = (home / "wheelhouse").glob(f"*/{victim}-*.whl")
        wheel.write_bytes(wheel.read_bytes()[:-10])
        subprocess.run(["rm", "-r", environment, home / "bin", home / "cache"], check=True)


def test_a_wheel_that_is_damaged_in_the_cache_is_not_sent(lab: Lab) -> None:
    """It is named and fetched again before anything goes to a node."""
    assert lab.run("provision", "--check").exit_code == 4  # resolves
    assert lab.run("provision").exit_code == 0
    (wheel,) = (lab.cache / "wheels").glob("*/torch-*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-10])
    assert lab.run("provision").exit_code == 0  # nothing is sent, so nothing is read
    for node in lab.nodes:
        subprocess.run(["rm", "-r", node.disk / "envs", node.disk / "wheelhouse"], check=True)
    again = lab.run("provision")
    assert again.exit_code == 0 and f"damaged in the cache, fetched again: {wheel.name}" in again.stderr, again.stderr


def test_a_lock_file_is_followed_to_the_letter(lab: Lab) -> None:
    """What was locked is installed with an empty cache though newer wheels are there; another stack or a cut file is refused."""
    lock = lab.directory / "lab.lock"
    first = lab.run("provision", "--lock", lock, "--json")
    assert first.exit_code == 0, first.stdout + first.stderr
    wheels = {wheel["name"]: wheel for wheel in json.loads(lock.read_text())["wheels"]}
    assert wheels["datasets"]["version"] == "4.0.0" and len(wheels["torch"]["sha256"]) == 64

    standins.build(standins.datasets("4.9.0"), lab.wheels)
    subprocess.run(["rm", "-r", lab.cache], check=True)
    assert lab.run("provision", "--locked", lock, "--check", "--json").result["in_order"]
    assert not lab.run("provision", "--check", "--json").result["in_order"]  # resolved anew, newer datasets are wanted
    for node in lab.nodes:
        subprocess.run(["rm", "-r", node.disk / "envs", node.disk / "wheelhouse"], check=True)
    again = lab.run("provision", "--locked", lock, "--json")
    assert again.exit_code == 0 and again.result["stack"] == first.result["stack"], again.stdout + again.stderr

    other = lab.run("provision", "--locked", lock, stack={"extra": ["seqeval"]})
    assert other.exit_code == 4 and "the inventory asks for seqeval, the lock does not" in other.stderr
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "target": "cp37 x86_64"}))
    other = lab.run("provision", "--locked", lock)
    assert other.exit_code == 4 and "is a lock for cp37" in other.stderr and "the nodes are cp3" in other.stderr
    lock.write_text(lock.read_text()[:-200])
    cut = lab.run("up", "--locked", lock, "--", __file__)
    assert cut.exit_code == 2 and f"{lock}: is not a lock" in cut.stderr and "Traceback" not in cut.stderr


def test_check_and_repair_exclude_each_other(cluster_train: Callable[..., Ran]) -> None:
    """One only looks, the other makes: a usage error."""
    ran = cluster_train("provision", "inventories/local.yml", "--check", "--repair")
    assert ran.exit_code == 2 and "--repair" in ran.stderr
