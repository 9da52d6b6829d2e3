"""`init` on real machines: addresses, a hostfile, names of ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path

import yaml
from commands import ClusterTrain
from sshd import SshdNodes

from orchestrator.actions.inventory_file import load_inventory


def test_names_of_ssh_config_become_a_commented_inventory(
    sshd_factory: SshdNodes, cluster_train: ClusterTrain, tmp_path: Path
) -> None:
    """The pattern picks among the names, those of an included file too; host, port, user and key are ~/.ssh/config's affair."""
    nodes = sshd_factory(2)
    ssh = tmp_path / ".ssh"
    ssh.mkdir(mode=0o700)
    common = f"IdentityFile {nodes[0].key}\nPort {nodes[0].port}\nUser {nodes[0].user}\n"
    (ssh / "known_hosts").write_text(nodes[0].known_hosts.read_text())
    own = "".join(f"Host node{index}\n  HostName {node.host}\n" for index, node in enumerate(nodes))
    (ssh / "config").write_text(f"Include lab.conf\n{own}Host node* !node9\n{common}")
    (ssh / "lab.conf").write_text("Host other bastion\n  HostName 127.0.0.9\n")
    path = tmp_path / "lab.yml"
    ran = cluster_train("init", "node?", "-o", path, env={"HOME": str(tmp_path)})
    assert ran.exit_code == 0, ran.stderr
    text = path.read_text()
    assert [(node.name, node.host) for node in load_inventory(path, {}).nodes] == [("node0", "node0"), ("node1", "node1")]
    assert text.count("sockets") + text.count("socket,") == 2 and "cores" in text and " GB, Python 3." in text
    assert load_inventory(path, {}).root == f"/var/tmp/cluster-train-{nodes[0].user}"  # these two have different homes
    assert "one rank per socket" in text and "bf16:" in text
    missed = cluster_train("init", "gpu*", "-o", tmp_path / "other.yml", env={"HOME": str(tmp_path)})
    assert missed.exit_code == 2 and "it knows other, bastion, node0, node1" in missed.stderr


def test_a_hostfile_and_what_is_said_for_all(sshd_factory: SshdNodes, cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """Slots and users come along; a file that exists is overwritten only with --yes, and one node that is down is named."""
    node = sshd_factory(1)[0]
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{node.user}@{node.host}:2   # two ranks\n")
    home = {"HOME": str(tmp_path)}
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "known_hosts").write_text(node.known_hosts.read_text())
    path = tmp_path / "lab.yml"
    path.write_text("mine")
    words = ("init", hosts, "-o", path, "--key", node.key, "--port", str(node.port))
    assert cluster_train(*words, env=home).exit_code == 2 and path.read_text() == "mine"
    ran = cluster_train(*words, "--yes", env=home)
    assert ran.exit_code == 0, ran.stderr
    assert yaml.safe_load(path.read_text())["nodes"] == [{"name": "node0", "host": node.host, "user": node.user, "slots": 2}]
    (made,) = load_inventory(path, {}).nodes
    assert made.slots == 2 and load_inventory(path, {}).ssh.port == node.port
    down = cluster_train("init", "127.0.0.99:1", "-o", tmp_path / "new.yml", env=home)
    assert down.exit_code == 3 and "127.0.0.99" in down.stderr and not (tmp_path / "new.yml").exists()
