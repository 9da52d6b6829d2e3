"""All nodes at once, a bounded number at a time; the failures of many nodes are one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from orchestrator.errors import ClusterTrainError, FleetError, LockedKeyError, PasswordNeededError, UnreachableError
from orchestrator.nodes.local import LocalTransport, is_this_machine
from orchestrator.nodes.passwords import Passwords
from orchestrator.nodes.ssh_config import find_route
from orchestrator.nodes.transport import Transport, failure_of
from orchestrator.specs.inventory import Inventory, Node

T = TypeVar("T")


class Fleet:
    """Connected nodes in the inventory's order; the first is the head.

    `on_interrupt` is called at a Ctrl-C in `each`, while the connections still stand. `unreachable` are nodes that are missing
    here, and why.
    """

    def __init__(
        self, transports: Mapping[str, Transport], parallel: int, connect_to: Callable[[str], Transport] | None = None
    ) -> None:
        self.transports = dict(transports)
        self.unreachable: dict[str, str] = {}
        self.on_interrupt: Callable[[], None] = lambda: None
        self._parallel = parallel
        self._connect_to = connect_to

    @property
    def head(self) -> Transport:
        """node0: where the run is started and supervised."""
        return next(iter(self.transports.values()))

    def each(self, action: Callable[[Transport], T], nodes: Iterable[str] | None = None) -> dict[str, T]:
        """The result of `action` on every node (or those named); raises FleetError holding every failure."""
        chosen = self.transports if nodes is None else nodes
        try:
            return on_all({name: partial(action, self.transports[name]) for name in chosen}, self._parallel)
        except KeyboardInterrupt:
            try:
                self.on_interrupt()
            finally:
                self.close()  # so that the threads, which wait for their nodes, come back
            raise

    def reconnect(self, node: str) -> Transport:
        """A new connection in the place of one that broke; raises NodeError."""
        if self._connect_to is None:
            raise UnreachableError(f"{node}: the connection was lost", node=node)
        self.transports[node].close()
        self.transports[node] = self._connect_to(node)
        return self.transports[node]

    def close(self) -> None:
        """Drop every connection."""
        for transport in self.transports.values():
            transport.close()


def connect(
    inventory: Inventory,
    nodes: Iterable[Node] | None = None,
    *,
    needs_all: bool = True,
    greet: Callable[[Transport], None] | None = None,
    passwords: Passwords | None = None,
) -> Fleet:
    """Connect to every node at once; raises FleetError, with all connections closed again, when any cannot be reached.

    Without `needs_all` only the head must be there; the fleet names the others that are not.

    Args:
        greet: called with each node as soon as it is connected, while others still are not.
        passwords: asks the person for those of nodes that take no key; without it such a node is an error.
    """
    by_name = {node.name: node for node in (inventory.nodes if nodes is None else nodes)}
    made, failures = _connect_all(inventory, by_name, greet, passwords)
    if failures and (needs_all or next(iter(by_name)) in failures):
        _close(made)
        raise _all_of(failures)
    fleet = Fleet(made, inventory.parallel, lambda name: _transport(inventory, by_name[name]))
    fleet.unreachable = {name: failure.message for name, failure in failures.items()}
    return fleet


def connect_each(inventory: Inventory) -> tuple[dict[str, Transport], dict[str, ClusterTrainError]]:
    """Connect to every node at once: those that answered, and why the others did not. The caller closes the connections."""
    return _connect_all(inventory, {node.name: node for node in inventory.nodes})


def _connect_all(
    inventory: Inventory,
    by_name: Mapping[str, Node],
    greet: Callable[[Transport], None] | None = None,
    passwords: Passwords | None = None,
) -> tuple[dict[str, Transport], dict[str, ClusterTrainError]]:
    made: dict[str, Transport] = {}

    def connector(node: Node) -> Callable[[], None]:
        def connect_one() -> None:
            made[node.name] = _transport(inventory, node, passwords)
            if greet:
                greet(made[node.name])

        return connect_one

    failures: dict[str, ClusterTrainError] = {}
    try:
        _with_answers({name: connector(node) for name, node in by_name.items()}, inventory.parallel, passwords)
    except FleetError as error:
        failures = {name: error.failures[name] for name in by_name if name in error.failures}
    except BaseException:
        _close(made)
        raise
    return {name: made[name] for name in by_name if name in made}, failures


def _close(transports: Mapping[str, Transport]) -> None:
    for transport in transports.values():
        transport.close()


def _with_answers(connectors: Mapping[str, Callable[[], None]], parallel: int, passwords: Passwords | None) -> None:
    """Connect, and again where the person's answer may open the way: asked here, once for all nodes, never in a thread."""
    failures: dict[str, ClusterTrainError] = {}
    waiting = dict(connectors)
    while waiting:
        failed: dict[str, ClusterTrainError] = {}
        try:
            on_all(waiting, parallel)
        except FleetError as error:
            failed = error.failures
        again = _unlocked(failed, or_else=passwords is not None) | _with_password(failed, passwords)
        failures |= {name: failure for name, failure in failed.items() if name not in again}
        waiting = {name: connectors[name] for name in connectors if name in again}
    if failures:
        raise _all_of(failures)


