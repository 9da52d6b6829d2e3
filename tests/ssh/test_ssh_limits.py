"""Servers that drop, stall, babble or die: each costs its own time limit once, and is named for what it is."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import paramiko
import pytest
from logins import login, options, reach
from netlab import Machine, NetworkLab, can_isolate
from sshd import SshdNodes

from orchestrator.errors import CommandError, FleetError, UnreachableError
from orchestrator.nodes import ssh
from orchestrator.nodes.dialling import dial
from orchestrator.nodes.fleet import connect
from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.transport import run
from orchestrator.specs.inventory import Inventory, Login


@contextmanager
def port_that_says(*words: bytes, then_closes: bool = False) -> Iterator[int]:
    """A TCP port on loopback that greets with these words, and then says nothing more."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            for word in words:
                self.request.sendall(word)
            if not then_closes:
                over.wait(60)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        over.set()
        server.shutdown()


def reach_port(port: int, limit_s: float = 1.0) -> SshTransport:
    there = Login(user="me", host="127.0.0.1", port=port, key=None, via=None)
    return SshTransport("node1", there, options(connect_timeout=limit_s, config="/nonexistent"))


def test_sixteen_logins_at_once_pass_a_low_max_startups(sshd_factory: SshdNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """MaxStartups 3:50:5: what sshd drops comes again, later and later (asyncssh 456, ansible 24594)."""
    (node,) = sshd_factory(1, MaxStartups="3:50:5")
    monkeypatch.setattr(ssh, "STARTS_AT_ONCE", 16)  # so that sshd has a reason to drop
    start = threading.Barrier(16)

    def reach_one(_: int) -> SshTransport:
        start.wait(60)
        return reach(node, connect_timeout=30)

    with ThreadPoolExecutor(16) as pool:
        reached = list(pool.map(reach_one, range(16)))
    assert all(run(one, ["true"], idle_timeout_s=60).exit_code == 0 for one in reached)
    for one in reached:
        one.close()
    assert "MaxStartups" in node.log.read_text()  # it did drop some


def test_sixteen_nodes_behind_one_gate_with_a_low_max_startups(sshd_factory: SshdNodes) -> None:
    """Every node is a connection to the gate: 3:50:5 drops some of 16 at once, and all are there in the end."""
    (gate,) = sshd_factory(1, MaxStartups="3:50:5")
    nodes = sshd_factory(16, machines={f"127.0.1.{index + 1}": "" for index in range(16)})
    (gate.home / ".ssh" / "authorized_keys").write_text((nodes[0].home / ".ssh" / "authorized_keys").read_text())
    with nodes[0].known_hosts.open("a") as known:
        known.write(gate.known_hosts.read_text())
    inventory = Inventory.model_validate(
        {
            "ssh": {
                "key": str(nodes[0].key),
                "known_hosts": str(nodes[0].known_hosts),
                "port": nodes[0].port,
                "connect_timeout": 60,
            },
            "nodes": [{"host": node.host, "via": f"{gate.user}@{gate.host}:{gate.port}"} for node in nodes],
            "parallel": 16,
        }
    )
    fleet = connect(inventory)
    assert len(fleet.transports) == 16
    fleet.close()


def test_we_stay_below_the_default_max_startups(sshd_factory: SshdNodes) -> None:
    """Through one gate to many names: so few connections at once are not logged in yet that sshd drops hardly any."""
    (node,) = sshd_factory(1, MaxStartups="10")
    with ThreadPoolExecutor(24) as pool:
        reached = list(pool.map(lambda _: reach(node, connect_timeout=30), range(24)))
    for one in reached:
        one.close()
    assert node.log.read_text().count("drop connection") < 5  # of 24 at once it would drop 14


def test_a_server_that_always_drops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the setting that does it."""
    monkeypatch.setattr(ssh, "COME_AGAIN_FOR_S", 1.0)
    for words in ((), (b"Exceeded MaxStartups\r\n",), (b"Not allowed at this time\r\n",)):
        with port_that_says(*words, then_closes=True) as port, pytest.raises(UnreachableError, match="closes them") as refused:
            reach_port(port)
        assert "MaxStartups" in refused.value.advice


def test_a_port_that_is_not_ssh_says_what_it_says() -> None:
    """A mail or web server at that port is shown, in its own words, made harmless."""
    with port_that_says(b"220 mail\x1b[2J ready\r\n") as port, pytest.raises(UnreachableError) as refused:
        reach_port(port)
    assert "no SSH server answers" in refused.value.message and r"220 mail\x1b[2J" in refused.value.message


@pytest.mark.parametrize("words", [(), (b"SSH-2.0-stalls\r\n",)])
def test_a_server_that_accepts_and_stalls_costs_its_time_limit_once(words: tuple[bytes, ...]) -> None:
    """Before its greeting and after it (sshd under swap, a port forwarded to nowhere); it is not tried again."""
    started = time.monotonic()
    with port_that_says(*words) as port, pytest.raises(UnreachableError, match=r"says nothing|did not end in time|no answer"):
        reach_port(port, 2.0)
    assert 1.5 < time.monotonic() - started < 20


def test_a_node_that_swallows_packets_costs_its_limit_once_for_all_nodes(sshd_factory: SshdNodes) -> None:
    """The others are connected meanwhile; one error, within the limit of one node, and nothing goes on with the rest."""
    good = sshd_factory(2)
    with full_backlog() as (host, port):
        inventory = Inventory.model_validate(
            {
                "ssh": {"key": str(good[0].key), "known_hosts": str(good[0].known_hosts), "connect_timeout": 2},
                "nodes": [
                    *({"name": f"good{i}", "host": node.host, "port": node.port} for i, node in enumerate(good)),
                    {"name": "hole", "host": host, "port": port},
                ],
            }
        )
        started = time.monotonic()
        with pytest.raises(FleetError, match=r"hole: cannot reach .*: no answer in time") as refused:
            connect(inventory)
        assert 1.5 < time.monotonic() - started < 20 and set(refused.value.failures) == {"hole"}


def test_a_node_that_dies_in_the_middle_of_a_copy_is_an_error_at_once(sshd_factory: SshdNodes) -> None:
    """The connection is cut while megabytes are under way; the command is named, and nothing waits for the time limit."""
    (node,) = sshd_factory(1)
    reached = reach(node)
    started = time.monotonic()

    def chunks() -> Iterator[bytes]:
        for index in range(4000):
            if index == 40:
                sshd_factory.stop(node)
            yield b"x" * 65536

    with pytest.raises(CommandError, match="connection was lost during: cat"):
        run(reached, ["cat"], stdin=chunks(), idle_timeout_s=600)
    assert time.monotonic() - started < 60
    reached.close()


def test_a_node_that_freezes_has_a_limit_on_every_channel(sshd_factory: SshdNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped sshd keeps its TCP connection: opening a channel is given up (fabric 2197, 1384, 1807 waited for an hour)."""
    monkeypatch.setattr(ssh, "CHANNEL_TIMEOUT_S", 1.0)
    (node,) = sshd_factory(1)
    reached = reach(node)
    frozen = [process.pid for process in node.processes()]

    def send(signum: int) -> None:
        for pid in frozen:
            with suppress(ProcessLookupError):  # a helper of the login that was about to end
                os.kill(pid, signum)

    send(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="cannot open a channel"):
            reached.open(["true"])
        assert time.monotonic() - started < 30
    finally:
        send(signal.SIGCONT)
    assert run(reached, ["true"], idle_timeout_s=60).exit_code == 0  # and it goes on when the node does
    reached.close()


def test_a_server_that_never_starts_the_command_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of a fake: a real sshd always answers at this point, or is gone."""
    monkeypatch.setattr(ssh, "CHANNEL_TIMEOUT_S", 1.0)
    host_key = paramiko.ECDSAKey.generate()
    known, key = tmp_path / "known_hosts", tmp_path / "key"
    paramiko.ECDSAKey.generate().write_private_key_file(str(key))
    with fake_that_never_answers_exec(host_key) as port:
        known.write_text(f"[127.0.0.1]:{port} {host_key.get_name()} {host_key.get_base64()}\n")
        there = Login(user="me", host="127.0.0.1", port=port, key=str(key), via=None)
        reached = SshTransport("node1", there, options(known_hosts=str(known)))
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="cannot open a channel"):
            reached.open(["true"])
        assert time.monotonic() - started < 30
        reached.close()


@pytest.mark.skipif(not can_isolate(), reason="firewalls of a test's own need namespaces, which only root may make")
def test_a_link_that_dies_without_a_word_is_noticed(tmp_path: Path) -> None:
    """From one moment on the node's packets are lost, while a command runs and nothing is sent: keep-alives find out."""
    lab = NetworkLab(tmp_path, [Machine(cards={"eth0": "10.77.0.10/24"})])
    try:
        code = (
            "from orchestrator.nodes import dialling, ssh, transport\n"
            "from orchestrator.specs.inventory import Login, SshOptions\n"
            "ssh.KEEPALIVE_S = 1; dialling.UNACKNOWLEDGED_LIMIT_S = 3\n"
            f"login = Login(user='root', host='10.77.0.10', port=22, key={str(tmp_path / 'user_key')!r}, via=None)\n"
            f"node = ssh.SshTransport('node0', login, SshOptions(known_hosts={str(tmp_path / 'known_hosts')!r}))\n"
            "script = ['sh', '-c', 'echo begun; exec sleep 600']\n"
            "transport.run(node, script, idle_timeout_s=600, on_line=lambda line: print(line, flush=True))\n"
        )
        command = lab.into("switch", sys.executable, "-c", code)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "b'begun'\n"
            lab.on("node0", "iptables", "-w", "-I", "OUTPUT", "-j", "DROP")
            lab.on("node0", "iptables", "-w", "-I", "INPUT", "-j", "DROP")
            _, stderr = process.communicate(timeout=120)
        assert process.returncode == 1 and "CommandError: node0: the connection was lost during: sh -c" in stderr
    finally:
        lab.close()


def test_a_session_that_has_ended_makes_room_for_the_next(sshd_factory: SshdNodes) -> None:
    """One at a time is allowed, and sshd may see the end of one after we ask for the next; a second one at once is refused."""
    reached = reach(sshd_factory(1, MaxSessions="1")[0])
    for number in range(10):
        assert run(reached, ["echo", str(number)], idle_timeout_s=60).stdout == b"%d\n" % number
    busy = reached.open(["cat"])  # which ends with its stdin
    with pytest.raises(UnreachableError, match="cannot open a channel"):
        reached.open(["true"])
    busy.close()
    assert run(reached, ["true"], idle_timeout_s=60).exit_code == 0
    reached.close()


def test_a_connection_that_is_closed_opens_nothing(sshd_factory: SshdNodes) -> None:
    """As after a Ctrl-C, when threads are still under way: an error of ours, at once."""
    reached = reach(sshd_factory(1)[0])
    reached.close()
    with pytest.raises(UnreachableError, match="cannot open a channel"):
        reached.open(["true"])
    reached.close()


def test_one_nodes_failure_does_not_make_the_others_wait(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """A key that one node refuses ends the command for all, with that node named (ColossalAI 2959 and 3066 hung there)."""
    good, bad = sshd_factory(2)
    (bad.home / ".ssh" / "authorized_keys").write_text("")
    inventory = Inventory.model_validate(
        {
            "ssh": {"key": str(good.key), "known_hosts": str(good.known_hosts), "port": good.port, "user": good.user},
            "nodes": [{"name": "good", "host": good.host}, {"name": "bad", "host": bad.host}],
        }
    )
    with pytest.raises(FleetError, match=r"bad: .* refused the login") as refused:
        connect(inventory)
    assert set(refused.value.failures) == {"bad"} and refused.value.exit_code == 3
    assert not login(bad).via


@contextmanager
def full_backlog() -> Iterator[tuple[str, int]]:
    """A port whose queue is full, so that the kernel lets further connections wait: what a firewall that drops looks like."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        try:
            yield listener.getsockname()
        finally:
            for one in waiting:
                one.close()


@contextmanager
def fake_that_never_answers_exec(host_key: paramiko.PKey) -> Iterator[int]:
    over = threading.Event()

    class Fake(paramiko.ServerInterface):
        def get_allowed_auths(self, username: str) -> str:
            return "publickey"

        def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
            return paramiko.AUTH_SUCCESSFUL

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_SUCCEEDED

        def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
            over.wait(60)
            return False

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            transport = paramiko.Transport(accepted)
            transport.add_server_key(host_key)
            transport.start_server(server=Fake())
            over.wait(60)
            transport.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join(60)


def test_small_packets_leave_at_once() -> None:
    """Two in a row, as at every login, do not wait for the far end's delayed acknowledgement."""
    with port_that_says(b"SSH-2.0-x\r\n") as port, dial("127.0.0.1", port, 10, None) as sock:
        assert isinstance(sock, socket.socket) and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
