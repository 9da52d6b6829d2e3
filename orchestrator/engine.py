"""The use cases: each composes actions and plans, emits events, and returns a value. Nothing here prints or exits."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from orchestrator.actions import agent, launch, trust
from orchestrator.actions.attend import Outcome, attend, outcome_of, sweep
from orchestrator.actions.doctor import Diagnosis, diagnose
from orchestrator.actions.follow import FINAL_STATES, Follower, RunReference
from orchestrator.actions.hosts import nodes_named
from orchestrator.actions.lockfile import LockFile
from orchestrator.actions.probe import interpreter, probe, probe_each
from orchestrator.actions.provision import Provisioned, choose, provision
from orchestrator.actions.prune import Unused, remove, survey, to_keep
from orchestrator.actions.recall import recall, remember
from orchestrator.actions.record import RECORD, RunRecord, records
from orchestrator.actions.setvars import setvars_effect
from orchestrator.actions.shared_root import by_root
from orchestrator.actions.sync import JobFiles, collect, job_dir, sync
from orchestrator.actions.verify import Verified, take_away, verify
from orchestrator.errors import InventoryError, PreflightError
from orchestrator.nodes.fleet import Fleet, connect
from orchestrator.planning.checks import findings
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.inventory_writing import named, written_inventory
from orchestrator.planning.launch import LaunchPlan, LaunchRequest, plan_launch
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.planning.verdict import judge
from orchestrator.specs.events import Emit, Event, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock


@contextmanager
def connected(inventory: Inventory, *, head_only: bool = False) -> Iterator[Fleet]:
    """The inventory's nodes, connected, and dropped at the end."""
    fleet = connect(inventory, inventory.nodes[:1] if head_only else None)
    try:
        yield fleet
    finally:
        fleet.close()


def up(inventory: Inventory, emit: Emit, *, detach: bool, log_dir: str | None, locked: LockFile | None = None) -> Outcome | None:
    """Probe, provision, sync, launch, and follow to the end; None where the run was left to itself (`detach`)."""
    files = collect(inventory.job)
    with connected(inventory) as fleet:
        nodes, network, stack = _ready(fleet, inventory, emit, files, locked)
        plan = _plan(fleet, inventory, nodes, network, stack.lock, stack.choice, files, launch.new_run_id(inventory.cluster))
        _announce(plan, stack, nodes, emit)
        record = RunRecord(plan.run_id, log_dir)
        label = _label(inventory, plan, stack.lock)
        record.write(RECORD, {"run_id": plan.run_id, "started_unix_s": time.time(), **label})
        record.write("lock.json", stack.lock.to_json())
        run = _reference(inventory, plan.run_id, label)
        start = partial(launch.start, fleet.head, run.root, run.python, plan, label)
        if detach:
            start()
            emit(Step(text=f"run {plan.run_id} goes on by itself: {_again(inventory, 'logs -f', plan.run_id)}"))
            return None
        return attend(fleet, inventory.job, run, record, emit, start)


def dry_run(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None) -> LaunchPlan:
    """The launch that `up` would carry out; looks at the nodes, changes nothing on them."""
    files = collect(inventory.job)
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        lock, choice = choose(inventory, nodes, emit, fetch="never", locked=locked)
        lacking = [node.name for node in nodes if lock.digest not in node.state.envs or files.digest not in node.state.jobs]
        if lacking:
            emit(Notice(text=f"not yet ready: {', '.join(lacking)}; `cluster-train provision` makes them so"))
        return _plan(
            fleet, inventory, nodes, network_of(inventory, nodes), lock, choice, files, launch.new_run_id(inventory.cluster)
        )


def prepare(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None, repair: bool = False) -> Provisioned:
    """Everything but the launch: the environment and, where the inventory names a script, the job's files.

    Args:
        locked: the lock to follow, instead of resolving.
        repair: verify first, and install damaged environments anew. Raises PreflightError while one is in use.
    """
    files = collect(inventory.job) if inventory.job.script else None
    with connected(inventory) as fleet:
        if repair:
            _repair(fleet, inventory, emit, locked)
        elif stack := _still_ready(fleet, inventory, emit, files, locked):
            return stack
        nodes, network, stack = _ready(fleet, inventory, emit, files, locked)
        if not _is_all_there(fleet, nodes, network, stack.lock, files):  # as they were before
            nodes = probe(fleet, inventory)
        remember(fleet, inventory, nodes)
        return stack


