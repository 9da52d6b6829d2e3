"""`doctor` and `init` on the two containers, as they are after a start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from commands import ClusterTrain
from containers import ContainerCluster, cluster_command
from jobs import write_model

from orchestrator.actions.inventory_file import load_inventory


def test_nothing_stops_up_on_two_fresh_containers(
    container_cluster: ContainerCluster, cluster_train: ClusterTrain, tmp_path: Path
) -> None:
    """All ways are open, both ends see each other's addresses; Docker's names resolve to the cards' own addresses."""
    ran = cluster_train("doctor", container_cluster.inventory(tmp_path), "--json")
    assert ran.exit_code == 0, ran.stdout
    result = ran.result
    assert {way["state"] for way in result["ways"]} == {"open"} and len(result["ways"]) == 4
    addresses = {node.name: node.address for node in container_cluster.nodes}
    assert all(way["seen_as"] == addresses[way["source"]] for way in result["ways"])
    names = {finding["what"] for finding in result["findings"]}
    assert not names & {"its name means itself only", "its name does not resolve", "little shared memory"}


def test_a_paused_container_hides_no_other(
    container_cluster: ContainerCluster, cluster_train: ClusterTrain, tmp_path: Path
) -> None:
    """A machine that accepts and stalls costs its own time limit, and is the only error."""
    ssh = {"user": container_cluster.user, "key": str(container_cluster.key), "known_hosts": str(container_cluster.known_hosts)}
    path = container_cluster.inventory(tmp_path, ssh={**ssh, "connect_timeout": 3})
    docker, paused = container_cluster.docker, container_cluster.container("node1")
    cluster_command.run((docker, "pause", paused), limit_s=60)
    try:
        ran = cluster_train("doctor", path, "--json")
    finally:
        cluster_command.run((docker, "unpause", paused), limit_s=60)
    assert ran.exit_code == 5 and list(ran.result["nodes"]) == ["node0"]
    errors = [(one["node"], one["what"]) for one in ran.result["findings"] if one["severity"] == "error"]
    assert errors == [("node1", "cannot be reached")]


def test_init_writes_what_it_found(container_cluster: ContainerCluster, cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """The network as a value; processors, memory and cards as comments."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "known_hosts").write_text(container_cluster.known_hosts.read_text())
    path = tmp_path / "new.yml"
    hosts = [node.address for node in container_cluster.nodes]
    words = ("--user", container_cluster.user, "--key", container_cluster.key)
    ran = cluster_train("init", *hosts, *words, "-o", path, env={"HOME": str(tmp_path)})
    assert ran.exit_code == 0, ran.stderr
    made = load_inventory(path, {})
    assert (
        made.network.cidr
        and [node.host for node in made.nodes] == hosts
        and [node.name for node in made.nodes] == ["node0", "node1"]
    )
    assert path.read_text().count(" on eth0") == 2 and "NUMA node" in path.read_text()


def test_what_a_container_is_kept_from_is_told_with_its_remedy(
    containers_with: Callable[..., ContainerCluster], cluster_train: ClusterTrain, tmp_path: Path
) -> None:
    """docker's limits of memory, processor time and cores, shared memory, open files and processes: on the node that has them
    each is found, with its figure and what raises it; on the other none is."""
    limits = ("--memory", "700m", "--cpus", "0.5", "--shm-size", "32m", "--ulimit", "nofile=512:512", "--ulimit", "nproc=700:700")
    cluster = containers_with(("--shm-size", "1g"), (*limits, "--cpuset-cpus", "0"))
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", parameters=60_000_000)
    job = {"args": ["--model_name_or_path", str(tmp_path / "model")]}
    ran = cluster_train("doctor", cluster.inventory(tmp_path, job=job), "--json")
    assert ran.exit_code == 0, ran.stdout
    told = {(one["node"], one["what"]): (one["evidence"], one["remedy"]) for one in ran.result["findings"]}
    expected = {
        "too little memory for the model": ("1 ranks need about 1.0 GB and activations, 0.7 GB are available", "ppn"),
        "processor time is limited": ("time of 0.5 CPUs for 1 cores", "--cpus"),
        "little shared memory": ("/dev/shm has 34 MB free", "--shm-size=1g"),
        "few open files allowed": ("512", "nofile"),
        "few processes allowed": ("700", "nproc"),
    }
    if (os.cpu_count() or 1) > 1:
        expected["some CPUs are not ours"] = (f"1 of {os.cpu_count()} CPUs may be used", "handled")
    for what, (evidence, remedy) in expected.items():
        found = told.get(("node1", what), ("nothing", "nothing"))
        assert found[0] == evidence and remedy in found[1], (what, found)
        assert ("node0", what) not in told
