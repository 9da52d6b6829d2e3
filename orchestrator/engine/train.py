"""Starting a run: claim the nodes, make them ready, plan, launch, follow."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.actions import agent, launch, trust
from orchestrator.actions.attend import Outcome, attend, start_only
from orchestrator.actions.claim import Terms, claimed
from orchestrator.actions.lockfile import LockFile
from orchestrator.actions.probe import interpreter
from orchestrator.actions.provision import Provisioned, choose
from orchestrator.actions.record import RECORD, RunRecord
from orchestrator.actions.setvars import setvars_effect
from orchestrator.actions.sync import JobFiles, collect, job_dir
from orchestrator.engine.life import again, one_status, reference
from orchestrator.engine.reach import connected, probed
from orchestrator.engine.ready import ready
from orchestrator.errors import PreflightError
from orchestrator.nodes.fleet import Fleet
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.launch import LaunchPlan, LaunchRequest, plan_launch
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.planning.verdict import FINAL_STATES
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock


def up(
    inventory: Inventory,
    emit: Emit,
    *,
    detach: bool,
    log_dir: str | None,
    locked: LockFile | None = None,
    resume: str | None = None,
    terms: Terms = Terms(),  # noqa: B008  frozen
) -> Outcome | None:
    """Claim the nodes, probe, provision, sync, launch, follow to the end; None where the run is left to itself (`detach`).

    Args:
        resume: the run from whose newest complete checkpoint to go on, or "newest".
    """
    files = collect(inventory.job)
    run_id = launch.new_run_id(inventory.cluster)
    python = interpreter(inventory)
    with connected(inventory) as fleet, claimed(fleet, inventory.root, python, _owner(inventory, run_id), terms, emit) as claim:
        from_run = _run_to_resume(fleet, inventory, resume) if resume else None
        nodes, network, stack = ready(fleet, inventory, emit, files, locked)
        plan = replace(_plan(fleet, inventory, nodes, network, stack.lock, stack.choice, files, run_id), from_run=from_run)
        _announce(plan, stack, nodes, emit)
        claim.release([node.name for node in nodes if node.name not in plan.nodes])
        record = RunRecord(plan.run_id, log_dir)
        label = _label(inventory, plan, stack.lock)
        record.write(RECORD, {"run_id": plan.run_id, "started_unix_s": time.time(), **label})
        record.write("lock.json", stack.lock.to_json())
        run = reference(inventory, plan.run_id, label)
        claim.check()
        start = partial(launch.start, fleet.head, run.root, run.python, plan, label)
        if detach:
            start_only(fleet, inventory.job, run, emit, start)
            claim.release(keep=True)
            emit(Step(text=f"run {plan.run_id} goes on by itself: {again(inventory, 'logs -f', plan.run_id)}"))
            return None
        return attend(fleet, inventory.job, run, record, emit, start)


def dry_run(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None) -> LaunchPlan:
    """The launch that `up` would carry out; looks at the nodes, changes nothing on them."""
    files = collect(inventory.job)
    with connected(inventory) as fleet:
        nodes = probed(fleet, inventory, emit)
        lock, choice = choose(inventory, nodes, emit, fetch="never", locked=locked)
        lacking = [node.name for node in nodes if lock.digest not in node.state.envs or files.digest not in node.state.jobs]
        if lacking:
            emit(Notice(text=f"not yet ready: {', '.join(lacking)}; `cluster-train provision` makes them so"))
        return _plan(
            fleet, inventory, nodes, network_of(inventory, nodes), lock, choice, files, launch.new_run_id(inventory.cluster)
        )


def _owner(inventory: Inventory, run_id: str) -> dict[str, str]:
    """What the nodes tell others about who has them."""
    return {
        "run_id": run_id,
        "root": inventory.root,
        "cluster": inventory.cluster,
        "script": inventory.job.script or "",
        "origin": f"{getpass.getuser()}@{socket.gethostname()}",
    }


def _run_to_resume(fleet: Fleet, inventory: Inventory, wanted: str) -> str:
    found = one_status(fleet, inventory, None if wanted == "newest" else wanted, has_begun=True)
    if found["state"] not in FINAL_STATES:
        raise PreflightError(
            f"run {found['run_id']} has not ended: it is {found['state']}",
            advice=again(inventory, "stop", found["run_id"]) + "   first, or follow it",
        )
    run_id: str = found["run_id"]
    return run_id


def _plan(
    fleet: Fleet,
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
    network: NetworkChoice,
    lock: Lock,
    choice: StackChoice,
    files: JobFiles,
    run_id: str,
) -> LaunchPlan:
    mpi = launch.system_mpi(fleet.head) if inventory.stack.mpi == "system" else None
    return plan_launch(
        LaunchRequest(
            inventory=inventory,
            nodes=nodes,
            network=network,
            lock=lock,
            choice=choice,
            agent_dir=f"{nodes[0].root}/agent/{agent.digest()}",
            job_dir=job_dir(nodes[0].root, files),
            script=files.script,
            script_text=files.files[0].source.read_text(errors="replace"),
            run_id=run_id,
            host_keys={name: transport.host_key for name, transport in fleet.transports.items()},
            identity=trust.planned_identity(fleet, nodes),
            mpi=mpi,
            setvars=setvars_effect(fleet, inventory.root, interpreter(inventory), lock, choice),
        )
    )


def _announce(plan: LaunchPlan, stack: Provisioned, nodes: Sequence[NodeFacts], emit: Emit) -> None:
    for note in plan.translation.notes:
        emit(Notice(text=note))
    if plan.restarts.restarts and not plan.restarts.patterns:
        text = "no checkpoints of this script are known (job.checkpoints): a restart begins from the beginning"
        emit(Notice(text=f"job.restarts: {text}, unless the script finds its own"))
    versions = stack.lock.versions
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate") if name in versions)
    emit(Step(text=f"stack {stack.lock.digest}: {shown}, backend {stack.choice.backend}"))
    if plan.setvars:
        emit(Step(text=f"setvars.sh of {plan.setvars.module} applied: {', '.join(plan.setvars.names)}"))
    emit(Step(text=plan.network.reason))
    variables = plan.document["env"]
    threads = sorted({rank.omp_num_threads for rank in plan.ranks})
    emit(
        Step(
            text=f"run {plan.run_id}: {len(plan.ranks)} ranks on {len(plan.nodes)} of {len(nodes)} nodes, "
            f"{'/'.join(map(str, threads))} threads each, MASTER_ADDR={variables['MASTER_ADDR']} "
            f"MASTER_PORT={variables['MASTER_PORT']}"
        )
    )


def _label(inventory: Inventory, plan: LaunchPlan, lock: Lock) -> dict[str, Any]:
    """What is kept with the run's state on the head, so that it can be followed from anywhere."""
    return {
        "cluster": inventory.cluster,
        "script": inventory.job.script,
        "run_dir": plan.run_dir,
        "root": plan.run_dir.rsplit("/runs/", 1)[0],
        "ranks": {node: list(plan.ranks_of(node)) for node in plan.nodes},
        "stack": lock.digest,
        "fetch": list(inventory.job.fetch),
    }
