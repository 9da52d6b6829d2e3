"""The loopback nodes are what the other ssh tests take them for: real servers, apart from each other."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sshd import SshdNode, SshdNodes, make_key


def run(argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)


def wait_until(holds: Callable[[], bool], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_key_opens_the_node(sshd_factory: SshdNodes) -> None:
    """The OpenSSH client logs in, host key checked; its command's output and exit code come back."""
    (node,) = sshd_factory(1)
    done = run(node.ssh("echo $SSH_CONNECTION; exit 7"))
    assert done.returncode == 7, done.stderr
    assert done.stdout.split()[2:] == [node.host, str(node.port)]


def test_a_wrong_key_is_refused(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """A key that the node does not know does not get in."""
    (node,) = sshd_factory(1)
    make_key(tmp_path / "stranger")
    command = tuple(str(tmp_path / "stranger") if word == str(node.key) else word for word in node.ssh("true"))
    done = run(command)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_nodes_have_host_keys_of_their_own(sshd_factory: SshdNodes) -> None:
    """Two nodes share a port and have different host keys; taken for one another they are not trusted."""
    first, second = sshd_factory(2)
    assert (first.host, first.port) == ("127.0.0.2", second.port)
    assert second.host == "127.0.0.3"
    keys = dict(line.split(maxsplit=1) for line in first.known_hosts.read_text().splitlines())
    assert len(set(keys.values())) == 2
    swapped = f"[{first.host}]:{first.port} {keys[f'[{second.host}]:{second.port}']}\n"
    first.known_hosts.write_text(swapped)
    done = run(first.ssh("true"))
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_nodes_have_homes_of_their_own(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """`~`, the working directory and relative sftp paths are the node's own home."""
    first, second = sshd_factory(2)
    for node in (first, second):
        assert run(node.ssh("pwd; echo ~; echo $HOME")).stdout.split() == [str(node.home)] * 3
    (tmp_path / "sent").write_text("for the second node")
    (tmp_path / "batch").write_text(f"put {tmp_path / 'sent'} arrived\n")
    _sftp(second, tmp_path / "batch")
    assert (second.home / "arrived").read_text() == "for the second node"
    assert not (first.home / "arrived").exists()


@pytest.mark.parametrize("word", ["two words", "a'b\"c", "$HOME *", "line\nbreak", "größer", ""])
def test_command_lines_arrive_as_sent(sshd_factory: SshdNodes, word: str) -> None:
    """The node's shell sees the client's command line byte for byte, as it would on any machine."""
    (node,) = sshd_factory(1)
    quoted = "'" + word.replace("'", "'\\''") + "'"
    assert run(node.ssh(f"printf %s {quoted}")).stdout == word


def test_settings_can_be_replaced(sshd_factory: SshdNodes) -> None:
    """A setting given to the factory is the one that the server obeys."""
    (node,) = sshd_factory(1, PubkeyAuthentication="no")
    assert run(node.ssh("true")).returncode == 255


def test_a_key_added_on_the_node_opens_it(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """`~/.ssh/authorized_keys` works as on any machine, which the way from node to node needs."""
    (node,) = sshd_factory(1)
    make_key(tmp_path / "second")
    added = (tmp_path / "second.pub").read_text().strip()
    assert run(node.ssh(f"echo '{added}' >> ~/.ssh/authorized_keys")).returncode == 0
    command = tuple(str(tmp_path / "second") if word == str(node.key) else word for word in node.ssh("true"))
    assert run(command).returncode == 0


def test_what_was_started_on_a_node_is_listed_there(sshd_factory: SshdNodes) -> None:
    """A process that left its session and lost its parent still counts to its node, and only to that one."""
    first, second = sshd_factory(2)
    run(first.ssh("setsid -f sleep 1234 >/dev/null 2>&1 </dev/null"))
    wait_until(lambda: [process.argv for process in first.processes()] == [("sleep", "1234")])
    assert second.processes() == ()


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    """After `close` the servers, open sessions and orphans are gone, nobody listens, and other processes live on."""
    bystander = subprocess.Popen(("sleep", "1234"))
    try:
        nodes = SshdNodes(tmp_path)
        first, second = nodes(2)
        session = subprocess.Popen(first.ssh("sleep 1234"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run(second.ssh("setsid -f sleep 1234 >/dev/null 2>&1 </dev/null"))
        wait_until(lambda: any("sleep" in process.argv for process in first.processes()))
        started = [process.pid for node in (first, second) for process in node.processes()]
        nodes.close()
        assert session.wait(timeout=10) == 255
        wait_until(lambda: not any(alive(pid) for pid in (*started, first.pid, second.pid)))
        for node in (first, second):
            with socket.socket() as client:
                assert client.connect_ex((node.host, node.port)) != 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def _sftp(node: SshdNode, batch: Path) -> None:
    ssh = node.ssh()
    options, target = ssh[1:-1], ssh[-1]
    port = options.index("-p")
    command = ("sftp", "-b", str(batch), *options[:port], "-P", options[port + 1], target)
    done = run(command)
    assert done.returncode == 0, done.stderr
