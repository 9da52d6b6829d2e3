"""The person's keys: files, the agent, passphrases that are asked for once on the terminal; and what node0 then logs in with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from logins import make_key_of, options, reach
from ssh_agents import add_to_agent, running_agent
from sshd import SshdNode, SshdNodes
from terminal import at_terminal

from orchestrator.errors import AuthenticationError, LockedKeyError, NodeError
from orchestrator.nodes import key_files
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.local import LocalTransport
from orchestrator.nodes.ssh import SshTransport
from orchestrator.specs.inventory import Login

PASSPHRASE = "open se'same $HOME"


@pytest.fixture
def nodes(sshd_factory: SshdNodes) -> list[SshdNode]:
    return sshd_factory(3, MaxAuthTries="4")


@pytest.fixture
def locked(nodes: list[SshdNode], tmp_path: Path) -> Path:
    """A key with a passphrase, the only one that the nodes accept."""
    key = make_key_of("ed25519", tmp_path / "locked", PASSPHRASE)
    for node in nodes:
        (node.home / ".ssh" / "authorized_keys").write_text(Path(f"{key}.pub").read_text())
    return key


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The person's agent, without keys."""
    with running_agent(tmp_path / "agent") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        yield socket


def plain_copy(key: Path, path: Path) -> Path:
    path.write_bytes(key.read_bytes())
    path.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", PASSPHRASE, "-N", "", "-f", path], check=True, capture_output=True)
    return path


def nameless(node: SshdNode, config: Path) -> SshTransport:
    """A login for which the inventory names no key."""
    login = Login(user=node.user, host=node.host, port=node.port, key=None, via=None)
    return SshTransport("node1", login, options(config=str(config), known_hosts=str(node.known_hosts)))


def test_the_agent_serves_a_key_that_is_locked_on_disk(nodes: list[SshdNode], locked: Path, tmp_path: Path, agent: Path) -> None:
    """Found by its public half; without the agent it is an error that names ssh-add, at once, as there is no terminal."""
    with pytest.raises(LockedKeyError, match="needs its passphrase") as refused:
        reach(nodes[0], changes={"key": str(locked)})
    assert f"ssh-add {locked}" in refused.value.advice and refused.value.exit_code == 3
    add_to_agent(plain_copy(locked, tmp_path / "plain"), agent)
    reached = reach(nodes[0], changes={"key": str(locked)})
    assert reached.key_file is None  # nothing that node0 could use without the person
    reached.close()


def test_any_key_of_the_agent_serves_unless_only_files_may(
    nodes: list[SshdNode], locked: Path, tmp_path: Path, agent: Path
) -> None:
    """IdentitiesOnly and IdentityAgent none are respected."""
    add_to_agent(plain_copy(locked, tmp_path / "plain"), agent)
    none = make_key_of("ed25519", tmp_path / "no-such-right")
    config = tmp_path / "config"
    config.write_text(f"IdentityFile {none}\n")
    nameless(nodes[0], config).close()
    for line in ("IdentitiesOnly yes", "IdentityAgent none"):
        config.write_text(f"IdentityFile {none}\n{line}\n")
        with pytest.raises(AuthenticationError, match=r"it accepted none of: .*no-such-right"):
            nameless(nodes[0], config)


