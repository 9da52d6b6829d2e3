"""The use cases: each composes actions and plans, emits events, and returns a value. Nothing here prints or exits."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.actions import agent, launch, trust
from orchestrator.actions.fetch import fetch
from orchestrator.actions.follow import FINAL_STATES, Followed, Follower, RunReference
from orchestrator.actions.probe import interpreter, probe
from orchestrator.actions.provision import Provisioned, choose, distinct_roots, provision
from orchestrator.actions.record import RECORD, RunRecord, records
from orchestrator.actions.sync import JobFiles, collect, job_dir, sync
from orchestrator.errors import ClusterTrainError, Interrupted, InventoryError, PreflightError
from orchestrator.nodes.fleet import Fleet, connect
from orchestrator.planning.checks import Finding, findings
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.launch import LaunchPlan, LaunchRequest, plan_launch
from orchestrator.planning.network import NetworkChoice, NetworkNode, choose_network
from orchestrator.planning.verdict import SHOWN_LINES, Verdict, judge
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run that was followed ended; `tail` is the end of the log of the rank that failed first."""

    run_id: str
    verdict: Verdict
    record: Path
    tail: tuple[str, ...] = ()


@contextmanager
def connected(inventory: Inventory, *, head_only: bool = False) -> Iterator[Fleet]:
    """The inventory's nodes, connected, and dropped at the end."""
    fleet = connect(inventory, inventory.nodes[:1] if head_only else None)
    try:
        yield fleet
    finally:
        fleet.close()


def up(inventory: Inventory, emit: Emit, *, detach: bool, log_dir: str | None) -> Outcome | None:
    """Probe, provision, sync, launch, and follow to the end; None where the run was left to itself (`detach`)."""
    files = collect(inventory.job)
    with connected(inventory) as fleet:
        nodes, stack = _ready(fleet, inventory, emit, files)
        plan = _plan(fleet, inventory, nodes, stack.lock, stack.choice, files, launch.new_run_id(inventory.cluster))
        _announce(plan, stack, nodes, emit)
        record = RunRecord(plan.run_id, log_dir)
        label = _label(inventory, plan, stack.lock)
        record.write(RECORD, {"run_id": plan.run_id, "started_unix_s": time.time(), **label})
        run = _reference(inventory, plan.run_id, label)
        if detach:
            launch.start(fleet.head, nodes[0].root, interpreter(inventory), plan, label)
            emit(Step(text=f"run {plan.run_id} goes on by itself: {_again(inventory, 'logs -f', plan.run_id)}"))
            return None
        follower = Follower(fleet, run, record, emit)
        with _interrupts(follower.interrupt):
            launch.start(fleet.head, nodes[0].root, interpreter(inventory), plan, label)
            return _follow_to_the_end(fleet, inventory, run, follower, record, emit)


def dry_run(inventory: Inventory, emit: Emit) -> LaunchPlan:
    """The launch that `up` would carry out; looks at the nodes, changes nothing on them."""
    files = collect(inventory.job)
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        lock, choice = choose(inventory, nodes, emit, fetch=False)
        lacking = [node.name for node in nodes if lock.digest not in node.state.envs or files.digest not in node.state.jobs]
        if lacking:
            emit(Notice(text=f"not yet ready: {', '.join(lacking)}; `cluster-train provision` makes them so"))
        return _plan(fleet, inventory, nodes, lock, choice, files, launch.new_run_id(inventory.cluster))


def prepare(inventory: Inventory, emit: Emit) -> Provisioned:
    """Everything but the launch: the environment and, where the inventory names a script, the job's files."""
    files = collect(inventory.job) if inventory.job.script else None
    with connected(inventory) as fleet:
        return _ready(fleet, inventory, emit, files)[1]


def check(inventory: Inventory, emit: Emit) -> dict[str, bool]:
    """Per node, whether it has the environment that the inventory asks for. Changes nothing."""
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        lock, _ = choose(inventory, nodes, emit, fetch=False)
        return {node.name: lock.digest in node.state.envs for node in nodes}


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
        return _outcome(run, record, followed) if followed.status.get("state") in FINAL_STATES else None


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


