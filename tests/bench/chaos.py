"""Kill a random process of ours at a random time, many times, and look at what is left.

    make bench                       or: python tests/bench/chaos.py [--kills 200] [--first 0] [--seed 1] [--mpi impi]

Each run has 4 ranks on two sshd's on loopback (for Open MPI in network namespaces, as root), which print numbered lines for two
seconds. One process is killed with SIGKILL: the orchestrator, a tail, an sshd session (ours or mpirun's), ssh, the supervisor,
mpirun, one of its daemons, a rank's guard or keeper, its script, or a login under way (ours or mpirun's). Afterwards:

orphans   a process of the run, on a node, 20 s after its end.
wrong     the run did not end; its state is not what happened (`succeeded` although a rank did not finish, another rank named
          than the one that was hit, a run that nothing could have harmed is not `succeeded`); a record cannot be read; or a
          line that a rank had written is not in its log.
seconds   from the kill to the end of the run and of the command.

The same seed and number of a run make the same choices, so a long trial can be made in pieces (--first), but a process may be
elsewhere in its work by then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from loopback import Loopback, loopback
from sshd import NodeProcess, descendants

SCRIPT = """
import os, time
rank = int(os.environ["RANK"])
written = os.open("written-%d" % rank, os.O_CREAT | os.O_WRONLY, 0o600)
for tick in range(80):
    print("tick", tick)
    os.pwrite(written, b"%d" % (tick + 1), 0)
    time.sleep(0.025)
open("done-%d" % rank, "w").close()
"""
LATEST_KILL_S = 2.5
LATEST_START_S = 0.8
WHILE_PREPARED, WHILE_STARTING = 0.15, 0.15  # of the runs
END_LIMIT_S = 90.0
ORPHAN_LIMIT_S = 20.0
FINAL = ("succeeded", "failed", "stopped", "lost")
# Without these a run has no reason to fail.
HARMLESS = ("orchestrator", "tail", "sshd", "other of ours")
OF_A_RANK = ("guard", "keeper", "script")
OF_MPIRUN = ("mpirun", "mpi daemon", "ssh", "sshd of mpirun")  # Open MPI needs its connections, hydra goes on without
LOGIN = "sshd at login"  # it has not let anybody in yet: whether that is us or mpirun does not show
TITLES_AT_LOGIN = ("[accepted]", "[net]", "[priv]")  # by which OpenSSH's processes are called until then

T = TypeVar("T")


@dataclass(kw_only=True)
class Trial:
    """One run, what was killed, and what was wrong afterwards."""

    number: int
    victim: str = "none"
    rank: int | None = None
    what: str = ""
    killed_s: float = 0.0
    seconds: float = 0.0
    state: str | None = None
    summary: str = ""
    orphans: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    """Try so often, print the table and every deviation; 1 where there was one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many runs, with a kill in each")
    parser.add_argument("--first", type=int, default=0, help="the number of the first run, to go on with an earlier trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mpi", default="impi", choices=["impi", "mpich", "openmpi"])
    options = parser.parse_args()
    trials: list[Trial] = []
    with loopback(have_cards=options.mpi == "openmpi") as lab:
        inventory = lab.inventory(mpi=options.mpi, grace_s=3, heartbeat_timeout_s=10)
        lab.provision(inventory)
        script = lab.directory / "ticks.py"
        script.write_text(SCRIPT)
        try:
            for number in range(options.first, options.first + options.kills):
                trials.append(attempt(lab, inventory, script, number, random.Random(f"{options.seed}/{number}")))
                tell(trials[-1])
        except KeyboardInterrupt:
            pass  # what was found so far is told
    print(table(trials, options))
    return 1 if any(trial.orphans or trial.wrong for trial in trials) else 0


def attempt(lab: Loopback, inventory: Path, script: Path, number: int, chance: random.Random) -> Trial:
    """One run with one kill."""
    trial = Trial(number=number)
    earlier = set(lab.runs.glob("*"))
    with (lab.directory / "up.out").open("wb") as out:
        up = lab.start("up", inventory, "--json", "--", script, stdout=out, stderr=subprocess.STDOUT)
    wait_for_phase(lab, up, earlier, chance)
    kill_one(lab, up, trial, chance)
    killed_s = time.monotonic()
    try:
        up.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        trial.wrong.append("`up` has not ended")
        up.kill()
        up.wait()
    until(lambda: new_runs(lab, earlier) or not left(lab), END_LIMIT_S)  # a start that was under way goes on without `up`
    if made := new_runs(lab, earlier):
        (run_dir,) = made
        judge(lab, inventory, run_dir, trial)
    elif trial.victim not in ("none", "orchestrator", "sshd", LOGIN, "other of ours", "supervisor") or up.returncode == 0:
        trial.wrong.append(f"there is no run, and `up` ended with {up.returncode}")  # `start` may be hit before it has made one
    trial.seconds = time.monotonic() - killed_s
    until(lambda: not left(lab), ORPHAN_LIMIT_S)
    trial.orphans = [" ".join(process.argv)[:90] for process in left(lab)]
    clear(lab)
    return trial


