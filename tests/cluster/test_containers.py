"""The two containers are what the other cluster tests take them for: two bare machines on a network of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from containers import ClusterNode, ContainerCluster, DockerError

# Answers one connection with this machine's host name, on a port that the system chose and that is printed first.
GREET_ONCE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.sendall(socket.gethostname().encode())
connection.close()
"""

LISTEN = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    print(connection.makefile().read())
"""

MISSING_MODULES = """
import importlib.util
print([name for name in ("torch", "transformers", "numpy", "pip", "ensurepip") if importlib.util.find_spec(name)])
"""


def ssh_argv(cluster: ContainerCluster, node: ClusterNode, *command: str) -> tuple[str, ...]:
    """The OpenSSH client's command line, with the session's key and with the host key checked."""
    options = ("BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10")
    flags = [word for option in (*options, f"UserKnownHostsFile={cluster.known_hosts}") for word in ("-o", option)]
    return ("ssh", "-F", "none", *flags, "-i", str(cluster.key), f"{cluster.user}@{node.address}", *command)


def over_ssh(cluster: ContainerCluster, node: ClusterNode, *command: str) -> subprocess.CompletedProcess[str]:
    argv = ssh_argv(cluster, node, *command)
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_both_answer_to_ssh(container_cluster: ContainerCluster) -> None:
    """Each node lets the session's key in as an ordinary user, and is the host that it is named after."""
    for node in container_cluster.nodes:
        done = over_ssh(container_cluster, node, "hostname; whoami; echo ~")
        assert done.stdout.split() == [node.name, "trainer", "/home/trainer"], done.stderr


def test_they_are_different_machines(container_cluster: ContainerCluster) -> None:
    """Names, addresses and host keys all differ."""
    first, second = container_cluster.nodes
    assert (first.name, second.name) == ("node0", "node1")
    assert first.address != second.address
    keys = [line.split()[2] for line in container_cluster.known_hosts.read_text().splitlines()]
    assert len(set(keys)) == 2


def test_host_keys_are_checked(container_cluster: ContainerCluster, tmp_path: Path) -> None:
    """With the keys of the two nodes swapped, the client refuses to talk to either."""
    first, second = container_cluster.nodes
    text = container_cluster.known_hosts.read_text()
    swapped = text.replace(first.address, "SWAP").replace(second.address, first.address).replace("SWAP", second.address)
    (tmp_path / "known_hosts").write_text(swapped)
    for node in container_cluster.nodes:
        argv = ssh_argv(container_cluster, node, "true")
        real = str(container_cluster.known_hosts)
        argv = tuple(word.replace(real, str(tmp_path / "known_hosts")) for word in argv)
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr


def test_root_and_passwords_stay_out(container_cluster: ContainerCluster) -> None:
    """Root cannot log in, not even with the key; a key is the only way that sshd offers."""
    for node in container_cluster.nodes:
        argv = ssh_argv(container_cluster, node, "true")
        argv = tuple(word.replace("trainer@", "root@") for word in argv)
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 255
        assert "Permission denied (publickey)" in done.stderr


def test_python_is_there_and_the_training_stack_is_not(container_cluster: ContainerCluster) -> None:
    """A node has Python 3, but neither pip nor what venv would install it from: provisioning has to bring all."""
    for node in container_cluster.nodes:
        modules = container_cluster.exec(node.name, ("python3", "-c", MISSING_MODULES), user="trainer")
        assert modules.strip() == "[]"
        with pytest.raises(DockerError, match="mpirun"):
            container_cluster.exec(node.name, ("mpirun", "--version"), user="trainer")


def test_they_reach_each_other_by_address(container_cluster: ContainerCluster) -> None:
    """A TCP connection from either node to a free port of the other one's address gets through."""
    first, second = container_cluster.nodes
    for client, server in ((first, second), (second, first)):
        argv = ssh_argv(container_cluster, server, f"python3 -c '{GREET_ONCE}'")
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as greeter:
            assert greeter.stdout is not None
            port = greeter.stdout.readline().strip()
            heard = container_cluster.exec(client.name, ("python3", "-c", LISTEN, server.address, port))
            assert greeter.wait(timeout=30) == 0
        assert heard.strip() == server.name


def test_processes_are_listed(container_cluster: ContainerCluster) -> None:
    """The listing of a node shows what runs there, whose it is, and nothing of the other node."""
    first, second = container_cluster.nodes
    with subprocess.Popen(
        ssh_argv(container_cluster, first, "echo $$; exec sleep 1234"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as session:
        assert session.stdout is not None
        pid = int(session.stdout.readline())
        (found,) = [process for process in container_cluster.processes(first.name) if process.pid == pid]
        elsewhere = [process.argv for process in container_cluster.processes(second.name)]
        container_cluster.exec(first.name, ("sh", "-c", f"kill {pid}"))
    assert found.argv == ("sleep", "1234")
    assert found.uid == int(container_cluster.exec(first.name, ("id", "-u", "trainer")))
    assert ("sleep", "1234") not in elsewhere


def test_the_inventory_names_both_nodes(container_cluster: ContainerCluster, tmp_path: Path) -> None:
    """The written inventory holds both addresses and the login; overrides replace top-level keys, None drops one."""
    path = container_cluster.inventory(tmp_path, job={"script": "train.py"}, cluster=None)
    content = yaml.safe_load(path.read_text())
    assert [node["host"] for node in content["nodes"]] == [node.address for node in container_cluster.nodes]
    assert content["ssh"]["key"] == str(container_cluster.key)
    assert content["job"] == {"script": "train.py"}
    assert "cluster" not in content
