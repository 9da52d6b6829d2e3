"""Who uses which node, as the nodes tell it, and what crashed runs left there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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
