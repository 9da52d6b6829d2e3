"""The person's public key on nodes that a password let in, so that the next command needs none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from orchestrator.actions import agent
from orchestrator.errors import AuthenticationError, ClusterTrainError, FleetError
from orchestrator.nodes.fleet import Fleet, connect
from orchestrator.nodes.ssh_config import find_route
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.health import PERSONS
from orchestrator.specs.inventory import Inventory


def copy_key(
    fleet: Fleet, inventory: Inventory, names: Sequence[str], python: str, agrees: Callable[[str], bool], emit: Emit
) -> None:
    """Put the person's key into authorized_keys on these nodes, and log in with it. Where they do not agree, say what follows.

    Args:
        agrees: asks the person a question.

    Raises FleetError where the login by key does not work even then.
    """
    keys = _public_keys(inventory, names)
    if lacking := [name for name in names if name not in keys]:
        emit(
            Notice(text=f"you have no key that could let you in on {', '.join(lacking)}: ssh-keygen -t ed25519, then init again")
        )
    files = ", ".join(sorted({file for file, _ in keys.values()}))
    question = f"Put your public key ({files}) into ~/.ssh/authorized_keys on {', '.join(keys)}, so that no password is needed?"
    if not keys or not agrees(question):
        left = ", ".join(names)
        emit(
            Notice(text=f"{left}: without a key there only `init` can log in, for it alone asks for passwords (see ssh-copy-id)")
        )
        return
    loose = _put(fleet, inventory, {name: public for name, (_, public) in keys.items()}, python, emit)
    try:
        connect(inventory, [node for node in inventory.nodes if node.name in keys]).close()
    except FleetError as error:
        raise _refused(error, loose) from None


def _public_keys(inventory: Inventory, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """For each node the first key that would be tried there: where it is from, and `TYPE BASE64`."""
    from orchestrator.nodes.ssh_keys import public_key

    found: dict[str, tuple[str, str]] = {}
    for node in inventory.nodes:
        if node.name in names and (key := public_key(find_route(node.name, inventory.login(node), inventory.ssh))):
            found[node.name] = key
    return found


def _put(fleet: Fleet, inventory: Inventory, keys: Mapping[str, str], python: str, emit: Emit) -> dict[str, list[str]]:
    """Returns for each node where sshd's StrictModes may object."""
    answers = {}
    for name, public in keys.items():
        comment = f"cluster-train:{hashlib.sha256(public.encode()).hexdigest()[:16]}{PERSONS}"
        arguments = ["person", comment]
        answer = agent.call(fleet.transports[name], inventory.root, python, "authorize.py", arguments, stdin=public.encode())
        emit(Step(node=name, text="accepts your key now" if answer["is_new"] else "has your key already"))
        answers[name] = [str(path) for path in answer["loose"]]
    return answers


def _refused(error: FleetError, loose: Mapping[str, Sequence[str]]) -> FleetError:
    failures: dict[str, ClusterTrainError] = {}
    for name, failure in error.failures.items():
        if isinstance(failure, AuthenticationError):
            places = loose.get(name, ())
            failure = AuthenticationError(
                f"{name}: your key is in ~/.ssh/authorized_keys there, and sshd refuses it: {failure.message}",
                node=name,
                advice=f"others may write there, which sshd's StrictModes forbids: chmod go-w {' '.join(places)}   on {name}"
                if places
                else f"see AuthorizedKeysFile and PubkeyAuthentication in sshd_config on {name}, and its log",
            )
        failures[name] = failure
    return FleetError("\n".join(failure.message for failure in failures.values()), failures)