def doctor(inventory: Inventory, emit: Emit) -> tuple[Finding, ...]:
    """Everything found that would make `up` fail or crawl, errors first. Changes nothing but our own scripts' directory."""
    with connected(inventory) as fleet:
        nodes = _probed(fleet, inventory, emit)
        found = list(findings(nodes, time.time()))
        try:
            emit(Step(text=_network(inventory, nodes).reason))
        except PreflightError as error:
            name = fleet.head.node
            problem = Finding(severity="error", node=name, what="no network", evidence=error.message, remedy=error.advice)
            found.insert(0, problem)
        return tuple(found)


def init(hosts: Sequence[str], ssh: Mapping[str, Any], emit: Emit) -> str:
    """The text of an inventory for machines that answer; raises FleetError naming those that do not."""
    cluster = {"cluster": "lab", "ssh": {key: value for key, value in ssh.items() if value}, "nodes": list(hosts)}
    inventory = parse_inventory(json.dumps(cluster), file="command line.yml", environment={})
    with connected(inventory) as fleet:
        _probed(fleet, inventory, emit)
    lines = ["# Written by `cluster-train init`; every other key has a default.", "cluster: lab"]
    lines += [f"ssh: {json.dumps(cluster['ssh'])}"] if cluster["ssh"] else []
    lines += ["nodes:", *(f"  - {json.dumps({'name': f'node{i}', 'host': host})}" for i, host in enumerate(hosts))]
    lines += [
        "stack:",
        "  extra_index: [https://download.pytorch.org/whl/cpu]   # CPU builds of torch",
        "job:",
        "  script: train.py",
    ]
    return "\n".join(lines) + "\n"


def teardown(inventory: Inventory, emit: Emit) -> dict[str, list[str]]:
    """Remove from every node all that was put there; per node the paths that are gone.

    Raises PreflightError while a run is going on.
    """
    with connected(inventory) as fleet:
        python = interpreter(inventory)
        known = fleet.each(lambda node: launch.status(node, inventory.root, python, None))
        going = sorted({run["run_id"] for found in known.values() for run in found if run["state"] not in FINAL_STATES})
        if going:
            raise PreflightError(f"still going on: {', '.join(going)}", advice="cluster-train stop --run ID   first")
        nodes = probe(fleet, inventory)
        removed: dict[str, list[str]] = {node.name: [] for node in nodes}
        for node in distinct_roots(nodes):
            answer = agent.call(fleet.transports[node.name], node.root, python, "remove.py", [node.root])
            removed[node.name] = answer["removed"]
            emit(Step(node=node.name, text=f"removed {len(answer['removed'])} directories and {len(answer['revoked'])} keys"))
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
        _sweep(fleet, inventory, found["run_id"], emit)
        return final


def _ready(fleet: Fleet, inventory: Inventory, emit: Emit, files: JobFiles | None) -> tuple[tuple[NodeFacts, ...], Provisioned]:
    """Nodes that have the environment, accept the head's key, and hold the job's files."""
    nodes = _probed(fleet, inventory, emit)
    network = _network(inventory, nodes)
    stack = provision(fleet, inventory, nodes, emit)
    trust.authorize_head(fleet, nodes, network.endpoints, emit)
    if files:
        sync(fleet, nodes, files, emit)
    return nodes, stack


def _network(inventory: Inventory, nodes: Sequence[NodeFacts]) -> NetworkChoice:
    hosts = {node.name: inventory.login(node).host for node in inventory.nodes}
    return choose_network([NetworkNode(name=node.name, facts=node, host=hosts[node.name]) for node in nodes], inventory.network)


def _probed(fleet: Fleet, inventory: Inventory, emit: Emit) -> tuple[NodeFacts, ...]:
    nodes = probe(fleet, inventory)
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
    return nodes


def _plan(
    fleet: Fleet,
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
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
        )
    )


