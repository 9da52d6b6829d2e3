"""Two of four nodes fail half-way, for different reasons: the others are finished, both are named, and the next run completes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from labs import SESSION, Lab, can_have_cards, ended, large_is_under_way, wait_for, whole_wheels
from sshd import SshdNode, SshdNodes

pytestmark = pytest.mark.stack

SMALL_DISK_BYTES = 700_000_000  # enough for the wheels and the environment, as far as can be told before


def in_its_namespace(node: SshdNode, *command: str | Path) -> None:
    """Run a command that sees the disks which the node sees."""
    subprocess.run(["nsenter", "--target", str(node.pid), "--mount", *command], check=True, capture_output=True, timeout=60)


def as_seen_by(node: SshdNode, path: Path) -> Path:
    return Path(f"/proc/{node.pid}/root{path}")


def has_the_environment(root: Path) -> bool:
    return len(list((root / "envs").glob("[!.]*/complete.json"))) == 1


def test_both_are_named_and_the_others_are_finished(lab: Lab, sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """While wheels are sent node1's sshd is killed and node2's disk fills up: exit code 4, both named; the others are whole."""
    if not can_have_cards():
        pytest.skip("nodes with disks and cards of their own need namespaces, which this user may not make")
    (disk := tmp_path / "disk").mkdir()
    four = Lab(nodes=sshd_factory(4, disk=disk, ForceCommand=SESSION), wheels=lab.wheels, cache=lab.cache)
    inventory = four.inventory(tmp_path / "lab.yml", disk / "root", "large")
    _, killed, full, _ = four.nodes
    in_its_namespace(full, "mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", disk)
    roots = [as_seen_by(node, disk / "root") for node in four.nodes]

    process = four.start(inventory)
    over: Callable[[], bool] = lambda: process.poll() is not None  # noqa: E731
    with ThreadPoolExecutor(2) as pool:

        def kill() -> None:
            wait_for(lambda: large_is_under_way(roots[1]), over)
            sshd_factory.stop(killed)

        def fill() -> None:
            wait_for(lambda: large_is_under_way(roots[2]), over)
            with pytest.raises(subprocess.CalledProcessError):  # until nothing is left
                in_its_namespace(full, "dd", "if=/dev/zero", f"of={disk}/ballast", "bs=1M")

        for done in [pool.submit(kill), pool.submit(fill)]:
            done.result()
    failed = ended(process)
    assert failed.exit_code == 4, failed.stderr
    error = failed.stderr[failed.stderr.index("error: ") :]
    assert "node1" in error and "node2" in error and "No space left on device" in error, error
    assert "node0" not in error and "node3" not in error, error
    assert has_the_environment(roots[0]) and has_the_environment(roots[3])
    assert not has_the_environment(roots[2])
    whole_wheels(roots[2])

    again = Lab(nodes=[four.nodes[0], sshd_factory.start_again(killed), full, four.nodes[3]], wheels=lab.wheels, cache=lab.cache)
    in_its_namespace(full, "rm", f"{disk}/ballast")
    second = again.provision(inventory, "--json")
    assert second.exit_code == 0, second.stdout + second.stderr
    assert second.result["installed_on"] == ["node1", "node2"]
    assert all(has_the_environment(as_seen_by(node, disk / "root")) for node in again.nodes)
    assert again.provision(inventory, "--check", "--json").result["packages"]["torch"]["differs"] == []
