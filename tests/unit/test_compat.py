"""Which versions go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from pydantic import ValidationError

from orchestrator.errors import ProvisionError
from orchestrator.planning.compat import ONECCL, StackChoice, all_bindings, choose_stack, facts
from orchestrator.specs.inventory import Stack

NODES = ("node0 Python 3.11.2 x86_64", "node1 Python 3.11.9 x86_64")


def choose(
    *,
    python: str = "3.11",
    machine: str = "x86_64",
    glibc: tuple[int, int] | None = None,
    nodes: Sequence[str] = (),
    **stack: Any,
) -> StackChoice:
    return choose_stack(Stack(**stack), python_version=python, machine=machine, glibc=glibc, nodes=nodes)


@pytest.mark.parametrize(
    ("torch", "bindings"),
    [
        ("1.12.1", "1.12.100"),
        ("1.12.0", "1.12.0"),
        ("2.8.0", "2.8.0"),
        ("2.8", "2.8.0"),
        ("2.8.0+cpu", "2.8.0"),
        ("1.13.0", "1.13.0"),
    ],
)
def test_the_bindings_match_torch_to_the_patch_version(torch: str, bindings: str) -> None:
    """oneccl_bind_pt 1.12.0 does not work with torch 1.12.1; the table knows."""
    choice = choose_stack(Stack(torch=torch, transformers=">=4.30", backend="ccl"), python_version="3.10", machine="x86_64")
    assert f"oneccl_bind_pt=={bindings}" in choice.requirements
    assert choice.backend == "ccl" and "oneccl_bindings_for_pytorch" in choice.modules


def test_the_last_torch_with_bindings_brings_all_that_goes_with_it() -> None:
    """torch 2.8.0 with ccl: bindings and IPEX of 2.8, the last Transformers to use IPEX, the last Accelerate to know ccl."""
    choice = choose(torch="2.8.0", backend="ccl")
    assert choice.requirements == (
        *("torch==2.8.0", "transformers[torch]<4.53", "accelerate<=1.12", "datasets", "oneccl_bind_pt==2.8.0"),
        *("intel_extension_for_pytorch==2.8.*", "impi-rt==2021.18.1"),
    )
    assert choice.modules[4:] == ("oneccl_bindings_for_pytorch", "intel_extension_for_pytorch")
    assert choice.notes == (
        "ipex: transformers <4.53, the last whose --use_ipex does anything; name another in `stack.transformers`",
    )
    without = choose(torch="2.8.0", backend="ccl", ipex=False)
    assert "transformers[torch]<5.1" in without.requirements and without.notes == ()
    asked = choose(torch="2.8.0", transformers="5.0.0", accelerate=">=1.10", backend="ccl").requirements
    assert {"transformers[torch]<5.1,==5.0.0", "accelerate<=1.12,>=1.10"} <= set(asked)


def test_the_default_transformers_gives_way_and_one_that_is_asked_for_does_not() -> None:
    """5.24.0 is a default, not a wish; written into the inventory it is a wish, and cannot be had with ccl."""
    assert "transformers[torch]<4.53" in choose(torch="2.8.0", backend="ccl").requirements
    with_gloo = choose(torch="2.8.0", backend="gloo", ipex=True).requirements
    assert {"transformers[torch]<4.53", "accelerate<=1.12"} <= set(with_gloo)
    assert "transformers==5.24.0" in choose(torch="2.8.0", transformers="5.24.0", backend="gloo", ipex=True).requirements
    assert "transformers==5.24.0" in choose(torch="2.8.0").requirements
    with pytest.raises(ProvisionError, match=r"transformers (==5\.24\.0 and <5\.1|<5\.1 and ==5\.24\.0)"):
        choose(torch="2.8.0", transformers="5.24.0", backend="ccl")


def test_all_contradictions_are_one_message_that_names_the_nodes_and_what_works() -> None:
    """What was asked, what each node has, which versions would do: found before the resolver is asked."""
    with pytest.raises(ProvisionError) as refused:
        choose(torch="2.8.0", transformers="5.24.0", accelerate="1.15.0", backend="ccl", nodes=NODES)
    said = refused.value.message
    assert "5.24.0" in said and "1.15.0" in said and "torch 2.8.0, backend ccl" in said
    assert "node0 Python 3.11.2 x86_64, node1 Python 3.11.9 x86_64" in said
    assert "transformers <5.1, accelerate <=1.12" in refused.value.advice and "`backend: gloo`" in refused.value.advice


@pytest.mark.parametrize(
    "stack",
    [
        {"torch": "2.8.0", "backend": "ccl", "transformers": ">=5.1"},
        {"torch": "2.8.0", "backend": "ccl", "accelerate": ">1.12,<2"},
        {"torch": "2.8.0", "backend": "ccl", "extra": ("oneccl-bind-pt==2.7.0",)},
        {"torch": "2.13.0", "extra": ("torch<2.13",)},
        {"extra": ("accelerate>=2", "Accelerate<1.0")},
    ],
)
def test_requirements_that_exclude_each_other_are_refused(stack: dict[str, object]) -> None:
    """Pins and ranges alike, also where `extra` names a package of the stack again."""
    with pytest.raises(ProvisionError, match="contradicts itself"):
        choose(**stack)


@pytest.mark.parametrize(
    "extra",
    [
        ("torch>=2.12", "torch!=2.12.5"),
        ("numpy>1.0,<1.1", "numpy!=1.0.1"),
        ("transformers~=5.2", "evaluate", "seqeval>=1.2,<2"),
        ("accelerate<1", "accelerate>0.99"),
        ("x===weird", "x>1"),
        ("x==1.*", "x==1.2.*,!=1.2.0"),
        ("x==1!2.0", "x>=1!1"),
        ("x; python_version < '3'", "x==1; python_version >= '3'", "x==2"),
        ("x @ https://host/x.whl", "x==2"),
    ],
)
def test_requirements_that_some_version_satisfies_are_left_to_the_resolver(extra: tuple[str, ...]) -> None:
    """A contradiction is only told where there surely is one."""
    assert choose(extra=extra).requirements[-len(extra) :] == extra


@pytest.mark.parametrize(
    ("wanted", "python", "chosen", "bindings"),
    [
        (">=2.7,<2.9", "3.11", "2.8.0", "2.8.0"),
        (">=2.0", "3.11", "2.8.0", "2.8.0"),
        ("==2.5.*", "3.11", "2.5.0", "2.5.0"),
        ("==2.8.0+cpu", "3.11", "2.8.0", "2.8.0"),
        ("~=1.12.0", "3.9", "1.12.1", "1.12.100"),
        ("<2.8", "3.8", "2.4.0", "2.4.0"),
        ("<2.8,!=2.4.0,!=2.2.0", "3.8", "2.3.0", "2.3.0"),
    ],
)
def test_of_a_range_the_newest_torch_that_has_bindings_is_taken(wanted: str, python: str, chosen: str, bindings: str) -> None:
    """It is then pinned, for the bindings fit no other, and a note tells so."""
    choice = choose(torch=wanted, backend="ccl", python=python)
    assert {f"torch=={chosen}", f"oneccl_bind_pt=={bindings}"} <= set(choice.requirements)
    assert any(chosen in note and wanted in note for note in choice.notes)


@pytest.mark.parametrize("wanted", ["2.5.1", "2.8.1", "1.13.1", "2.0.0", "==2.0.0", ">2.3,<2.4"])
def test_a_torch_that_no_bindings_were_built_for_is_refused_with_those_that_have_some(wanted: str) -> None:
    """No guess is made between the rows; what the nodes' interpreter could have is listed, and what it could not is not."""
    with pytest.raises(ProvisionError) as refused:
        choose(torch=wanted, backend="ccl", nodes=NODES)
    assert f"torch {wanted} with backend ccl" in refused.value.message and "node1 Python 3.11.9" in refused.value.message
    listed = "with Python 3.11 and backend ccl torch 2.0.1, 2.1.0, 2.3.0, 2.5.0, 2.6.0, 2.7.0, 2.8.0; "
    assert listed in refused.value.advice and "1.12" not in refused.value.advice


