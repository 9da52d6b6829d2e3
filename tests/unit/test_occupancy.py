"""Who is there, in words, and what crashed runs left."""

from __future__ import annotations

from typing import Any

from orchestrator.planning.occupancy import busy_text, find_remains


def look(machine: str, states: dict[str, str], **living: tuple[int, bool]) -> dict[str, Any]:
    """What a node says: runs with one living process each, and whether it is watched."""
    runs = [
        {"run_id": run_id, "processes": [{"pid": pid, "start_ticks": 1, "command": f"python {run_id}"}], "is_watched": watched}
        for run_id, (pid, watched) in living.items()
    ]
    return {"machine": machine, "states": states, "living": runs}


def test_what_counts_as_remains() -> None:
    """Over or lost by the head's word; unknown to the head only where nobody watches; one machine is told once."""
    states = {"going": "running", "over": "failed", "gone": "lost", "stopping": "stopping"}
    looks = {
        "node0": look("a", states, going=(1, True), over=(2, False), gone=(3, True), stopping=(4, False)),
        "node1": look("b", {"foreign": "running"}, over=(5, True), foreign=(6, True), stray=(7, False)),
        "again1": look("b", {}, over=(5, True), stray=(7, False)),
    }
    found = [(remains.node, remains.run_id) for remains in find_remains(looks)]
    assert found == [("node0", "over"), ("node0", "gone"), ("node1", "over"), ("node1", "stray")]
    assert find_remains(looks)[2].text() == "node1: run over left process 5: python over"


def test_who_is_there_once_for_each_run() -> None:
    """Whose run, of what, since when, from where; all nodes that it has stand before it."""
    lock = {"run_id": "r1", "user": "anna", "cluster": "lab", "script": "train.py", "asked_unix_s": 0.0, "origin": "anna@laptop"}
    text = busy_text({"node0": [{**lock, "state": "held"}], "node1": [{**lock, "since_unix_s": 9.0, "state": "held"}]})
    (line,) = text.splitlines()
    assert line.startswith("node0, node1: run r1 of anna (lab, train.py), there since 19") and line.endswith(", from anna@laptop")
    assert "waiting since" in busy_text({"n": [{"run_id": "r2", "user": "1001", "asked_unix_s": 5.0, "state": "waiting"}]})
