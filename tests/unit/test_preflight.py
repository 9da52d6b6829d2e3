"""What stands in the way of provisioning is told for every node at once, before anything is copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ProvisionError
from orchestrator.planning.checks import findings
from orchestrator.planning.preflight import Finding, needed_bytes, refuse, unfit, unfit_for
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.lock import Lock, LockedWheel

FACTS = Path(__file__).resolve().parent.parent / "data" / "facts" / "x86_64-64cpu.json"
NOW_UNIX_S = 1_800_000_000.0
SIZE_BYTES = 100_000_000


def node(name: str = "node0") -> NodeFacts:
    """A node with which nothing is wrong."""
    facts = NodeFacts.from_json(name, json.loads(FACTS.read_text()))
    return replace(
        facts,
        arch="x86_64",
        libc=("glibc", "2.36"),
        python=replace(facts.python, version="3.11.2", has_venv=True),
        root="/data/ct",
        user="trainer",
        time_unix_s=NOW_UNIX_S,
        disk=replace(facts.disk, free_bytes=10**10, writable=True),
    )


def lock(*, with_uv: bool = True) -> Lock:
    def wheel(letter: str) -> LockedWheel:
        return LockedWheel(name=letter, version="1.0", filename=f"{letter}.whl", sha256=letter * 64, source="")

    return Lock(requirements=(), target="t", wheels=(wheel("a"), wheel("b")), installer=wheel("c") if with_uv else None)


def size_bytes(wheel: LockedWheel) -> int:
    return SIZE_BYTES


def unwritable(node: NodeFacts) -> NodeFacts:
    return replace(node, disk=replace(node.disk, writable=False))


def yesterday(node: NodeFacts) -> NodeFacts:
    return replace(node, time_unix_s=NOW_UNIX_S - 3 * 86_400)


def on_musl(node: NodeFacts) -> NodeFacts:
    return replace(node, libc=("musl", "1.2"))


def test_good_nodes_pass() -> None:
    """Where nothing is wrong nothing is found, and nothing is refused."""
    nodes = [node("a"), node("b")]
    assert unfit(nodes, NOW_UNIX_S) == () and unfit_for(lock(), nodes, size_bytes) == ()
    refuse(())


@pytest.mark.parametrize(
    ("change", "figure"), [(unwritable, "/data/ct as trainer"), (yesterday, "by -3.0 days"), (on_musl, "musl 1.2")]
)
def test_each_obstacle_names_node_figure_and_remedy(change: Callable[[NodeFacts], NodeFacts], figure: str) -> None:
    """One bad node among two: it alone is found, with what is wrong there and what to do."""
    (found,) = unfit([node("good"), change(node("bad"))], NOW_UNIX_S)
    assert (found.severity, found.node, found.evidence) == ("error", "bad", figure) and found.remedy


def test_all_problems_of_all_nodes_are_one_error() -> None:
    """Nobody mends one node, tries again, and learns of the next."""
    nodes = [unwritable(node("a")), yesterday(unwritable(node("b"))), replace(node("c"), arch="aarch64")]
    with pytest.raises(ProvisionError) as refused:
        refuse(unfit(nodes, NOW_UNIX_S))
    assert refused.value.exit_code == 4
    for part in ("a /data/ct as trainer, b /data/ct as trainer", "b by -3.0 days", "a x86_64, b x86_64, c aarch64"):
        assert part in refused.value.message
    assert "timedatectl" in refused.value.advice and refused.value.advice.count("make this one writable") == 1


def test_room_is_needed_for_the_wheels_that_are_missing_and_for_what_is_in_all_of_them() -> None:
    """A wheel that is there already need not be sent, but is unpacked all the same."""
    facts = node()
    holds_one = replace(facts, state=replace(facts.state, wheels=("a" * 64,)))
    assert needed_bytes(lock(), facts, size_bytes) - needed_bytes(lock(), holds_one, size_bytes) == SIZE_BYTES
    assert needed_bytes(lock(), holds_one, size_bytes) > 3 * SIZE_BYTES


def test_too_little_room_is_told_with_both_figures() -> None:
    """What is free, what is needed, and where."""
    full = replace(node("full"), disk=replace(node().disk, free_bytes=10**9))
    (found,) = unfit_for(lock(), [node("roomy"), full], size_bytes)
    assert (found.node, found.evidence) == ("full", "/data/ct has 1.0 GB free, about 1.4 GB are needed")


def test_venv_is_needed_only_where_pip_has_to_serve() -> None:
    """uv does without; a Python that is too old for uv cannot."""
    bare = node("bare")
    bare = replace(bare, python=replace(bare.python, has_venv=False))
    assert unfit_for(lock(), [bare], size_bytes) == ()
    (found,) = unfit_for(lock(with_uv=False), [bare], size_bytes)
    assert "lacks venv" in found.evidence and "python3-venv" in found.remedy


def test_doctor_tells_the_same() -> None:
    """Each obstacle is an error of `doctor` too, and told once; a clock that is off by minutes is a warning."""
    nodes = [unwritable(yesterday(node("a"))), replace(node("b"), time_unix_s=NOW_UNIX_S + 120)]
    found = findings(nodes, NOW_UNIX_S)
    assert set(unfit(nodes, NOW_UNIX_S)) <= set(found) and len(set(found)) == len(found)
    assert _of("b", "clock differs", found).severity == "warning" and not [f for f in found if f.what == "clock differs"][1:]


def _of(name: str, what: str, found: tuple[Finding, ...]) -> Finding:
    return next(finding for finding in found if (finding.node, finding.what) == (name, what))
