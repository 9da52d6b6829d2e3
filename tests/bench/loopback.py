"""Two throw-away sshd's on loopback with the small stack, for benches that start many runs of small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in ("tests", "tests/ssh", "remote"):
    sys.path.insert(0, str(REPOSITORY / folder))

import yaml  # noqa: E402
from small_stack import make_wheels, offline, stack  # noqa: E402
from sshd import SshdNode, SshdNodes  # noqa: E402
from switched import machines  # noqa: E402

COMMAND = Path(sys.executable).with_name("cluster-train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback:
    """Two nodes that share one root, and what `cluster-train` needs to start runs there."""

    directory: Path
    nodes: list[SshdNode]
    wheels: Path

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def runs(self) -> Path:
        """The runs' directories on the nodes."""
        return self.root / "runs"

    @property
    def records(self) -> Path:
        """The runs' records where the orchestrator runs."""
        return self.directory / "state" / "cluster-train" / "runs"

    @property
    def environment(self) -> dict[str, str]:
        mine = {"XDG_STATE_HOME": str(self.directory / "state")}
        return {**os.environ, **offline(self.directory / "cache"), **mine}

    def inventory(self, name: str = "loopback", *, mpi: str = "impi", **job: Any) -> Path:
        content = {
            "cluster": name,
            "root": str(self.root),
            "ssh": {"key": str(self.nodes[0].key), "known_hosts": str(self.nodes[0].known_hosts), "port": self.nodes[0].port},
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(self.nodes)],
            "stack": stack(self.wheels, mpi),
            "job": {"ppn": 2, **job},
        }
        path = self.directory / f"{name}.yml"
        path.write_text(yaml.safe_dump(content))
        return path

    def start(self, *arguments: str | Path, stdout: Any = subprocess.DEVNULL, stderr: Any = None) -> subprocess.Popen[bytes]:
        """Start a command of cluster-train."""
        return subprocess.Popen(
            [COMMAND, *arguments], cwd=REPOSITORY, env=self.environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )

    def provision(self, inventory: Path) -> None:
        """Install the stack, so that what follows starts at once."""
        done = self.start("provision", inventory, stderr=subprocess.PIPE)
        _, errors = done.communicate()
        if done.returncode:
            raise SystemExit(errors.decode(errors="replace"))


@contextmanager
def loopback(*, have_cards: bool = False) -> Iterator[Loopback]:
    """The two nodes; all that runs there is ended with them.

    have_cards: they are network namespaces with a card each (made by root only), which Open MPI needs to take them for machines.
    """
    with tempfile.TemporaryDirectory(prefix="cluster-train-bench-") as scratch, ExitStack() as stack:
        hosts = stack.enter_context(machines()) if have_cards else None
        nodes = SshdNodes(Path(scratch) / "sshd")
        stack.callback(nodes.close)
        yield Loopback(directory=Path(scratch), nodes=nodes(2, machines=hosts), wheels=make_wheels(Path(scratch) / "wheels"))
