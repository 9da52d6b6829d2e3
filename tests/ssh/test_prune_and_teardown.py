"""What is taken away from nodes again: `provision --prune` what no recent run uses, `teardown` everything, and nothing else."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
from commands import Ran
from labs import Lab, ended, whole_wheels
from sshd import SshdNodes, can_mount

from orchestrator.actions import agent
from orchestrator.actions.inventory_file import load_inventory
from orchestrator.engine.reach import connected
from orchestrator.engine.survey import teardown
from orchestrator.specs.events import Event, Notice

pytestmark = pytest.mark.stack

FOREIGN_KEY = b"ssh-ed25519 AAAAforeign somebody else, no end of line"


def at_a_terminal(lab: Lab, inventory: Path, *, answer: str) -> Ran:
    """`provision --prune` as a person calls it, who types the answer."""
    ours, its = pty.openpty()
    try:
        process = lab.start(inventory, "--prune", stdin=its)
        os.write(ours, f"{answer}\n".encode())
        return ended(process)
    finally:
        os.close(ours)
        os.close(its)


def test_what_no_run_uses_goes_and_the_inventorys_stack_stays(lab: Lab, tmp_path: Path) -> None:
    """Sizes are shown first; the older stack and its wheels go, the other needs nothing afterwards."""
    root = tmp_path / "root"
    old, new = lab.inventory(tmp_path / "a.yml", root, "small", "large"), lab.inventory(tmp_path / "b.yml", root, "small")
    for inventory in (old, new):
        assert lab.provision(inventory).exit_code == 0
    (used_uv,) = (root / "bin").glob("uv-*")
    old_uv = used_uv.with_name("uv-" + "0" * 16)  # as an earlier stack left it
    old_uv.write_bytes(b"x" * 30_000_000)
    asked = lab.provision(new, "--prune")
    assert asked.exit_code == 2 and "no terminal to answer at" in asked.stderr and "--yes" in asked.stderr
    for what, size in (("environments", "80."), ("wheels", "80."), ("installers", "30.0 MB")):
        (row,) = [line for line in asked.stderr.splitlines() if f" {what} " in line]
        assert size in row and row.startswith("node0")
    assert len(list((root / "envs").glob("[!.]*"))) == 2 and old_uv.exists()
    refused = at_a_terminal(lab, new, answer="n")
    assert refused.exit_code == 0 and "nothing was removed" in refused.stdout and old_uv.exists()
    pruned = lab.provision(new, "--prune", "--yes", "--json")
    assert pruned.exit_code == 0, pruned.stdout
    assert sorted(Path(path).parent.name for path in pruned.result["removed"]["node0"]) == ["bin", "envs", "wheelhouse"]
    assert sorted(path.name for path in (root / "bin").iterdir()) == ["uv", used_uv.name]
    assert whole_wheels(root) == ["accelerate", "datasets", "small", "torch", "transformers", "uv"]
    assert "nothing to install" in lab.provision(new).stderr
    assert lab.provision(new, "--prune", "--yes").stdout == "nothing was removed\n"


def test_teardown_leaves_the_nodes_as_they_were(lab: Lab, sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """Two machines with a key between them: roots are gone, authorized_keys is what it was, to the byte."""
    if not can_mount():
        pytest.skip("nodes with disks of their own need mount namespaces, which only root may make")
    (disk := tmp_path / "disk").mkdir()
    pair = Lab(nodes=sshd_factory(2, disk=disk), wheels=lab.wheels, cache=lab.cache)
    keys = [node.home / ".ssh" / "authorized_keys" for node in pair.nodes]
    for path in keys:
        path.write_bytes(path.read_bytes() + FOREIGN_KEY)
    before = [path.read_bytes() for path in keys]
    inventory = load_inventory(str(pair.inventory(tmp_path / "lab.yml", disk / "root")))
    with connected(inventory) as fleet:
        for transport in fleet.transports.values():
            agent.ship(transport, inventory.root, "python3")
        made = agent.call(fleet.head, inventory.root, "python3", "authorize.py", ["key", inventory.root])
        other = list(fleet.transports.values())[1]
        allow = ["allow", "cluster-train:c0ffee:127.0.0.2", "127.0.0.2"]
        agent.call(other, inventory.root, "python3", "authorize.py", allow, stdin=made["public"].encode())
    assert keys[1].read_bytes() != before[1]
    (pair.nodes[1].disk / "root" / "notes.txt").write_text("mine")
    said: list[Event] = []
    removed = teardown(inventory, said.append)
    assert [path.read_bytes() for path in keys] == before
    assert list(pair.nodes[0].disk.iterdir()) == []
    assert [path.relative_to(pair.nodes[1].disk).as_posix() for path in pair.nodes[1].disk.rglob("*")] == [
        "root",
        "root/notes.txt",
    ]
    assert len(removed["node0"]) == 2
    assert Notice(text=f"node1: {disk}/root/notes.txt is not ours, and stays") in said
