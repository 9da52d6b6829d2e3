"""~/.ssh/config is followed as OpenSSH follows it: by asking OpenSSH (fabric 2215, paramiko 1992 and 2632)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from logins import address_of, login, make_key_of, options, reach
from sshd import SshdNode, SshdNodes

from orchestrator.errors import HostKeyError, NodeError, UnreachableError
from orchestrator.nodes import ssh_config
from orchestrator.nodes.fleet import connect
from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.ssh_config import Route, find_route, unread_config
from orchestrator.specs.inventory import Inventory, Login


@pytest.fixture(scope="module")
def nodes(session_sshd_factory: SshdNodes) -> list[SshdNode]:
    return session_sshd_factory(3)


def route(tmp_path: Path, text: str, host: str = "lab1", **given: object) -> Route:
    """The route to a host under a configuration of this text."""
    (tmp_path / "config").write_text(text)
    values = {"user": None, "port": None, "key": None, "via": None, **given, "host": host}
    return find_route("node1", Login(**values), options(config=str(tmp_path / "config")))  # type: ignore[arg-type]


def by_name(node: SshdNode, tmp_path: Path, *lines: str) -> SshTransport:
    """Reach a node that only the configuration knows, as `lab1`."""
    config = tmp_path / "config"
    config.write_text("".join(f"{line}\n" for line in lines))
    only_name = Login(user=None, host="lab1", port=None, key=None, via=None)
    return SshTransport("node1", only_name, options(config=str(config), known_hosts=str(node.known_hosts)))


def relay_to(tmp_path: Path) -> str:
    """A program that connects its stdin and stdout to HOST PORT."""
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import socket, sys, threading, os\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    return f"{sys.executable} {relay}"


def test_all_that_a_host_block_says_leads_to_the_node(nodes: list[SshdNode], tmp_path: Path) -> None:
    """Include, Match host, HostName, Port, User, IdentityFile with a token, HostKeyAlias: the login works by a bare name."""
    node = nodes[1]
    key = Path(shutil.copy(node.key, tmp_path / f"key for {node.user}"))
    lines = node.known_hosts.read_text().splitlines()
    known = next(line.split(" ", 1)[1] for line in lines if f"[{node.host}]" in line)
    (tmp_path / "alias").write_text(f"the-machine {known}\n")
    (tmp_path / "more.conf").write_text(
        f'Host lab*\n  HostName {node.host}\n  User {node.user}\n  IdentityFile "{key.parent}/key for %r"\n'
        f"  UserKnownHostsFile {tmp_path / 'alias'}\n"
    )
    config = tmp_path / "config"
    config.write_text(f"Include {tmp_path}/*.conf\nMatch host {node.host}\n  Port {node.port}\n  HostKeyAlias the-machine\n")
    reached = SshTransport("node1", Login(user=None, host="lab1", port=None, key=None, via=None), options(config=str(config)))
    assert address_of(reached) == node.host and reached.key_file == str(key)
    reached.close()


def test_what_the_inventory_says_wins(tmp_path: Path) -> None:
    """Port 22 in the inventory is port 22, and no port leaves it to the configuration."""
    text = "Host lab1\n  Port 2200\n  User conf\n  IdentityFile /conf\n"
    left = route(tmp_path, text)
    assert (left.port, left.user, left.key_files) == (2200, "conf", ("/conf",))
    given = route(tmp_path, text, port=22, user="me", key="/mine")
    assert (given.port, given.user, given.key_files[0], given.known_as) == (22, "me", "/mine", "lab1")


def test_match_exec_runs_as_it_would_for_ssh_and_within_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome counts; one that hangs is ended with all that it started, and named."""
    assert route(tmp_path, 'Match exec "test %h = lab1"\n  Port 2201\n').port == 2201
    monkeypatch.setattr(ssh_config, "CONFIG_TIMEOUT_S", 1.0)
    with pytest.raises(NodeError, match="did not end within 1 s") as refused:
        route(tmp_path, 'Match exec "sleep 3137"\n  Port 2201\n')
    assert "Match exec" in refused.value.advice
    assert subprocess.run(["pgrep", "-f", "sleep 3137"], capture_output=True).returncode == 1


def test_a_configuration_that_ssh_refuses_is_refused(tmp_path: Path) -> None:
    """With what ssh itself says of it, file and line."""
    with pytest.raises(NodeError, match=r"config: line 2: Bad configuration option: nonsense"):
        route(tmp_path, "Port 22\nNonsense yes\n")


def test_nothing_weakens_the_check_of_host_keys(nodes: list[SshdNode], tmp_path: Path) -> None:
    """StrictHostKeyChecking no, and a known_hosts of nothing, do not let an unknown key pass."""
    node = nodes[1]
    (tmp_path / "none").touch()
    with pytest.raises(HostKeyError, match="not known"):
        by_name(
            node,
            tmp_path,
            f"HostName 127.0.0.1\nPort {node.port}\nProxyCommand {relay_to(tmp_path)} {node.host} %p\nUser {node.user}",
            f"IdentityFile {node.key}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null",
        )