@pytest.mark.parametrize("wanted", ["2.9.0", "2.13.0", ">=2.9", "~=2.13", "3.0"])
def test_a_torch_after_the_last_bindings_gets_oneccl_itself(wanted: str) -> None:
    """Whatever is above 2.8 has no bindings, and IPEX neither; the backend is ccl all the same."""
    choice = choose(torch=wanted, backend="ccl")
    assert choice.backend == "ccl" and choice.modules[-1] == "cluster_train_oneccl"
    assert "cluster-train-oneccl==2022.1.2" in choice.requirements and choice.notes == ()
    assert not any("oneccl_bind" in one or "intel_ext" in one for one in choice.requirements)


def test_an_interpreter_without_any_bindings_is_told_those_that_have_some() -> None:
    """Python 3.14 has no oneccl_bind_pt at all."""
    with pytest.raises(ProvisionError) as refused:
        choose(torch="2.8.0", backend="ccl", python="3.14")
    assert "exists for Python 3.9, 3.10, 3.11, 3.12, 3.13" in refused.value.message
    assert "Python 3.6 to 3.13" in refused.value.advice and "stack.python" in refused.value.advice


def test_another_architecture_has_no_bindings() -> None:
    """oneccl_bind_pt is x86-64 only; the message says what the nodes are."""
    with pytest.raises(ProvisionError, match=r"x86_64 only; the nodes have arm0 Python 3\.11"):
        choose(torch="2.8.0", backend="ccl", mpi="mpich", machine="aarch64", nodes=["arm0 Python 3.11.2 aarch64"])


