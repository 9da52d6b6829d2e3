"""Make every node's environment what the lock says: send the wheels it lacks, install, verify, rename."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.actions import agent
from orchestrator.actions.probe import interpreter
from orchestrator.actions.resolve import lock_for, wheel_path
from orchestrator.errors import ClusterTrainError, ProvisionError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import CHUNK_BYTES, Transport, check, run
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.wheels import install_plan, missing_wheels, plan_stack
from orchestrator.specs.events import Emit, Notice, Step, Transfer
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock, LockedWheel

INSTALL_IDLE_TIMEOUT_S = 1200
COPY_IDLE_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """The stack that the nodes have.

    Args:
        installed_on: the nodes where something had to be installed.
    """

    lock: Lock
    choice: StackChoice
    installed_on: tuple[str, ...]


def choose(inventory: Inventory, nodes: Sequence[NodeFacts], emit: Emit, *, fetch: bool = True) -> tuple[Lock, StackChoice]:
    """The lock for these nodes, with `fetch` its wheels at hand, and what the stack comes to."""
    request = plan_stack(inventory.stack, nodes)
    for note in request.choice.notes:
        emit(Notice(text=note))
    return lock_for(request, lambda text: emit(Step(text=text)), fetch=fetch), request.choice


def provision(fleet: Fleet, inventory: Inventory, nodes: Sequence[NodeFacts], emit: Emit) -> Provisioned:
    """Bring every node to the lock's environment; nodes that have it already are left alone.

    Raises FleetError (exit code 4) naming every node that failed; the others are finished all the same.
    """
    lock, choice = choose(inventory, nodes, emit)
    lacking = {node.name: node for node in distinct_roots(nodes) if lock.digest not in node.state.envs}

    def provision_one(transport: Transport) -> None:
        try:
            _send_wheels(transport, lacking[transport.node], missing_wheels(lock, lacking[transport.node]), emit)
            _install(transport, lacking[transport.node], inventory, lock, choice, emit)
        except ClusterTrainError as error:
            raise _as_provision_error(transport.node, error) from error

    fleet.each(provision_one, lacking)
    if not lacking:
        emit(Step(text=f"environment {lock.digest} is on every node: nothing to install"))
    return Provisioned(lock=lock, choice=choice, installed_on=tuple(lacking))


def distinct_roots(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """One node for each root directory: several nodes on one machine (loopback addresses) share theirs."""
    keys = [(node.machine, node.root) if node.machine.identifies else node.name for node in nodes]
    return [node for index, node in enumerate(nodes) if keys.index(keys[index]) == index]


def _as_provision_error(node: str, error: ClusterTrainError) -> ClusterTrainError:
    return ProvisionError(error.message if node in error.message else f"{node}: {error.message}", advice=error.advice)


def _send_wheels(transport: Transport, node: NodeFacts, wheels: Sequence[LockedWheel], emit: Emit) -> None:
    if not wheels:
        return
    sizes = [wheel_path(wheel).stat().st_size for wheel in wheels]
    total = sum(sizes)
    _check_space(node, total)
    emit(Step(node=transport.node, text=f"sending {len(wheels)} wheels, {total / 1e6:.0f} MB"))
    argv = agent.command(node.root, node.python.executable, "unpack.py", ["--sha256", f"{node.root}/wheelhouse"])
    started = time.monotonic()

    def stream() -> Iterator[bytes]:
        sent = 0
        for chunk in _wheel_archive(wheels):
            yield chunk
            sent += len(chunk)
            emit(Transfer(node=transport.node, what="wheels", sent_bytes=min(sent, total), total_bytes=total))

    check(transport, argv, run(transport, argv, stdin=stream(), idle_timeout_s=COPY_IDLE_TIMEOUT_S))
    rate = total / 1e6 / max(time.monotonic() - started, 1e-3)
    emit(Step(node=transport.node, text=f"{len(wheels)} wheels sent at {rate:.0f} MB/s"))


def _check_space(node: NodeFacts, wheels_bytes: int) -> None:
    """Wheels unpack to about three and a half times their size (measured on torch 2.13's stack: 428 MB to 1.5 GB)."""
    needed_bytes = int(wheels_bytes * 4.5)
    if node.disk.free_bytes < needed_bytes:
        raise ProvisionError(
            f"{node.name}: {node.root} has {node.disk.free_bytes / 1e9:.1f} GB free, "
            f"about {needed_bytes / 1e9:.1f} GB are needed",
            advice="free some space there, or name another `root`",
        )


def _wheel_archive(wheels: Sequence[LockedWheel]) -> Iterator[bytes]:
    """A tar stream of `<sha256>/<filename>` members, without ever holding a wheel in memory."""
    for wheel in wheels:
        path = wheel_path(wheel)
        member = tarfile.TarInfo(f"{wheel.sha256}/{wheel.filename}")
        member.size = path.stat().st_size
        member.mode = 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        with path.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                yield chunk
        yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
    yield b"\0" * tarfile.BLOCKSIZE * 2


def _install(transport: Transport, node: NodeFacts, inventory: Inventory, lock: Lock, choice: StackChoice, emit: Emit) -> None:
    argv = agent.command(node.root, interpreter(inventory), "install.py", [])
    plan = install_plan(lock, choice, node.root, node.python.executable)
    last: dict[str, object] = {}

    def follow(line: bytes) -> None:
        last.clear()
        last.update(json.loads(line))
        if "step" in last and last["step"] != "lock":
            emit(Step(node=transport.node, text=f"{last['step']}: {last['detail']}"))

    completed = run(transport, argv, stdin=json.dumps(plan).encode(), idle_timeout_s=INSTALL_IDLE_TIMEOUT_S, on_line=follow)
    check(transport, argv, replace(completed, stdout=b""))
    emit(Step(node=transport.node, text=f"environment {lock.digest} ready in {last.get('seconds')} s"))
