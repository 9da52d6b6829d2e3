"""Which private keys are tried at a login: those named, those of the agent, and last those that need a passphrase.

A passphrase is asked for once, by whoever collects the failures of all nodes (`fleet`), on the terminal only. What it opens is
kept in this process's memory, for all nodes, and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import suppress

import paramiko

from orchestrator.nodes.certificates import expiry_of
from orchestrator.nodes.key_files import Agent, certificate_in, certified, is_certified, public_line, read_key, written
from orchestrator.nodes.ssh_config import Route
from orchestrator.nodes.ssh_passwords import PASSWORD_METHODS, login_methods
from orchestrator.nodes.terminal import ask_hidden

PASSPHRASE_ATTEMPTS = 3
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
        self._tried: list[str] = []
        self._locked: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Raises LockedKey or Refused when no key is accepted, FileNotFoundError when the key that was named is not there."""
        agent = Agent(self._route.agent)
        methods = login_methods(transport, self._route.user) if self._asks_first else frozenset()
        try:
            return self._try_all(transport, agent)
        except Refused as refused:
            if not methods and transport.is_active():
                methods = login_methods(transport, self._route.user)
            refused.takes_password = bool(methods & PASSWORD_METHODS)
            raise
        finally:
            agent.close()

    def _try_all(self, transport: paramiko.Transport, agent: Agent) -> list[str]:
        for key, file, name in self._keys(agent):
            self._tried.append(name)
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
                wanted = f"after the key it also wants {', '.join(further)}, which needs a person"
                raise paramiko.AuthenticationException(wanted)
            self.key_file = file if file and file not in _opened else None
            return []
        waiting = [file for file in self._locked if file not in _given_up]
        if waiting:
            raise LockedKey(waiting[0])
        locked = "".join(f"; {file} needs its passphrase (ssh-add {file})" for file in self._locked)
        raise Refused((f"it accepted none of: {', '.join(self._tried)}" if self._tried else "there is no key to offer") + locked)

    def _keys(self, agent: Agent) -> Iterator[tuple[paramiko.PKey, str | None, str]]:
        """Each key, the file where it serves by itself, and what it is called; a key's certificates come before it.

        First the files, by the agent where they need a passphrase, then the agent's others.
        """
        agents = agent.listed()
        for file in self._route.key_files:
            key, public = self._read(file, {public for public, _ in agents})
            usable: list[tuple[paramiko.PKey, str | None, str]] = [
                (one, None, _of_agent(one)) for named, one in agents if named == public and (not key or is_certified(one))
            ]
            usable += [(key, file, file)] if key else []
            for one, its_file, _ in usable[-1:]:  # the plain key comes last
                for both, certificate in certified(one, file, self._route.certificate_files):
                    yield both, its_file, f"{certificate}{expiry_of(certificate_in(certificate))}"
            yield from usable
            agents = [(named, one) for named, one in agents if named != public]
        if not self._route.only_key_files:
            yield from ((one, None, _of_agent(one)) for _, one in agents)

    def _read(self, file: str, with_agent: Set[str]) -> tuple[paramiko.PKey | None, str]:
        """A private key and its public half; the latter alone where only the agent can use it."""
        try:
            key = _opened.get(file) or read_key(file)
        except FileNotFoundError:
            if (public := public_line(file)) not in with_agent and self._route.key_is_named and file == self._route.key_files[0]:
                raise
            return None, public
        except paramiko.PasswordRequiredException:
            if (public := public_line(file)) not in with_agent:
                self._locked.append(file)
            return None, public
        public = written(key) if key else public_line(file)
        if key is None and public not in with_agent:
            self._tried.append(f"{file} (not a private key that can be read)")
        return key, public

    def _too_many(self) -> str:
        shown = ", ".join(self._tried)
        return f"it closed the connection after {len(self._tried)} keys ({shown}): name the right one with `ssh.key`"


def public_key(route: Route) -> tuple[str, str] | None:
    """The first key that would be tried at a login and whose public half can be read: where it is from, and `TYPE BASE64`."""
    for file in route.key_files:
        with suppress(OSError, paramiko.SSHException):
            if public := public_line(file):
                return f"{file.removesuffix('.pub')}.pub", public
            if key := _opened.get(file) or read_key(file):
                return file, written(key)
    agent = Agent(None if route.only_key_files else route.agent)
    found = [public for public, _ in agent.listed()]
    agent.close()
    return ("the agent's", found[0]) if found else None


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
                if key := read_key(file, passphrase):
                    _opened[file] = key
                    return True
        _given_up.add(file)
        return False


def _of_agent(key: paramiko.PKey) -> str:
    return f"the agent's {key.get_name()} key"
