#!/usr/bin/env python3
"""Start, stop and show the two-container cluster that `inventories/docker.yml` describes.

    python docker/cluster.py up        build the image, start node0 and node1, make a key, learn their host keys
    python docker/cluster.py status    which node answers where
    python docker/cluster.py down      remove containers, network and keys

The standard library and a Docker client are all it needs; `docker compose` (v2) and `docker-compose` (v1) serve alike.
The cluster tests use the functions below on projects of their own. Nothing here knows what cluster-train does.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker_engine import DockerError, ensure_base_image, find_docker, find_engine, last_lines, run, say

HERE = Path(__file__).resolve().parent
USER = "trainer"
SERVICES = ("node0", "node1")
DEFAULT_PROJECT = "cluster-train"
DEFAULT_SUBNET = "172.30.77.0/24"
FIRST_HOST = 10  # node0 is the subnet's .10, node1 its .11
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
STATE_FILES = ("id_ed25519", "id_ed25519.pub", "known_hosts")
LABEL = "com.docker.compose."  # what both generations of compose write on what they make


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One container of a project; `address` is its own on the private network, empty while it is not running."""

    name: str
    container: str
    address: str
    running: bool
    made_by: str  # the directory of the compose file it was made from


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except DockerError as error:
        print(f"cluster.py: {error}", file=sys.stderr)  # noqa: T201
        return 1


def up(options: argparse.Namespace) -> int:
    """Bring the cluster up; where it is up already, only check it and write its host keys again."""
    engine = find_engine()
    before = find_nodes(engine.docker, options.project)
    refuse_other_checkout(before, options.project)
    ensure_base_image(engine.docker)
    addresses = node_addresses(options.subnet)
    environment = {
        "CLUSTER_TRAIN_AUTHORIZED_KEY": make_user_key(options.state),
        "CLUSTER_TRAIN_SUBNET": options.subnet,
        **{f"CLUSTER_TRAIN_{name.upper()}": address for name, address in addresses.items()},
    }
    compose = (*engine.compose, *_compose_files(options.lay_over), "--project-name", options.project)
    say("building the image of the nodes (the first time takes about a minute)")
    run((*compose, "build"), environment=environment, limit_s=900)
    try:
        _start(compose, environment)
        nodes = wait_for_ssh(engine.docker, options.project, timeout_s=options.timeout)
        write_known_hosts(options.state / "known_hosts", engine.docker, nodes)
    except BaseException:  # Ctrl-C too: nothing half-started stays behind, and what ran before goes on
        if not before:
            remove_project(engine.docker, options.project)
        raise
    _show_usage(addresses, options)
    return 0


