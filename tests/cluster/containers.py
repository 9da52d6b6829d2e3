"""The two-container cluster as the tests see it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def load_docker_module(name: str) -> ModuleType:
    """A module of docker/, which is no package: `cluster` or `docker_engine`."""
    if str(DOCKER) not in sys.path:
        sys.path.append(str(DOCKER))  # its modules import each other
    known = f"docker/{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, DOCKER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


cluster_command = load_docker_module("cluster")
DockerError = cluster_command.DockerError

PLACE = "/shared"  # where the containers of a pair have one volume between them

# Runs in a container: Debian's slim image has no `ps`. Leaves itself out.
_LIST_PROCESSES = """
import json, os
found = []
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid == os.getpid():
        continue
    try:
        with open("/proc/%d/stat" % pid) as stat, open("/proc/%d/cmdline" % pid, "rb") as cmdline:
            state, parent, *rest = stat.read().rpartition(")")[2].split()
            argv = [os.fsdecode(word) for word in cmdline.read().rstrip(b"\\0").split(b"\\0")]
            uid = os.fstat(stat.fileno()).st_uid
    except (FileNotFoundError, ProcessLookupError):
        continue
    identity = {"pid": pid, "parent": int(parent), "started": int(rest[17]), "uid": uid}
    found.append({**identity, "state": state, "argv": argv})
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerProcess:
    """A process in a container; pid and start time (clock ticks since boot) together name it for good."""

    pid: int
    parent: int
    state: str
    started: int
    uid: int
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One container; `address` is its own on the private network."""

    name: str
    address: str
    container: str


@dataclass(frozen=True, kw_only=True)
class ContainerCluster:
    """Two containers that answer to SSH, and what is needed to log in."""

    docker: str
    nodes: tuple[ClusterNode, ...]
    user: str
    key: Path
    known_hosts: Path

    def exec(self, node: str, argv: Sequence[str], *, user: str = "root", environment: Mapping[str, str] | None = None) -> str:
        """Run `argv` in the container of that name, past SSH; returns its stdout, raises DockerError where it fails."""
        variables = [word for name, value in (environment or {}).items() for word in ("--env", f"{name}={value}")]
        command = (self.docker, "exec", "--user", user, *variables, self.container(node), *argv)
        return str(cluster_command.run(command, limit_s=120))

    def below(self, node: str, *places: str) -> list[str]:
        """All that lies below directories of a container, sorted."""
        return sorted(self.exec(node, ("find", *places, "-mindepth", "1")).splitlines())

    def container(self, node: str) -> str:
        return next(known.container for known in self.nodes if known.name == node)

    def processes(self, node: str) -> tuple[ContainerProcess, ...]:
        """Every process of the container, that of this listing left out; zombies are there with state Z."""
        listed = json.loads(self.exec(node, ("python3", "-c", _LIST_PROCESSES)))
        return tuple(ContainerProcess(**{**process, "argv": tuple(process["argv"])}) for process in listed)

    def ours(self) -> list[str]:
        """Every process of the user on either node that is not part of SSH: supervisors, mpirun, its daemons, ranks."""
        return [
            f"{node.name}: {process.pid} {' '.join(process.argv)}"
            for node in self.nodes
            for process in self.processes(node.name)
            if process.uid == self.uid and process.state != "Z" and not process.argv[0].startswith("sshd")
        ]

    @cached_property
    def uid(self) -> int:
        """The user's number, the same on both nodes."""
        return int(self.exec("node0", ("id", "-u", self.user)))

    def inventory(self, directory: Path, **overrides: Any) -> Path:
        """Write an inventory of both nodes to `directory`; `overrides` are its top-level keys (stack={…}, job={…}).

        The value None leaves a key out.
        """
        content: dict[str, Any] = {
            "cluster": "containers",
            "ssh": {"user": self.user, "key": str(self.key), "known_hosts": str(self.known_hosts)},
            "nodes": [{"name": node.name, "host": node.address} for node in self.nodes],
        }
        kept = {key: value for key, value in {**content, **overrides}.items() if value is not None}
        path = directory / "containers.yml"
        path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return path
