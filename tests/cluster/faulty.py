"""Runs on the two containers that something is done to: started with `up`, watched, broken, and looked at afterwards.

The stack is small (stand-ins for torch and its kin) but the three MPIs in it are real. A rank of these runs prints numbered
lines, and keeps beside its log how many it has written: what a log must hold is known without asking the log.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from commands import COMMAND, REPOSITORY, ClusterTrain
from containers import ContainerCluster, cluster_command
from small_stack import offline, stack

FLAVOURS = ("impi", "mpich", "openmpi")
LIMIT_S = 90.0
POLL_S = 0.05
GRACE_S = 3
PADDING = "xxx"  # lines of these are not counted

# The text of a script: `do` is run after every line; `broken()` notes the time of a fault of the rank's own making.
TICKING = """
import os, signal, subprocess, sys, time
RANK = int(os.environ["RANK"])
written = os.open("written-%d" % RANK, os.O_CREAT | os.O_WRONLY, 0o600)
def broken():
    with open("broken", "w") as note:
        note.write(repr(time.time()))
{before}
for tick in range({ticks}):
    print("tick", tick)
    os.pwrite(written, b"%d" % (tick + 1), 0)
    {do}
    time.sleep({every_s})
"""

# What a rank of ours has in the run's directory of a node, as JSON.
_READ_RUN = """
import glob, json, os, sys
def read(name):
    with open(name, "rb") as stream:
        return stream.read().decode("latin-1")
if not os.path.isdir(sys.argv[1]):
    sys.exit(print("{}"))
os.chdir(sys.argv[1])
print(json.dumps({name: read(name) for pattern in sys.argv[2:] for name in glob.glob(pattern)}))
"""

T = TypeVar("T")


def ticking(do: str = "", *, before: str = "", ticks: int = 3000, every_s: float = 0.05) -> str:
    """A script whose ranks print numbered lines; `do` is one line of Python that follows each."""
    return TICKING.format(do=do or "pass", before=before, ticks=ticks, every_s=every_s)


def until(look: Callable[[], T], what: str | Callable[[], object], limit_s: float = LIMIT_S) -> T:
    """The first true answer of `look`, or a failure that says what was waited for."""
    deadline = time.monotonic() + limit_s
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what() if callable(what) else what}: not within {limit_s:g} s"
        time.sleep(POLL_S)
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the fault table, as it went."""

    name: str
    mpi: str
    state: str
    seconds: float | None
    summary: str


ROWS: list[Row] = []