def _announce(plan: LaunchPlan, stack: Provisioned, nodes: Sequence[NodeFacts], emit: Emit) -> None:
    for note in plan.translation.notes:
        emit(Notice(text=note))
    versions = stack.lock.versions
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate") if name in versions)
    emit(Step(text=f"stack {stack.lock.digest}: {shown}, backend {stack.choice.backend}"))
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


def _follow_to_the_end(
    fleet: Fleet, inventory: Inventory, run: RunReference, follower: Follower, record: RunRecord, emit: Emit
) -> Outcome:
    """Follow; Ctrl-C asks the run to stop and goes on following, a second one ends it at once."""
    stop = partial(launch.stop, fleet.head, run.root, run.python, run.run_id, inventory.job.grace_s)
    stoppers: list[threading.Thread] = []

    def on_interrupt(count: int) -> bool:
        wait = f"the ranks have {inventory.job.grace_s:g} s to end by themselves; Ctrl-C again ends them at once"
        emit(Notice(text=f"stopping: {wait}" if count == 1 else "ending them at once"))
        stoppers.append(threading.Thread(target=_quietly, args=(partial(stop, now=count > 1),), daemon=True))
        stoppers[-1].start()
        return count == 1

    follower.start()
    followed = follower.follow(on_interrupt)
    if stoppers:
        stoppers[-1].join(inventory.job.grace_s + launch.START_TIMEOUT_S)
        _sweep(fleet, inventory, run.run_id, emit)
        raise Interrupted(f"run {run.run_id} was stopped", advice=f"its record: {record.path}")
    outcome = _outcome(run, record, followed)
    if outcome.verdict.state != "succeeded":
        _sweep(fleet, inventory, run.run_id, emit)
    record.write("verdict.json", outcome.verdict.to_json())
    _fetch(fleet, inventory, run, record, emit)
    return outcome


@contextmanager
def _interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at every Ctrl-C, instead of breaking off wherever the program happens to be."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quietly(action: Callable[[], Any]) -> None:
    """Run an action in a thread; what it could not do is found by the sweep that follows."""
    try:
        action()
    except ClusterTrainError:
        pass


def _sweep(fleet: Fleet, inventory: Inventory, run_id: str, emit: Emit) -> None:
    """End what is left of the run on every node, and name it."""
    swept = launch.sweep(fleet, inventory.root, interpreter(inventory), run_id, inventory.job.grace_s)
    for node, found in swept.items():
        for what, text in (("killed", "was left running and has been ended"), ("left", "COULD NOT BE ENDED")):
            for process in found[what]:
                emit(Notice(text=f"{node}: process {process['pid']} of run {run_id} {text}"))


def _again(inventory: Inventory, verb: str, run_id: str) -> str:
    """The command that takes this run up again, as it can be typed."""
    return shlex.join(["cluster-train", *verb.split(), *([inventory.file] if inventory.file else []), "--run", run_id])


def _outcome(run: RunReference, record: RunRecord, followed: Followed) -> Outcome:
    verdict = judge(followed.status, followed.exits.values())
    tail = _last_lines(record, verdict.rank) if verdict.rank is not None else ()
    return Outcome(run_id=run.run_id, verdict=verdict, record=record.path, tail=tail)


def _last_lines(record: RunRecord, rank: int) -> tuple[str, ...]:
    """The end of a rank's stderr, or of its stdout where it wrote nothing there."""
    for stream in ("err", "out"):
        path = record.path / f"rank-{rank}.{stream}"
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            return tuple(text.splitlines()[-SHOWN_LINES:])
    return ()


def _fetch(fleet: Fleet, inventory: Inventory, run: RunReference, record: RunRecord, emit: Emit) -> None:
    paths = inventory.job.fetch
    if not paths:
        return
    missing = fetch(fleet.head, run.root, run.python, f"{run.run_dir}/work", paths, record.path)
    for path in missing:
        emit(Notice(text=f"job.fetch: the run left no {path} on {fleet.head.node}"))
    for path in sorted(set(paths) - set(missing)):
        emit(Step(text=f"fetched {record.path / path}"))
