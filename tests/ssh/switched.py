"""Machines to all that asks for a network: namespaces with a card each, on one switch that is ours alone.

To hydra two addresses on loopback are two machines, the first of them its own. Open MPI looks whether a card bears an address:
to it 127.0.0.2 is never its own machine, and it would reach itself by SSH.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from sshd import can_mount


class NoNamespaces(Exception):
    """Only root makes disks and networks for some processes alone."""


@contextmanager
def machines(count: int = 2) -> Iterator[dict[str, str]]:
    """Network namespaces and a switch between them and us, as address -> name; NoNamespaces where they cannot be made."""
    mine, numbers = f"ct{os.getpid()}", f"10.{200 + os.getpid() // 256 % 50}.{os.getpid() % 256}"
    switch, hosts = f"{mine}s", {f"{numbers}.{last}": f"{mine}n{last}" for last in range(2, 2 + count)}
    if not can_mount() or subprocess.run(["ip", "netns", "add", switch], capture_output=True).returncode:
        raise NoNamespaces("disks and networks for some processes alone are made by root only")
    try:
        _ip(f"-n {switch} link add switch type bridge", f"-n {switch} link set switch up")
        for address, name in hosts.items():
            _ip(f"netns add {name}", f"link add card netns {name} type veth peer name {name} netns {switch}")
            _ip(f"-n {name} link set lo up", f"-n {name} link set card up", f"-n {name} address add {address}/24 dev card")
            _ip(f"-n {switch} link set {name} master switch up")
        _ip(f"link add {mine} type veth peer name {mine} netns {switch}", f"-n {switch} link set {mine} master switch up")
        _ip(f"link set {mine} up", f"address add {numbers}.1/24 dev {mine}")
        yield hosts
    finally:
        subprocess.run(["ip", "link", "delete", mine], check=False, capture_output=True)
        for name in (switch, *hosts.values()):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