@dataclass(kw_only=True)
class FaultLab:
    """The two containers, the small stack, and a directory of one test."""

    cluster: ContainerCluster
    wheels: Path
    cache: Path
    directory: Path
    cluster_train: ClusterTrain
    row: str = ""
    started: list[Up] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables with which pip asks no index, and nobody else's cache is used."""
        return {**offline(self.cache), "XDG_STATE_HOME": str(self.directory / "state")}

    def inventory(self, mpi: str = "impi", *, root: str | None = None, **job: Any) -> Path:
        """Two ranks on each node, and little time to save."""
        job = {"ppn": 2, "grace_s": GRACE_S, **job}
        return self.cluster.inventory(self.directory, cluster="faults", root=root, stack=stack(self.wheels, mpi), job=job)

    def call(self, *arguments: str | Path) -> Any:
        """A command of cluster-train, to its end."""
        return self.cluster_train(*arguments, env=self.settings)

    def up(
        self, script: str, mpi: str = "impi", *options: str, name: str = "run", inventory: Path | None = None, **job: Any
    ) -> Up:
        """Start `up --json` of a script, in the background."""
        source = self.directory / f"{name}.py"
        source.write_text(script)
        path = inventory or self.inventory(mpi, **job)
        out = self.directory / f"{name}.events"
        with out.open("wb") as stdout, (self.directory / f"{name}.err").open("wb") as stderr:
            command = [COMMAND, "up", path, "--json", *options, "--", source]
            environment = {**os.environ, **self.settings}
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        self.started.append(Up(lab=self, mpi=mpi, process=process, out=out, inventory=path))
        return self.started[-1]

    def sh(self, node: str, text: str, *arguments: str) -> str:
        """Run shell text as root in a container."""
        return self.cluster.exec(node, ("sh", "-c", text, "sh", *arguments))

    def kill(self, node: str, pids: Sequence[int], signal: str = "KILL") -> None:
        """Signal processes of a container."""
        self.sh(node, f'kill -{signal} "$@"', *map(str, pids))

    def docker(self, *arguments: str) -> str:
        """A command of the engine."""
        return str(cluster_command.run((self.cluster.docker, *arguments), limit_s=120))

    def restart(self, node: str) -> None:
        """Start a container that was killed."""
        self.docker("start", self.cluster.container(node))
        self.wait_for_ssh()

    def wait_for_ssh(self) -> None:
        """Wait until both containers answer again at the addresses that they had."""
        label = '{{index .Config.Labels "com.docker.compose.project"}}'
        project = self.docker("inspect", "--format", label, self.cluster.container("node0")).strip()
        found = cluster_command.wait_for_ssh(self.cluster.docker, project, timeout_s=60)
        assert {one.name: one.address for one in found} == {one.name: one.address for one in self.cluster.nodes}

    def left(self, node: str = "") -> list[str]:
        """What runs of ours on a node (or both), but for what waits at the end of a connection: a tail, the holder of a lock."""
        found = [line for line in self.cluster.ours() if line.startswith(node)]
        return [line for line in found if "tail.py" not in line and "locks.py hold" not in line]

    def close(self) -> None:
        """End what a failed test left, so that the next one finds quiet nodes."""
        for up in self.started:
            if up.process.poll() is None:
                up.process.kill()
                up.process.wait()
        for node in self.cluster.nodes:
            pids = [process.pid for process in self.cluster.processes(node.name) if process.uid == self.cluster.uid]
            self.sh(node.name, 'for pid do kill -9 "$pid" 2>/dev/null; done; true', *map(str, pids))