def check(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None) -> Verified:
    """What every node really has, against what the inventory (or a lock) asks for. Changes nothing."""
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        lock, choice = choose(inventory, nodes, emit, fetch="never", locked=locked)
        return verify(fleet, inventory, nodes, lock, choice)


def _repair(fleet: Fleet, inventory: Inventory, emit: Emit, locked: LockFile | None) -> None:
    """Take damaged environments and wheels away from the nodes, once the wheels are at hand here."""

    def emit_steps(event: Event) -> None:
        if not isinstance(event, Notice):  # which are told when the nodes are made ready, next
            emit(event)

    nodes = probe(fleet, inventory)
    lock, choice = choose(inventory, nodes, emit_steps, fetch="always", locked=locked)
    comparison = verify(fleet, inventory, nodes, lock, choice).comparison
    for drift in comparison.drift:
        emit(Step(node=drift.node, text=drift.what))
    if comparison.to_make:
        damaged = [root for root in by_root(fleet, nodes) if comparison.to_make & {node.name for node in root}]
        take_away(fleet, inventory, damaged, lock, emit)


def logs(
    inventory: Inventory,
    run_id: str | None,
    emit: Emit,
    *,
    follow: bool,
    ranks: Sequence[int] | None,
    log_dir: str | None,
) -> Outcome | None:
    """Show a run's output from its beginning, with `follow` until it ends; the outcome if it has ended."""
    with connected(inventory) as fleet:
        status = _one_status(fleet, inventory, run_id)
        run = _reference(inventory, status["run_id"], status["label"], fleet)
        record = _record_of(status, log_dir)
        follower = Follower(fleet, run, record, emit, wanted=ranks)
        follower.start(live=follow)
        followed = follower.follow()
        return outcome_of(run, record, followed) if followed.status.get("state") in FINAL_STATES else None


def status(inventory: Inventory, run_id: str | None) -> dict[str, Any]:
    """One run's state (the newest, unless named) with the records of its ranks from every node."""
    with connected(inventory) as fleet:
        head = _one_status(fleet, inventory, run_id)
        python = interpreter(inventory)
        per_node = fleet.each(lambda node: launch.status(node, inventory.root, python, head["run_id"]))
        ranks = {rank["rank"]: rank for runs in per_node.values() for run in runs for rank in run["ranks"]}
        found = {**head, "ranks": [ranks[rank] for rank in sorted(ranks)]}
        if head["state"] in FINAL_STATES:
            found["verdict"] = judge(head, [rank["exit"] for rank in ranks.values() if rank.get("exit")]).to_json()
        return found


def runs(inventory: Inventory, limit: int) -> list[dict[str, Any]]:
    """The runs that the head knows, newest first."""
    with connected(inventory, head_only=True) as fleet:
        return launch.status(fleet.head, inventory.root, interpreter(inventory), None, limit)


def local_runs(log_dir: str | None) -> list[dict[str, Any]]:
    """The runs that were started or followed from here, newest first."""
    return [{**record.read(RECORD), "status": record.read("status.json")} for record in records(log_dir)]


def doctor(inventory: Inventory, emit: Emit) -> Diagnosis:
    """Everything found that would make `up` fail or crawl, errors first. Changes nothing but our own scripts' directory."""
    return diagnose(inventory, emit)


