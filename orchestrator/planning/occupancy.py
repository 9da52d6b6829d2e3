"""Who uses which node, as the nodes tell it, and what crashed runs left there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.planning.preflight import Finding
from orchestrator.specs.health import RunProcess

OVER = frozenset({"succeeded", "failed", "stopped", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Processes of one of our runs on one node that nobody watches over any more; `processes` are (pid, command line)."""

    node: str
    run_id: str
    processes: tuple[tuple[int, str], ...]

    def text(self) -> str:
        """One line for people."""
        pids = ", ".join(str(pid) for pid, _ in self.processes)
        command = self.processes[0][1]
        shown = command if len(command) <= 100 else command[:99] + "…"
        return f"{self.node}: run {self.run_id} left process{'es' if len(self.processes) > 1 else ''} {pids}: {shown}"


def find_remains(looks: Mapping[str, Mapping[str, Any]]) -> tuple[Remains, ...]:
    """What crashed runs of ours left on the nodes.

    The head knows how its runs stand: processes of one that is over, or lost, are remains wherever they live. A run that the
    head does not know was started from another one: its processes are remains where neither rank.py nor a lock is with them.

    Args:
        looks: what each node's `locks.py hold` said first, the head's first of all.
    """
    head = next(iter(looks.values()))
    found: dict[tuple[str, str, int], Remains] = {}
    for node, look in looks.items():
        for run in look["living"]:
            state = head["states"].get(run["run_id"])
            if state in OVER or (state is None and not run["is_watched"]):
                those = tuple((who["pid"], who["command"]) for who in run["processes"])
                # Two names of one machine show the same processes.
                key = (look["machine"], run["run_id"], those[0][0])
                found.setdefault(key, Remains(node=node, run_id=run["run_id"], processes=those))
    return tuple(found.values())


def occupancy_findings(
    looks: Mapping[str, Mapping[str, Any]], processes: Mapping[str, Sequence[RunProcess]]
) -> Iterator[Finding]:
    """Who is in the way of a new run: what `up` refuses for is an error, other processes of runs are a warning.

    Args:
        looks: what each node's doctor.py said of its locks and of our runs there, the head's first of all.
        processes: by node, all that bear the mark of a run.
    """
    told: set[str] = set()
    for node, look in looks.items():
        for lock in look["locks"]:
            told.add(lock["run_id"])
            remedy = f"let it end (`up --wait` waits, `up --share` runs beside it), or: cluster-train stop --run {lock['run_id']}"
            yield Finding(severity="error", node=node, what="a run is alive here", evidence=describe(lock), remedy=remedy)
    for left in find_remains(looks):
        told.add(left.run_id)
        shown = left.text().partition(": ")[2]
        remedy = "cluster-train up --clean   ends them first"
        yield Finding(severity="error", node=left.node, what="a crashed run left processes", evidence=shown, remedy=remedy)
    for node, found in processes.items():
        for run_id, count in Counter(process.run_id for process in found if process.run_id not in told).items():
            first = next(process for process in found if process.run_id == run_id)
            shown = f"{count} processes of {run_id}, such as {first.pid}: {first.command[:60]}"
            remedy = f"let it end, or: cluster-train stop --run {run_id}"
            yield Finding(severity="warning", node=node, what="a run is alive here", evidence=shown, remedy=remedy)


def describe(lock: Mapping[str, Any]) -> str:
    """One lock as people read it: whose run, of what, since when, from where."""
    facts = ", ".join(str(lock[key]) for key in ("cluster", "script") if lock.get(key))
    since = datetime.fromtimestamp(float(lock.get("since_unix_s") or lock["asked_unix_s"])).strftime("%Y-%m-%d %H:%M:%S")
    doing = "waiting" if lock.get("state") == "waiting" else "there"
    origin = f", from {lock['origin']}" if lock.get("origin") else ""
    return f"run {lock['run_id']} of {lock['user']}{f' ({facts})' if facts else ''}, {doing} since {since}{origin}"


def busy_text(busy: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Who is in the way, each run once, with the nodes on which it is."""
    first: dict[str, Mapping[str, Any]] = {}
    nodes: dict[str, list[str]] = {}
    for node, locks in busy.items():
        for lock in locks:
            first.setdefault(lock["run_id"], lock)
            nodes.setdefault(lock["run_id"], []).append(node)
    return "\n".join(f"{', '.join(nodes[run_id])}: {describe(lock)}" for run_id, lock in first.items())
