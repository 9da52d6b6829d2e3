"""Which versions go together."""

from __future__ import annotations

import pytest

from orchestrator.errors import ProvisionError
from orchestrator.planning.compat import choose_stack
from orchestrator.specs.inventory import Stack


@pytest.mark.parametrize(
    ("torch", "bindings"), [("1.12.1", "1.12.100"), ("1.12.0", "1.12.0"), ("2.8.0", "2.8.0"), ("1.13.0", "1.13.0")]
)
def test_the_bindings_match_torch_to_the_patch_version(torch: str, bindings: str) -> None:
    """oneccl_bind_pt 1.12.0 does not work with torch 1.12.1; the table knows."""
    choice = choose_stack(Stack(torch=torch, transformers=">=4.30", backend="ccl"), python_version="3.10", machine="x86_64")
    assert f"oneccl_bind_pt=={bindings}" in choice.requirements
    assert choice.backend == "ccl" and "oneccl_bindings_for_pytorch" in choice.modules


def test_ccl_limits_transformers_and_accelerate() -> None:
    """Where the retired bindings are used, so are the last releases that know them."""
    choice = choose_stack(Stack(torch="2.8.0", transformers="5.0.0", backend="ccl"), python_version="3.11", machine="x86_64")
    assert "accelerate<=1.12" in choice.requirements
    assert any(r.startswith("transformers") and "<5.1" in r and "==5.0.0" in r for r in choice.requirements)


def test_a_torch_without_bindings_falls_back_and_says_so() -> None:
    """torch 2.13 has no oneccl_bind_pt: gloo is used, and a note tells why."""
    choice = choose_stack(Stack(torch="2.13.0", backend="ccl"), python_version="3.11", machine="x86_64")
    assert (choice.backend, choice.asked_backend) == ("gloo", "ccl")
    assert any("2.8.0" in note and "gloo" in note for note in choice.notes)
    assert not any("oneccl" in requirement for requirement in choice.requirements)


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
