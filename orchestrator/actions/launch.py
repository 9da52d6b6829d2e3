"""Start a run on the head, stop it, ask for its state, and end what is left of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.actions import agent
from orchestrator.errors import PreflightError
from orchestrator.nodes.transport import Transport, run
from orchestrator.planning.mpirun import Flavour

if TYPE_CHECKING:  # its planning is no part of asking for runs
    from orchestrator.planning.launch import LaunchPlan

START_TIMEOUT_S = 60


def new_run_id(cluster: str) -> str:
    """A name that sorts by time and that two people starting at once do not share."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{cluster}-{secrets.token_hex(2)}"


def start(head: Transport, root: str, python: str, plan: LaunchPlan, label: Mapping[str, Any]) -> dict[str, Any]:
    """Hand the launch to the supervisor on the head; raises CommandError when mpirun cannot be started."""
    document = json.dumps(plan.start_document(label)).encode()
    return agent.call(head, root, python, "supervise.py", ["start"], stdin=document, idle_timeout_s=START_TIMEOUT_S)


def status(transport: Transport, root: str, python: str, run_id: str | None, limit: int = 20) -> list[dict[str, Any]]:
    """The runs that a node knows, newest first, with the records of the ranks that are there."""
    arguments = ["status", "--root", root, "--limit", str(limit)] + (["--run", run_id] if run_id else [])
    runs: list[dict[str, Any]] = agent.call(transport, root, python, "supervise.py", arguments)["runs"]
    return runs


def stop(head: Transport, root: str, python: str, run_id: str, grace_s: float, *, now: bool = False) -> dict[str, Any]:
    """Ask the supervisor to end the run, with `now` without the ranks' grace, and wait until it has: its final status."""
    arguments = ["stop", "--root", root, "--run", run_id, *(["--now"] if now else [])]
    return agent.call(head, root, python, "supervise.py", arguments, idle_timeout_s=grace_s + START_TIMEOUT_S)


def sweep(transport: Transport, root: str, python: str, run_id: str, grace_s: float) -> dict[str, Any]:
    """End what is left of a run on a node, and list again: {"killed": [...], "left": [...]}."""
    arguments = ["sweep", "--root", root, "--run", run_id]
    return agent.call(transport, root, python, "supervise.py", arguments, idle_timeout_s=grace_s + START_TIMEOUT_S)


def system_mpi(head: Transport) -> tuple[Flavour, str]:
    """The mpirun on the head's own PATH and its flavour; raises PreflightError when there is none that we know."""
    found = run(head, ["sh", "-c", "command -v mpirun && mpirun --version"], idle_timeout_s=20)
    lines = found.stdout.decode(errors="replace").splitlines()
    if found.exit_code == 0 and lines:
        text = "\n".join(lines[1:])
        for mark, flavour in (("Intel(R) MPI", "impi"), ("Open MPI", "openmpi"), ("HYDRA", "mpich")):
            if mark in text:
                return flavour, _launcher(lines[0], flavour)  # type: ignore[return-value, arg-type]
    raise PreflightError(
        f"mpi: system: {head.node} has no mpirun on the PATH of a non-interactive login",
        advice="load its module in a start-up file that non-interactive shells read, or use `mpi: impi`, which needs no root",
    )


def _launcher(mpirun: str, flavour: Flavour) -> str:
    """Intel's and MPICH's mpirun may be shell scripts: hydra itself lies beside them."""
    return mpirun if flavour == "openmpi" else mpirun.rsplit("/", 1)[0] + "/mpiexec.hydra"
