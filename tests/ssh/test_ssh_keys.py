"""The person's keys: files, the agent, passphrases that are asked for once on the terminal; and what node0 then logs in with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from logins import make_key_of, options, reach
from sshd import SshdNode, SshdNodes
from terminal import at_terminal

from orchestrator.errors import AuthenticationError, LockedKeyError, NodeError
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
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real ssh-agent of this test's own, without keys."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield
    process.terminate()
    process.wait(20)


def add_to_agent(key: Path) -> None:
    subprocess.run(["ssh-add", "-q", key], check=True, stdin=subprocess.DEVNULL, timeout=60)


def plain_copy(key: Path, path: Path) -> Path:
    path.write_bytes(key.read_bytes())
    path.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", PASSPHRASE, "-N", "", "-f", path], check=True, capture_output=True)
    return path


def nameless(node: SshdNode, config: Path) -> SshTransport:
    """A login for which the inventory names no key."""
    login = Login(user=node.user, host=node.host, port=node.port, key=None, via=None)
    return SshTransport("node1", login, options(config=str(config), known_hosts=str(node.known_hosts)))


def test_the_agent_serves_a_key_that_is_locked_on_disk(nodes: list[SshdNode], locked: Path, tmp_path: Path, agent: None) -> None:
    """Found by its public half; without the agent it is an error that names ssh-add, at once, as there is no terminal."""
    with pytest.raises(LockedKeyError, match="needs its passphrase") as refused:
        reach(nodes[0], changes={"key": str(locked)})
    assert f"ssh-add {locked}" in refused.value.advice and refused.value.exit_code == 3
    add_to_agent(plain_copy(locked, tmp_path / "plain"))
    reached = reach(nodes[0], changes={"key": str(locked)})
    assert reached.key_file is None  # nothing that node0 could use without the person
    reached.close()


def test_any_key_of_the_agent_serves_unless_only_files_may(
    nodes: list[SshdNode], locked: Path, tmp_path: Path, agent: None
) -> None:
    """IdentitiesOnly and IdentityAgent none are respected."""
    add_to_agent(plain_copy(locked, tmp_path / "plain"))
    none = make_key_of("ed25519", tmp_path / "no-such-right")
    config = tmp_path / "config"
    config.write_text(f"IdentityFile {none}\n")
    nameless(nodes[0], config).close()
    for line in ("IdentitiesOnly yes", "IdentityAgent none"):
        config.write_text(f"IdentityFile {none}\n{line}\n")
        with pytest.raises(AuthenticationError, match=r"it accepted none of: .*no-such-right"):
            nameless(nodes[0], config)


def test_too_many_keys_are_told_as_that(nodes: list[SshdNode], tmp_path: Path, agent: None) -> None:
    """A server closes the connection after MaxAuthTries; the message lists what was tried and names `ssh.key`."""
    for index in range(6):
        add_to_agent(make_key_of("ed25519", tmp_path / f"key{index}"))
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
