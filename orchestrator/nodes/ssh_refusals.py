"""What went wrong on the way to a server, as one of our errors: what happened, where, and what to do next."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

import paramiko

from orchestrator.errors import (
    AuthenticationError,
    HostKeyError,
    LockedKeyError,
    NodeError,
    PasswordNeededError,
    UnreachableError,
)
from orchestrator.nodes.certificates import authority_of, host_fault
from orchestrator.nodes.dialling import SaysNothing
from orchestrator.nodes.key_files import written
from orchestrator.nodes.known_hosts import host_of
from orchestrator.nodes.ssh_config import Route
from orchestrator.nodes.ssh_keys import LockedKey, Refused
from orchestrator.nodes.ssh_passwords import WrongPassword


def failure(node: str, route: Route, error: Exception, said: str) -> NodeError:
    """What went wrong on the way to a server, as one of ours; `said` is what its ProxyCommand wrote to stderr."""
    where = f"{route.host}:{route.port}"
    if isinstance(error, LockedKey):
        return LockedKeyError(
            f"{node}: {where} took no other key, and {error.file} needs its passphrase",
            node=node,
            key_file=error.file,
            advice=f"ssh-add {error.file}   or run this in a terminal, where it is asked for",
        )
    if isinstance(error, WrongPassword) or (isinstance(error, Refused) and error.takes_password):
        return _password_needed(node, route, error)
    if isinstance(error, paramiko.AuthenticationException):
        return AuthenticationError(
            f"{node}: {where} refused the login as {route.user}: {reason(error)}",
            node=node,
            advice=f"this must work first: ssh -p {route.port} {route.user}@{route.host} true   (see ssh.user and ssh.key)",
        )
    if isinstance(error, FileNotFoundError):
        return NodeError(f"{node}: no such key file: {error.filename}", node=node, advice="see `ssh.key` in the inventory")
    if isinstance(error, SaysNothing):
        return unreachable(node, route, str(error), "is this sshd's port, and is sshd well? see `ssh -v` to it")
    if said:
        return unreachable(node, route, f"{reason(error)} (its ProxyCommand says: {said})", "see ProxyCommand in ~/.ssh/config")
    advice = "is the machine up, the address and port right, sshd running, and no firewall between?"
    return unreachable(node, route, reason(error), advice)


def _password_needed(node: str, route: Route, error: Exception) -> PasswordNeededError:
    where = f"{route.host}:{route.port}"
    if isinstance(error, WrongPassword):
        what = f"{where} did not take the password of {route.user}"
    else:
        what = f"{where} refused the login as {route.user}: {reason(error)}; it would take a password"
    return PasswordNeededError(
        f"{node}: {what}",
        node=node,
        user=route.user,
        address=route.host,
        advice="in a terminal `cluster-train init` asks for the password and puts your key there; by hand: "
        f"ssh-copy-id -p {route.port} {route.user}@{route.host}",
    )


def unreachable(node: str, route: Route, why: str, advice: str) -> UnreachableError:
    """No connection to a server."""
    return UnreachableError(f"{node}: cannot reach {route.host}:{route.port}: {why}", node=node, advice=advice)


def distrust(node: str, route: Route, key: paramiko.PKey, verdict: str, known: Sequence[str]) -> HostKeyError:
    """The host key of the node, or of one of its jump hosts, is revoked, changed or unknown; `known` are those on record."""
    name, shown = route.known_as, fingerprint(written(key))
    bracketed = re.fullmatch(r"\[(.+)\]:(\d+)", name)
    host, port = bracketed.groups() if bracketed else (route.host, str(route.port))
    if verdict == "revoked":
        return HostKeyError(
            f"{node}: the host key of {name} is REVOKED: {shown}",
            node=node,
            advice="somebody may hold a copy of it: give the machine a new host key, and remove no @revoked line"
            + (f"; also listed as revoked is all, where {route.revoked_keys} cannot be read" if route.revoked_keys else ""),
        )
    if verdict == "changed":
        was = ", ".join(fingerprint(one) for one in known)
        return HostKeyError(
            f"{node}: the host key of {name} has CHANGED: it is now {shown}, known was {was}",
            node=node,
            advice=f"if the machine was really reinstalled: ssh-keygen -R '{name}' -f {route.known_hosts[0]}, "
            "then accept its new key",
        )
    return HostKeyError(
        f"{node}: the host key of {name} is not known: {shown}",
        node=node,
        advice=(
            "compare it with the machine's own (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there), then accept it: "
            f"ssh-keyscan -p {port} {host} >> ~/.ssh/known_hosts   "
            "(throw-away clusters: `host_keys: accept-new` under `ssh:` in the inventory)"
        ),
    )


def uncertified(node: str, route: Route, key: paramiko.PKey, certificate: str, authorities: Sequence[str]) -> HostKeyError:
    """known_hosts has a certificate authority for this host, and no key: why the key that it shows is not certified by it."""
    name, host = route.known_as, host_of(route.known_as)
    ours = ", ".join(map(fingerprint, authorities))
    if not certificate:
        why = "and it shows no certificate of it"
    elif (signer := authority_of(certificate)) not in authorities:
        why = f"and its certificate is of another one ({fingerprint(signer) if signer else 'unknown'})"
    else:
        why = f"whose certificate is not good: {host_fault(certificate, host)}"
    return HostKeyError(
        f"{node}: the host key of {name} is not known: {fingerprint(written(key))}; "
        f"known_hosts names a certificate authority for it ({ours}), {why}",
        node=node,
        advice=f"with the authority's key: ssh-keygen -s CA_KEY -I {host} -h -n {host} -V +52w HOST_KEY.pub, then name it in"
        " HostCertificate in its sshd_config; or, once you have compared its key, accept that: "
        f"ssh-keyscan -p {route.port} {route.host} >> ~/.ssh/known_hosts",
    )


def fingerprint(key: str) -> str:
    """The SHA-256 fingerprint of a key that is written as `TYPE BASE64`, as `ssh-keygen -l` prints it."""
    kind, content = key.split()[:2]
    with suppress(ValueError):
        digest = base64.b64encode(hashlib.sha256(base64.b64decode(content)).digest()).decode().rstrip("=")
        return f"{kind} SHA256:{digest}"
    return f"{kind} (damaged)"


def reason(error: Exception) -> str:
    """An exception's words, and ours for those that say little."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    if "No existing session" in str(error):
        return "the SSH handshake did not end in time"
    return str(error) or type(error).__name__
