"""Ranks of the `ccl` backend under a real Intel MPI, all on this machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import oneccl_wheel
import pytest
from commands import REPOSITORY
from one_machine import rank_environment

LIMIT_S = 600.0
SCRIPTS = REPOSITORY / "tests" / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How `mpiexec` ended: its exit code, what the ranks said, how long it took."""

    exit_code: int
    output: str
    duration_s: float


def start(python: Path, size: int, script: Path, *arguments: str | Path, limit_s: float = LIMIT_S, **variables: str) -> Ended:
    """Run a script as `size` ranks by an interpreter with `mpiexec.hydra` beside it; the time limit ends them all."""
    launcher = python.with_name("mpiexec.hydra")
    if not launcher.exists():
        pytest.skip(f"there is no Intel MPI beside {python}")
    environment = {
        "PATH": os.defpath,
        "HOME": os.environ["HOME"],
        **rank_environment(),
        "PYTHONPATH": f"{REPOSITORY / 'remote'}:{REPOSITORY / 'tests'}",
        "CLUSTER_TRAIN_ONECCL": str(oneccl_wheel.libraries()),
        "CCL_KVS_IFACE": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    command: Sequence[str | Path] = [launcher, "-n", str(size), python, "-u", script, *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # hydra hands it on to the ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        pytest.fail(f"not within {limit_s} s: {output[-3000:]}")
    return Ended(exit_code=process.returncode, output=output, duration_s=time.monotonic() - started)
