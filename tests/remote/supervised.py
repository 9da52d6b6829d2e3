"""Runs started as a node starts them: `supervise.py`, a real MPI, `rank.py`, the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import interpreters

from orchestrator.planning.mpirun import PROGRAM, STOP_SIGNAL, Flavour, MpiRequest, mpi_command

REMOTE = Path(__file__).resolve().parents[2] / "remote"
sys.path.insert(0, str(REMOTE))

import processes  # noqa: E402  (shipped as single files, not as a package)
import records  # noqa: E402
import tail  # noqa: E402

LIMIT_S = 30.0
FINAL = ("succeeded", "failed", "stopped")
INTERPRETERS = [str(path) for path in interpreters.INTERPRETERS]  # nodes may be as old as 3.6

__all__ = ["processes", "records", "tail"]

T = TypeVar("T")


def until(look: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """The first true answer of `look`, or a failure that says what was waited for."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.02)


def tagged(run_id: str) -> list[str]:
    """The command lines of a run's living processes on this machine."""
    return [processes.command_line(who["pid"]) for who in processes.tagged({records.RUN_VARIABLE: run_id})]


class Node:
    """A node's root directory, and our scripts run on it by one interpreter."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.root = root
        self.python = python
        self.agent_dir = REMOTE
        self.limits: dict[str, Any] = {}
        self.restart: dict[str, Any] = {}
        self.hostfile = "127.0.0.1:4\n"

    def run_dir(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    def launch(self, run_id: str, source: str, *arguments: str, size: int = 4, **changes: Any) -> dict[str, Any]:
        """A launch document for a script with this source; all ranks on this node."""
        job_dir = self.root / "jobs" / run_id
        job_dir.mkdir(parents=True)
        (job_dir / "script.py").write_text(source)
        ranks = [
            {
                "rank": n,
                "local_rank": n,
                "local_world_size": size,
                "node": "node0",
                "hostname": None,
                "cores": [],
                "env": {},
            }
            for n in range(size)
        ]
        document = {
            "schema": 1,
            "run_id": run_id,
            "run_dir": str(self.run_dir(run_id)),
            "agent_dir": str(self.agent_dir),
            "python": self.python,
            "job_dir": str(job_dir),
            "argv": ["script.py", *arguments],
            "env": {},
            "world_size": size,
            "grace_s": 10.0,
            "bootstrap": {"backend": "gloo"},
            "beat": {"address": "127.0.0.1", "timeout_s": 60.0},
            "ranks": ranks,
        }
        return {**document, **changes}

    def call(self, script: str, *arguments: str, stdin: str = "") -> tuple[int, dict[str, Any]]:
        """Exit code and answer of one of our scripts."""
        argv = [self.python, str(self.agent_dir / script), *arguments]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=LIMIT_S * 3)
        assert done.stdout, f"{argv} said nothing: {done.stderr}"
        return done.returncode, json.loads(done.stdout)

    def start(self, launch: dict[str, Any], argv: Sequence[str], **env: str) -> tuple[int, dict[str, Any]]:
        """Hand a launch to the supervisor, with `self.limits`, `self.restart` and `self.hostfile`."""
        order = {
            "launch": launch,
            "mpirun": {"argv": list(argv), "env": env},
            "grace_s": launch["grace_s"],
            "files": {"hostfile": {"text": self.hostfile, "mode": 0o600}},
            "label": {"cluster": "here"},
            "limits": self.limits,
            "restart": self.restart,
        }
        return self.call("supervise.py", "start", stdin=json.dumps(order))

    def start_alone(self, launch: dict[str, Any]) -> None:
        """Start a launch of one rank; what hydra would tell it stands in its environment."""
        env = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        code, answer = self.start(launch, [self.python, str(self.agent_dir / "rank.py")], **env)
        assert code == 0, answer

    def status(self, run_id: str) -> dict[str, Any]:
        _, answer = self.call("supervise.py", "status", "--root", str(self.root), "--run", run_id)
        status: dict[str, Any] = answer["runs"][0]
        return status

    def stop(self, run_id: str, *options: str) -> tuple[int, dict[str, Any]]:
        return self.call("supervise.py", "stop", "--root", str(self.root), "--run", run_id, *options)

    def sweep(self, run_id: str, *options: str) -> dict[str, Any]:
        return self.call("supervise.py", "sweep", "--root", str(self.root), "--run", run_id, *options)[1]

    def until_final(self, run_id: str) -> dict[str, Any]:
        """The status of a run that has ended, with its ranks."""
        path = self.run_dir(run_id) / "status.json"
        until(lambda: json.loads(path.read_text())["state"] in FINAL, f"the end of {run_id}")
        return self.status(run_id)

    def output(self, run_id: str, rank: int, stream: str = "out") -> str:
        return (self.run_dir(run_id) / f"rank-{rank}.{stream}").read_text()

    def until_all_say(self, run_id: str, word: str, size: int = 4) -> None:
        """Wait until every rank has printed this word."""
        paths = [self.run_dir(run_id) / f"rank-{rank}.out" for rank in range(size)]
        until(lambda: all(path.exists() and word in path.read_text() for path in paths), f"{word!r} from all of {run_id}")


class MpiNode(Node):
    """A node with an MPI: Intel's beside its interpreter, or another one."""

    def __init__(self, root: Path, python: str, flavour: Flavour = "impi", program: Path | None = None) -> None:
        super().__init__(root, python)
        self.flavour: Flavour = flavour
        self.program = program or Path(python).with_name(PROGRAM[flavour])
        self.before: tuple[str, ...] = ()  # what mpirun starts instead of rank.py, which is its last arguments

    def start_mpi(self, launch: dict[str, Any], **env: str) -> None:
        """Start a launch with mpirun, as the plan would."""
        request = MpiRequest(
            flavour=self.flavour,
            program=str(self.program),
            hosts=(("127.0.0.1", launch["world_size"]),),
            run_dir=launch["run_dir"],
            uses_ssh=False,
            interface="lo",
            variables={},
            command=(*self.before, self.python, str(self.agent_dir / "rank.py")),
        )
        command = mpi_command(request)
        if self.flavour == "openmpi":
            self.hostfile = command.hostfile  # its own dialect
        launch = {"stop_signal": STOP_SIGNAL[self.flavour], **launch}
        code, answer = self.start(launch, command.argv, **{**command.env, **env})
        assert code == 0, answer

    def run(self, run_id: str, source: str, *arguments: str, **changes: Any) -> dict[str, Any]:
        """Run a script to its end."""
        self.start_mpi(self.launch(run_id, source, *arguments, **changes))
        return self.until_final(run_id)


def ended(node: Node, run_ids: Sequence[str]) -> Iterator[None]:
    """After a test: nothing that it started is left, however it ended."""
    yield
    for run_id in run_ids:
        node.sweep(run_id, "--patience-s", "0")


def exits(status: dict[str, Any]) -> list[tuple[int | None, str | None, str | None]]:
    """(exit code, signal, ended by) of each rank."""
    return [(rank["exit"]["exit_code"], rank["exit"]["signal"], rank["exit"]["ended_by"]) for rank in status["ranks"]]


def environment(**variables: str) -> dict[str, str]:
    """A plain environment with these variables."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables}
