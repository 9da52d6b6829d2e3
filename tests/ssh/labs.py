"""A small stack of wheels that are made here, and nodes that it is provisioned to with real pip and real uv."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import standins
import yaml
from commands import COMMAND, REPOSITORY, Ran
from sshd import SshdNode, can_mount
from wheels_by_hand import write_wheel

LIMIT_S = 60.0
# Each session has a network of its own, whose one card bears an address with the last digit of the node's home.
OWN_CARD = (
    "ip link add card type veth peer name other && ip link set other up && ip link set card up"
    " && ip addr add 10.9.0.1${HOME##*home}/24 dev card"
)
SESSION = f"""exec unshare --net sh -c '{OWN_CARD} && cd "$HOME" &&
exec "$SHELL" ${{SSH_ORIGINAL_COMMAND+-c "$SSH_ORIGINAL_COMMAND"}}'""".replace("\n", " ")
LARGE_BYTES = 80_000_000  # under way for a second or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Nodes, wheels for a small stack, and a cache of these tests' own."""

    nodes: list[SshdNode]
    wheels: Path
    cache: Path

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables with which pip asks no index, and nobody else's cache is used."""
        return {"XDG_CACHE_HOME": str(self.cache), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

    def inventory(self, path: Path, root: Path, *extra: str) -> Path:
        content: dict[str, Any] = {
            "cluster": "interrupted",
            "root": str(root),
            "ssh": {"key": str(self.nodes[0].key), "known_hosts": str(self.nodes[0].known_hosts), "port": self.nodes[0].port},
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(self.nodes)],
            "stack": {"torch": "2.13.0", "mpi": "system", "find_links": [str(self.wheels)], "extra": list(extra)},
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def start(self, inventory: Path, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment = {**plain, **self.settings}
        command = [COMMAND, "provision", inventory, *arguments]
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def provision(self, inventory: Path, *arguments: str) -> Ran:
        return ended(self.start(inventory, *arguments))


def can_have_cards() -> bool:
    """Whether nodes may be given disks (mount namespaces) and cards (network namespaces) of their own, as machines have."""
    card = ["unshare", "--net", "sh", "-c", OWN_CARD]
    made = subprocess.run(card, env={**os.environ, "HOME": "home0"}, capture_output=True)
    return can_mount() and made.returncode == 0


def ended(process: subprocess.Popen[str]) -> Ran:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    return Ran(exit_code=process.returncode, stdout=stdout, stderr=stderr)


def make_wheels(directory: Path, installer: Path) -> Path:
    """Stand-ins for the stack, one large wheel and one small one, and the real uv."""
    (directory / installer.name).symlink_to(installer)
    stack = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "datasets": "5.2.0"}
    for name, version in stack.items():
        standins.build(standins.package(name, version), directory)
    write_wheel(directory, "large", ballast_bytes=LARGE_BYTES)
    write_wheel(directory, "small")
    return directory


def whole_wheels(root: Path) -> list[str]:
    """The names of the wheels that can be seen; each must have the hash that its directory names."""
    found = list((root / "wheelhouse").glob("[!.]*/*"))
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name for path in found)
    return sorted(path.name.split("-")[0] for path in found)


def wait_for(condition: Callable[[], bool], is_over: Callable[[], bool]) -> None:
    """Until a condition holds; the provisioning must not be over by then."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline and not is_over()
        time.sleep(0.005)


def large_is_under_way(root: Path) -> bool:
    for path in root.glob("wheelhouse/.*.part/*/large-*.whl"):
        with suppress(FileNotFoundError):  # it got its name meanwhile
            if 1_000_000 < path.stat().st_size < LARGE_BYTES:
                return True
    return False


def loopback_inventory(directory: Path, root: Path, nodes: list[SshdNode], **job: Any) -> Path:
    """An inventory of the nodes with the stack of inventories/local.yml and these job keys, written into a directory."""
    local = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())
    content = {
        "cluster": "loopback",
        "root": str(root),
        "ssh": {"key": str(nodes[0].key), "known_hosts": str(nodes[0].known_hosts), "port": nodes[0].port},
        "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
        "stack": local["stack"],
        "job": job,
    }
    path = directory / "loopback.yml"
    path.write_text(yaml.safe_dump(content))
    return path
