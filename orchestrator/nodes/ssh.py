"""A node over SSH: Fabric's Connection for the login, Paramiko's channels for bytes.

The only module that imports fabric. Channels are read as bytes: Fabric's own `run` decodes output by chunks, which
breaks characters on their borders, and neither quotes the environment that it is given.

Where a route leads (`ssh_config`), which host keys are trusted (`known_hosts`) and which keys are offered (`ssh_keys`) is
decided beside this module; here the connections are made, each step within its time limit.
"""

from __future__ import annotations

import logging
import random
import secrets
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import fabric
import paramiko

from orchestrator.errors import AuthenticationError, ClusterTrainError, PasswordNeededError, UnreachableError
from orchestrator.nodes import ssh_keys
from orchestrator.nodes.certificates import SUFFIX
from orchestrator.nodes.dialling import Dropped, ProxyCommand, await_greeting, dial
from orchestrator.nodes.key_files import certificate_of, written
from orchestrator.nodes.known_hosts import KnownHosts, is_listed_as_revoked
from orchestrator.nodes.passwords import Passwords
from orchestrator.nodes.ssh_config import Route, find_route
from orchestrator.nodes.ssh_passwords import PasswordLogin
from orchestrator.nodes.ssh_refusals import distrust, failure, reason, uncertified, unreachable
from orchestrator.nodes.transport import CHUNK_BYTES
from orchestrator.specs.inventory import Login, SshOptions

KEEPALIVE_S = 15
CHANNEL_TIMEOUT_S = 20.0
FREED_WITHIN_S, ASK_AGAIN_S = 2.0, 0.02  # for sshd to see that a session has ended, of which it allows MaxSessions at once
# Above its MaxStartups, 10 by default, sshd drops connections that are not logged in yet; it takes a moment to see that one
# is. We stay well below that, and come again where we are dropped.
STARTS_AT_ONCE = 5
COME_AGAIN_FOR_S = 20.0
LONGEST_PAUSE_S = 3.0
# Paramiko logs tracebacks of what it raises as well; whoever wants them adds a handler.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# Fabric's defaults without any file: what ~/.ssh/config says is in the route already.
_CONFIG = fabric.Config(lazy=True)
WINDOW_BYTES = 1 << 24  # the default of 2 MiB holds a fast link back
# What a shell's start-up files print comes before this line, the command's own output after it.
BEGIN = f"cluster-train-{secrets.token_hex(8)}"
MOST_NOISE_BYTES = 1 << 20

_starting: defaultdict[tuple[str, int], threading.BoundedSemaphore] = defaultdict(
    lambda: threading.BoundedSemaphore(STARTS_AT_ONCE)
)