def wait_for_phase(lab: Loopback, up: subprocess.Popen[bytes], earlier: set[Path], chance: random.Random) -> None:
    """Until some time in the run's preparation, from the start of its mpirun on, or (mostly) while its ranks run."""
    phase = chance.random()
    if phase < WHILE_PREPARED:
        time.sleep(chance.uniform(0.1, LATEST_KILL_S))
        return
    is_starting = phase < WHILE_PREPARED + WHILE_STARTING
    pattern, latest_s = ("mpirun.err", LATEST_START_S) if is_starting else ("rank-*.out", LATEST_KILL_S)
    until(lambda: up.poll() is not None or [path for run in new_runs(lab, earlier) for path in run.glob(pattern)], END_LIMIT_S)
    time.sleep(chance.uniform(0, latest_s))


def new_runs(lab: Loopback, earlier: set[Path]) -> set[Path]:
    """The directories of runs that have come."""
    return set(lab.runs.glob("*")) - earlier


def kill_one(lab: Loopback, up: subprocess.Popen[bytes], trial: Trial, chance: random.Random) -> None:
    """Kill one process of a kind that is there now; every kind is as likely."""
    kinds: dict[str, list[NodeProcess]] = {}
    for kind, process in ours(lab):
        kinds.setdefault(kind, []).append(process)
    choices = sorted(kinds) + (["orchestrator"] if up.poll() is None else [])
    if not choices:
        return
    trial.victim = chance.choice(choices)
    if trial.victim == "orchestrator":
        up.kill()
        return
    victim = chance.choice(kinds[trial.victim])
    trial.what, trial.rank = (
        f"{victim.pid} {' '.join(victim.argv)[:60]}",
        rank_of(victim.pid) if trial.victim in OF_A_RANK else None,
    )
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        trial.victim = "none"


def ours(lab: Loopback) -> Iterator[tuple[str, NodeProcess]]:
    """(kind, process) of all that runs on the nodes, but the sshd's that are the nodes."""
    for node in lab.nodes:
        processes = {process.pid: process for process in node.processes()}
        for process in processes.values():
            kind = kind_of(process, processes.get(process.parent))
            below = {kind_of(one, None) for one in descendants(process.pid)} if kind in ("sshd", LOGIN) else set()
            yield "sshd of mpirun" if "mpi daemon" in below else kind, process


def kind_of(process: NodeProcess, parent: NodeProcess | None) -> str:
    """What a process is to a run, by its command line and its parent."""
    words = [Path(word).name for word in process.argv[:6]]
    if words[0].startswith("sshd"):
        return LOGIN if process.argv[-1].endswith(TITLES_AT_LOGIN) else "sshd"
    if words[0] == "ssh":
        return "ssh"
    if words[0].startswith(("mpiexec", "mpirun", "prterun")):
        return "mpirun"
    if words[0].startswith(("hydra_", "prted")):
        return "mpi daemon"
    if "tail.py" in words:
        return "tail"
    if "bootstrap.py" in words:
        return "script"
    if "rank.py" in words:
        return "keeper" if parent and "rank.py" in [Path(word).name for word in parent.argv[:4]] else "guard"
    return "supervisor" if "supervise.py" in words and "start" in words else "other of ours"


def rank_of(pid: int) -> int | None:
    """The rank that a process belongs to, by its environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [value.partition(b"=")[2] for value in variables if value.startswith((b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="))]
    return int(values[0]) if values else None


def judge(lab: Loopback, inventory: Path, run_dir: Path, trial: Trial) -> None:
    """Wait for the run's end, and compare what is said of it with what happened."""
    if not until(lambda: state_of(lab, inventory, run_dir) in FINAL, END_LIMIT_S):
        trial.wrong.append(f"the run has not ended: {state_of(lab, inventory, run_dir)}")
        return
    told = status(lab, inventory, run_dir)
    trial.state = told.get("state")
    verdict = told.get("verdict") or {}
    trial.summary = verdict.get("summary", "")
    done = [rank for rank in range(4) if (run_dir / "work" / f"done-{rank}").exists()]
    if trial.state == "succeeded" and len(done) < 4:
        trial.wrong.append(f"succeeded, although only ranks {done} finished")
    if trial.state != "succeeded" and trial.victim in ("none", *HARMLESS):
        trial.wrong.append(f"{trial.state}: {verdict.get('summary')}, although nothing of the run was hit")
    if trial.state == "failed" and trial.rank is not None and not names(verdict, trial.rank):
        trial.wrong.append(f"rank {trial.rank} was hit, but the verdict is: {verdict.get('summary')}")
    is_about_mpirun = verdict.get("kind") in ("mpirun", "orphaned") or (verdict.get("kind"), verdict.get("rank")) == (
        "vanished",
        None,
    )
    if trial.state == "failed" and trial.victim in (*OF_MPIRUN, LOGIN) and not is_about_mpirun:
        trial.wrong.append(f"{trial.victim} was hit, but the verdict is: {verdict.get('summary')}")
    if trial.victim == "supervisor" and trial.state == "failed":
        trial.wrong.append(f"the supervisor was hit, but the verdict is: {verdict.get('summary')}")
    trial.wrong += unreadable(run_dir) + unreadable(lab.records / run_dir.name) + incomplete(run_dir, lab.records / run_dir.name)


