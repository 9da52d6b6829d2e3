"""Nodes that cannot be provisioned are told of before anything is copied: every one, with figure and remedy, exit code 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import COMMAND, REPOSITORY, ClusterTrain
from labs import LIMIT_S, Lab
from sshd import SshdNodes, can_mount


def test_a_root_that_cannot_be_written_is_told_for_every_node(
    cluster_train: ClusterTrain, sshd_factory: SshdNodes, tmp_path: Path
) -> None:
    """A root below a regular file, where not even root may write: both nodes are named, with the system's own words."""
    nodes = sshd_factory(2)
    (tmp_path / "file").touch()
    path = Lab(nodes=nodes, wheels=tmp_path, cache=tmp_path).inventory(tmp_path / "lab.yml", tmp_path / "file" / "root")
    ran = cluster_train("provision", path)
    assert ran.exit_code == 4, ran.stderr
    for name in ("node0", "node1"):
        assert f"{name}: root {tmp_path}/file/root cannot be written: [Errno 20] Not a directory" in ran.stderr
    assert ran.stderr.count("do: name another `root`, or make this one writable") == 1


@pytest.mark.stack
def test_a_disk_that_is_too_small_is_told_with_both_figures(lab: Lab, tmp_path: Path) -> None:
    """50 MB, and a wheel of 80 MB that unpacks to more: what is free, what is needed, and nothing of it was sent."""
    if not can_mount():
        pytest.skip("a small disk needs a mount namespace, which only root may make")
    (disk := tmp_path / "disk").mkdir()
    path = lab.inventory(tmp_path / "lab.yml", disk / "root", "large")
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "ssh": {}, "nodes": [{"name": "here", "host": "localhost"}]}))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    script = 'mount -t tmpfs -o size=50m tmpfs "$1" && shift && "$@"; code=$?; ls "$0/root"; exit $code'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, disk, disk, COMMAND, "provision", path],
        cwd=REPOSITORY,
        env={**plain, **lab.settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 4, done.stderr
    assert f"too little disk space: here {disk}/root has 0.1 GB free, about 0.4 GB are needed" in done.stderr
    assert "do: free some space there, or name another `root`" in done.stderr
    assert done.stdout.split() == ["agent"]


def test_an_interpreter_that_torch_has_no_wheels_for_is_told_before_resolving(
    cluster_train: ClusterTrain, sshd_factory: SshdNodes, tmp_path: Path
) -> None:
    """A torch from before this Python: what was asked, what both nodes have, what would do; nothing was resolved or copied."""
    nodes = sshd_factory(2)
    path = Lab(nodes=nodes, wheels=tmp_path, cache=tmp_path).inventory(tmp_path / "lab.yml", tmp_path / "root")
    path.write_text(path.read_text().replace("2.13.0", "1.10.2"))
    here = f"3.{sys.version_info[1]}"
    ran = cluster_train("provision", path)
    assert ran.exit_code == 4, ran.stderr
    assert f"torch 1.10.2 has no wheels for Python {here}, only for 3.6 to 3.9; the nodes have node0 Python {here}." in ran.stderr
    assert f", node1 Python {here}." in ran.stderr and f"with Python {here} torch " in ran.stderr
    assert "resolving" not in ran.stderr
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["agent", "ssh"]
