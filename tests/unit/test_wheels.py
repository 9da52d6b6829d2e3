"""What is resolved for which nodes, and what must never be installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ProvisionError, ResolveError
from orchestrator.planning.wheels import install_plan, missing_wheels, plan_stack, refuse_cuda, requirements_of, target_of
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Stack
from orchestrator.specs.lock import Lock, LockedWheel

FACTS = Path(__file__).resolve().parent.parent / "data" / "facts" / "x86_64-epyc_7451.json"


def node(
    name: str = "node0", *, python: str = "3.11.2", libc: tuple[str, str] = ("glibc", "2.36"), arch: str = "x86_64"
) -> NodeFacts:
    facts = NodeFacts.from_json(name, json.loads(FACTS.read_text()))
    return replace(facts, arch=arch, libc=libc, python=replace(facts.python, version=python))


def wheel(name: str, version: str = "1.0", sha256: str = "0" * 64) -> LockedWheel:
    return LockedWheel(name=name, version=version, filename=f"{name}-{version}.whl", sha256=sha256, source="")


def test_the_oldest_glibc_decides() -> None:
    """Wheels must run on every node: the node with the oldest C library sets the tags."""
    request = plan_stack(Stack(), [node("new"), node("old", libc=("glibc", "2.28"))])
    assert request.target.platforms[0] == "manylinux_2_28_x86_64"
    assert "manylinux_2_36_x86_64" not in request.target.platforms and "manylinux2014_x86_64" in request.target.platforms


def test_mixed_interpreters_are_refused_with_the_list() -> None:
    """Pickles and wheels must match, so every node needs the same minor version."""
    with pytest.raises(ProvisionError, match=r"a Python 3\.11, b Python 3\.9"):
        plan_stack(Stack(), [node("a"), node("b", python="3.9.1")])


def test_mixed_architectures_are_refused_with_the_list() -> None:
    """One set of wheels cannot serve two kinds of machine."""
    with pytest.raises(ProvisionError, match="a x86_64, b aarch64"):
        plan_stack(Stack(), [node("a"), node("b", arch="aarch64")])


def test_a_node_without_glibc_is_refused() -> None:
    """torch has no wheels for musl."""
    with pytest.raises(ProvisionError, match="musl"):
        target_of(node(libc=("musl", "1.2")))


def test_uv_travels_where_it_runs() -> None:
    """uv is asked for along with the stack, except for interpreters that are too old for it."""
    assert "uv" in requirements_of(plan_stack(Stack(), [node()]))
    assert "uv" not in requirements_of(plan_stack(Stack(torch="1.13.1"), [node(python="3.7.2")]))


@pytest.mark.parametrize("picked", [wheel("nvidia-cublas-cu12"), wheel("torch", "2.13.0+cu128")])
def test_a_cuda_build_is_refused_with_the_remedy(picked: LockedWheel) -> None:
    """Gigabytes that a CPU never uses are not installed unasked; the error names PyTorch's CPU index."""
    with pytest.raises(ResolveError, match="CUDA") as refused:
        refuse_cuda([wheel("numpy"), picked])
    assert "https://download.pytorch.org/whl/cpu" in refused.value.advice
    refuse_cuda([wheel("torch", "2.13.0+cpu"), wheel("numpy")])


def test_only_what_a_node_lacks_is_sent() -> None:
    """Wheels are known by their hash."""
    lock = Lock(requirements=(), target="t", wheels=(wheel("a", sha256="a" * 64), wheel("b", sha256="b" * 64)), installer=None)
    facts = node()
    assert [w.name for w in missing_wheels(lock, replace(facts, state=replace(facts.state, wheels=("a" * 64,))))] == ["b"]


def test_an_environment_is_named_by_its_content() -> None:
    """The digest follows wheels and target, not their order or where they came from; a lock survives its JSON."""
    one = Lock(requirements=(), target="t", wheels=(wheel("a"), wheel("b")), installer=wheel("uv"))
    assert one.digest == replace(one, wheels=one.wheels[::-1], installer=None).digest
    assert one.digest != replace(one, target="u").digest
    assert one.digest != replace(one, wheels=(wheel("a"), wheel("b", sha256="1" * 64))).digest
    assert Lock.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_pyarrow_is_imported_for_datasets_where_it_is_installed() -> None:
    """Everything else that must import is imported by the installer itself; without pyarrow so is datasets."""
    choice = plan_stack(Stack(), [node()]).choice
    lock = Lock(requirements=(), target="t", wheels=(wheel("datasets"), wheel("pyarrow")), installer=None)
    without = replace(lock, wheels=lock.wheels[:1])
    assert install_plan(lock, choice, "/root", "python3")["verify"] == [
        *("pyarrow" if module == "datasets" else module for module in choice.modules)
    ]
    assert install_plan(without, choice, "/root", "python3")["verify"] == list(choice.modules) and "datasets" in choice.modules