def names(verdict: dict[str, Any], rank: int) -> bool:
    """Whether the verdict is about this rank; MPICH may only know that it was one of some that had not begun."""
    is_one_of = verdict.get("kind") == "vanished" and f"{rank} on node{rank // 2}" in verdict.get("summary", "")
    return verdict.get("rank") == rank or (verdict.get("rank") is None and is_one_of)


def status(lab: Loopback, inventory: Path, run_dir: Path) -> dict[str, Any]:
    """What `cluster-train status` tells of the run."""
    asked = lab.start("status", inventory, "--run", run_dir.name, "--json", stdout=subprocess.PIPE)
    out, _ = asked.communicate(timeout=END_LIMIT_S)
    try:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return answer


def state_of(lab: Loopback, inventory: Path, run_dir: Path) -> str | None:
    """The state, asked of the nodes only where the file does not tell the end (of a lost run it never will)."""
    try:
        state: str = json.loads((run_dir / "status.json").read_text())["state"]
    except (OSError, ValueError):
        state = "none"
    return state if state in FINAL else status(lab, inventory, run_dir).get("state")


def unreadable(directory: Path) -> list[str]:
    """Records that are no JSON."""
    found = []
    for path in directory.glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            found.append(f"cannot be read: {path}")
    return found


def incomplete(run_dir: Path, record: Path) -> list[str]:
    """Logs that lack a line that a rank had written, on the node or, as far as they came, in the record."""
    found = []
    for counter in (run_dir / "work").glob("written-*"):
        rank = counter.name.rpartition("-")[2]
        text = (run_dir / f"rank-{rank}.out").read_text()
        *lines, last = text.split("\n")  # the last is empty, or as much of a line as was written when the script was killed
        said = int(counter.read_text() or 0)
        if lines != [f"tick {tick}" for tick in range(len(lines))] or len(lines) < said or not f"tick {said}".startswith(last):
            found.append(f"rank {rank} has written {said} lines, its log has {len(lines)} and {last!r}")
        copy = record / f"rank-{rank}.out"
        if copy.exists() and not text.startswith(copy.read_text()):
            found.append(f"the record of rank {rank} is not what it has written")
    return found


def left(lab: Loopback) -> list[NodeProcess]:
    """What runs on the nodes and is not sshd."""
    return [process for kind, process in ours(lab) if not kind.startswith("sshd")]


def clear(lab: Loopback) -> None:
    """End what is left, so that the next run is not harmed by it."""
    for process in left(lab):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def until(look: Callable[[], T], limit_s: float) -> T:
    """The first true answer of `look`, or its last one within the limit."""
    deadline = time.monotonic() + limit_s
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def tell(trial: Trial) -> None:
    """One line for each run, and what was wrong with it."""
    line = (
        f"{trial.number:4} {trial.victim:13} {'' if trial.rank is None else trial.rank!s:2} {trial.seconds:5.1f} s  {trial.state}"
        f"  {trial.summary}"
    )
    print(line, flush=True)
    for text in [*trial.wrong, *(f"left: {orphan}" for orphan in trial.orphans)]:
        print(f"       {text}   ({trial.what})", flush=True)


def table(trials: list[Trial], options: argparse.Namespace) -> str:
    """The victims, how often each was hit, and what was wrong afterwards."""
    lines = [
        f"{len(trials)} runs from {options.first} on, seed {options.seed}, {options.mpi}; load average {os.getloadavg()[0]:.1f}",
        f"{'victim':14} {'count':>5} {'orphans':>8} {'wrong':>6}   seconds (median, max)",
    ]
    for victim in sorted({trial.victim for trial in trials}):
        those = [trial for trial in trials if trial.victim == victim]
        seconds = [trial.seconds for trial in those]
        orphans, wrong = sum(len(trial.orphans) for trial in those), sum(bool(trial.wrong) for trial in those)
        lines.append(f"{victim:14} {len(those):5} {orphans:8} {wrong:6}   {statistics.median(seconds):.1f}, {max(seconds):.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