def down(options: argparse.Namespace) -> int:
    """Remove everything that `up` made, the throw-away key included."""
    docker = find_docker()
    refuse_other_checkout(find_nodes(docker, options.project), options.project)
    removed = remove_project(docker, options.project)
    for name in STATE_FILES:
        (options.state / name).unlink(missing_ok=True)
    say(f"removed {', '.join(removed)}" if removed else f"nothing to remove: no project {options.project}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Print one line per node; 0 when both answer to SSH, 1 otherwise."""
    nodes = {node.name: node for node in find_nodes(find_docker(), options.project)}
    states = {name: _state_of(nodes.get(name)) for name in SERVICES}
    for name, state in states.items():
        address = nodes[name].address if name in nodes else ""
        say(f"{name}  {address or '-':15}  {state}")
    return 0 if set(states.values()) == {"answers to ssh"} else 1


def make_user_key(directory: Path) -> str:
    """Make `directory`/id_ed25519 unless it exists, readable by us alone; returns the public key's line."""
    if shutil.which("ssh-keygen") is None:
        raise DockerError("no `ssh-keygen` on PATH; install openssh-client")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    key = directory / "id_ed25519"
    if not key.exists():
        run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster-train-docker", "-f", str(key)), limit_s=30)
    return key.with_suffix(".pub").read_text(encoding="ascii").strip()


def node_addresses(subnet: str) -> dict[str, str]:
    """The fixed address of each node in `subnet`, for example 172.30.77.0/24."""
    try:
        network = ipaddress.ip_network(subnet)
        return {name: str(network[FIRST_HOST + index]) for index, name in enumerate(SERVICES)}
    except (ValueError, IndexError) as error:
        raise DockerError(f"--subnet {subnet}: {error}; give a network of 16 addresses or more") from error


def find_nodes(docker: str, project: str) -> tuple[Node, ...]:
    """The project's containers, running or not, in the order of their names."""
    containers = run((docker, "ps", "--all", "--quiet", "--filter", f"label={LABEL}project={project}"), limit_s=30)
    if not containers.split():
        return ()
    facts = json.loads(run((docker, "inspect", *containers.split()), limit_s=30))
    return tuple(sorted((_node(fact) for fact in facts), key=lambda node: node.name))


def refuse_other_checkout(nodes: Sequence[Node], project: str) -> None:
    """Another checkout's cluster of the same name is not ours to change."""
    for node in nodes:
        if node.made_by and node.made_by != str(HERE):
            raise DockerError(
                f"project {project} was started from {node.made_by}; stop it there, "
                "or start this one with another --project and --subnet"
            )


def wait_for_ssh(docker: str, project: str, *, timeout_s: float) -> tuple[Node, ...]:
    """Wait until every node greets as an SSH server does; what a node printed is in the error when it does not."""
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = find_nodes(docker, project)
        silent = [node for node in nodes if not ssh_answers(node)]
        if len(nodes) == len(SERVICES) and not silent:
            return nodes
        dead = [node for node in nodes if not node.running]
        if dead or time.monotonic() > deadline:
            raise DockerError(_why_silent(docker, dead or silent))
        time.sleep(0.1)


def ssh_answers(node: Node) -> bool:
    """Whether an SSH server greets at port 22 of the node's own address."""
    if not node.address:
        return False
    try:
        with socket.create_connection((node.address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def write_known_hosts(path: Path, docker: str, nodes: Sequence[Node]) -> None:
    """Write each node's host key, read through the engine and not from the wire: nothing is trusted on first use."""
    lines = (f"{node.address} {run((docker, 'exec', node.container, 'cat', HOST_KEY), limit_s=30)}" for node in nodes)
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(lines), encoding="ascii")
    temporary.replace(path)


def remove_project(docker: str, project: str) -> list[str]:
    """Remove what bears the project's label, whichever compose made it; returns the names of what was removed."""
    ours = f"label={LABEL}project={project}"
    containers = run((docker, "ps", "--all", "--filter", ours, "--format", "{{.Names}}"), limit_s=30).split()
    if containers:
        run((docker, "rm", "--force", "--volumes", *containers), limit_s=60)
    networks = run((docker, "network", "ls", "--filter", ours, "--format", "{{.Name}}"), limit_s=30).split()
    if networks:
        run((docker, "network", "rm", *networks), limit_s=60)
    return containers + networks


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--project", default=DEFAULT_PROJECT, help="compose project name (default: %(default)s)")
    state = "where the throw-away key and known_hosts lie (default: docker/.state)"
    common.add_argument("--state", type=Path, default=HERE / ".state", metavar="DIR", help=state)

    parser = argparse.ArgumentParser(prog="cluster.py", description="The two containers of inventories/docker.yml.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start = commands.add_parser("up", parents=[common], help="start both nodes and wait until they answer")
    subnet = os.environ.get("CLUSTER_TRAIN_SUBNET", DEFAULT_SUBNET)
    start.add_argument("--subnet", default=subnet, help="of the nodes (default: $CLUSTER_TRAIN_SUBNET, now %(default)s)")
    more = "a compose file to lay over ours, such as more memory; may be given more than once"
    start.add_argument("--lay-over", type=Path, action="append", default=[], metavar="FILE", help=more)
    start.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds to wait for sshd (default: 60)")
    start.set_defaults(command=up)
    stop = commands.add_parser("down", parents=[common], help="remove everything that up made")
    stop.set_defaults(command=down)
    show = commands.add_parser("status", parents=[common], help="which node answers where")
    show.set_defaults(command=status)
    return parser


def _show_usage(addresses: Mapping[str, str], options: argparse.Namespace) -> None:
    state = os.path.relpath(options.state)
    for name, address in addresses.items():
        say(f"{name}  ssh -i {state}/id_ed25519 -o UserKnownHostsFile={state}/known_hosts {USER}@{address}")
    if options.subnet != DEFAULT_SUBNET:
        pairs = " ".join(f"CLUSTER_TRAIN_{name.upper()}={address}" for name, address in addresses.items())
        say(f"for inventories/docker.yml: export {pairs}")
    say("next: cluster-train up inventories/docker.yml")


def _start(compose: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        run((*compose, "up", "--detach"), environment=environment, limit_s=120)
    except DockerError as error:
        subnet = environment["CLUSTER_TRAIN_SUBNET"]
        advice = f"; {subnet} is taken: choose another with --subnet" if "overlaps" in str(error) else ""
        raise DockerError(f"{error}{advice}") from error


def _compose_files(more: Sequence[Path]) -> tuple[str, ...]:
    files = (HERE / "compose.yaml", HERE / "compose.addresses.yaml", *more)
    return tuple(word for path in files for word in ("--file", str(path)))


def _node(record: Mapping[str, Any]) -> Node:
    """One node from the engine's own record of the container (`docker inspect`)."""
    labels = record["Config"]["Labels"]
    networks = record["NetworkSettings"]["Networks"].values()
    return Node(
        name=labels[LABEL + "service"],
        container=record["Id"],
        address=next((network["IPAddress"] for network in networks), ""),
        running=record["State"]["Running"],
        made_by=labels.get(LABEL + "project.working_dir", ""),
    )


def _state_of(node: Node | None) -> str:
    if node is None:
        return "absent"
    if not node.running:
        return "stopped"
    return "answers to ssh" if ssh_answers(node) else "does not answer to ssh"


def _why_silent(docker: str, nodes: Sequence[Node]) -> str:
    reports = [f"{node.name} ({node.address or 'stopped'}) printed: {_printed_by(docker, node)}" for node in nodes]
    return (
        f"a node does not answer to SSH: {'; '.join(reports) or 'no container was made'}. Where sshd runs, the nodes' "
        "own addresses cannot be reached from here: the engine has to run on this very machine"
    )


def _printed_by(docker: str, node: Node) -> str:
    return last_lines(run(("sh", "-c", '"$0" logs --tail 5 "$1" 2>&1', docker, node.container), limit_s=30))


if __name__ == "__main__":
    sys.exit(main())
