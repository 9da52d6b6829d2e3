"""`provision --check` with the real stack on two containers: table and document, before and after a real package is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import REPOSITORY, ClusterTrain
from containers import ContainerCluster

pytestmark = pytest.mark.stack


def test_a_damaged_package_on_one_container_is_marked_there(
    cluster_train: ClusterTrain, container_cluster: ContainerCluster, tmp_path: Path
) -> None:
    """Exit 0, no mark; then accelerate lacks a file and datasets is another version on node1: exit 4, both marked there alone."""
    stack = yaml.safe_load((REPOSITORY / "inventories" / "docker.yml").read_text())["stack"]
    path = container_cluster.inventory(tmp_path, stack=stack)
    made = cluster_train("provision", path, "--json")
    assert made.exit_code == 0, made.stdout + made.stderr
    good = cluster_train("provision", path, "--check")
    assert good.exit_code == 0 and "!" not in good.stdout, good.stdout
    stack, header = good.stdout.splitlines()[:2]
    assert stack.endswith(", backend gloo") and header.split() == ["package", "lock", "node0", "node1"]
    assert good.stdout.splitlines()[-1] == "every node is as the lock says"

    site = f"/home/{container_cluster.user}/.cluster-train/envs/{made.result['stack']}/lib/python3.11/site-packages"
    versions = made.result["versions"]
    dist_info = f"{site}/datasets-{versions['datasets']}.dist-info/METADATA"
    container_cluster.exec("node1", ("rm", f"{site}/accelerate/accelerator.py"))
    container_cluster.exec("node1", ("sed", "-i", "s/^Version: .*/Version: 1.0.0/", dist_info), user=container_cluster.user)
    try:
        shown = cluster_train("provision", path, "--check")
        told = cluster_train("provision", path, "--check", "--json")
    finally:
        repaired = cluster_train("provision", path, "--repair", "--json")

    assert shown.exit_code == 4, shown.stdout + shown.stderr
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.strip()}
    accelerate, datasets = versions["accelerate"], versions["datasets"]
    assert rows["accelerate"].split() == ["accelerate", accelerate, accelerate, "!", accelerate, "does", "not", "import"]
    assert rows["datasets"].split()[:5] == ["datasets", datasets, datasets, "!", "1.0.0"]
    assert "!" not in rows["torch"] and "!" not in rows["transformers"] and "!" not in rows["python"]
    assert f"node1: changed: datasets 1.0.0 instead of {datasets}" in shown.stdout and "node0:" not in shown.stdout
    assert "cluster-train provision --repair" in shown.stdout and "1 of 2 nodes are not as the lock says" in shown.stdout

    document = told.result
    assert told.exit_code == 4 and document["in_order"] is False and set(document["nodes"]) == {"node0", "node1"}
    assert document["packages"]["torch"] == {
        "locked": versions["torch"],
        "nodes": {"node0": versions["torch"], "node1": versions["torch"]},
        "differs": [],
    }
    assert {name for name, row in document["packages"].items() if row["differs"]} == {"accelerate", "datasets"}
    assert all(row["differs"] in ([], ["node1"]) for row in document["packages"].values())
    assert document["packages"]["datasets"]["nodes"] == {"node0": datasets, "node1": "1.0.0"}
    assert {drift["node"] for drift in document["drift"]} == {"node1"}
    assert document["nodes"]["node1"]["modules"]["accelerate"]["error"].startswith("ModuleNotFoundError")

    assert repaired.exit_code == 0 and repaired.result["installed_on"] == ["node1"], repaired.stdout + repaired.stderr
    assert cluster_train("provision", path, "--check").exit_code == 0
