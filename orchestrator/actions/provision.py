"""Make every node's environment what the lock says: send the wheels it lacks, install, verify, rename."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from orchestrator.actions import agent
from orchestrator.actions.backend import as_loaded, as_locked, lock_of, without_on
from orchestrator.actions.carry import Carrier, Delivery, cargo_of
from orchestrator.actions.lockfile import LockFile
from orchestrator.actions.probe import interpreter
from orchestrator.actions.resolve import have_wheels, sound_wheels, wheel_path
from orchestrator.actions.shared_root import by_root
from orchestrator.actions.verify import verify
from orchestrator.errors import ClusterTrainError, ProvisionError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport, check, run
from orchestrator.planning.compat import ONECCL, StackChoice
from orchestrator.planning.preflight import refuse, unfit, unfit_for
from orchestrator.planning.wheels import install_plan, missing_wheels, plan_stack, refuse_other_lock
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock
from orchestrator.specs.run import Endpoint

INSTALL_IDLE_TIMEOUT_S = 1200
SEEN_WITHIN_S = 90  # a client of NFS may keep what it knows of a directory for 60 s (acdirmax)

Fetch = Literal["never", "needed", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What was done on one node.

    Args:
        unusable: {module: why} of what need not import there, and does not.
    """

    node: str
    delivery: Delivery
    install_s: float
    unusable: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """The stack that the nodes have, and what had to be done for it."""

    lock: Lock
    choice: StackChoice
    changes: tuple[Change, ...]

    @property
    def installed_on(self) -> tuple[str, ...]:
        """The nodes where something had to be installed."""
        return tuple(change.node for change in self.changes)


def choose(
    inventory: Inventory, nodes: Sequence[NodeFacts], emit: Emit, *, fetch: Fetch = "needed", locked: LockFile | None = None
) -> tuple[Lock, StackChoice]:
    """The lock for these nodes, and what the stack comes to.

    Args:
        fetch: whether to have the lock's wheels at hand: needed means where a node lacks the environment.
        locked: a lock from a file, which is taken instead of resolving.

    Raises ProvisionError where the lock of a file (`locked`) is not one for these nodes and this inventory.
    """
    request = plan_stack(inventory.stack, nodes)
    told = _tell(request.choice, (), emit)
    if locked:
        request = as_locked(request, locked)
        refuse_other_lock(locked.lock, request, str(locked.path))

    def say(text: str) -> None:
        emit(Step(text=text))

    lock, request = (locked.lock, request) if locked else lock_of(request, say, fetch=False)
    is_lacking = any(lock.digest not in node.state.envs for node in nodes)
    if fetch == "always" or (fetch == "needed" and is_lacking):
        if locked is None:
            lock, request = lock_of(request, say, fetch=True)
        else:
            have_wheels(lock, request, say)
    choice = as_loaded(request.choice, lock.digest, nodes)
    _tell(choice, told, emit)
    return lock, choice


def _tell(choice: StackChoice, told: Sequence[str], emit: Emit) -> Sequence[str]:
    """Emit the notes of a choice that have not been told; all of them."""
    for note in choice.notes[len(told) :]:
        emit(Notice(text=note))
    return choice.notes


