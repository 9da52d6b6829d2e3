"""The installed `cluster-train` as the tests call it, and what it answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("cluster-train")
COMMAND_LIMIT_S = 900
BORROWED = ("envs", "wheelhouse", "bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a `cluster-train` command did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines of a command that was given --json."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        """The last event, which is the answer."""
        return self.events[-1]


ClusterTrain = Callable[..., Ran]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """The training stack on this machine; `envs` and `wheelhouse` lie below `root`."""

    root: Path
    digest: str

    @property
    def python(self) -> Path:
        """The environment's interpreter; `mpiexec.hydra` lies beside it."""
        return self.root / "envs" / self.digest / "bin" / "python"

    def borrowed(self, root: Path) -> Path:
        """A new root that finds this stack through links: nothing is installed twice for a test."""
        root.mkdir()
        for name in BORROWED:
            (root / name).symlink_to(self.root / name)
        return root