def init(hosts: Sequence[str], ssh: Mapping[str, Any], emit: Emit) -> str:
    """The text of an inventory for machines that answer; raises FleetError naming those that do not."""
    nodes, said = named(nodes_named(hosts)), {key: value for key, value in ssh.items() if value}
    cluster = json.dumps({"cluster": "lab", "ssh": said, "nodes": nodes})
    inventory = parse_inventory(cluster, file="command line.yml", environment={})
    with connected(inventory) as fleet:
        facts = probe_each(fleet, inventory)
        _tell(fleet, facts, emit)
    try:
        network: NetworkChoice | PreflightError = network_of(inventory, facts)
    except PreflightError as error:
        network = error  # whoever wrote the inventory can say which
    return written_inventory(nodes, said, facts, network)


def prune(
    inventory: Inventory, emit: Emit, is_wanted: Callable[[Mapping[str, Unused]], bool], *, locked: LockFile | None = None
) -> dict[str, list[str]]:
    """Remove from the nodes what neither recent runs nor this inventory use; per node the paths that are gone.

    Args:
        is_wanted: is shown what could go from each node, and decides.
    """
    files = collect(inventory.job) if inventory.job.script else None
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        lock, _ = choose(inventory, nodes, emit, fetch="never", locked=locked)
        keep = to_keep(fleet, nodes, lock, files.digest if files else None)
        roots = by_root(fleet, nodes)
        unused = survey(fleet, roots, keep)
        if not any(node.count for node in unused.values()) or not is_wanted(unused):
            return {name: [] for name in unused}
        return remove(fleet, roots, keep, emit)


def teardown(inventory: Inventory, emit: Emit) -> dict[str, list[str]]:
    """Remove from every node all that was put there; per node the paths that are gone.

    Raises PreflightError while a run is going on.
    """
    with connected(inventory) as fleet:
        python = interpreter(inventory)
        known = launch.status(fleet.head, inventory.root, python, None)  # other nodes hold ranks, but no run's state
        going = [run["run_id"] for run in known if run["state"] not in FINAL_STATES]
        if going:
            raise PreflightError(f"still going on: {', '.join(going)}", advice="cluster-train stop --run ID   first")
        nodes = probe(fleet, inventory)
        # On every node, for a root in common does not mean a home in common; and while our scripts are still there.
        here = fleet.each(lambda node: agent.call(node, inventory.root, python, "remove.py", ["machine", inventory.root]))
        removed: dict[str, list[str]] = {node: list(answer["removed"]) for node, answer in here.items()}
        for node, *others in by_root(fleet, nodes):
            answer = agent.call(fleet.transports[node.name], node.root, python, "remove.py", ["root", node.root])
            removed[node.name] += answer["removed"]
            keys = len(here[node.name]["revoked"])
            emit(Step(node=node.name, text=f"removed {len(removed[node.name])} directories and {keys} keys"))
            for path in answer["left"]:
                emit(Notice(text=f"{node.name}: {path} is not ours, and stays"))
            for other in others:
                emit(Step(node=other.name, text=f"had its root in common with {node.name}"))
        return removed


def stop(inventory: Inventory, run_id: str | None, emit: Emit) -> dict[str, Any]:
    """End a run on every node, and say what was left; its final status."""
    with connected(inventory) as fleet:
        found = _one_status(fleet, inventory, run_id)
        if found["state"] in FINAL_STATES:
            emit(Notice(text=f"run {found['run_id']} has ended already: {found['state']}"))
            final = found
        else:
            emit(Step(text=f"stopping {found['run_id']}: the ranks have {inventory.job.grace_s:g} s to end by themselves"))
            final = launch.stop(fleet.head, inventory.root, interpreter(inventory), found["run_id"], inventory.job.grace_s)
        sweep(fleet, inventory.root, interpreter(inventory), found["run_id"], inventory.job.grace_s, emit)
        return final


def _ready(
    fleet: Fleet, inventory: Inventory, emit: Emit, files: JobFiles | None, locked: LockFile | None = None
) -> tuple[tuple[NodeFacts, ...], NetworkChoice, Provisioned]:
    """Nodes that have the environment, accept the head's key, and hold the job's files; their network, their stack."""
    nodes = _probed(fleet, inventory, emit)
    for finding in findings(nodes, time.time()):
        if finding.severity == "warning":  # errors are told, all at once, by what would fail
            emit(Notice(text=f"{finding.node}: {finding.what}: {finding.evidence} ({finding.remedy})"))
    network = network_of(inventory, nodes)
    trust.authorize_head(fleet, nodes, network.endpoints, emit)
    stack = provision(fleet, inventory, nodes, emit, locked, network.endpoints)
    if files:
        sync(fleet, nodes, files, emit)
    return nodes, network, stack


