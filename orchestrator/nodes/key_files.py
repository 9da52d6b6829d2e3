"""Private keys as they lie on disk or in an agent, with the certificates that belong to them."""

from __future__ import annotations

import base64
import copy
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.message import Message
from paramiko.pkey import PublicBlob

from orchestrator.nodes.certificates import SUFFIX, certified_key

LISTING_LIMIT_S = 10.0
SIGNING_LIMIT_S = 60.0  # an agent may ask a person first
_CLASSES: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class Agent(AgentSSH):
    """An agent at a socket; one that is not there, or says nothing, has no keys."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        if path is None:
            return
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(LISTING_LIMIT_S)
        try:
            link.connect(path)
            self._connect(link)  # type: ignore[attr-defined]  # paramiko's own Agent takes no path
            link.settimeout(SIGNING_LIMIT_S)
        except (OSError, paramiko.SSHException, EOFError):
            link.close()

    def listed(self) -> list[tuple[str, paramiko.PKey]]:
        """Each key with its public half, a certified one with that of the key that it is for: certificates first."""
        found: list[tuple[str, paramiko.PKey]] = []
        for key in self.get_keys():
            public = f"{key.get_name()} {key.get_base64()}"
            if key.get_name().endswith(SUFFIX):
                # Paramiko offers it as a certificate only where it is told what to send.
                blob = PublicBlob.from_message(Message(key.blob))
                key.public_blob = blob  # type: ignore[assignment]
                public = certified_key(_line(blob)) or public
            found.append((public, key))
        return sorted(found, key=lambda one: not is_certified(one[1]))

    def close(self) -> None:
        """Let go of the agent."""
        self._close()  # type: ignore[attr-defined]


def read_key(file: str, passphrase: str | None = None) -> paramiko.PKey | None:
    """A private key of any kind; None for a file that holds none. Raises PasswordRequiredException, FileNotFoundError."""
    for kind in _CLASSES:
        try:
            return kind.from_private_key_file(file, passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError, UnicodeError):
            continue  # of another kind
    return None


def public_line(file: str) -> str:
    """The public half of a private key as `TYPE BASE64`, from the file beside it or, where it is that file, itself; or empty."""
    for path in (f"{file}.pub", file):
        with suppress(OSError, ValueError):
            kind, content = Path(path).read_text(errors="replace").split()[:2]
            if content.startswith("AAAA"):
                return f"{kind} {content}"
    return ""


def written(key: paramiko.PKey) -> str:
    """A key's public half as `TYPE BASE64`."""
    return f"{key.get_name()} {key.get_base64()}"


def is_certified(key: paramiko.PKey) -> bool:
    """Whether it is its certificate that is shown for a key."""
    return key.public_blob is not None


def certified(key: paramiko.PKey, file: str, certificate_files: Sequence[str]) -> Iterator[tuple[paramiko.PKey, str]]:
    """The key once with each certificate that is for it, with that one's file: those named, and the one beside the key."""
    for path in dict.fromkeys([*certificate_files, f"{file.removesuffix('.pub')}-cert.pub"]):
        if certified_key(certificate := certificate_in(path)) == written(key):
            both = AgentKey(key.agent, key.blob) if isinstance(key, AgentKey) else copy.copy(key)
            both.load_certificate(certificate)
            yield both, path


def certificate_of(key: paramiko.PKey) -> str:
    """The certificate that a key came with, as `TYPE BASE64`; empty where it came alone."""
    return _line(key.public_blob) if key.public_blob else ""


def certificate_in(path: str) -> str:
    """The certificate that a file holds, as `TYPE BASE64`; empty where there is none."""
    with suppress(OSError):
        words = Path(path).read_text(errors="replace").split()[:2]
        if len(words) == 2 and words[0].endswith(SUFFIX):
            return " ".join(words)
    return ""


def _line(blob: PublicBlob) -> str:
    return f"{blob.key_type} {base64.b64encode(blob.key_blob).decode()}"
