"""`python docker/cluster.py`, the two-container cluster by hand, on a project and a network that belong to one test."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import DOCKER, cluster_command

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(docker_engine: Any) -> Iterator[str]:
    name = f"cluster-train-test-{uuid.uuid4().hex[:8]}"
    yield name
    cluster_command.remove_project(docker_engine.docker, name)


@pytest.fixture
def subnet() -> str:
    """A small network outside the ranges that Docker itself hands out."""
    return f"10.{random.randrange(200, 250)}.{random.randrange(256)}.{16 * random.randrange(16)}/28"


@pytest.fixture
def command(project: str, tmp_path: Path) -> Command:
    """Runs cluster.py on the test's own project; `folder` is the docker/ to run it from."""

    def run(verb: str, *options: str, folder: Path = DOCKER) -> subprocess.CompletedProcess[str]:
        argv = (
            sys.executable,
            str(folder / "cluster.py"),
            verb,
            "--project",
            project,
            "--state",
            str(tmp_path / "state"),
        )
        return subprocess.run((*argv, *options), capture_output=True, text=True, timeout=300)

    return run


def test_up_status_and_down(command: Command, project: str, subnet: str, tmp_path: Path, docker_engine: Any) -> None:
    """`up` makes a cluster that its key and known_hosts open, a second `up` changes nothing, `down` removes all."""
    started = command("up", "--subnet", subnet)
    assert started.returncode == 0, started.stderr
    addresses = cluster_command.node_addresses(subnet)
    assert f"CLUSTER_TRAIN_NODE0={addresses['node0']}" in started.stdout
    assert command("status").returncode == 0
    assert _host_name(addresses["node1"], tmp_path / "state") == "node1"

    before = cluster_command.find_nodes(docker_engine.docker, project)
    assert command("up", "--subnet", subnet).returncode == 0
    assert cluster_command.find_nodes(docker_engine.docker, project) == before

    assert command("down").returncode == 0
    assert cluster_command.find_nodes(docker_engine.docker, project) == ()
    assert list((tmp_path / "state").iterdir()) == []
    assert command("status").returncode == 1


def test_another_checkouts_cluster_is_left_alone(command: Command, subnet: str, tmp_path: Path) -> None:
    """From another checkout neither `up` nor `down` touches the project; the message names the one that owns it."""
    assert command("up", "--subnet", subnet).returncode == 0
    other = shutil.copytree(DOCKER, tmp_path / "docker", ignore=shutil.ignore_patterns(".state"))
    for verb in ("up", "down"):
        refused = command(verb, folder=other)
        assert refused.returncode == 1
        assert f"was started from {DOCKER}" in refused.stderr
    assert command("status").returncode == 0


def test_a_taken_network_is_reported(command: Command, container_cluster: Any, docker_engine: Any, project: str) -> None:
    """Where the subnet overlaps another network, `up` says which option to use, and leaves nothing behind."""
    taken = f"{container_cluster.nodes[0].address.rpartition('.')[0]}.0/28"
    refused = command("up", "--subnet", taken)
    assert refused.returncode == 1
    assert f"{taken} is taken: choose another with --subnet" in refused.stderr
    assert cluster_command.remove_project(docker_engine.docker, project) == []


def test_a_node_that_does_not_start_is_reported(
    command: Command, project: str, subnet: str, tmp_path: Path, docker_engine: Any
) -> None:
    """Where sshd does not come up, `up` shows what the node printed, and leaves nothing behind."""
    broken = shutil.copytree(DOCKER, tmp_path / "docker", ignore=shutil.ignore_patterns(".state"))
    (broken / "start-sshd").write_text("echo the disk is made of cheese; exit 1\n")
    compose = broken / "compose.yaml"
    compose.write_text(compose.read_text().replace("image: cluster-train-node", f"image: {project}"))
    try:
        refused = command("up", "--subnet", subnet, folder=broken)
    finally:
        cluster_command.run((docker_engine.docker, "image", "rm", "--force", project), limit_s=60)
    assert refused.returncode == 1
    assert "the disk is made of cheese" in refused.stderr
    assert cluster_command.remove_project(docker_engine.docker, project) == []


@pytest.mark.parametrize("subnet", ["10.1.2.3/24", "10.1.2.0/29", "nonsense"])
def test_a_useless_network_is_refused(command: Command, subnet: str) -> None:
    """A subnet that is none, or has no room for the nodes, is named in the message before anything is started."""
    refused = command("up", "--subnet", subnet)
    assert refused.returncode == 1
    assert f"--subnet {subnet}" in refused.stderr


def _host_name(address: str, state: Path) -> str:
    options = ("StrictHostKeyChecking=yes", "BatchMode=yes", f"UserKnownHostsFile={state / 'known_hosts'}")
    flags = [word for option in options for word in ("-o", option)]
    argv = ("ssh", "-F", "none", *flags, "-i", str(state / "id_ed25519"), f"trainer@{address}", "hostname")
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60).stdout.strip()