def provision(
    fleet: Fleet,
    inventory: Inventory,
    nodes: Sequence[NodeFacts],
    emit: Emit,
    locked: LockFile | None = None,
    endpoints: Sequence[Endpoint] = (),
) -> Provisioned:
    """Bring every node to the lock's environment, of a file where one is given; nodes that have it already are left alone.

    With `endpoints`, addresses on the cluster network where the head's key is accepted, the head may feed the others.

    Raises ProvisionError before anything is copied, naming every node that cannot be used as it is, and FleetError (exit
    code 4) naming every node that failed on the way; the others are finished all the same.
    """
    refuse(unfit(nodes, time.time()))
    lock, choice = choose(inventory, nodes, emit, locked=locked)
    roots = by_root(fleet, [node for node in nodes if lock.digest not in node.state.envs])
    lacking = {first.name: first for first, *_ in roots}
    sharing = [node for _, *others in roots for node in others]
    for first, *others in roots:
        for node in others:
            emit(Step(node=node.name, text=f"has its root in common with {first.name}, where it is installed"))
    refuse(unfit_for(lock, lacking.values(), lambda wheel: wheel_path(wheel).stat().st_size))
    missing = {name: missing_wheels(lock, node) for name, node in lacking.items()}
    to_send = dict.fromkeys(wheel for wheels in missing.values() for wheel in wheels)
    sound_wheels(list(to_send), plan_stack(inventory.stack, nodes), lambda text: emit(Step(text=text)))
    cargo = {name: cargo_of(node, missing[name]) for name, node in lacking.items()}
    carrier = Carrier(fleet, inventory, nodes, endpoints, cargo, emit)

    def provision_one(transport: Transport) -> Change:
        try:
            delivery = carrier.bring(transport)
            started = time.monotonic()
            unusable = _install(transport, lacking[transport.node], inventory, lock, choice, emit)
            install_s = time.monotonic() - started
            return Change(node=transport.node, delivery=delivery, install_s=install_s, unusable=unusable)
        except ClusterTrainError as error:
            raise _as_provision_error(transport.node, error) from error

    changes = fleet.each(provision_one, lacking)
    if sharing:
        _verify_shared(fleet, inventory, sharing, lock, choice)
    if not lacking:
        emit(Step(text=f"environment {lock.digest} is on every node: nothing to install"))
    loaded = without_on(choice, {name: change.unusable[ONECCL] for name, change in changes.items() if ONECCL in change.unusable})
    _tell(loaded, choice.notes, emit)
    return Provisioned(lock=lock, choice=loaded, changes=tuple(changes.values()))


def _verify_shared(fleet: Fleet, inventory: Inventory, sharing: Sequence[NodeFacts], lock: Lock, choice: StackChoice) -> None:
    """Raise ProvisionError where an environment that another node installed in the common root is not seen, or does not work."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        drift = verify(fleet, inventory, sharing, lock, choice).comparison.drift
        if all(one.kind != "missing" for one in drift) or time.monotonic() > deadline:
            break
        time.sleep(1)
    wrong = [one for one in drift if one.kind in ("missing", "damaged")]
    if wrong:
        raise ProvisionError(
            "installed by another node in a common root, and not usable here:\n    "
            + "\n    ".join(f"{one.node}: {one.what}" for one in wrong),
            advice="the nodes need the same interpreter at the same path and alike systems: see `cluster-train provision "
            "--check`; or name a `root` that each node has for itself",
        )


def _as_provision_error(node: str, error: ClusterTrainError) -> ClusterTrainError:
    return ProvisionError(error.message if node in error.message else f"{node}: {error.message}", advice=error.advice)


def _install(
    transport: Transport, node: NodeFacts, inventory: Inventory, lock: Lock, choice: StackChoice, emit: Emit
) -> dict[str, str]:
    """Install; {module: why} of what need not import, and does not."""
    argv = agent.command(node.root, interpreter(inventory), "install.py", [])
    plan = install_plan(lock, choice, node.root, node.python.executable)
    last: dict[str, Any] = {}

    def follow(line: bytes) -> None:
        last.clear()
        last.update(json.loads(line))
        if last.get("step") not in (None, "lock"):
            emit(Step(node=transport.node, text=f"{last['step']}: {last['detail']}"))

    completed = run(transport, argv, stdin=json.dumps(plan).encode(), idle_timeout_s=INSTALL_IDLE_TIMEOUT_S, on_line=follow)
    if "damaged" in last:
        raise ProvisionError(
            f"{transport.node}: {completed.stderr.strip().removeprefix('install: ')}",
            advice=shlex.join(["cluster-train", "provision", "--repair", inventory.file or "INVENTORY"])
            + "   takes what is damaged away, and sends and installs it again",
        )
    check(transport, argv, replace(completed, stdout=b""))
    emit(Step(node=transport.node, text=f"environment {lock.digest} ready in {last.get('seconds')} s"))
    return dict(last.get("unusable", {}))
