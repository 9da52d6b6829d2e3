"""A node over SSH: Fabric's Connection for everything up to the login, Paramiko's channels for bytes.

The only module that imports fabric. Channels are read as bytes: Fabric's own `run` decodes output by chunks, which
breaks characters on their borders, and neither quotes the environment that it is given.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import shlex
import socket
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fabric
import paramiko

from orchestrator.errors import AuthenticationError, HostKeyError, NodeError, UnreachableError
from orchestrator.nodes.transport import CHUNK_BYTES
from orchestrator.specs.inventory import Login, SshOptions

KEEPALIVE_S = 15
UNACKNOWLEDGED_LIMIT_S = 30  # after which the kernel calls a link dead whose far end says nothing to our keep-alives
CHANNEL_TIMEOUT_S = 20
# Paramiko logs tracebacks of what it raises as well; whoever wants them adds a handler.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

WINDOW_BYTES = 1 << 24  # the default of 2 MiB holds a fast link back


class SshTransport:
    """One connected node; raises a NodeError that says what to do when it cannot be reached, trusted or logged in to."""

    is_local = False

    def __init__(self, node: str, login: Login, options: SshOptions) -> None:
        self.node = node
        self._connection = _connection(login, options)
        for hop in _hops(self._connection):
            _trust(hop, options)
        _open(node, login, self._connection)
        transport = self._connection.transport
        transport.set_keepalive(KEEPALIVE_S)
        transport.default_window_size = WINDOW_BYTES
        # A jump host's channel is no socket, and has no such limit but that of its own link; macOS knows none.
        if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_LIMIT_S)
        key = transport.get_remote_server_key()
        self.host_key: str | None = f"{key.get_name()} {key.get_base64()}"

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start `argv` through the login shell, every word quoted; raises UnreachableError when no channel opens in time."""
        try:
            channel = self._connection.transport.open_session(timeout=CHANNEL_TIMEOUT_S)
            channel.settimeout(CHANNEL_TIMEOUT_S)
            channel.exec_command(shlex.join(argv))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise UnreachableError(
                f"{self.node}: cannot open a channel: {_reason(error)}",
                node=self.node,
                advice="sshd's MaxSessions may be reached, or the connection is gone: try again",
            ) from error
        return SshChannel(channel)

    def close(self) -> None:
        """Close the connection and all its channels."""
        self._connection.close()


class SshChannel:
    """A command on the far side of an SSH channel."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._stderr = bytearray()

    def write(self, data: bytes) -> None:
        # Under the time limit of the `read` that goes on at the same time: a channel has one for both directions.
        self._channel.sendall(data)

    def close_stdin(self) -> None:
        self._channel.shutdown_write()

    def read(self, timeout_s: float) -> bytes:
        self._channel.settimeout(timeout_s)
        return self._channel.recv(CHUNK_BYTES)

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
        return self._stderr.decode(errors="replace")

    def close(self) -> None:
        self.stderr()
        self._channel.close()


class _Encrypted(paramiko.Transport):
    """Paramiko's transport with AES-GCM tried first: half the processor time of AES-CTR and HMAC, which it prefers; no CBC."""

    _preferred_ciphers = (
        "aes128-gcm@openssh.com",
        "aes256-gcm@openssh.com",
        "aes128-ctr",
        "aes192-ctr",
        "aes256-ctr",
    )


def _connection(login: Login, options: SshOptions) -> fabric.Connection:
    arguments: dict[str, Any] = {
        "transport_factory": _Encrypted,
        "banner_timeout": options.connect_timeout,
        "auth_timeout": options.connect_timeout,
    }
    if login.key:
        arguments |= {"key_filename": str(Path(login.key).expanduser()), "look_for_keys": False}
    gateway = None
    if login.via:
        gateway = fabric.Connection(
            login.via, config=_config(), connect_timeout=options.connect_timeout, connect_kwargs=dict(arguments)
        )
    return fabric.Connection(
        login.host,
        config=_config(),
        user=login.user,
        port=None if login.port == 22 else login.port,  # left open, so that ~/.ssh/config may say another
        gateway=gateway,
        connect_timeout=options.connect_timeout,
        connect_kwargs=arguments,
    )


def _hops(connection: fabric.Connection) -> Iterator[fabric.Connection]:
    """The connection and the jump hosts before it, those of `via` as well as those that ~/.ssh/config names."""
    hop: object = connection
    while isinstance(hop, fabric.Connection):  # a ProxyCommand is text, and checks what it likes
        yield hop
        hop = hop.gateway


