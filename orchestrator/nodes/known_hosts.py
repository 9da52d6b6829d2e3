"""known_hosts files as OpenSSH reads and writes them: hashed names, `[host]:port`, patterns, several keys per host, markers.

The format is that of sshd(8), SSH_KNOWN_HOSTS FILE FORMAT. A `@cert-authority` line makes the keys known that its authority
certifies for the host, and no other; a host that has such a line is not taken for a new one.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from orchestrator.nodes.certificates import authority_of, host_fault

REVOCATION_LIMIT_S = 20.0
KRL = b"SSHKRL\n\0"  # how such a file begins: PROTOCOL.krl of OpenSSH
Verdict = Literal["known", "unknown", "changed", "revoked", "uncertified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line: the hosts it is for, as they are written there, its marker (`@revoked`, or ""), and `TYPE BASE64`."""

    hosts: str
    marker: str
    key: str

    def is_for(self, name: str) -> bool:
        """Whether the line is about `name`, which is `host` or `[host]:port` in small letters."""
        if self.hosts.startswith("|1|"):
            return _is_hash_of(self.hosts, name)
        patterns = self.hosts.lower().split(",")
        if any(pattern[:1] == "!" and _matches(name, pattern[1:]) for pattern in patterns):
            return False
        return any(_matches(name, pattern) for pattern in patterns)


class KnownHosts:
    """All that some files say, the first of which takes new keys."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = [Path(file) for file in files]

    def keys_of(self, name: str) -> list[str]:
        """The keys that are known for a host, as `TYPE BASE64`."""
        return [line.key for line in self._lines(name) if not line.marker]

    def authorities_of(self, name: str) -> list[str]:
        """The keys of those whose certificates count for a host, at this port or at the usual one."""
        lines = [line for place in _places(name) for line in self._lines(place)]
        return list(dict.fromkeys(line.key for line in lines if line.marker == "@cert-authority"))

    def judge(self, name: str, key: str, certificate: str = "") -> Verdict:
        """What is to be thought of `key` (`TYPE BASE64`) at the host `name`, which shows this certificate of it.

        `uncertified`: only certificate authorities are known for the host, and none of them vouches for the key.
        """
        authority = authority_of(certificate) if certificate else None
        revoked = {line.key for place in _places(name) for line in self._lines(place) if line.marker == "@revoked"}
        if revoked & {key, authority}:
            return "revoked"
        if authority in self.authorities_of(name) and host_fault(certificate, host_of(name)) is None:
            return "known"
        lines = self._lines(name)
        plain = [line.key for line in lines if not line.marker]
        if key in plain:
            return "known"
        if plain:
            return "changed"
        if any(line.marker for line in lines if line.marker != "@revoked"):
            return "uncertified"
        # As OpenSSH does: a key that is known for the host at its usual port is the same machine's at another one.
        return "known" if any(self.judge(place, key) == "known" for place in _places(name)[1:]) else "unknown"

    def accept(self, name: str, key: str, *, hashed: bool) -> Verdict:
        """Store a key that is not known yet; what others stored meanwhile counts. Safe among threads and processes.

        Args:
            hashed: how the name is written where the file holds none yet; else as those that it holds.
        """
        file = self._files[0]
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            verdict = self.judge(name, key)
            if verdict == "unknown":
                content = stream.read()
                hosts = [line.hosts for line in _parse(content)]
                written = _hash_of(name) if (any(map(_is_hashed, hosts)) if hosts else hashed) else name
                start = b"\n" if content and not content.endswith(b"\n") else b""
                stream.write(start + f"{written} {key}\n".encode())
                verdict = "known"
            return verdict

    def _lines(self, name: str) -> list[KnownKey]:
        return [line for file in self._files for line in _about(file, name)]


def is_listed_as_revoked(file: str, key: str, certificate: str) -> bool:
    """Whether RevokedHostKeys, a file of keys or a KRL, names a key, its certificate or that one's authority.

    True as well where that cannot be found out, as with OpenSSH.
    """
    try:
        content = Path(file).read_bytes()
        if not content.startswith(KRL):
            listed = {" ".join(line.split()[:2]) for line in content.decode(errors="replace").splitlines()}
            return bool(listed & {key, authority_of(certificate)})
        argv = ["ssh-keygen", "-Q", "-f", file, "/dev/stdin"]
        asked = subprocess.run(argv, input=f"{certificate or key}\n".encode(), capture_output=True, timeout=REVOCATION_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return asked.returncode != 0


def host_of(name: str) -> str:
    """The host alone of `host` or `[host]:port`."""
    return _places(name)[-1]


def _places(name: str) -> list[str]:
    """Under which names a key may be known: that of its port, then that of the usual port."""
    host, bracket, _ = name.removeprefix("[").partition("]:")
    return [name, host] if bracket else [name]


def _about(file: Path, name: str) -> tuple[KnownKey, ...]:
    try:
        seen = file.stat()
    except OSError:
        return ()
    return _about_in_version(name, file, seen.st_ino, seen.st_mtime_ns, seen.st_size)


@lru_cache(maxsize=4096)
def _about_in_version(name: str, *version: Any) -> tuple[KnownKey, ...]:
    """Found once for each node: a hashed line costs an HMAC."""
    return tuple(line for line in _read_version(*version) if line.is_for(name))


@lru_cache(maxsize=64)
def _read_version(file: Path, inode: int, changed_ns: int, size_bytes: int) -> tuple[KnownKey, ...]:
    """Read once for all nodes: with a hundred of them each would read a hundred lines."""
    return tuple(_parse(file.read_bytes()))


def _parse(content: bytes) -> Iterable[KnownKey]:
    """The lines that can be read; OpenSSH passes over the others as well."""
    for line in content.decode(errors="replace").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) >= 3:
            yield KnownKey(hosts=words[0], marker=marker, key=f"{words[1]} {words[2]}")


def _matches(name: str, pattern: str) -> bool:
    # Of fnmatch's characters OpenSSH knows `*` and `?`; brackets stand for themselves, as in `[host]:port`.
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def _is_hashed(hosts: str) -> bool:
    return hosts.startswith("|1|")


def _is_hash_of(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hashed.split("|")[2:4])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def _hash_of(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
