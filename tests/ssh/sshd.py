"""Throw-away SSH servers on loopback: machines to all that speaks SSH, each with an address and a home of its own.

Each server is Debian's own sshd, run by whoever runs the tests, on 127.0.0.2, 127.0.0.3, …; it lets one throw-away key
in. Whatever is started through a server stays in that server's process tree even when its parent dies. So a test can
list all that lives "on" a node, and stopping the node ends all of it and nothing else.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
SFTP_SERVER = "/usr/lib/openssh/sftp-server"
LIMIT_S = 10.0
POLL_S = 0.01

# PR_SET_CHILD_SUBREAPER (36) outlives exec: orphans become children of this server, not of process 1; sshd reaps them.
# With files of its own, the server sees other ones at those places: unshare(CLONE_NEWNS), then "/" made private for all below
# (MS_REC | MS_PRIVATE), then a bind mount (MS_BIND) for each.
_BECOME_SSHD = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(36, 1, 0, 0, 0)
mounts = json.loads(sys.argv[1])
if mounts and (
    libc.unshare(0x20000)
    or libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None)
    or any(libc.mount(os.fsencode(own), os.fsencode(place), None, ctypes.c_ulong(0x1000), None) for place, own in mounts.items())
):
    sys.exit("cannot mount: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
"""

# SetEnv gives the node its own HOME (and its own locks, as a machine of its own has), but sshd changes to the directory in
# /etc/passwd: go to that HOME as a login does.
_START_AT_HOME = 'cd "$HOME" && exec "$SHELL" ${SSH_ORIGINAL_COMMAND+-c "$SSH_ORIGINAL_COMMAND"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A process that lives on a node; pid and start time (clock ticks since boot) together name it for good."""

    pid: int
    parent: int
    started: int
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SshdNode:
    """One server and what is needed to log in; `disk` is where its own disk, if it has one, lies for us."""

    host: str
    port: int
    user: str
    key: Path
    known_hosts: Path
    home: Path
    log: Path
    pid: int
    disk: Path

    def ssh(self, *command: str) -> tuple[str, ...]:
        """The OpenSSH client's command line that runs `command` here, host key checked."""
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self.known_hosts),
            "ConnectTimeout": "10",
        }
        flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return (
            "ssh",
            "-F",
            "none",
            *flags,
            "-i",
            str(self.key),
            "-p",
            str(self.port),
            f"{self.user}@{self.host}",
            *command,
        )

    def processes(self) -> tuple[NodeProcess, ...]:
        """All that was started through this server and lives, sshd's own processes for open sessions included."""
        return descendants(self.pid)


class SshdNodes:
    """Makes nodes when called, and ends them all with `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups = 0
        self._servers: list[subprocess.Popen[bytes]] = []
        self._how: dict[tuple[str, int], tuple[Path, int, int, tuple[str, str], Path | None, str, Mapping[str, str]]] = {}

    def __call__(
        self,
        count: int,
        *,
        disk: Path | None = None,
        machines: Mapping[str, str] | None = None,
        password: str = "",
        **config: str,
    ) -> list[SshdNode]:
        """Start `count` servers on one free port; `config` replaces settings of ours, as in MaxStartups="3".

        Args:
            disk: a directory in whose place each node sees one of its own, as different machines do. See `can_mount`.
            machines: address -> network namespace that has it, for as many nodes, instead of addresses on loopback.
            password: of the user on these nodes, who are at home there by their own passwd file too. See `can_mount`.
        """
        group = self._directory / f"group{self._groups}"
        self._groups += 1
        group.mkdir(parents=True)
        for name in ("user_key", *(f"host_key{index}" for index in range(count))):
            make_key(group / name)
        places = list((machines or {f"127.0.0.{index + 2}": "" for index in range(count)}).items())
        for _ in range(5):
            try:
                return self._start(group, _free_port(), places, disk, password, config)
            except _PortTaken:
                continue  # by somebody else, between our asking and sshd's binding
        raise RuntimeError("five times another process took the port that was free just before")

    def close(self) -> None:
        while self._servers:
            stop(self._servers.pop())

    def stop(self, node: SshdNode) -> None:
        """End one node and all that runs on it, as if its plug were pulled."""
        (server,) = [server for server in self._servers if server.pid == node.pid]
        self._servers.remove(server)
        stop(server)

    def start_again(self, node: SshdNode) -> SshdNode:
        """The node that was stopped, with the same address, keys, home and disk."""
        made = self._start_one(*self._how[node.host, node.port])
        _wait_until_listening(self._servers[-1], made.log)
        return made

    def _start(
        self,
        group: Path,
        port: int,
        places: list[tuple[str, str]],
        disk: Path | None,
        password: str,
        config: Mapping[str, str],
    ) -> list[SshdNode]:
        before = len(self._servers)
        try:
            nodes = [self._start_one(group, port, index, place, disk, password, config) for index, place in enumerate(places)]
            for server, node in zip(self._servers[before:], nodes, strict=True):
                _wait_until_listening(server, node.log)
        except BaseException:
            while len(self._servers) > before:
                stop(self._servers.pop())
            raise
        host_keys = ((node.host, (group / f"host_key{index}.pub").read_text()) for index, node in enumerate(nodes))
        (group / "known_hosts").write_text("".join(f"[{host}]:{port} {key}" for host, key in host_keys))
        return nodes

    def _start_one(
        self,
        group: Path,
        port: int,
        index: int,
        place: tuple[str, str],
        disk: Path | None,
        password: str,
        config: Mapping[str, str],
    ) -> SshdNode:
        (host, namespace), home, log = place, _make_home(group, index), group / f"sshd{index}.log"
        self._how[host, port] = (group, port, index, place, disk, password, config)
        settings = {**_settings(host, port, home, group / f"host_key{index}"), **config}
        settings_file = group / f"sshd_config{index}"
        settings_file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        log.unlink(missing_ok=True)
        sshd = (str(SSHD), "-D", "-f", str(settings_file), "-E", str(log))
        own_disk = group / f"disk{index}"
        own_disk.mkdir(exist_ok=True)
        mounts = {**({str(disk): str(own_disk)} if disk else {}), **(_accounts(group, home, password) if password else {})}
        become = (sys.executable, "-c", _BECOME_SSHD, json.dumps(mounts))
        inside = ("ip", "netns", "exec", namespace) if namespace else ()
        server = subprocess.Popen((*inside, *become, *sshd), stdin=subprocess.DEVNULL, cwd="/", start_new_session=True)
        self._servers.append(server)
        return SshdNode(
            host=host,
            port=port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            key=group / "user_key",
            known_hosts=group / "known_hosts",
            home=home,
            log=log,
            pid=server.pid,
            disk=own_disk,
        )


def can_mount() -> bool:
    """Whether this process may give its children file systems of their own."""
    return subprocess.run(("unshare", "--mount", "true"), capture_output=True, check=False).returncode == 0


def make_key(path: Path) -> None:
    """Make an ed25519 key without a passphrase, and `path`.pub beside it."""
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)


def descendants(pid: int) -> tuple[NodeProcess, ...]:
    """All living descendants of a process. Zombies are not counted: nothing of them runs."""
    children: dict[int, list[NodeProcess]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := _read_process(entry)):
            children.setdefault(process.parent, []).append(process)
    found: list[NodeProcess] = []
    parents = [pid]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return tuple(found)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and everything that was started through it; the server last, for it holds the orphans together."""
    deadline = time.monotonic() + LIMIT_S
    while server.poll() is None and (left := descendants(server.pid)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"alive {LIMIT_S:g} s after SIGKILL: {left}")
        for process in left:
            if _read_process(Path(f"/proc/{process.pid}")) == process:
                _kill(process.pid)
        time.sleep(POLL_S)
    server.terminate()
    server.wait(timeout=LIMIT_S)


