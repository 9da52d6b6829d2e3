"""What the commands answer, as text for people and as documents. Nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.actions.attend import Outcome
from orchestrator.planning.launch import LaunchPlan
from orchestrator.planning.progress import Progress
from orchestrator.planning.script import by_hand, mpirun_line, placement_table
from orchestrator.planning.tables import table
from orchestrator.planning.verdict import Verdict
from orchestrator.specs.events import Result
from orchestrator.specs.inventory import Inventory


def outcome_result(outcome: Outcome) -> Result:
    """How a run ended: what failed first, its last lines, what became of the others, and where the record is."""
    verdict = outcome.verdict
    lines = [f"run {outcome.run_id} {verdict.state}: {verdict.summary}", f"record: {outcome.record}"]
    if outcome.tail and verdict.state == "failed":
        whose = "mpirun" if verdict.rank is None or verdict.tail_of == "mpirun" else f"rank {verdict.rank}"
        lines[1:1] = [f"last lines of {whose}:", *(f"    {line}" for line in outcome.tail)]
    lines[1:1] = _consequences(verdict)
    if verdict.advice:
        lines.append(f"   do: {verdict.advice}")
    document = {
        "run_id": outcome.run_id,
        **verdict.to_json(),
        "record": str(outcome.record),
        "tail": list(outcome.tail) if verdict.state == "failed" else [],
    }
    return Result(document=document, text="\n".join(lines))


def dry_run_result(inventory: Inventory, plan: LaunchPlan) -> Result:
    job = inventory.job
    script = by_hand(plan, [name for name in job.env if job.hides(name) or job.env[name] in inventory.secrets], inventory.secrets)
    text = [
        *(f"note: {note}" for note in plan.translation.notes),
        "# hostfile",
        plan.command.hostfile.rstrip(),
        "",
        "# ranks",
        placement_table(plan),
        "",
        "# environment of all ranks",
        *(f"{name}={value}" for name, value in plan.document["env"].items()),
        *(f"{name}={value}:${name}" for name, value in plan.document["prepend"].items()),
        "",
        "# mpirun",
        mpirun_line(plan),
        "",
        f"# the same by hand, on {plan.nodes[0]} after `cluster-train provision`; ranks log into {plan.run_dir}",
        script,
    ]
    document = {
        "hostfile": plan.command.hostfile,
        "mpirun": list(plan.command.argv),
        "mpirun_env": dict(plan.command.env),
        "env": plan.document["env"],
        "ranks": plan.document["ranks"],
        "argv": plan.document["argv"],
        "notes": list(plan.translation.notes),
        "network": plan.network.reason,
        "script": script,
    }
    return Result(document=document, text="\n".join(text))


def status_text(found: Mapping[str, Any]) -> str:
    verdict = found.get("verdict")
    lines = [f"run {found['run_id']}: {found['state']}" + (f": {verdict['summary']}" if verdict else "")]
    lines.append(f"since {_when(found['started_unix_s'])}, {_duration(found)}, script {found['label'].get('script')}")
    if found["nodes_used"]:
        lines.append(f"on {', '.join(found['nodes_used'])}, stack {found['stack']}")
    if text := Progress(**found.get("progress", {})).text():
        lines.append(text)
    lines += found["unreachable"].values()
    lines += _what_is_heard(found)
    rows = [("rank", "node", "state", "pid", "max memory", "CPU time")]
    rows += [_rank_row(rank) for rank in found["ranks"]]
    return "\n".join([*lines, *([table(rows)] if found["ranks"] else [])])


def runs_text(found: list[dict[str, Any]]) -> str:
    rows = [("run", "state", "since", "duration", "nodes", "stack", "script", "verdict")]
    for run in found:
        label = run.get("label") or run
        verdict = (run.get("verdict") or {}).get("summary") or ""
        rows.append(
            (
                run["run_id"],
                run["state"],
                _when(run["started_unix_s"]),
                _duration(run),
                ", ".join(label.get("ranks", ())),
                str(label.get("stack") or "")[:8],
                Path(str(label.get("script"))).name,
                verdict if run["state"] != "succeeded" else "",
            )
        )
    return table(rows) if found else "no runs yet"


def _consequences(verdict: Verdict) -> list[str]:
    """What became of the other ranks, each kind of end on a line."""
    ranks: dict[str, list[str]] = {}
    for other in verdict.others:
        ranks.setdefault(other["summary"], []).append(str(other["rank"]))
    return [f"because of it, rank{'s' * (len(those) > 1)} {', '.join(those)}: {end}" for end, those in ranks.items()]


def _what_is_heard(found: Mapping[str, Any]) -> list[str]:
    """Nodes of which nothing is heard, and what the ranks of a stalled run are doing."""
    heard = found.get("nodes") or {}
    lines = [f"{node}: {state}" for node, state in heard.items() if state == "quiet" or state.startswith("no heartbeat")]
    lines += found.get("notices") or []
    stall = found.get("stall")
    if stall:
        lines.append(f"no rank has written anything since {_when(stall['since_unix_s'])}")
    for rank in stall["ranks"] if stall else ():
        lines.append(
            f"rank {rank['rank']} on {rank['node']}, {rank['cpu_s']:.1f} s of CPU time since then, {rank['by'] or 'no stacks'}:"
        )
        lines += [f"    {line}" for line in (rank["stacks"] or "").splitlines()]
    return lines


def _rank_row(rank: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    ended = rank.get("exit")
    if not ended:
        return str(rank["rank"]), rank["node"], "running", str(rank["child"]["pid"]), "", ""
    state = f"killed by {ended['signal']}" if ended["signal"] else f"exit code {ended['exit_code']}"
    memory, seconds = ended.get("max_rss_bytes"), ended.get("cpu_s")
    return (
        str(rank["rank"]),
        rank["node"],
        state + (" (stopped)" if ended["stopped"] else ""),
        "",
        f"{memory / 1e6:.0f} MB" if memory else "",
        f"{seconds:.1f} s" if seconds is not None else "",
    )


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def _duration(run: Mapping[str, Any]) -> str:
    if run["state"] == "lost":
        return "unknown"
    seconds = (run.get("ended_unix_s") or time.time()) - run["started_unix_s"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