def test_proxy_command_carries_the_connection(nodes: list[SshdNode], tmp_path: Path) -> None:
    """Run by a shell with its tokens filled in; it ends with the connection. What it says when it fails is told, at once."""
    node = nodes[1]
    lines = (f"HostName {node.host}", f"Port {node.port}", f"User {node.user}", f"IdentityFile {node.key}")
    reached = by_name(node, tmp_path, *lines, f"ProxyCommand {relay_to(tmp_path)} %h %p")
    assert address_of(reached) == node.host
    reached.close()
    assert subprocess.run(["pgrep", "-f", str(tmp_path / "relay.py")], capture_output=True).returncode == 1
    with pytest.raises(UnreachableError, match="its ProxyCommand says: no way today"):
        by_name(node, tmp_path, *lines, "ProxyCommand echo no way today >&2; exit 1")


@pytest.mark.parametrize("where", ["via", "ProxyJump"])
def test_a_chain_of_jump_hosts_is_followed_and_each_is_checked(nodes: list[SshdNode], tmp_path: Path, where: str) -> None:
    """`a,b` leads through a to b to the node; a key that is not known at any of the three ends it."""
    first, second, last = nodes
    chain = ",".join(f"{node.user}@{node.host}:{node.port}" for node in (first, second))
    config = tmp_path / "config"
    config.write_text(f"Host {last.host}\n  ProxyJump {chain}\n" if where == "ProxyJump" else "")
    via = chain if where == "via" else None
    reached = reach(last, changes={"via": via}, config=str(config))
    assert address_of(reached) == last.host
    assert len([line for line in second.log.read_text().splitlines() if "Accepted publickey" in line and first.host not in line])
    reached.close()
    lines = last.known_hosts.read_text().splitlines(keepends=True)
    for unknown in nodes:
        known = tmp_path / "known_hosts"
        known.write_text("".join(line for line in lines if unknown.host not in line))
        with pytest.raises(HostKeyError, match=rf"\[{unknown.host}\]"):
            reach(last, known, changes={"via": via}, config=str(config))


def test_a_way_in_a_circle_is_named(tmp_path: Path) -> None:
    """`Host *` with a ProxyJump, which ssh refuses as well; and a longer circle."""
    with pytest.raises(NodeError, match="jumphost loop via gate"):
        route(tmp_path, "Host *\n  ProxyJump gate\n")
    with pytest.raises(NodeError, match="lab1 -> a -> b -> a"):
        route(tmp_path, "Host lab1\n  ProxyJump a\nHost a\n  ProxyJump b\nHost b\n  ProxyJump a\n")


def test_ssh_is_asked_only_where_something_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in any file no process is started; an Include of nothing is nothing."""
    monkeypatch.setattr(ssh_config, "_output", lambda *_: pytest.fail("ssh was asked"))
    assert route(tmp_path, "# comment\nHost *\n  SendEnv LANG\n  HashKnownHosts yes\nInclude nothing/*.conf\n").port == 22
    (tmp_path / "more").write_text("Port 2222\n")
    with pytest.raises(pytest.fail.Exception):
        route(tmp_path, f"Include {tmp_path}/mo*\n")


def test_without_an_ssh_program_paramiko_reads_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said what is lost."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = route(tmp_path, "Host lab1\n  HostName 10.1.1.1\n  Port 2200\n  ProxyJump me@gate:23\n")
    assert (found.host, found.port, [(jump.user, jump.host, jump.port) for jump in found.jumps]) == (
        "10.1.1.1",
        2200,
        [("me", "gate", 23)],
    )
    assert "Include" in (unread_config(options(config=str(tmp_path / "config"))) or "")


def test_a_name_that_leads_elsewhere_is_not_this_machine(nodes: list[SshdNode], tmp_path: Path) -> None:
    """`localhost` whose port the configuration sets (a forwarded one) is reached over SSH, not taken for here."""
    node = nodes[1]
    (tmp_path / "config").write_text(f"Host localhost\n  HostName {node.host}\n  Port {node.port}\n")
    ssh = {"config": str(tmp_path / "config"), "key": str(node.key), "known_hosts": str(node.known_hosts)}
    fleet = connect(Inventory.model_validate({"ssh": ssh, "nodes": ["localhost"]}))
    assert not fleet.head.is_local
    fleet.close()


def test_a_default_login_is_what_openssh_would_do() -> None:
    """Without configuration: port 22, one's own name, the usual files."""
    node = Login(user=None, host="h", port=None, key=None, via=None)
    found = find_route("n", node, options(config="/nonexistent"))
    assert found.port == 22 and found.key_files[0].endswith("/.ssh/id_ed25519") and found.is_direct
    assert found.known_hosts[0].endswith("/.ssh/known_hosts") and "/etc/ssh/ssh_known_hosts" in found.known_hosts


def test_key_kinds_are_all_taken(nodes: list[SshdNode], tmp_path: Path) -> None:
    """ed25519, ECDSA and RSA key files, in OpenSSH's format and in PEM (ColossalAI 5213 named every key an RSA key)."""
    node = nodes[0]
    allowed = node.home / ".ssh" / "authorized_keys"
    before = allowed.read_text()
    for kind in ("ed25519", "ecdsa", "rsa"):
        key = make_key_of(kind, tmp_path / kind)
        if kind != "ed25519":
            subprocess.run(["ssh-keygen", "-q", "-p", "-m", "PEM", "-N", "", "-f", key], check=True, stdout=subprocess.DEVNULL)
        allowed.write_text(before + Path(f"{key}.pub").read_text())
        reached = reach(node, changes={"key": str(key)})
        assert reached.key_file == str(key)
        reached.close()
    allowed.write_text(before)
    assert login(node).key == str(node.key)
