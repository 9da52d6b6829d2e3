"""All nodes at once, a bounded number at a time; the failures of many nodes are one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from orchestrator.errors import ClusterTrainError, FleetError
from orchestrator.nodes.local import LocalTransport, is_this_machine
from orchestrator.nodes.transport import Transport, failure_of
from orchestrator.specs.inventory import Inventory, Node

T = TypeVar("T")


class Fleet:
    """Connected nodes in the inventory's order; the first is the head."""

    def __init__(self, transports: Mapping[str, Transport], parallel: int) -> None:
        self.transports = dict(transports)
        self._parallel = parallel

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
            self.close()  # so that the threads, which wait for their nodes, come back
            raise

    def close(self) -> None:
        """Drop every connection."""
        for transport in self.transports.values():
            transport.close()


def connect(inventory: Inventory, nodes: Iterable[Node] | None = None) -> Fleet:
    """Connect to every node at once; raises FleetError, with all connections closed again, when any cannot be reached."""
    made: dict[str, Transport] = {}

    def connector(node: Node) -> Callable[[], None]:
        def connect_one() -> None:
            made[node.name] = _transport(inventory, node)

        return connect_one

    chosen = list(inventory.nodes if nodes is None else nodes)
    try:
        on_all({node.name: connector(node) for node in chosen}, inventory.parallel)
    except BaseException:
        for transport in made.values():
            transport.close()
        raise
    return Fleet({node.name: made[node.name] for node in chosen}, inventory.parallel)


def connect_each(inventory: Inventory) -> tuple[dict[str, Transport], dict[str, ClusterTrainError]]:
    """Connect to every node at once: those that answered, and why the others did not. The caller closes the connections."""

    def connector(node: Node) -> Callable[[], Transport | ClusterTrainError]:
        def connect_one() -> Transport | ClusterTrainError:
            try:
                return _transport(inventory, node)
            except Exception as error:
                return failure_of(node.name, error)

        return connect_one

    found = on_all({node.name: connector(node) for node in inventory.nodes}, inventory.parallel)
    failures = {name: result for name, result in found.items() if isinstance(result, ClusterTrainError)}
    return {name: result for name, result in found.items() if not isinstance(result, ClusterTrainError)}, failures


def on_all(actions: Mapping[str, Callable[[], T]], parallel: int) -> dict[str, T]:
    """Run one action per node in threads; raises FleetError after all have ended if any failed."""
    if len(actions) == 1:  # no thread, so that a single node's traceback and Ctrl-C stay simple
        futures = {name: _done(action) for name, action in actions.items()}
    else:
        with ThreadPoolExecutor(max_workers=max(1, min(parallel, len(actions)))) as pool:
            futures = {name: pool.submit(action) for name, action in actions.items()}
    failures = {name: failure_of(name, error) for name, future in futures.items() if (error := _exception(future))}
    if failures:
        raise FleetError("\n".join(error.message for error in failures.values()), failures)
    return {name: future.result() for name, future in futures.items()}


def _transport(inventory: Inventory, node: Node) -> Transport:
    login = inventory.login(node)
    if login.via is None and _is_own_user(login.user) and is_this_machine(login.host, login.port):
        return LocalTransport(node.name)
    # Fabric takes a third of a second to import: a purely local cluster need not pay for it.
    from orchestrator.nodes.ssh import SshTransport

    return SshTransport(node.name, login, inventory.ssh)


def _is_own_user(user: str | None) -> bool:
    if user is None:
        return True
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
