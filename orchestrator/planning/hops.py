"""SSH from the head to the other nodes: the files that let mpirun reach them exactly as the inventory says. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import PreflightError
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.run import Endpoint

KEEPALIVE_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One node as seen from the head.

    Args:
        node: its name in the inventory.
        address: its address on the cluster network.
        port: the port that its sshd listens on there.
        user: the login name.
        host_key: the key that we verified ourselves, `TYPE BASE64`.
        identity: private key file on the head, or None for the head's own defaults and agent.
    """

    node: str
    address: str
    port: int
    user: str
    host_key: str
    identity: str | None


def hops_from_head(
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
    endpoints: Sequence[Endpoint],
    host_keys: Mapping[str, str | None],
    identity: str | None,
) -> list[Hop]:
    """How the head reaches each other node: the address on the cluster network, the port that sshd itself sees.

    Raises PreflightError for a node that we reached without SSH: its host key is not known, and the head could not check it.
    """
    hops = []
    logins = {node.name: inventory.login(node) for node in inventory.nodes}
    for node, endpoint in list(zip(nodes, endpoints, strict=True))[1:]:
        host_key = host_keys[node.name]
        if host_key is None:
            raise PreflightError(
                f"{node.name}: this machine was reached without SSH, but {nodes[0].name}, the head, must reach it by SSH",
                advice=f"list {node.name} first in the inventory: the run is then started from here",
            )
        seen = node.ssh_connection
        hops.append(
            Hop(
                node=node.name,
                address=endpoint.address,
                port=seen.server_port if seen else logins[node.name].port or 22,
                user=node.user,
                host_key=host_key,
                identity=identity,
            )
        )
    return hops


def ssh_config(hops: Sequence[Hop], directory: str, head_address: str, connect_timeout_s: float) -> str:
    """The ssh_config for `ssh -F`, complete: neither the person's nor the system's files are read besides.

    Connections come from the head's address on the cluster network, from which alone its key is accepted.
    """
    blocks = [_block(hop) for hop in hops]
    common = [
        "Host *",
        f"    BindAddress {head_address}",
        f"    UserKnownHostsFile {_quoted(directory + '/known_hosts')}",
        "    GlobalKnownHostsFile none",
        "    StrictHostKeyChecking yes",
        "    BatchMode yes",
        f"    ConnectTimeout {max(1, round(connect_timeout_s))}",
        f"    ServerAliveInterval {KEEPALIVE_S}",
        "    ServerAliveCountMax 4",
        "    ForwardAgent no",
        "    ForwardX11 no",
        "    LogLevel ERROR",
    ]
    return "\n".join([*blocks, *common]) + "\n"


def known_hosts(hops: Sequence[Hop]) -> str:
    """The verified keys, each under its node's name (`HostKeyAlias`), so that no port or second address can blur it."""
    return "".join(f"{hop.node} {hop.host_key}\n" for hop in hops)


def wrapper(directory: str, head_address: str, environment: Mapping[str, str] | None = None) -> str:
    """The program that mpirun calls as ssh, with `-q -x HOST COMMAND...` (hydra; `-q -6 -x` with IPv6) or `-x HOST COMMAND...`.

    -q would hide why a login failed; -6 goes without saying of an address. For the head itself, whose address hydra does not
    always take for its own, no connection is made: the command runs in a shell, as sshd would run it.

    Args:
        environment: for the command on another node, where the head's own does not come along.
    """
    config = shlex.quote(f"{directory}/ssh_config")
    words = shlex.join(f"{name}={value}" for name, value in (environment or {}).items())
    told = f'if [ "$1" = -x ]; then host=$2; shift 2; set -- -x "$host" env {words} "$@"; fi\n' if words else ""
    return f"""#!/bin/sh
[ "$1" = -q ] && shift
[ "$1" = -6 ] && shift
if [ "$1" = -x ] && [ "$2" = {shlex.quote(head_address)} ]; then
    shift 2
    exec /bin/sh -c "$*"
fi
{told}exec ssh -F {config} "$@"
"""


def _block(hop: Hop) -> str:
    lines = [
        f"Host {hop.address}",
        f"    HostKeyAlias {hop.node}",
        f"    HostKeyAlgorithms {_algorithms(hop.host_key)}",
        f"    Port {hop.port}",
        f"    User {hop.user}",
    ]
    if hop.identity:
        lines += [f"    IdentityFile {_quoted(hop.identity)}", "    IdentitiesOnly yes"]
    return "\n".join(lines)


def _algorithms(host_key: str) -> str:
    """Offer only what the known key can answer: sshd may have others that we did not verify."""
    kind = host_key.split()[0]
    return "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind


def _quoted(path: str) -> str:
    """A path for ssh_config: percent signs are its own escape, double quotes hold blanks."""
    return '"' + path.replace("%", "%%") + '"'