def test_every_row_of_the_table_can_be_had() -> None:
    """For each release of the bindings its torch, on each of its interpreters, gives exactly that release and its module."""
    for row in all_bindings():
        for python in row.pythons or ("3.11",):
            choice = choose(torch=str(row.torch), backend="ccl", python=python)
            assert f"oneccl_bind_pt=={row.version}" in choice.requirements and row.module in choice.modules
            major, minor = row.torch.release[:2]
            assert f"intel_extension_for_pytorch=={major}.{minor}.*" in choice.requirements
    assert {row.module for row in all_bindings()} == {"torch_ccl", "oneccl_bindings_for_pytorch"}


VERSIONS = st.one_of(
    st.from_regex(r"\A(1!)?[0-9]{1,2}(\.[0-9]{1,3}){0,3}((a|b|rc|\.post|\.dev)[0-9])?(\+cpu)?\Z"),
    st.sampled_from([str(row.torch) for row in all_bindings()] + ["2.13.0", "5.24.0", "1.15.0"]),
)
RANGES = st.one_of(
    VERSIONS,
    st.builds(lambda low, high: f">={low},<{high}", VERSIONS, VERSIONS),
    st.builds(lambda operator, version: operator + version, st.sampled_from(["==", "<", "<=", ">", "!=", "~=", "==="]), VERSIONS),
    st.builds(lambda version: f"=={version}.*", VERSIONS),
)