def test_the_agent_is_the_one_that_is_named(
    nodes: list[SshdNode], locked: Path, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IdentityAgent: a path with `~`, tokens or `${NAME}`, `$NAME`, SSH_AUTH_SOCK; one that is not there has no keys."""
    config = tmp_path / "config"
    only = f"IdentityFile {make_key_of('ed25519', tmp_path / 'no-such-right')}"
    with running_agent(tmp_path / f"other agent of {nodes[0].user}") as other:
        add_to_agent(plain_copy(locked, tmp_path / "plain"), other)
        monkeypatch.setenv("OTHER", str(other))
        monkeypatch.setenv("PLACE", str(tmp_path))
        config.write_text(f"{only}\n")
        with pytest.raises(AuthenticationError):
            nameless(nodes[0], config)
        for named in (f'"{other}"', '"${PLACE}/other agent of %r"', "$OTHER", "${OTHER}"):
            config.write_text(f"{only}\nIdentityAgent {named}\n")
            nameless(nodes[0], config).close()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(other))
        config.write_text(f"{only}\nIdentityAgent SSH_AUTH_SOCK\n")
        nameless(nodes[0], config).close()
        for named in ("none", "$NOT_SET", str(tmp_path / "nobody"), str(agent)):
            config.write_text(f"{only}\nIdentityAgent {named}\n")
            with pytest.raises(AuthenticationError, match=r"it accepted none of: \S*no-such-right$"):
                nameless(nodes[0], config)
        assert not subprocess.run([*ssh_with(nodes[0], config, "$OTHER", only)], capture_output=True, timeout=60).returncode


def test_only_the_listed_keys_of_an_agent_are_offered(nodes: list[SshdNode], tmp_path: Path, agent: Path) -> None:
    """IdentitiesOnly with more keys in the agent than the server looks at: the right one by its .pub file, and no other."""
    keys = [make_key_of("ed25519", tmp_path / f"key{index}") for index in range(6)]
    for key in keys:
        add_to_agent(key, agent)
        key.unlink()
    node, config = nodes[0], tmp_path / "config"
    (node.home / ".ssh" / "authorized_keys").write_text(Path(f"{keys[5]}.pub").read_text())
    with pytest.raises(AuthenticationError, match="closed the connection after"):
        nameless(node, config)
    seen = len(node.log.read_text())
    assert "Failed publickey" in node.log.read_text()
    for named in (keys[5], f"{keys[5]}.pub"):
        config.write_text(f"IdentityFile {named}\nIdentitiesOnly yes\n")
        nameless(node, config).close()
        assert node.log.read_text()[seen:].count("Failed publickey") == 0
    config.write_text(f"IdentityFile {keys[0]}.pub\nIdentitiesOnly yes\n")
    with pytest.raises(AuthenticationError, match=r"it accepted none of: the agent's ssh-ed25519 key$"):
        nameless(node, config)


def test_an_agent_that_says_nothing_costs_its_limit_once(
    nodes: list[SshdNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forwarded agent whose far end is gone: the key files are tried all the same."""
    monkeypatch.setattr(key_files, "LISTING_LIMIT_S", 0.5)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        config = tmp_path / "config"
        config.write_text(f"IdentityFile {nodes[0].key}\nIdentityAgent {tmp_path}/silent\n")
        nameless(nodes[0], config).close()


def ssh_with(node: SshdNode, config: Path, agent: str, identity: str) -> list[str]:
    """OpenSSH's own login with this agent, which must come in as well."""
    config.write_text(f"{identity}\nIdentityAgent {agent}\nUserKnownHostsFile {node.known_hosts}\nBatchMode yes\n")
    return ["ssh", "-F", str(config), "-p", str(node.port), f"{node.user}@{node.host}", "true"]


def test_too_many_keys_are_told_as_that(nodes: list[SshdNode], tmp_path: Path, agent: Path) -> None:
    """A server closes the connection after MaxAuthTries; the message lists what was tried and names `ssh.key`."""
    for index in range(6):
        add_to_agent(make_key_of("ed25519", tmp_path / f"key{index}"), agent)
    with pytest.raises(AuthenticationError, match=r"closed the connection after \d keys .*`ssh.key`"):
        nameless(nodes[0], tmp_path / "none")


def test_a_file_that_is_no_key_and_a_file_that_is_not_there(nodes: list[SshdNode], tmp_path: Path) -> None:
    """Told by their names; nothing waits (ColossalAI 5213, 2959, 3066)."""
    (tmp_path / "rubbish").write_text("no key")
    with pytest.raises(AuthenticationError, match=r"rubbish .not a private key that can be read"):
        reach(nodes[0], changes={"key": str(tmp_path / "rubbish")})
    with pytest.raises(NodeError, match=r"no such key file: .*/absent"):
        reach(nodes[0], changes={"key": str(tmp_path / "absent")})


def test_a_passphrase_is_asked_once_for_all_nodes_on_the_terminal(nodes: list[SshdNode], locked: Path, tmp_path: Path) -> None:
    """A wrong one is asked again; nothing of it is echoed; three nodes are then connected, and stdin was not read."""
    out = on_a_terminal(nodes, locked, tmp_path, ["wrong", PASSPHRASE])
    assert out.count(f"passphrase of {locked}:") == 2 and "connected 3" in out
    assert PASSPHRASE not in out and "wrong" not in out


def test_whoever_does_not_know_the_passphrase_is_not_asked_for_ever(nodes: list[SshdNode], locked: Path, tmp_path: Path) -> None:
    """Three times, then the error; an empty answer gives up at once."""
    out = on_a_terminal(nodes, locked, tmp_path, ["a", "b", "c"])
    assert out.count("passphrase of") == 3 and "FleetError" in out and "connected" not in out
    assert on_a_terminal(nodes, locked, tmp_path, [""]).count("passphrase of") == 1


def test_node0_uses_a_key_that_serves_without_the_person_else_the_clusters_own(
    nodes: list[SshdNode], locked: Path, tmp_path: Path
) -> None:
    """Where we sit on node0: one plain file that let us in everywhere; a locked one, the agent or several files are no such."""
    from orchestrator.actions.trust import _key_that_served

    class Reached(LocalTransport):
        is_local = False

        def __init__(self, key_file: str | None) -> None:
            super().__init__("x")
            self.key_file = key_file

    def served(*key_files: str | None) -> str | None:
        here = LocalTransport("node0")
        return _key_that_served(Fleet({"node0": here, **{str(i): Reached(file) for i, file in enumerate(key_files)}}, 4))

    assert served("/k/a", "/k/a") == "/k/a"
    assert served("/k/a", "/k/b") is None and served("/k/a", None) is None and served(None) is None


def on_a_terminal(nodes: list[SshdNode], key: Path, tmp_path: Path, answers: list[str]) -> str:
    """What a terminal shows of connecting to the nodes, each question answered with the next answer."""
    content = {
        "ssh": {"key": str(key), "known_hosts": str(nodes[0].known_hosts), "port": nodes[0].port, "user": nodes[0].user},
        "nodes": [node.host for node in nodes],
    }
    (tmp_path / "lab.yml").write_text(yaml.safe_dump(content))
    code = (
        "from orchestrator.actions.inventory_file import load_inventory\n"
        "from orchestrator.nodes.fleet import connect\n"
        f"fleet = connect(load_inventory({str(tmp_path / 'lab.yml')!r}))\n"
        "print('connected', len(fleet.transports)); fleet.close()\n"
    )
    plain = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
    asked = [(f"passphrase of {key}: ", answer) for answer in answers]
    return at_terminal([sys.executable, "-c", code], asked, env=plain, stdin_is_terminal=False)[1]
