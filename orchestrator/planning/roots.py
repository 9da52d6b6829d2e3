"""Which nodes have one root between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.specs.facts import NodeFacts


def distinct_roots(nodes: Sequence[NodeFacts], shared: Mapping[str, str] | None = None) -> list[NodeFacts]:
    """One node for each root directory: several nodes on one machine (loopback addresses) share theirs.

    Args:
        shared: of machines that have their root on one network file system, each to the first of them.
    """
    first_of = shared or {}
    places = {node.name: _place(node) for node in nodes}
    keys = [places.get(first_of.get(node.name, node.name)) for node in nodes]
    return [node for index, node in enumerate(nodes) if keys.index(keys[index]) == index]


def perhaps_shared(nodes: Sequence[NodeFacts]) -> list[list[NodeFacts]]:
    """Groups of machines whose roots may be one directory of a network file system.

    The number of the root's inode comes from the file server and is the same on all its clients; the number of the device is
    each machine's own. Equal numbers may be chance: whether they mean anything is for `actions/shared_root.py` to find out.
    """
    groups: dict[tuple[str, str], list[NodeFacts]] = {}
    for node in distinct_roots(nodes):
        if node.state.nonce_dir_id:
            inode = node.state.nonce_dir_id.partition(":")[2]
            groups.setdefault((node.root, inode), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _place(node: NodeFacts) -> object:
    return (node.machine, node.root) if node.machine.identifies else node.name