@settings(max_examples=300, deadline=None)
@given(torch=RANGES, transformers=RANGES, accelerate=RANGES, python=st.sampled_from(["3.6", "3.9", "3.11", "3.14"]))
def test_whatever_is_asked_there_is_a_stack_or_one_refusal(torch: str, transformers: str, accelerate: str, python: str) -> None:
    """Any legal versions give requirements that pip can read, with bindings for exactly the torch that is pinned, or an error."""
    try:
        stack = Stack(torch=torch, transformers=transformers, accelerate=accelerate, backend="ccl")
    except ValidationError:
        assume(False)
    try:
        choice = choose_stack(stack, python_version=python, machine="x86_64", nodes=NODES)
    except ProvisionError as refused:
        assert all(node in refused.message for node in NODES) and refused.advice
        return
    asked = {Requirement(one).name: Requirement(one).specifier for one in choice.requirements}
    pinned = {row.version: row.torch for row in all_bindings()}
    assert (choice.backend == "ccl") == ("oneccl_bind_pt" in asked or "cluster-train-oneccl" in asked)
    assert not ("oneccl_bind_pt" in asked and "cluster-train-oneccl" in asked)
    if "oneccl_bind_pt" in asked:
        (bindings,) = asked["oneccl_bind_pt"]
        assert asked["torch"].contains(pinned[bindings.version]) or asked["torch"].contains(f"{pinned[bindings.version]}+cpu")


def test_the_requirement_takes_the_local_version_of_intels_index() -> None:
    """By PEP 440, ==2.8.0 is satisfied by 2.8.0+cpu, and ==1.12.100 never by 1.12.0."""
    assert Requirement("oneccl_bind_pt==2.8.0").specifier.contains("2.8.0+cpu")
    assert Requirement("intel_extension_for_pytorch==1.12.*").specifier.contains("1.12.300+cpu")
    assert not Requirement("oneccl_bind_pt==1.12.100").specifier.contains("1.12.0+cpu")


@pytest.fixture
def auto_takes_ccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(facts()["oneccl"], "auto", True)


@pytest.mark.usefixtures("auto_takes_ccl")
@pytest.mark.parametrize("backend", ["ccl", "auto"])
@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"machine": "aarch64", "mpi": "mpich"}, "oneCCL exists for x86_64 only"),
        ({"mpi": "openmpi"}, "its ranks must be started by `mpi: impi`, not openmpi"),
        ({"mpi": "system"}, "its ranks must be started by `mpi: impi`, not system"),
        ({"python": "3.9"}, "it needs Python 3.10, the nodes have 3.9"),
        ({"glibc": (2, 17)}, "it needs glibc 2.28, and a node has 2.17"),
    ],
)
def test_where_there_is_no_oneccl_gloo_is_used_and_the_reason_told(where: dict[str, Any], why: str, backend: str) -> None:
    """torch 2.13 has no bindings, and oneCCL itself is not for every machine."""
    choice = choose(torch="2.13.0", backend=backend, **where)
    assert (choice.backend, choice.asked_backend) == ("gloo", None if backend == "auto" else "ccl")
    assert choice.notes == (f"backend {backend}: {why}; gloo is used instead",)
    assert not any("oneccl" in requirement for requirement in choice.requirements)


@pytest.mark.usefixtures("auto_takes_ccl")
def test_auto_is_ccl_where_that_works_and_may_still_become_gloo() -> None:
    """The same wheels as for ccl by name, so the same environment; but oneCCL need not load."""
    asked, auto = (choose(torch="2.13.0", backend=backend, glibc=(2, 28)) for backend in ("ccl", "auto"))
    assert (auto.backend, auto.notes, auto.requirements) == ("ccl", (), asked.requirements)
    assert auto.may_do_without == {ONECCL} and not asked.may_do_without
    fallen = auto.without_oneccl("it does not load on node1: no such file")
    assert fallen.notes == ("backend auto: it does not load on node1: no such file; gloo is used instead",)
    gloo = choose(torch="2.13.0", backend="gloo")
    assert (fallen.backend, fallen.requirements, fallen.modules) == ("gloo", gloo.requirements, gloo.modules)


@pytest.mark.usefixtures("auto_takes_ccl")
@pytest.mark.parametrize("torch", ["2.8.0", "1.13.1", ">=2.7"])
def test_auto_leaves_the_retired_bindings_to_those_who_ask(torch: str) -> None:
    """With a torch that has (or may have) bindings: gloo, and why."""
    choice = choose(torch=torch, backend="auto", python="3.10")
    assert choice.backend == "gloo" and not any("ccl" in requirement for requirement in choice.requirements)
    assert choice.notes == (
        f"backend auto: oneCCL is taken for torch above 2.8, and the stack has {torch}; gloo is used instead",
    )


