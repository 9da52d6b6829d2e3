"""Host keys are checked: unknown is refused with the fingerprint, changed is refused always."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sshd import SshdNode, SshdNodes

from orchestrator.errors import AuthenticationError, FleetError, HostKeyError, UnreachableError
from orchestrator.nodes.fleet import connect
from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.transport import run
from orchestrator.specs.inventory import Inventory, Login, SshOptions


@pytest.fixture(scope="module")
def nodes(session_sshd_factory: SshdNodes) -> list[SshdNode]:
    return session_sshd_factory(2)


def login(node: SshdNode, **changes: object) -> Login:
    values = {"user": node.user, "host": node.host, "port": node.port, "key": str(node.key), "via": None, **changes}
    return Login(**values)  # type: ignore[arg-type]


def reach(node: SshdNode, known_hosts: Path, host_keys: str = "strict", **changes: object) -> SshTransport:
    options = SshOptions(known_hosts=str(known_hosts), host_keys=host_keys, connect_timeout=5)  # type: ignore[arg-type]
    return SshTransport("node1", login(node, **changes), options)


def test_an_unknown_key_is_refused_with_its_fingerprint(nodes: list[SshdNode], tmp_path: Path) -> None:
    """The message has the fingerprint that ssh-keygen prints, and the command that accepts the key."""
    with pytest.raises(HostKeyError) as refused:
        reach(nodes[0], tmp_path / "none")
    public = next(line for line in nodes[0].known_hosts.read_text().splitlines() if nodes[0].host in line).split(" ", 1)[1]
    (tmp_path / "key.pub").write_text(public)
    printed = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], capture_output=True, text=True, check=True).stdout
    assert printed.split()[1] in refused.value.message
    assert "ssh-keyscan" in refused.value.advice and not (tmp_path / "none").exists()


def test_accept_new_stores_the_key_once(nodes: list[SshdNode], tmp_path: Path) -> None:
    """A throw-away cluster's key is accepted at first sight, kept, and then simply known."""
    known = tmp_path / "known_hosts"
    reach(nodes[0], known, "accept-new").close()
    reach(nodes[0], known, "strict").close()
    assert len(known.read_text().splitlines()) == 1


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
def test_a_changed_key_is_always_refused(nodes: list[SshdNode], tmp_path: Path, host_keys: str) -> None:
    """Where another key is on record, no setting lets us in."""
    other = next(line for line in nodes[0].known_hosts.read_text().splitlines() if nodes[1].host in line).split(" ", 1)[1]
    known = tmp_path / "known_hosts"
    known.write_text(f"[{nodes[0].host}]:{nodes[0].port} {other}\n")
    with pytest.raises(HostKeyError, match="CHANGED"):
        reach(nodes[0], known, host_keys)
    assert len(known.read_text().splitlines()) == 1


def test_a_refused_login_says_what_to_try(nodes: list[SshdNode], tmp_path: Path) -> None:
    """A key that the node does not accept is an authentication error with the ssh command that must work first."""
    wrong = tmp_path / "wrong"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", wrong], check=True)
    with pytest.raises(AuthenticationError) as refused:
        reach(nodes[0], nodes[0].known_hosts, key=str(wrong))
    assert f"ssh -p {nodes[0].port}" in refused.value.advice


def test_every_node_that_fails_is_named_at_once(nodes: list[SshdNode], tmp_path: Path) -> None:
    """One error holds all failures, each of its own kind; nothing stays connected."""
    inventory = Inventory.model_validate(
        {
            "ssh": {"key": str(nodes[0].key), "known_hosts": str(nodes[0].known_hosts), "connect_timeout": 5},
            "nodes": [
                {"name": "good", "host": nodes[0].host, "port": nodes[0].port},
                {"name": "closed", "host": "127.0.0.9", "port": nodes[0].port},
                {"name": "nameless", "host": "no-such-host.invalid", "port": 2222},
            ],
        }
    )
    with pytest.raises(FleetError) as refused:
        connect(inventory)
    assert {name: type(error) for name, error in refused.value.failures.items()} == {
        "closed": UnreachableError,
        "nameless": UnreachableError,
    }
    assert refused.value.exit_code == 3 and "does not resolve" in refused.value.message


def test_a_jump_host_leads_to_a_node_and_is_checked_as_well(nodes: list[SshdNode], tmp_path: Path) -> None:
    """`via` reaches node1 through node0; the jump host's own key is checked like any other."""
    via = f"{nodes[0].user}@{nodes[0].host}:{nodes[0].port}"
    reached = reach(nodes[1], nodes[1].known_hosts, via=via)
    done = run(reached, ["sh", "-c", "echo $SSH_CONNECTION"], idle_timeout_s=10)
    reached.close()
    assert done.stdout.split()[2].decode() == nodes[1].host
    only_the_target = tmp_path / "known_hosts"
    lines = nodes[1].known_hosts.read_text().splitlines(keepends=True)
    only_the_target.write_text("".join(line for line in lines if nodes[1].host in line))
    with pytest.raises(HostKeyError, match=nodes[0].host):
        reach(nodes[1], only_the_target, via=via)


def test_a_jump_host_of_the_persons_own_configuration_is_checked_too(
    nodes: list[SshdNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ProxyJump in ~/.ssh/config is followed, and leads through no host whose key is not known."""
    jump = f"{nodes[0].user}@{nodes[0].host}:{nodes[0].port}"
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(f"Host {nodes[1].host}\n    ProxyJump {jump}\n    IdentityFile {nodes[0].key}\n")
    lines = nodes[1].known_hosts.read_text().splitlines(keepends=True)
    (tmp_path / "known_hosts").write_text("".join(line for line in lines if nodes[1].host in line))
    code = (
        "from orchestrator.nodes.ssh import SshTransport\n"
        "from orchestrator.specs.inventory import Login, SshOptions\n"
        f"login = Login(user={nodes[1].user!r}, host={nodes[1].host!r}, port={nodes[1].port}, key=None, via=None)\n"
        f"SshTransport('node1', login, SshOptions(known_hosts={str(tmp_path / 'known_hosts')!r}))\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0 and f"HostKeyError: node1: the host key of [{nodes[0].host}]" in refused.stderr