@dataclass(kw_only=True)
class Up:
    """An `up` in the background."""

    lab: FaultLab
    mpi: str
    process: subprocess.Popen[bytes]
    out: Path
    inventory: Path
    broken_unix_s: float | None = None
    ended_unix_s: float | None = None
    _run: dict[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> Path:
        """Where the run is recorded here."""
        return self.lab.directory / "state" / "cluster-train" / "runs" / self.run_id

    @property
    def run_id(self) -> str:
        """What the command calls its run; "" before it has said so."""
        found = re.search(r'"text": "run (\S+?): ', read(self.out))
        return found.group(1) if found else ""

    @property
    def run_dir(self) -> str:
        """The run's directory on the nodes."""
        if not self._run:
            self._run = json.loads((self.record / "record.json").read_text())
        return str(self._run["run_dir"])

    def until_ticking(self, tick: int = 3, ranks: Sequence[int] = (0, 1, 2, 3)) -> Up:
        """Wait until these ranks' lines up to this number have arrived here."""

        def has_come() -> bool:
            assert self.process.poll() is None, self.text()
            return bool(self.run_id) and all(f"tick {tick}\n" in read(self.record / f"rank-{rank}.out") for rank in ranks)

        until(has_come, f"tick {tick}")
        return self

    def last_tick(self, rank: int) -> int:
        """The number of the last whole line that has arrived here."""
        return read(self.record / f"rank-{rank}.out").count("\n") - 1

    def broken(self) -> None:
        """Note that the fault happens now."""
        self.broken_unix_s = time.time()

    def wait(self, limit_s: float = LIMIT_S) -> Up:
        """Wait for the end of the command."""
        self.process.wait(limit_s)
        self.ended_unix_s = time.time()
        return self

    @property
    def seconds(self) -> float | None:
        """From the fault to the command's end."""
        if self.broken_unix_s is None:
            notes = [self.on_node(node.name, "work/broken") for node in self.lab.cluster.nodes]
            times = [float(text) for note in notes for text in note.values() if text]
            self.broken_unix_s = min(times) if times else None
        if self.broken_unix_s is None or self.ended_unix_s is None:
            return None
        return self.ended_unix_s - self.broken_unix_s

    def text(self) -> str:
        """What the command has printed, but not the ranks' own lines."""
        lines = (read(self.out) + read(self.out.with_suffix(".err"))).splitlines()
        return "\n".join(line for line in lines if not ('"logtext"' in line and '"rank": null' not in line))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        return self.events()[-1]

    def on_node(self, node: str, *patterns: str) -> dict[str, str]:
        """Files below the run's directory on a node, as latin-1 text."""
        argv = ("python3", "-c", _READ_RUN, self.run_dir, *patterns)
        found: dict[str, str] = json.loads(self.lab.cluster.exec(node, argv))
        return found

    def rank_record(self, rank: int) -> dict[str, Any]:
        """rank-<n>.json as it is on the rank's node: which processes it is."""
        name = f"rank-{rank}.json"
        document: dict[str, Any] = json.loads(self.on_node(f"node{rank // 2}", name)[name])
        return document

    def status_record(self) -> dict[str, Any]:
        """status.json as it is on node0."""
        document: dict[str, Any] = json.loads(self.on_node("node0", "status.json")["status.json"])
        return document

    def check(
        self, state: str, *, code: int = 1, limit_s: float = 60.0, dead: str = "", has_ticks: bool = True, **expected: Any
    ) -> dict[str, Any]:
        """The verdict, the exit code, the time, that nothing is left, and that the logs are whole; the result.

        Args:
            limit_s: from the fault to the end of the command.
            dead: the node that could not tell its last lines; they lie there.
            has_ticks: whether the ranks ran a script of `ticking`.
        """
        assert self.process.returncode == code, self.text()
        result = self.result
        seconds = self.seconds
        summary = result.get("summary") or result.get("message", "")
        ROWS.append(Row(name=self.lab.row, mpi=self.mpi, state=state, seconds=seconds, summary=summary))
        assert result.get("state", state) == state, result
        assert {key: result.get(key) for key in expected} == expected, result
        assert seconds is None or seconds < limit_s, f"{seconds:.1f} s from the fault to the end"
        self.check_nothing_left()
        if has_ticks:
            self.check_logs(dead)
        return result

    def check_nothing_left(self) -> None:
        """No process of ours is on either node."""
        until(lambda: not self.lab.left(), self.lab.left, 5)
        # What waits at the end of a connection that was cut ends when it has heard nothing for half a minute.
        until(lambda: not self.lab.cluster.ours(), self.lab.cluster.ours, 40)

    def check_logs(self, dead: str = "") -> None:
        """Every line that a rank had written is in its log, once and in order, and here as well."""
        for rank in range(4):
            node, log, counter = f"node{rank // 2}", f"rank-{rank}.out", f"work/written-{rank}"
            found = {log: "", counter: "0", **self.on_node(node, log, counter)}  # of a rank that had not begun there is nothing
            whole, _, cut = found[log].rpartition("\n")
            lines = [line for line in whole.split("\n") if line and not line.startswith(PADDING)]
            assert lines == [f"tick {tick}" for tick in range(len(lines))], rank
            # A rank that is killed between writing a line and counting it has written one more, or the beginning of one.
            assert int(found[counter] or 0) <= len(lines) <= int(found[counter] or 0) + 1, (rank, found[counter], lines[-3:])
            assert f"tick {len(lines)}".startswith(cut) or not cut.removeprefix(PADDING).strip("x"), (rank, cut)
            here = read(self.record / log)
            assert found[log].startswith(here) and (here == found[log] or node == dead), (rank, len(here), len(found[log]))


def read(path: Path) -> str:
    """A file's text, "" where there is none (yet)."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