def _still_ready(
    fleet: Fleet, inventory: Inventory, emit: Emit, files: JobFiles | None, locked: LockFile | None
) -> Provisioned | None:
    """The stack, where everything is on the nodes and nothing was touched since that was seen; None where that is not so."""
    nodes = recall(fleet, inventory)
    if nodes is None:
        return None
    events: list[Event] = []
    lock, choice = choose(inventory, nodes, events.append, fetch="never", locked=locked)
    if not _is_all_there(fleet, nodes, network_of(inventory, nodes), lock, files):
        return None
    _tell(fleet, nodes, emit)
    for event in events:
        emit(event)
    emit(Step(text=f"environment {lock.digest} is on every node, and nothing was touched there: nothing to do"))
    return Provisioned(lock=lock, choice=choice, changes=())


def _is_all_there(fleet: Fleet, nodes: Sequence[NodeFacts], network: NetworkChoice, lock: Lock, files: JobFiles | None) -> bool:
    """Whether, by these facts, every node has the environment and the job's files, and lets the head in."""
    have_files = files is None or all(files.digest in node.state.jobs for node in nodes)
    have_environment = all(lock.digest in node.state.envs for node in nodes)
    return have_files and have_environment and not trust.unauthorized(fleet, nodes, network.endpoints)


def _probed(fleet: Fleet, inventory: Inventory, emit: Emit) -> tuple[NodeFacts, ...]:
    nodes = probe(fleet, inventory)
    _tell(fleet, nodes, emit)
    return nodes


def _tell(fleet: Fleet, nodes: Sequence[NodeFacts], emit: Emit) -> None:
    for node in nodes:
        cores = len({cpu.core for cpu in node.cpu.logical})
        sockets = len({cpu.socket for cpu in node.cpu.logical})
        way = "this machine" if fleet.transports[node.name].is_local else "over SSH"
        emit(
            Step(
                node=node.name,
                text=f"{node.hostname}, {sockets} sockets, {cores} cores, Python {node.python.version}, {way}",
            )
        )


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
            identity=trust.planned_identity(fleet, inventory, nodes),
            mpi=mpi,
            setvars=setvars_effect(fleet, inventory.root, interpreter(inventory), lock, choice),
        )
    )


def _announce(plan: LaunchPlan, stack: Provisioned, nodes: Sequence[NodeFacts], emit: Emit) -> None:
    for note in plan.translation.notes:
        emit(Notice(text=note))
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


def _reference(inventory: Inventory, run_id: str, label: Mapping[str, Any], fleet: Fleet | None = None) -> RunReference:
    missing = [node for node in label["ranks"] if fleet and node not in fleet.transports]
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
        again=_again(inventory, "logs -f", run_id),
    )


def _record_of(status: Mapping[str, Any], log_dir: str | None) -> RunRecord:
    record = RunRecord(status["run_id"], log_dir)
    if not record.read(RECORD):
        record.write(RECORD, {"run_id": status["run_id"], "started_unix_s": status["started_unix_s"], **status["label"]})
    return record


def _one_status(fleet: Fleet, inventory: Inventory, run_id: str | None) -> dict[str, Any]:
    found = launch.status(fleet.head, inventory.root, interpreter(inventory), run_id, 1)
    if not found:
        raise InventoryError(
            f"{fleet.head.node} knows no run {run_id}" if run_id else f"{fleet.head.node} knows no run yet",
            advice="see `cluster-train runs`",
        )
    return found[0]


def _again(inventory: Inventory, verb: str, run_id: str) -> str:
    """The command that takes this run up again, as it can be typed."""
    return shlex.join(["cluster-train", *verb.split(), *([inventory.file] if inventory.file else []), "--run", run_id])