def test_an_old_torch_between_the_rows_is_refused_with_the_list() -> None:
    """No guess is made for a torch that no bindings were built for."""
    with pytest.raises(ProvisionError) as refused:
        choose_stack(Stack(torch="2.0.0", backend="ccl"), python_version="3.10", machine="x86_64")
    assert "2.0.1" in refused.value.advice


def test_bindings_need_a_python_they_were_built_for() -> None:
    """The refusal names the interpreters that there are wheels for."""
    with pytest.raises(ProvisionError, match=r"3\.7, 3\.8, 3\.9, 3\.10"):
        choose_stack(Stack(torch="1.12.1", backend="ccl"), python_version="3.11", machine="x86_64")


def test_an_mpi_without_a_wheel_for_the_machine_is_refused_with_those_that_have_one() -> None:
    """Intel MPI exists for x86-64 only."""
    with pytest.raises(ProvisionError) as refused:
        choose_stack(Stack(mpi="impi"), python_version="3.11", machine="aarch64")
    assert "mpich or openmpi" in refused.value.advice


def test_the_mpi_backend_is_refused() -> None:
    """torch's wheels are built without MPI."""
    with pytest.raises(ProvisionError, match="without MPI"):
        choose_stack(Stack(backend="mpi"), python_version="3.11", machine="x86_64")


def test_a_torch_from_before_numpy_2_gets_numpy_1() -> None:
    """2.3.0 is the first torch that works with NumPy 2; its wheels do not tell, so the resolver has to be told."""
    assert "numpy<2" in choose(torch="2.2.0").requirements and "numpy<2" in choose(torch="2.0.1", backend="ccl").requirements
    assert not any(one.startswith("numpy") for torch in ("2.3.0", "2.13.0", ">=2.2") for one in choose(torch=torch).requirements)
    with pytest.raises(ProvisionError, match="numpy"):
        choose(torch="1.13.0", extra=("numpy>=2",))


def test_ipex_for_a_range_needs_a_pin() -> None:
    """Its major.minor is torch's, so a torch that is not known yet cannot have it; above 2.8 there is none to match."""
    with pytest.raises(ProvisionError) as refused:
        choose(torch=">=2.7", ipex=True)
    assert 'torch: "2.8.0"' in refused.value.advice
    assert any("ended with 2.8.0" in note for note in choose(torch=">=2.9", ipex=True).notes)


def test_ipex_comes_with_the_retired_bindings_or_when_asked() -> None:
    """Its major.minor is torch's; with a torch it never knew it is left out, and told when it was asked for."""

    def ipex(**stack: object) -> list[str]:
        choice = choose_stack(Stack(**stack), python_version="3.11", machine="x86_64")  # type: ignore[arg-type]
        return [requirement for requirement in choice.requirements if "intel_extension" in requirement]

    assert ipex(torch="2.8.0", transformers="5.0.0", backend="ccl") == ["intel_extension_for_pytorch==2.8.*"]
    assert ipex(torch="2.7.1", ipex=True) == ["intel_extension_for_pytorch==2.7.*"]
    assert ipex(torch="2.8.0") == [] and ipex(torch="2.13.0", ipex=True) == []
    told = choose_stack(Stack(torch="2.13.0", ipex=True), python_version="3.11", machine="x86_64").notes
    assert any("intel_extension_for_pytorch ended" in note for note in told)


def test_ranges_are_kept_and_versions_pinned() -> None:
    """A version means exactly that one; a range stays a range."""
    choice = choose_stack(
        Stack(torch="2.13.0", transformers=">=5,<6", accelerate="1.15.0"), python_version="3.11", machine="x86_64"
    )
    assert {"torch==2.13.0", "accelerate==1.15.0", "datasets", "impi-rt==2021.18.1"} <= set(choice.requirements)
    assert "transformers<6,>=5" in choice.requirements
