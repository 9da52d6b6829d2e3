"""Which private keys are tried at a login: those named, those of the agent, and last those that need a passphrase.

A passphrase is asked for once, by whoever collects the failures of all nodes (`fleet`), on the terminal only. What it opens is
kept in this process's memory, for all nodes, and nowhere else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import paramiko

from orchestrator.nodes.ssh_config import Route
from orchestrator.nodes.ssh_passwords import PASSWORD_METHODS, login_methods
from orchestrator.nodes.terminal import ask_hidden

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
    """The server took none of the keys; `takes_password` tells whether it would take a password."""

    takes_password = False


class KeyLogin:
    """Logs in to one server; `key_file` is then the file that did it, None where it was the agent or needs a passphrase.

    It is what paramiko calls an AuthStrategy.

    Args:
        asks_first: whether the server is asked what it takes before it is shown keys: it may close the connection after some.
    """

    def __init__(self, route: Route, *, asks_first: bool = False) -> None:
        self.key_file: str | None = None
        self._route = route
        self._asks_first = asks_first
        self._agent: paramiko.Agent | None = None
        self._tried: list[str] = []
        self._locked: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Raises LockedKey or Refused when no key is accepted, FileNotFoundError when the key that was named is not there."""
        self._agent = _agent() if self._route.uses_agent else None
        methods = login_methods(transport, self._route.user) if self._asks_first else frozenset()
        try:
            return self._try_all(transport)
        except Refused as refused:
            if not methods and transport.is_active():
                methods = login_methods(transport, self._route.user)
            refused.takes_password = bool(methods & PASSWORD_METHODS)
            raise
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


def public_key(route: Route) -> tuple[str, str] | None:
    """The first key that would be tried at a login and whose public half can be read: where it is from, and `TYPE BASE64`."""
    for file in route.key_files:
        with suppress(OSError, paramiko.SSHException):
            if written := _public_line(file):
                return f"{file}.pub", written
            if key := _opened.get(file) or _read(file):
                return file, f"{key.get_name()} {key.get_base64()}"
    agent = _agent() if route.uses_agent else None
    try:
        for key in agent.get_keys() if agent and not route.only_key_files else ():
            return "the agent's", f"{key.get_name()} {key.get_base64()}"
    finally:
        if agent:
            agent.close()
    return None


def unlock(file: str) -> bool:
    """Ask for a key's passphrase on the terminal; False where there is none, or the person does not know it."""
    with _lock:
        if file in _opened:
            return True
        for _ in range(PASSPHRASE_ATTEMPTS):
            passphrase = ask_hidden(f"passphrase of {file}: ")
            if not passphrase:
                break
            with suppress(ValueError, paramiko.SSHException):
                if key := _read(file, passphrase):
                    _opened[file] = key
                    return True
        _given_up.add(file)
        return False


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
    return _public_line(file).partition(" ")[2]


def _public_line(file: str) -> str:
    """The public half of a private key as `TYPE BASE64`, from the file beside it; empty where there is none."""
    try:
        kind, content = Path(f"{file}.pub").read_text(errors="replace").split()[:2]
    except (OSError, ValueError):
        return ""
    return f"{kind} {content}"


def _agent() -> paramiko.Agent | None:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return None
    try:
        return paramiko.Agent()
    except (OSError, paramiko.SSHException, EOFError):
        return None
