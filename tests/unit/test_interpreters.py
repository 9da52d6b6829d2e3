"""A torch that the nodes' Python cannot have is refused before anything is resolved, with what would do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ProvisionError
from orchestrator.planning.compat import facts
from orchestrator.planning.interpreters import refuse_interpreter
from orchestrator.planning.wheels import plan_stack
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Stack

FACTS = Path(__file__).resolve().parent.parent / "data" / "facts" / "x86_64-epyc_7451.json"


def node(name: str, python: str, *others: str) -> NodeFacts:
    found = NodeFacts.from_json(name, json.loads(FACTS.read_text()))
    return replace(found, arch="x86_64", libc=("glibc", "2.36"), python=replace(found.python, version=python, others=others))


def test_too_old_an_interpreter_is_told_with_every_node_and_what_works() -> None:
    """What was asked, what each node has, the torch versions for this Python; no interpreter that only some nodes have."""
    nodes = [node("node0", "3.9.2", "3.9", "3.11"), node("node1", "3.9.18", "3.9")]
    with pytest.raises(ProvisionError) as refused:
        plan_stack(Stack(torch="2.13.0"), nodes)
    assert refused.value.message == (
        "torch 2.13.0 has no wheels for Python 3.9, only for 3.10 to 3.14; "
        "the nodes have node0 Python 3.9.2 x86_64, node1 Python 3.9.18 x86_64"
    )
    assert "with Python 3.9 torch 1.10 to 2.8" in refused.value.advice and "3.11" not in refused.value.advice
    assert refused.value.exit_code == 4


def test_an_interpreter_that_all_nodes_have_is_named() -> None:
    """The newest of those that torch has wheels for: not 3.15, which is too new, nor one that only one node has."""
    nodes = [node("node0", "3.9.2", "3.9", "3.11", "3.12", "3.15"), node("node1", "3.9.2", "3.9", "3.11", "3.15")]
    with pytest.raises(ProvisionError) as refused:
        plan_stack(Stack(torch="2.13.0"), nodes)
    assert '`stack: {python: "3.11"}`, which all nodes have' in refused.value.advice


@pytest.mark.parametrize(
    ("torch", "python"),
    [("2.13.0", "3.9"), ("2.15.0", "3.10"), ("2.4.1", "3.13"), ("1.13.1", "3.12"), (">=2.9", "3.9"), ("==2.8.*", "3.14")],
)
def test_what_the_index_does_not_have_is_refused(torch: str, python: str) -> None:
    """Too old and too new, one version and a range."""
    with pytest.raises(ProvisionError, match="has no wheels for Python"):
        refuse_interpreter(Stack(torch=torch), [node("node0", f"{python}.1")])


@pytest.mark.parametrize(
    ("torch", "python"),
    [
        *[("2.13.0", "3.11"), ("2.13.0+cpu", "3.14"), (">=2.0", "3.9"), ("2.8", "3.9"), ("1.13.1", "3.7")],
        *[("2.99.0", "3.9"), (">=2.9", "3.15"), ("1.4.0", "3.6")],  # of which the table knows nothing
        ("2.13.0+mine", "3.9"),  # a build of somebody's own
    ],
)
def test_what_may_be_had_is_left_to_the_resolver(torch: str, python: str) -> None:
    """Also where the table cannot tell."""
    refuse_interpreter(Stack(torch=torch), [node("node0", f"{python}.1")])


def test_every_release_of_the_bindings_fits_its_torch() -> None:
    """The two tables come from different sources: no interpreter of a release of oneccl_bind_pt is one that its torch lacks."""
    for row in facts()["oneccl_bind_pt"].values():
        for python in row["python"] if isinstance(row["python"], list) else ():
            refuse_interpreter(Stack(torch=row["torch"]), [node("node0", f"{python}.1")])


def test_unequal_nodes_are_told_what_all_have() -> None:
    """The remedy names what is there, not an example."""
    nodes = [node("node0", "3.9.2", "3.9", "3.11"), node("node1", "3.11.2", "3.11")]
    with pytest.raises(ProvisionError, match="interpreters differ") as refused:
        plan_stack(Stack(), nodes)
    assert 'all nodes have Python 3.11: name one, as in `stack: {python: "3.11"}`' in refused.value.advice