@cache
def _config() -> fabric.Config:
    """~/.ssh/config and Fabric's own settings, read once for all nodes."""
    return fabric.Config()


def _trust(connection: fabric.Connection, options: SshOptions) -> None:
    """Check host keys as OpenSSH does: Fabric's default would accept anything."""
    name = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
    trusted = connection.client.get_host_keys()
    for key in _known_keys(name, options.known_hosts):
        trusted.add(name, key.get_name(), key)
    accept_new = options.host_keys == "accept-new"
    connection.client.set_missing_host_key_policy(_AcceptNew(options.known_hosts) if accept_new else _Strict())


def _known_keys(name: str, known_hosts: str | None) -> list[paramiko.PKey]:
    """The keys on record for a host: those in ~/.ssh/known_hosts, and where it has none, those in the inventory's file."""
    for file in ("~/.ssh/known_hosts", *([known_hosts] if known_hosts else [])):
        path = Path(file).expanduser()
        if path.exists():
            found = _host_keys(path, path.stat().st_mtime_ns).lookup(name)
            if found:
                return list(found.values())
    return []


@cache
def _host_keys(path: Path, changed_ns: int) -> paramiko.HostKeys:
    """A known_hosts file, read once for all nodes: with a hundred of them each would read a hundred lines."""
    return paramiko.HostKeys(str(path))


class _UnknownHostKey(paramiko.SSHException):
    def __init__(self, hostname: str, key: paramiko.PKey) -> None:
        super().__init__(hostname)
        self.hostname = hostname
        self.key = key


class _Strict(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise _UnknownHostKey(hostname, key)


class _AcceptNew(paramiko.MissingHostKeyPolicy):
    """Store a key at first sight, as OpenSSH's StrictHostKeyChecking=accept-new does; a changed one stays an error."""

    def __init__(self, known_hosts: str | None) -> None:
        self._file = Path(known_hosts or "~/.ssh/known_hosts").expanduser()

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._file.open("a") as lines:
            lines.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")


def _open(node: str, login: Login, connection: fabric.Connection) -> None:
    where = f"{login.host}:{login.port}"
    try:
        connection.open()
    except _UnknownHostKey as error:
        raise _unknown_host_key(node, error) from None
    except paramiko.BadHostKeyException as error:
        raise HostKeyError(
            f"{node}: the host key of {error.hostname} has CHANGED: it is now {fingerprint(error.key)}, known was "
            f"{fingerprint(error.expected_key)}",
            node=node,
            advice=f"if the machine was really reinstalled: ssh-keygen -R '{error.hostname}', then accept its new key",
        ) from None
    except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as error:
        raise AuthenticationError(
            f"{node}: {where} refused the login as {connection.user}: {error}",
            node=node,
            advice=f"this must work first: ssh -p {login.port} {connection.user}@{login.host} true   (see ssh.user and ssh.key)",
        ) from None
    except FileNotFoundError as error:
        raise NodeError(
            f"{node}: no such key file: {error.filename}", node=node, advice="see `ssh.key` in the inventory"
        ) from None
    except (socket.gaierror, OSError, paramiko.SSHException, EOFError) as error:
        raise UnreachableError(
            f"{node}: cannot reach {where}: {_reason(error)}",
            node=node,
            advice="is the machine up, the address and port right, sshd running, and no firewall between?",
        ) from None


def _unknown_host_key(node: str, error: _UnknownHostKey) -> HostKeyError:
    """Of the node or of its jump host: `hostname` is the one as known_hosts writes it, `host` or `[host]:port`."""
    bracketed = re.fullmatch(r"\[(.+)\]:(\d+)", error.hostname)
    host, port = bracketed.groups() if bracketed else (error.hostname, "22")
    return HostKeyError(
        f"{node}: the host key of {error.hostname} is not known: {fingerprint(error.key)}",
        node=node,
        advice=(
            "compare it with the machine's own (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there), then accept it: "
            f"ssh-keyscan -p {port} {host} >> ~/.ssh/known_hosts   "
            "(throw-away clusters: `host_keys: accept-new` under `ssh:` in the inventory)"
        ),
    )


def fingerprint(key: paramiko.PKey) -> str:
    """A host key's SHA-256 fingerprint, as `ssh-keygen -l` prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    return str(error) or type(error).__name__
