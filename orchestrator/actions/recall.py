"""What the nodes were like when all was ready on them, believed again as long as nothing there was touched since.

Asking a node anew starts Python there; whether anything was touched is one `stat` of the files and directories that the
earlier answer came from. It is no more than a shortcut to "nothing to do": whoever finds something to do asks anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.actions import agent
from orchestrator.actions.probe import interpreter
from orchestrator.actions.resolve import cache_dir, write_cached
from orchestrator.errors import ClusterTrainError
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport, run
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory, Node

LOOK_TIMEOUT_S = 30
SOME_MISSING = 1  # the exit code of `stat`


@dataclass(frozen=True, slots=True, kw_only=True)
class Recollection:
    """One node as it was.

    Args:
        document: what its probe printed.
        paths: where that came from.
        seen: what `stat` said of those paths.
    """

    document: Mapping[str, Any]
    paths: Sequence[str]
    seen: str


class Recall:
    """What is remembered of an inventory's nodes. `look` is to be called once with each of them."""

    def __init__(self, inventory: Inventory) -> None:
        self._kept = {node.name: _stored(_file(inventory, node)) for node in inventory.nodes}
        self._untouched: set[str] = set()

    def look(self, transport: Transport) -> None:
        """Find out whether anything was touched on one node; whatever fails will be told by who asks in full."""
        kept = self._kept[transport.node]
        if kept and all(self._kept.values()):
            with suppress(ClusterTrainError):
                if _look(transport, kept.paths) == kept.seen:
                    self._untouched.add(transport.node)

    def facts(self) -> tuple[NodeFacts, ...] | None:
        """Of all nodes, as they were, in the inventory's order; None where one is not known or was touched since."""
        known = {name: kept for name, kept in self._kept.items() if kept and name in self._untouched}
        if len(known) < len(self._kept):
            return None
        try:
            return tuple(NodeFacts.from_json(name, kept.document) for name, kept in known.items())
        except ClusterTrainError:
            return None  # of another version


def remember(fleet: Fleet, inventory: Inventory, nodes: Sequence[NodeFacts]) -> None:
    """Keep the facts of nodes on which all is ready, as they are now."""
    facts = {node.name: node for node in nodes}

    def see(transport: Transport) -> Recollection | None:
        paths = _paths(facts[transport.node])
        seen = _look(transport, paths)
        return Recollection(document=facts[transport.node].document, paths=paths, seen=seen) if seen else None

    for node, recollection in zip(inventory.nodes, fleet.each(see).values(), strict=True):
        if recollection:
            write_cached(_file(inventory, node), json.dumps(asdict(recollection)))


def _paths(node: NodeFacts) -> tuple[str, ...]:
    """What a change of these facts would touch: directories that gain or lose an entry, and files that are replaced."""
    root = node.root
    held = [f"{root}/{name}" for name in ("agent", "envs", "jobs", "wheelhouse")]
    complete = [f"{root}/envs/{digest}/{name}" for digest in node.state.envs for name in ("complete.json", "bin/python")]
    keys = [f"{node.home}/.ssh/authorized_keys"] if node.authorized else []
    key = [f"{root}/ssh/id_ed25519"] if node.cluster_key else []
    # Replaced with the system's libraries, glibc among them; its boot names the machine.
    system = [node.python.executable, "/etc/ld.so.cache", "/proc/1"]
    return (*held, *complete, *keys, *key, *system)


def _look(transport: Transport, paths: Sequence[str]) -> str:
    """`stat` of the paths that are there: name, device, inode, size and time of the last change; empty where it cannot tell."""
    done = run(transport, ["stat", "-L", "-c", "%n %d %i %s %.9Y", "--", *paths], idle_timeout_s=LOOK_TIMEOUT_S)
    return done.stdout.decode(errors="replace") if done.exit_code in (0, SOME_MISSING) else ""


def _file(inventory: Inventory, node: Node) -> Path:
    """One file for each way to reach a root with the same scripts and interpreter."""
    login = inventory.login(node)
    way = [login.user, login.host, login.port, login.via, inventory.root, interpreter(inventory), agent.digest()]
    return cache_dir() / "nodes" / f"{hashlib.sha256(json.dumps(way).encode()).hexdigest()[:16]}.json"


def _stored(path: Path) -> Recollection | None:
    try:
        kept = json.loads(path.read_bytes())
        return Recollection(document=kept["document"], paths=kept["paths"], seen=kept["seen"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none yet, or damaged
