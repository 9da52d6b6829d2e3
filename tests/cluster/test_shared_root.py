"""A root that two machines have in common: two containers that mount one Docker volume, as two clients mount one export.

(The kernel of a test machine need not know NFS; a volume is one file system below two machines all the same.)
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standins
from commands import COMMAND, COMMAND_LIMIT_S, REPOSITORY, ClusterTrain, Ran
from containers import ClusterNode, ContainerCluster, cluster_command

pytestmark = pytest.mark.stack

PLACE = "/shared"
ROOT = f"{PLACE}/root"
START_LIMIT_S = 60
STACK = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "datasets": "5.2.0"}


@pytest.fixture
def pair(container_cluster: ContainerCluster, tmp_path: Path) -> Iterator[ContainerCluster]:
    """Two more containers of the cluster's image, with one volume between them."""
    docker, made = container_cluster.docker, uuid.uuid4().hex[:8]
    run = cluster_command.run
    volume = run((docker, "volume", "create", f"cluster-train-test-{made}"), limit_s=30).strip()
    public = container_cluster.key.with_suffix(".pub").read_text().strip()
    options = ("--detach", "--init", "--volume", f"{volume}:{PLACE}", "--env", f"AUTHORIZED_KEY={public}")
    containers: list[str] = []
    try:
        for name in ("node0", "node1"):
            command = (docker, "run", *options, "--hostname", name, "cluster-train-node")
            containers.append(run(command, limit_s=60).strip())
        nodes = [_node(docker, index, container) for index, container in enumerate(containers)]
        deadline = time.monotonic() + START_LIMIT_S
        while not all(cluster_command.ssh_answers(node) for node in nodes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cluster_command.write_known_hosts(tmp_path / "known_hosts", docker, nodes)
        cluster = ContainerCluster(
            docker=docker,
            nodes=tuple(ClusterNode(name=node.name, address=node.address, container=node.container) for node in nodes),
            user=container_cluster.user,
            key=container_cluster.key,
            known_hosts=tmp_path / "known_hosts",
        )
        cluster.exec("node0", ("chown", cluster.user, PLACE))
        yield cluster
    finally:
        if containers:
            run((docker, "rm", "--force", *containers), limit_s=60)
        run((docker, "volume", "rm", volume), limit_s=60)


def _node(docker: str, index: int, container: str) -> Any:
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = cluster_command.run((docker, "inspect", "--format", template, container), limit_s=30).strip()
    return cluster_command.Node(name=f"node{index}", container=container, address=address, running=True, made_by="")


@pytest.fixture
def inventory(pair: ContainerCluster, uv_wheel: Path, tmp_path: Path) -> Path:
    """Both containers, their root on the volume, and a small stack of stand-ins with the real uv."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / uv_wheel.name).symlink_to(uv_wheel)
    for name, version in STACK.items():
        standins.build(standins.package(name, version), wheels)
    return pair.inventory(tmp_path, root=ROOT, stack={"torch": "2.13.0", "mpi": "system", "find_links": [str(wheels)]})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index, no configuration, and nobody else's cache, for all that is started."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)


def job(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text("print('hello')\n")
    return path


def said(ran: Ran, text: str) -> list[str]:
    """The nodes that told of a step whose text holds this."""
    return [event["node"] for event in ran.events if event["event"] == "step" and text in event["text"]]


def below(cluster: ContainerCluster, node: str, *places: str) -> list[str]:
    return cluster.exec(node, ("find", *places, "-mindepth", "1")).split("\n")[:-1]


@pytest.mark.usefixtures("settings")
def test_a_common_root_is_filled_once_and_emptied_once(
    cluster_train: ClusterTrain, pair: ContainerCluster, inventory: Path, tmp_path: Path
) -> None:
    """One installer, one copy of the job's files, both nodes verified; pruning asks both; teardown leaves nothing on either."""
    homes = {node.name: below(pair, node.name, f"/home/{pair.user}", "/tmp", "/dev/shm") for node in pair.nodes}
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
        assert below(pair, node.name, PLACE) == []
        assert below(pair, node.name, f"/home/{pair.user}", "/tmp", "/dev/shm") == homes[node.name]
        assert pair.exec(node.name, ("cat", f"/home/{pair.user}/.ssh/authorized_keys")) == keys[node.name]


@pytest.mark.usefixtures("settings")
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


@pytest.mark.usefixtures("settings")
def test_what_the_other_machine_works_in_is_neither_pruned_nor_repaired(
    cluster_train: ClusterTrain, pair: ContainerCluster, inventory: Path
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
        standins.build(standins.package("extra", "1.0"), inventory.parent / "wheels")
        inventory.write_text(content.replace("mpi: system", "mpi: system\n  extra: [extra]"))
        assert cluster_train("provision", inventory).exit_code == 0
        pruned = cluster_train("provision", inventory, "--prune", "--yes")
        assert pruned.exit_code == 0 and f"node1: {digest} (environments) is in use, and stays" in pruned.stderr, pruned.stderr
        assert digest in pair.exec("node0", ("ls", f"{ROOT}/envs"))
        process.communicate(b"\n", timeout=COMMAND_LIMIT_S)
    assert cluster_train("provision", inventory, "--prune", "--yes").exit_code == 0
    assert digest not in pair.exec("node0", ("ls", f"{ROOT}/envs"))