class SshTransport:
    """One connected node; raises a NodeError that says what to do when it cannot be reached, trusted or logged in to.

    Args:
        route: the way there, where it has been found already.
        passwords: where the node's own is, if there is one; without it only keys are tried.
    """

    is_local = False

    def __init__(
        self, node: str, login: Login, options: SshOptions, route: Route | None = None, passwords: Passwords | None = None
    ) -> None:
        self.node = node
        route = route or find_route(node, login, options)
        self._hops: list[_Hop] = []
        try:
            before: paramiko.Transport | None = None
            for jump in route.jumps:
                self._hops.append(_connect_to_jump_host(node, jump, before, options))
                before = self._transport
            self._hops.append(_connect(node, route, before, options, passwords))
        except BaseException:
            self.close()
            raise
        transport = self._transport
        transport.set_keepalive(KEEPALIVE_S)
        transport.default_window_size = WINDOW_BYTES
        self.key_file = self._hops[-1].login.key_file
        self.host_key: str | None = written(transport.get_remote_server_key())

    @property
    def _transport(self) -> paramiko.Transport:
        return self._hops[-1].transport

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start `argv` through the login shell, every word quoted; raises UnreachableError when no channel opens in time."""
        try:
            channel = self._open_session()
            channel.settimeout(CHANNEL_TIMEOUT_S)
            with _closed_after(CHANNEL_TIMEOUT_S, channel):  # paramiko itself would wait for the answer for ever
                channel.exec_command(f"echo {BEGIN}; exec {shlex.join(argv)}")
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise UnreachableError(
                f"{self.node}: cannot open a channel: {reason(error)}",
                node=self.node,
                advice="sshd's MaxSessions may be reached, or the connection is gone: try again",
            ) from error
        return SshChannel(channel)

    def _open_session(self) -> paramiko.Channel:
        """A new session; asked for again for a moment where it is refused, as one that we have closed may still count as open."""
        deadline = time.monotonic() + FREED_WITHIN_S
        while True:
            try:
                return self._transport.open_session(timeout=CHANNEL_TIMEOUT_S)
            except paramiko.ChannelException:
                if time.monotonic() > deadline:
                    raise
            time.sleep(ASK_AGAIN_S)

    def close(self) -> None:
        """Close the connection and all its channels, and those to the jump hosts."""
        for hop in reversed(self._hops):
            hop.close()


class SshChannel:
    """A command on the far side of an SSH channel. Its output is what comes after the line BEGIN."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._stderr = bytearray()
        self._noise: bytearray | None = bytearray()
        self._preamble = b""

    def write(self, data: bytes) -> None:
        # Under the time limit of the `read` that goes on at the same time: a channel has one for both directions.
        self._channel.sendall(data)

    def close_stdin(self) -> None:
        self._channel.shutdown_write()

    def read(self, timeout_s: float) -> bytes:
        self._channel.settimeout(timeout_s)
        while True:
            data = self._channel.recv(CHUNK_BYTES)
            if self._noise is None or not data:
                return data
            self._noise += data
            before, mark, after = self._noise.partition(f"{BEGIN}\n".encode())
            if mark:
                self._noise, self._preamble = None, bytes(before)
                if after:
                    return bytes(after)
            elif len(before) > MOST_NOISE_BYTES:
                raise ConnectionError("the login shell's start-up files print without end")

    def wait(self, timeout_s: float) -> int:
        if not self._channel.status_event.wait(timeout_s):
            raise TimeoutError
        code = self._channel.recv_exit_status()
        if code == -1:
            raise ConnectionError("the node closed the connection before the command ended")
        return code

    def stderr(self) -> str:
        while self._channel.recv_stderr_ready():
            self._stderr += self._channel.recv_stderr(CHUNK_BYTES)
        # A shell that never came to the command (nologin) says why on stdout.
        return (self._stderr + (self._noise or b"")).decode(errors="replace")

    def preamble(self) -> str:
        return self._preamble.decode(errors="replace")

    def close(self) -> None:
        self.stderr()
        self._channel.close()


class _Transport(paramiko.Transport):
    """Paramiko's transport with AES-GCM tried first: half the processor time of AES-CTR and HMAC, which it prefers; no CBC.

    Of a server's host keys it asks for one that can be judged: a certificate where an authority is known, a kind that is known.
    """

    known_kinds: frozenset[str] = frozenset()
    wants_certificate = False

    _preferred_ciphers = tuple(
        cipher
        for cipher in ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
        # Paramiko before 3.5 has no GCM.
        if cipher in paramiko.Transport._cipher_info  # type: ignore[attr-defined]
    )

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        kinds = super().preferred_keys
        certificates = tuple(kind for kind in kinds if kind.endswith(SUFFIX)) if self.wants_certificate else ()
        plain = [kind for kind in kinds if not kind.endswith(SUFFIX)]
        return (*certificates, *sorted(plain, key=lambda kind: kind not in self.known_kinds))


AnyLogin = ssh_keys.KeyLogin | PasswordLogin


class _Hop:
    """One server that we are logged in to."""

    def __init__(self, connection: fabric.Connection, login: AnyLogin, proxy: ProxyCommand | None) -> None:
        self.login = login
        self.transport: paramiko.Transport = connection.client.get_transport()  # which a closed client forgets
        self._connection = connection
        self._proxy = proxy

    def close(self) -> None:
        self._connection.client.close()
        if self._proxy:
            self._proxy.close()


class _HostKeyCheck(paramiko.MissingHostKeyPolicy):
    """Judges every host key, right after the key exchange; paramiko itself is given none to compare with."""

    def __init__(self, node: str, route: Route, options: SshOptions) -> None:
        self._node = node
        self._route = route
        self._options = options

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        known, name, certificate = KnownHosts(self._route.known_hosts), self._route.known_as, certificate_of(key)
        verdict = known.judge(name, written(key), certificate)
        if self._route.revoked_keys and is_listed_as_revoked(self._route.revoked_keys, written(key), certificate):
            verdict = "revoked"
        if verdict == "unknown" and self._options.host_keys == "accept-new":
            verdict = known.accept(name, written(key), hashed=self._route.hashes_hosts)
        if verdict == "uncertified":
            raise uncertified(self._node, self._route, key, certificate, known.authorities_of(name))
        if verdict != "known":
            raise distrust(self._node, self._route, key, verdict, known.keys_of(name))


