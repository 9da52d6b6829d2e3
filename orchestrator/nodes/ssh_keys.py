"""Which private keys are tried at a login: those named, those of the agent, and last those that need a passphrase.

A passphrase is asked for once, by whoever collects the failures of all nodes (`fleet`), on the terminal only. What it opens is
kept in this process's memory, for all nodes, and nowhere else.
"""

from __future__ import annotations

import getpass
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import paramiko

from orchestrator.nodes.ssh_config import Route

PASSPHRASE_ATTEMPTS = 3
_CLASSES: tuple[type[paramiko.PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
_opened: dict[str, paramiko.PKey] = {}
_given_up: set[str] = set()
_lock = threading.Lock()


class LockedKey(paramiko.AuthenticationException):
    """Nothing else let us in, and this private key needs a passphrase."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file} needs its passphrase")
        self.file = file


class Refused(paramiko.AuthenticationException):
    """The server took none of the keys."""


class KeyLogin:
    """Logs in to one server; `key_file` is then the file that did it, None where it was the agent or needs a passphrase.

    It is what paramiko calls an AuthStrategy.
    """

    def __init__(self, route: Route) -> None:
        self.key_file: str | None = None
        self._route = route
        self._agent: paramiko.Agent | None = None
        self._tried: list[str] = []
        self._locked: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Raises LockedKey or Refused when no key is accepted, FileNotFoundError when the key that was named is not there."""
        self._agent = _agent() if self._route.uses_agent else None
        try:
            return self._try_all(transport)
        finally:
            if self._agent:
                self._agent.close()

    def _try_all(self, transport: paramiko.Transport) -> list[str]:
        for key, file in self._keys():
            self._tried.append(file or f"the agent's {key.get_name()} key")
            try:
                further = transport.auth_publickey(self._route.user, key)
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error):  # which is not for the next key to wait for again
                    raise TimeoutError from None
                if not transport.is_active():
                    raise Refused(self._too_many()) from None
                continue
            except (paramiko.SSHException, EOFError):
                if transport.is_active():  # this kind of key cannot be used here; the next one may
                    continue
                raise Refused(self._too_many()) from None
            if further:
                raise Refused(f"after the key it also wants {', '.join(further)}, which needs a person")
            self.key_file = file if file and file not in _opened else None
            return []
        waiting = [file for file in self._locked if file not in _given_up]
        if waiting:
            raise LockedKey(waiting[0])
        locked = "".join(f"; {file} needs its passphrase (ssh-add {file})" for file in self._locked)
        raise Refused((f"it accepted none of: {', '.join(self._tried)}" if self._tried else "there is no key to offer") + locked)

    def _keys(self) -> Iterator[tuple[paramiko.PKey, str | None]]:
        """Each key once: the files, by the agent where they need a passphrase, then the agent's others."""
        agents = {key.get_base64(): key for key in self._agent.get_keys()} if self._agent else {}
        for file in self._route.key_files:
            try:
                key = _opened.get(file) or _read(file)
            except FileNotFoundError:
                if key := agents.pop(_public_half(file), None):
                    yield key, None
                elif self._route.key_is_named and file == self._route.key_files[0]:
                    raise
                continue
            except paramiko.PasswordRequiredException:
                if key := agents.pop(_public_half(file), None):
                    yield key, None
                else:
                    self._locked.append(file)
                continue
            if key is None:
                self._tried.append(f"{file} (not a private key that can be read)")
            else:
                agents.pop(key.get_base64(), None)
                yield key, file
        if not self._route.only_key_files:
            yield from ((key, None) for key in agents.values())

    def _too_many(self) -> str:
        shown = ", ".join(self._tried)
        return f"it closed the connection after {len(self._tried)} keys ({shown}): name the right one with `ssh.key`"


def unlock(file: str) -> bool:
    """Ask for a key's passphrase on the terminal; False where there is none, or the person does not know it."""
    with _lock:
        if file in _opened:
            return True
        for _ in range(PASSPHRASE_ATTEMPTS if _has_terminal() else 0):
            passphrase = getpass.getpass(f"passphrase of {file}: ")
            if not passphrase:
                break
            with suppress(ValueError, paramiko.SSHException):
                if key := _read(file, passphrase):
                    _opened[file] = key
                    return True
        _given_up.add(file)
        return False


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _read(file: str, passphrase: str | None = None) -> paramiko.PKey | None:
    """A private key of any kind; None for a file that holds none. Raises PasswordRequiredException, FileNotFoundError."""
    for kind in _CLASSES:
        try:
            key = kind.from_private_key_file(file, passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError, UnicodeError):
            continue  # of another kind
        with suppress(OSError, ValueError, paramiko.SSHException):
            if Path(f"{file}-cert.pub").exists():
                key.load_certificate(f"{file}-cert.pub")
        return key
    return None


def _public_half(file: str) -> str:
    try:
        return Path(f"{file}.pub").read_text(errors="replace").split()[1]
    except (OSError, IndexError):
        return ""


def _agent() -> paramiko.Agent | None:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return None
    try:
        return paramiko.Agent()
    except (OSError, paramiko.SSHException, EOFError):
        return None