def _unlocked(failures: Mapping[str, ClusterTrainError], *, or_else: bool) -> set[str]:
    """The nodes whose private key the person opened now; with `or_else` the others too, where a password may do instead."""
    locked = {name: failure.key_file for name, failure in failures.items() if isinstance(failure, LockedKeyError)}
    if not locked:
        return set()
    from orchestrator.nodes.ssh_keys import unlock

    opened = {file for file in sorted(set(locked.values())) if unlock(file) or or_else}
    return {name for name, file in locked.items() if file in opened}


def _with_password(failures: Mapping[str, ClusterTrainError], passwords: Passwords | None) -> set[str]:
    wanting = {name: failure for name, failure in failures.items() if isinstance(failure, PasswordNeededError)}
    return passwords.ask(wanting) if passwords and wanting else set()


def _all_of(failures: Mapping[str, ClusterTrainError]) -> FleetError:
    return FleetError("\n".join(error.message for error in failures.values()), failures)


def on_all(actions: Mapping[str, Callable[[], T]], parallel: int) -> dict[str, T]:
    """Run one action per node in threads; raises FleetError after all have ended if any failed."""
    if len(actions) == 1:  # no thread, so that a single node's traceback and Ctrl-C stay simple
        futures = {name: _done(action) for name, action in actions.items()}
    else:
        pool = ThreadPoolExecutor(max_workers=max(1, min(parallel, len(actions))))
        try:
            futures = {name: pool.submit(action) for name, action in actions.items()}
            wait(futures.values())
        finally:  # after a Ctrl-C the threads still wait for their nodes, and whoever catches it lets go of those
            pool.shutdown(wait=False, cancel_futures=True)
    failures = {name: failure_of(name, error) for name, future in futures.items() if (error := _exception(future))}
    if failures:
        raise _all_of(failures)
    return {name: future.result() for name, future in futures.items()}


def _transport(inventory: Inventory, node: Node, passwords: Passwords | None = None) -> Transport:
    login = inventory.login(node)
    route = find_route(node.name, login, inventory.ssh)
    if route.is_direct and _is_own_user(route.user) and is_this_machine(route.host, route.port):
        return LocalTransport(node.name)
    # Fabric takes a third of a second to import: a purely local cluster need not pay for it.
    from orchestrator.nodes.ssh import SshTransport

    return SshTransport(node.name, login, inventory.ssh, route, passwords)


def _is_own_user(user: str) -> bool:
    import getpass

    return user == getpass.getuser()


def _done(action: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)
    return future


def _exception(future: Future[T]) -> Exception | None:
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
