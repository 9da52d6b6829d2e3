"""SSH from node0 to the other nodes as mpirun uses it: what breaks there is named in the run's outcome, and nothing hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import REPOSITORY, ClusterTrain, LocalStack, Ran
from jobs import script
from logins import make_key_of, public, sign
from sshd import SshdNode, SshdNodes

HELLO = "import os; print('hello from', os.environ['RANK'])"
# On the second node mpirun's helper meets this; everything else works there, our own commands too.
ON_NODE1 = """case "$HOME $SSH_ORIGINAL_COMMAND" in
*home1\\ *hydra_bstrap_proxy*) {0} ;;
esac;
cd "$HOME" && exec "$SHELL" ${{SSH_ORIGINAL_COMMAND+-c "$SSH_ORIGINAL_COMMAND"}}""".replace("\n", " ")


@pytest.fixture
def up(
    cluster_train: ClusterTrain, sshd_factory: SshdNodes, local_stack: LocalStack, tmp_path: Path
) -> Callable[..., tuple[Ran, list[SshdNode]]]:
    """Runs a job on two nodes, of which the second does this to mpirun's helper."""

    def call(trouble: str) -> tuple[Ran, list[SshdNode]]:
        nodes = sshd_factory(2, ForceCommand=ON_NODE1.format(trouble))
        content = {
            "root": str(local_stack.borrowed(tmp_path / "root")),
            "ssh": {"key": str(nodes[0].key), "known_hosts": str(nodes[0].known_hosts), "port": nodes[0].port},
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
            "stack": yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"],
            "job": {"ppn": 1, "grace_s": 3, "script": script(tmp_path, HELLO)},
        }
        (tmp_path / "lab.yml").write_text(yaml.safe_dump(content))
        return cluster_train("up", tmp_path / "lab.yml"), nodes

    return call


@pytest.mark.stack
@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("echo hydra_bstrap_proxy: not found >&2; exit 127", "hydra_bstrap_proxy: not found"),
        ("exit 127", "it is not there"),
        ("exit 126", "it is there, but cannot be run"),
        ("kill -9 $PPID; exit 1", "closed by remote host"),
    ],
)
def test_a_helper_that_does_not_start_on_the_other_node_is_told(
    up: Callable[..., tuple[Ran, list[SshdNode]]], trouble: str, why: str
) -> None:
    """hydra says "unable to run bstrap_proxy" and hides why (volcano 2398, az-hop 906): the node's, or ssh's, own words do."""
    ran, nodes = up(trouble)
    assert ran.exit_code == 1, ran.stderr
    summary = next(line for line in ran.stdout.splitlines() if line.startswith("run "))
    assert f"mpirun could not start its helper on {nodes[1].host}: " in summary and why in summary
    assert not [one for node in nodes for one in node.processes() if "hydra" in " ".join(one.argv)]