class _PortTaken(Exception):
    pass


def _make_home(group: Path, index: int) -> Path:
    """A home that lets the key in the usual way, so that further keys can be added to it as on any machine."""
    home = group / f"home{index}"
    (home / ".ssh").mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(group / "user_key.pub", home / ".ssh" / "authorized_keys")
    return home


def _accounts(group: Path, home: Path, password: str) -> dict[str, str]:
    """Files of a node where the user is at home here and has this password, each by its place; PAM asks shadow alone."""
    name = pwd.getpwuid(os.getuid()).pw_name
    hashed = subprocess.run(
        ("openssl", "passwd", "-6", "-stdin"), input=password + "\n", capture_output=True, text=True, check=True
    ).stdout.strip()
    fields = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    texts = {
        "passwd": "".join(":".join([*one[:5], str(home), *one[6:]] if one[0] == name else one) + "\n" for one in fields),
        "shadow": f"{name}:{hashed}:20000:0:99999:7:::\n",
        "pam.d/sshd": "".join(f"{kind} required pam_unix.so\n" for kind in ("auth", "account", "password", "session")),
    }
    made = {}
    for place, text in texts.items():
        path = group / f"{home.name}-{Path(place).name}"
        path.write_text(text)
        made[f"/etc/{place}"] = str(path)
    return made


def _settings(host: str, port: int, home: Path, host_key: Path) -> dict[str, str]:
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd of root locks its unprivileged part in
    return {
        "ListenAddress": host,
        "Port": str(port),
        "HostKey": str(host_key),
        "AuthorizedKeysFile": str(home / ".ssh" / "authorized_keys"),
        "StrictModes": "no",  # the test directory may lie below /tmp, which everybody may write to
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "PermitUserEnvironment": "no",
        "SetEnv": f"HOME={home} CLUSTER_TRAIN_LOCKS={home}/locks",
        "ForceCommand": _START_AT_HOME,
        "Subsystem": f"sftp {SFTP_SERVER}",
        "MaxStartups": "100",
        "PidFile": "none",
        "LogLevel": "VERBOSE",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return int(probe.getsockname()[1])


def _wait_until_listening(server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for this server's own word: a port that answers might be somebody else's."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended = server.poll() is not None
        text = log.read_text(errors="replace") if log.exists() else ""
        if "Address already in use" in text:
            raise _PortTaken
        if ended:
            raise RuntimeError(f"sshd ended at once ({server.returncode}): {text or 'it logged nothing'}")
        if "Server listening on" in text:
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"sshd did not listen within {LIMIT_S:g} s: {text}")


def _read_process(entry: Path) -> NodeProcess | None:
    """The process of a /proc/<pid> directory; None for a zombie, and for one that just ended."""
    try:
        # The name in parentheses may hold anything, spaces and parentheses too.
        state, parent, *fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        argv = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if state in "ZX":
        return None
    words = tuple(os.fsdecode(word) for word in argv)
    return NodeProcess(pid=int(entry.name), parent=int(parent), started=int(fields[17]), argv=words)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
