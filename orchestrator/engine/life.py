"""The life of a run that has been started: its logs, its state, its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from orchestrator.actions import launch
from orchestrator.actions.attend import Outcome, outcome_of, sweep
from orchestrator.actions.follow import Follower, RunReference
from orchestrator.actions.probe import interpreter
from orchestrator.actions.progress import progress
from orchestrator.actions.record import RECORD, RunRecord, records
from orchestrator.engine.reach import connected
from orchestrator.errors import InventoryError
from orchestrator.nodes.fleet import Fleet
from orchestrator.planning.logview import LogView
from orchestrator.planning.verdict import FINAL_STATES, judge
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.inventory import Inventory

NOT_BEGUN = ("waiting", "provisioning")


def logs(
    inventory: Inventory, run_id: str | None, emit: Emit, *, follow: bool, view: LogView, log_dir: str | None
) -> Outcome | None:
    """Show a run's output, with `follow` until it ends; the outcome if it has ended.

    Following, it begins behind the last line that the record here holds: what `up` or an earlier `logs -f` showed.
    """
    with connected(inventory, needs_all=False) as fleet:
        status = one_status(fleet, inventory, run_id, has_begun=True)
        run = reference(inventory, status["run_id"], status["label"], fleet)
        record = _record_of(status, log_dir)
        follower = Follower(fleet, run, record, emit, view=view)
        if known_bytes := follower.start(live=follow, go_on=follow and view.is_everything):
            everything = again(inventory, "logs", run.run_id)
            emit(Notice(text=f"going on behind the {known_bytes} bytes that were shown here before; all of it: {everything}"))
        followed = follower.follow()
        follower.finish(look_again=False)
        return outcome_of(run, record, followed) if followed.status.get("state") in FINAL_STATES else None


def status(inventory: Inventory, run_id: str | None) -> dict[str, Any]:
    """One run's state (the newest, unless named), its ranks' records from every node that answers, and how far it is."""
    with connected(inventory, needs_all=False) as fleet:
        head = one_status(fleet, inventory, run_id)
        python = interpreter(inventory)
        per_node = fleet.each(lambda node: launch.status(node, inventory.root, python, head["run_id"]))
        attempt = head.get("attempt", 1)  # a node that was left out still has the records of an earlier one
        ranks = {
            rank["rank"]: rank
            for runs in per_node.values()
            for run in runs
            for rank in run["ranks"]
            if (rank.get("exit") or rank).get("attempt", 1) == attempt
        }
        found = {**_judged(head, [ranks[rank] for rank in sorted(ranks)]), "unreachable": fleet.unreachable}
        first = next((rank for rank in found["ranks"] if rank.get("node") in fleet.transports), None)
        if first:
            log = first.get("log", first["rank"])
            shown = progress(fleet.transports[first["node"]], inventory.root, python, head["label"]["run_dir"], log)
            found["progress"] = shown.to_json()
        return found


def runs(inventory: Inventory, limit: int) -> list[dict[str, Any]]:
    """The runs that the head knows, newest first."""
    with connected(inventory, head_only=True) as fleet:
        known = launch.status(fleet.head, inventory.root, interpreter(inventory), None, limit)
        return [_judged(run, run["ranks"]) for run in known]


def local_runs(log_dir: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest runs that were started or followed from here, newest first, as far as they are known here."""
    found = []
    for record in islice(records(log_dir), limit):
        about = {**record.read(RECORD), "state": "unknown", **record.read("status.json")}
        verdict = record.read("verdict.json") or about.get("verdict")
        found.append({**about, "verdict": verdict, "record": str(record.path)})
    return found


def stop(inventory: Inventory, run_id: str | None, emit: Emit) -> dict[str, Any]:
    """End a run on every node, and say what was left; its final status."""
    with connected(inventory, needs_all=False) as fleet:
        found = one_status(fleet, inventory, run_id, has_begun=True)
        if found["state"] in FINAL_STATES:
            emit(Notice(text=f"run {found['run_id']} has ended already: {found['state']}"))
            final = found
        else:
            emit(Step(text=f"stopping {found['run_id']}: the ranks have {inventory.job.grace_s:g} s to end by themselves"))
            final = launch.stop(fleet.head, inventory.root, interpreter(inventory), found["run_id"], inventory.job.grace_s)
        python, gone = interpreter(inventory), fleet.unreachable
        nodes = sweep(fleet, inventory.root, python, found["run_id"], inventory.job.grace_s, emit, gone=gone)
        return {**final, "swept": nodes}


def _judged(run: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run's status with the records of its ranks, where and on what it ran, and how it ended."""
    label = run["label"]
    found = {**run, "ranks": list(ranks), "nodes_used": list(label.get("ranks", ())), "stack": label.get("stack")}
    if run["state"] in FINAL_STATES:
        found["verdict"] = judge(run, [rank["exit"] for rank in ranks if rank.get("exit")]).to_json()
    return found


def reference(inventory: Inventory, run_id: str, label: Mapping[str, Any], fleet: Fleet | None = None) -> RunReference:
    """Where a run is, by the label that the head keeps with it; raises InventoryError where the inventory lacks its nodes."""
    missing = [node for node in label["ranks"] if fleet and node not in (*fleet.transports, *fleet.unreachable)]
    if missing:
        raise InventoryError(
            f"run {run_id} is on nodes that the inventory does not have: {', '.join(missing)}",
            advice="name its own inventory",
        )
    return RunReference(
        run_id=run_id,
        run_dir=label["run_dir"],
        root=label["root"],
        python=interpreter(inventory),
        ranks={node: tuple(ranks) for node, ranks in label["ranks"].items()},
        again=again(inventory, "logs -f", run_id),
    )


def _record_of(status: Mapping[str, Any], log_dir: str | None) -> RunRecord:
    record = RunRecord(status["run_id"], log_dir)
    if not record.read(RECORD):
        record.write(RECORD, {"run_id": status["run_id"], "started_unix_s": status["started_unix_s"], **status["label"]})
    return record


def one_status(fleet: Fleet, inventory: Inventory, run_id: str | None, *, has_begun: bool = False) -> dict[str, Any]:
    """The run of this name, or the newest; with `has_begun` of those that are more than asked for."""
    found = launch.status(fleet.head, inventory.root, interpreter(inventory), run_id)
    if has_begun and run_id and found and found[0]["state"] in NOT_BEGUN:
        raise InventoryError(
            f"run {run_id} has not begun: it is {found[0]['state']}",
            advice="press Ctrl-C where its `up` was typed to give it up",
        )
    found = [run for run in found if not (has_begun and run["state"] in NOT_BEGUN)]
    if not found:
        raise InventoryError(
            f"{fleet.head.node} knows no run {run_id}" if run_id else f"{fleet.head.node} knows no run yet",
            advice="see `cluster-train runs`",
        )
    return found[0]


def again(inventory: Inventory, verb: str, run_id: str) -> str:
    """The command that takes this run up again, as it can be typed."""
    return shlex.join(["cluster-train", *verb.split(), *([inventory.file] if inventory.file else []), "--run", run_id])