def _connect_to_jump_host(node: str, jump: Route, before: paramiko.Transport | None, options: SshOptions) -> _Hop:
    try:
        return _connect(node, jump, before, options, None)
    except PasswordNeededError as error:
        raise AuthenticationError(
            error.message,
            node=node,
            advice=f"a jump host must take a key of yours: ssh-copy-id -p {jump.port} {jump.user}@{jump.host}",
        ) from None


def _connect(
    node: str, route: Route, before: paramiko.Transport | None, options: SshOptions, passwords: Passwords | None
) -> _Hop:
    """Log in to one server, coming again where it drops us for its MaxStartups: after growing pauses of random length."""
    give_up = time.monotonic() + COME_AGAIN_FOR_S
    pause_s = 0.2
    while True:
        try:
            with _starting[route.host, route.port]:
                return _log_in(node, route, before, options, _login(node, route, passwords))
        except Dropped as error:
            if time.monotonic() + pause_s > give_up:
                raise unreachable(
                    node, route, f"{error}, for {COME_AGAIN_FOR_S:g} s", "see MaxStartups in its sshd_config"
                ) from None
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _login(node: str, route: Route, passwords: Passwords | None) -> AnyLogin:
    password = passwords.of(node) if passwords else None
    return PasswordLogin(route.user, password) if password else ssh_keys.KeyLogin(route, asks_first=passwords is not None)


def _log_in(node: str, route: Route, before: paramiko.Transport | None, options: SshOptions, login: AnyLogin) -> _Hop:
    limit_s = options.connect_timeout
    proxy: ProxyCommand | None = None
    connection: fabric.Connection | None = None
    sock: Any = None
    try:
        if route.proxy_command:
            proxy = ProxyCommand(route.proxy_command)
            sock = proxy.socket
        else:
            sock = dial(route.host, route.port, limit_s, before)
        await_greeting(sock, limit_s)
        connection = _connection(node, route, options, sock, login)
        connection.open()
        return _Hop(connection, login, proxy)
    except BaseException as error:
        if connection:
            connection.client.close()
        if sock:
            sock.close()
        said = proxy.close() if proxy else ""
        if isinstance(error, ClusterTrainError) or not isinstance(error, Exception):
            raise
        if _is_dropped(error) and not proxy:
            raise Dropped("it takes connections and closes them at once") from None
        raise failure(node, route, error, said) from None


def _connection(node: str, route: Route, options: SshOptions, sock: object, login: AnyLogin) -> fabric.Connection:
    limit_s = options.connect_timeout
    arguments: dict[str, Any] = {
        "sock": sock,
        "timeout": limit_s,
        "banner_timeout": limit_s,
        "auth_timeout": limit_s,
        "channel_timeout": CHANNEL_TIMEOUT_S,
        "auth_strategy": login,
        "transport_factory": partial(_transport, KnownHosts(route.known_hosts), route.known_as),
    }
    connection = fabric.Connection(
        route.host, config=_CONFIG, user=route.user, port=route.port, forward_agent=False, connect_kwargs=arguments
    )
    connection.client.set_missing_host_key_policy(_HostKeyCheck(node, route, options))
    return connection


def _transport(known: KnownHosts, name: str, *arguments: Any, **named: Any) -> paramiko.Transport:
    transport = _Transport(*arguments, **named)
    transport.known_kinds = frozenset(kind for key in known.keys_of(name) for kind in _algorithms(key.split()[0]))
    transport.wants_certificate = bool(known.authorities_of(name))
    return transport


def _algorithms(kind: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


@contextmanager
def _closed_after(limit_s: float, channel: paramiko.Channel) -> Iterator[None]:
    def close() -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the connection itself may end at this moment
            channel.close()

    timer = threading.Timer(limit_s, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_dropped(error: Exception) -> bool:
    """Through a jump host it is paramiko that waits for the greeting, and tells of its end as of a line that it cannot read."""
    cut = isinstance(error, paramiko.SSHException) and "protocol banner" in str(error) and "timed out" not in str(error)
    return isinstance(error, Dropped) or cut