@pytest.mark.stack
def test_node0s_key_is_restricted_and_goes_again(
    up: Callable[..., tuple[Ran, list[SshdNode]]], cluster_train: ClusterTrain, tmp_path: Path
) -> None:
    """It runs commands, from node0's address only; no terminal, no forwarding. `doctor` lists it, `teardown` removes it."""
    _, (head, other) = up("exit 127")
    allowed = other.home / ".ssh" / "authorized_keys"
    line = allowed.read_text().splitlines()[0]
    assert line.startswith(f'restrict,from="{head.host}" ssh-ed25519 ') and line.split()[-1].startswith("cluster-train:")
    assert "cluster-train:" not in (head.home / ".ssh" / "authorized_keys").read_text()
    identity = tmp_path / "root" / "ssh" / "id_ed25519"
    assert identity.stat().st_mode & 0o777 == 0o600
    plain = [word.replace(str(other.key), str(identity)) for word in other.ssh()]

    def code(source: str, *words: str, options: tuple[str, ...] = ()) -> int:
        command = [*plain[:-1], "-b", source, *options, plain[-1], *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode

    assert code(head.host, "true") == 0
    assert code("127.0.0.1", "true") == 255
    assert code(head.host, "test -t 0", options=("-tt",)) != 0
    assert code(head.host, options=("-W", f"{head.host}:{head.port}")) == 255
    told = cluster_train("doctor", tmp_path / "lab.yml").stdout
    assert "a cluster key may log in" in told and f"from {head.host}" in told and "teardown" in told
    for link in (tmp_path / "root").iterdir():
        if link.is_symlink():  # what this test has borrowed
            link.unlink()
    assert cluster_train("teardown", tmp_path / "lab.yml", "--yes").exit_code == 0
    assert "cluster-train:" not in allowed.read_text() and not identity.exists()


@pytest.mark.stack
def test_node0_checks_the_very_keys_that_we_verified(
    cluster_train: ClusterTrain, sshd_factory: SshdNodes, local_stack: LocalStack, tmp_path: Path
) -> None:
    """We know the nodes by an authority alone, under aliases, the second through the first, at ports of their own.

    node0 then knows the keys themselves, each by its node's name (capitals too), and mpirun gets from node to node.
    """
    authority = make_key_of("ed25519", tmp_path / "authority")
    kinds = {"127.0.0.2": "ecdsa", "127.0.0.3": "rsa"}
    keys = {address: make_key_of(kind, tmp_path / kind) for address, kind in kinds.items()}
    nodes = []
    for address, key in keys.items():
        certificate = sign(authority, key, "-h", name=f"machine-{address}")
        # The server has one more key, that we have not verified and node0 must not meet.
        other = make_key_of("ed25519", tmp_path / f"other-{address}")
        settings = {"HostKey": f"{key}\nHostKey {other}", "HostCertificate": str(certificate)}
        nodes += sshd_factory(1, machines={address: ""}, **settings)
    head, node = nodes
    (node.home / ".ssh" / "authorized_keys").write_text((head.home / ".ssh" / "authorized_keys").read_text())
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    known.write_text(
        f"@cert-authority machine-* {public(authority)}\n@revoked * {public(make_key_of('ed25519', tmp_path / 'lost'))}\n"
    )
    config.write_text(
        f"Host {head.host}\n  Port {head.port}\n  HostKeyAlias machine-{head.host}\n"
        f"Host {node.host}\n  Port {node.port}\n  HostKeyAlias machine-{node.host}\n  ProxyJump {head.host}\n"
    )
    content = {
        "root": str(local_stack.borrowed(tmp_path / "root")),
        "ssh": {"config": str(config), "known_hosts": str(known), "key": str(head.key), "user": head.user},
        "nodes": [{"name": "Node-0", "host": head.host}, {"name": "Node-1", "host": node.host}],
        "stack": yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"],
        "job": {"ppn": 1, "script": script(tmp_path, HELLO)},
    }
    (tmp_path / "lab.yml").write_text(yaml.safe_dump(content))
    ran = cluster_train("up", tmp_path / "lab.yml")
    assert ran.exit_code == 0 and "hello from 1" in ran.stdout, ran.stdout + ran.stderr
    (run,) = (tmp_path / "root" / "runs").iterdir()
    assert (run / "known_hosts").read_text() == f"Node-1 {public(keys[node.host])}\n"
    block = (run / "ssh_config").read_text().split("Host *")[0]
    assert f"Port {node.port}\n" in block and "HostKeyAlgorithms rsa-sha2-512,rsa-sha2-256\n" in block and "Proxy" not in block
    assert f"Accepted publickey for {node.user} from {head.host} " in node.log.read_text()
    secret = head.key.read_bytes().splitlines()[2]  # of the person's key, which stays where it is
    places = [path for place in (tmp_path, head.home, node.home) for path in place.rglob("*") if path.is_file()]
    assert not [path for path in places if secret in path.read_bytes()]


@pytest.mark.stack
@pytest.mark.parametrize("has_a_key_of_its_own", [False, True])
def test_from_node0_itself_mpirun_uses_the_key_that_ssh_config_names_or_the_clusters(
    cluster_train: ClusterTrain, sshd_factory: SshdNodes, local_stack: LocalStack, tmp_path: Path, has_a_key_of_its_own: bool
) -> None:
    """The inventory says addresses only. A key that serves without a person serves mpirun too; one in the agent does not."""
    (node,) = sshd_factory(1)
    key = Path(shutil.copy(node.key, tmp_path / "key"))
    config = tmp_path / "ssh_config"
    config.write_text(f"Host {node.host}\n  Port {node.port}\n  User {node.user}\n  IdentityFile {key}\n")
    content = {
        "root": str(local_stack.borrowed(tmp_path / "root")),
        "ssh": {"config": str(config), "known_hosts": str(node.known_hosts)},
        "nodes": [{"name": "node0", "host": "localhost"}, {"name": "node1", "host": node.host}],
        "stack": yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"],
        "job": {"ppn": 1, "script": script(tmp_path, HELLO)},
    }
    (tmp_path / "lab.yml").write_text(yaml.safe_dump(content))
    environment: dict[str, str] = {}
    if has_a_key_of_its_own:
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
        environment["SSH_AUTH_SOCK"] = str(tmp_path / "agent")
        try:
            while not (tmp_path / "agent").exists():
                assert agent.poll() is None
            subprocess.run(["ssh-add", "-q", key], env={**os.environ, **environment}, check=True, timeout=60)
            key.unlink()
            ran = cluster_train("up", tmp_path / "lab.yml", env=environment)
        finally:
            agent.terminate()
            agent.wait(60)
    else:
        ran = cluster_train("up", tmp_path / "lab.yml", env=environment)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert "hello from 1" in ran.stdout
    (used,) = (tmp_path / "root" / "runs").glob("*/ssh_config")
    assert (str(tmp_path / "root" / "ssh" / "id_ed25519") in used.read_text()) is has_a_key_of_its_own
    assert ("accepts the cluster's key" in ran.stderr) is has_a_key_of_its_own
