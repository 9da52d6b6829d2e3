"""Making the nodes ready: environment, keys and the job's files; looking whether they are; freeing them of what is old."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.actions import trust
from orchestrator.actions.lockfile import LockFile
from orchestrator.actions.probe import probe
from orchestrator.actions.provision import Provisioned, choose, provision
from orchestrator.actions.prune import Unused, remove, survey, to_keep
from orchestrator.actions.recall import Recall, remember
from orchestrator.actions.shared_root import by_root
from orchestrator.actions.sync import JobFiles, collect, sync
from orchestrator.actions.verify import Verified, take_away, verify
from orchestrator.engine.reach import connected, probed, tell
from orchestrator.nodes.fleet import Fleet
from orchestrator.planning.checks import findings
from orchestrator.planning.network import NetworkChoice, network_of
from orchestrator.specs.events import Emit, Event, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock


def prepare(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None, repair: bool = False) -> Provisioned:
    """Everything but the launch: the environment and, where the inventory names a script, the job's files.

    Args:
        locked: the lock to follow, instead of resolving.
        repair: verify first, and install damaged environments anew. Raises PreflightError while one is in use.
    """
    files = collect(inventory.job) if inventory.job.script else None
    recall = Recall(inventory)
    with connected(inventory, greet=None if repair else recall.look) as fleet:
        if repair:
            _repair(fleet, inventory, emit, locked)
        elif (known := recall.facts()) and (stack := _still_ready(fleet, inventory, known, emit, files, locked)):
            return stack
        nodes, network, stack = ready(fleet, inventory, emit, files, locked)
        if not _is_all_there(fleet, nodes, network, stack.lock, files):  # as they were before
            nodes = probe(fleet, inventory)
        remember(fleet, inventory, nodes)
        return stack


def check(inventory: Inventory, emit: Emit, *, locked: LockFile | None = None) -> Verified:
    """What every node really has, against what the inventory (or a lock) asks for. Changes nothing."""
    with connected(inventory) as fleet:
        nodes = probed(fleet, inventory, emit)
        lock, choice = choose(inventory, nodes, emit, fetch="never", locked=locked)
        return verify(fleet, inventory, nodes, lock, choice)


def prune(
    inventory: Inventory, emit: Emit, is_wanted: Callable[[Mapping[str, Unused]], bool], *, locked: LockFile | None = None
) -> dict[str, list[str]]:
    """Remove from the nodes what neither recent runs nor this inventory use; per node the paths that are gone.

    Args:
        is_wanted: is shown what could go from each node, and decides.
    """
    files = collect(inventory.job) if inventory.job.script else None
    with connected(inventory) as fleet:
        nodes = probed(fleet, inventory, emit)
        lock, _ = choose(inventory, nodes, emit, fetch="never", locked=locked)
        keep = to_keep(fleet, nodes, lock, files.digest if files else None)
        roots = by_root(fleet, nodes)
        unused = survey(fleet, roots, keep)
        if not any(node.count for node in unused.values()) or not is_wanted(unused):
            return {name: [] for name in unused}
        return remove(fleet, roots, keep, emit)


def ready(
    fleet: Fleet, inventory: Inventory, emit: Emit, files: JobFiles | None, locked: LockFile | None = None
) -> tuple[tuple[NodeFacts, ...], NetworkChoice, Provisioned]:
    """Nodes that have the environment, accept the head's key, and hold the job's files; their network, their stack."""
    nodes = probed(fleet, inventory, emit)
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
    fleet: Fleet,
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
    emit: Emit,
    files: JobFiles | None,
    locked: LockFile | None,
) -> Provisioned | None:
    """The stack, where everything is on the nodes by what is known of them; None where that is not so.

    Args:
        nodes: as they were; nothing was touched there since.
    """
    events: list[Event] = []
    lock, choice = choose(inventory, nodes, events.append, fetch="never", locked=locked)
    if not _is_all_there(fleet, nodes, network_of(inventory, nodes), lock, files):
        return None
    tell(fleet, nodes, emit)
    for event in events:
        emit(event)
    emit(Step(text=f"environment {lock.digest} is on every node: nothing to install, as nothing was touched there"))
    return Provisioned(lock=lock, choice=choice, changes=())


def _is_all_there(fleet: Fleet, nodes: Sequence[NodeFacts], network: NetworkChoice, lock: Lock, files: JobFiles | None) -> bool:
    """Whether, by these facts, every node has the environment and the job's files, and lets the head in."""
    have_files = files is None or all(files.digest in node.state.jobs for node in nodes)
    have_environment = all(lock.digest in node.state.envs for node in nodes)
    return have_files and have_environment and not trust.unauthorized(fleet, nodes, network.endpoints)


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
