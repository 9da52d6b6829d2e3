"""Which backend a stack really gets: what `backend: auto` takes where oneCCL cannot be had, or does not load on a node.

All nodes and ranks use one backend. That the wheels of oneCCL cannot be had is remembered beside the locks, so that the nodes'
environment does not change from one run to the next: asking for `backend: ccl` by name tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.actions.lockfile import LockFile
from orchestrator.actions.resolve import OneCCLMissingError, cache_dir, has_made_oneccl, lock_for, write_cached
from orchestrator.errors import ProvisionError
from orchestrator.planning.compat import ONECCL, StackChoice
from orchestrator.planning.wheels import StackRequest
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.lock import Lock


def lock_of(request: StackRequest, say: Callable[[str], None], *, fetch: bool) -> tuple[Lock, StackRequest]:
    """The lock that answers a request, and the request as it could be met: without oneCCL where that is missing and need not be.

    Raises ResolveError as `resolve.lock_for` does.
    """
    request = as_known(request)
    try:
        return lock_for(request, say, fetch=fetch), request
    except OneCCLMissingError as error:
        if not request.choice.may_do_without:
            raise
        write_cached(_note(request), error.why)
        request = as_known(request)
        return lock_for(request, say, fetch=fetch), request


def as_known(request: StackRequest) -> StackRequest:
    """The request, without oneCCL where it is known that its wheels cannot be had, and it need not be there."""
    if not request.choice.may_do_without or has_made_oneccl():
        return request
    try:
        why = _note(request).read_text()
    except OSError:
        return request
    return replace(request, choice=request.choice.without_oneccl(f"oneCCL cannot be had: {why}"))


def as_locked(request: StackRequest, locked: LockFile) -> StackRequest:
    """The request, without oneCCL where the lock of a file has none, and it need not be there."""
    if not request.choice.may_do_without or any(wheel.name == ONECCL.replace("_", "-") for wheel in locked.lock.wheels):
        return request
    return replace(request, choice=request.choice.without_oneccl(f"{locked.path} was written without oneCCL"))


def as_loaded(choice: StackChoice, digest: str, nodes: Sequence[NodeFacts]) -> StackChoice:
    """The stack as the nodes' environments can run it: on gloo where oneCCL did not load on one of them.

    Raises ProvisionError where oneCCL was asked for by name.
    """
    reasons = {node.name: one.why for node in nodes for one in node.state.unusable if (one.env, one.module) == (digest, ONECCL)}
    return without_on(choice, reasons)


def without_on(choice: StackChoice, reasons: dict[str, str]) -> StackChoice:
    """The same, by node name and reason."""
    if not choice.has_oneccl or not reasons:
        return choice
    why = "oneCCL does not load on " + "; ".join(f"{node}: {reason}" for node, reason in reasons.items())
    if not choice.may_do_without:
        raise ProvisionError(f"backend ccl: {why}", advice="use `backend: gloo`, or auto, which takes ccl where it can")
    return choice.without_oneccl(why)


def _note(request: StackRequest) -> Path:
    return cache_dir() / "locks" / f"{request.digest}.no-oneccl"
