"""Which backend and which extra packages go with the torch that was asked for. Data: compat.yaml beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from orchestrator.errors import ProvisionError
from orchestrator.specs.inventory import Stack

LAST_BINDINGS = Version("2.8.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChoice:
    """What an inventory's `stack` comes to.

    Args:
        backend: the torch.distributed backend that the ranks use.
        asked_backend: the backend the person named, or None for `auto`.
        requirements: PEP 508 requirements for the resolver.
        modules: what must import in the finished environment.
        notes: one sentence per thing that is not as asked, and why.
    """

    backend: str
    asked_backend: str | None
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    notes: tuple[str, ...]


@cache
def facts() -> Mapping[str, Any]:
    """The version facts of compat.yaml."""
    loaded: dict[str, Any] = yaml.safe_load(files("orchestrator.planning").joinpath("compat.yaml").read_text("utf-8"))
    return loaded


def choose_stack(stack: Stack, *, python_version: str, machine: str) -> StackChoice:
    """One consistent set of requirements for an interpreter ("3.11") on a machine ("x86_64").

    Raises ProvisionError, with the versions that would work, when no set satisfies what was asked.
    """
    torch = _pinned(stack.torch)
    bindings, notes = _bindings(stack, torch, python_version, machine)
    ipex, ipex_notes = _ipex(stack, torch, machine, wanted=bool(bindings) if stack.ipex == "auto" else stack.ipex)
    limits: Mapping[str, str] = facts()["ccl_limits"] if bindings else {}
    requirements = [
        _requirement("torch", stack.torch),
        _requirement("transformers", stack.transformers, limits.get("transformers", "")),
        _requirement("accelerate", stack.accelerate, limits.get("accelerate", "")),
        _requirement("datasets", stack.datasets),
        *bindings,
        *ipex,
        *_mpi(stack, machine),
        *stack.extra,
    ]
    modules = ["torch", "transformers", "accelerate", "datasets"]
    modules += [facts()["oneccl_bind_pt"][bindings[0].split("==")[1]]["module"]] if bindings else []
    modules += ["intel_extension_for_pytorch"] if ipex else []
    return StackChoice(
        backend="ccl" if bindings else "mpi" if stack.backend == "mpi" else "gloo",
        asked_backend=None if stack.backend == "auto" else stack.backend,
        requirements=tuple(requirements),
        modules=tuple(modules),
        notes=tuple(notes + ipex_notes),
    )


def _pinned(torch: str) -> Version | None:
    try:
        return Version(torch)
    except InvalidVersion:
        return None


def _bindings(stack: Stack, torch: Version | None, python_version: str, machine: str) -> tuple[list[str], list[str]]:
    """The oneccl_bind_pt requirement, if the backend needs it, and what to tell."""
    if stack.backend == "mpi":
        raise ProvisionError(
            "backend: mpi cannot be had: the torch wheels are built without MPI",
            advice="use `backend: auto` (the ranks are started by mpirun all the same), or a torch that you built yourself",
        )
    if stack.backend != "ccl":
        return [], []
    if torch is None or torch > LAST_BINDINGS:
        return [], [
            f"backend ccl: oneccl_bind_pt ended with torch {LAST_BINDINGS}, torch {stack.torch} has none; gloo is used instead"
        ]
    table: Mapping[str, Any] = facts()["oneccl_bind_pt"]
    for version, row in table.items():
        if Version(row["torch"]) == Version(torch.public):
            _check_bindings(version, row["python"], python_version, machine)
            return [f"oneccl_bind_pt=={version}"], []
    known = ", ".join(row["torch"] for row in table.values())
    raise ProvisionError(
        f"backend: ccl needs an oneccl_bind_pt built for exactly torch {torch}, and there is none",
        advice=f"torch versions that have one: {known}; or `backend: gloo`",
    )


def _check_bindings(version: str, pythons: list[str] | str, python_version: str, machine: str) -> None:
    if machine != "x86_64":
        raise ProvisionError(f"oneccl_bind_pt exists for x86_64 only, the nodes are {machine}", advice="use `backend: gloo`")
    if isinstance(pythons, list) and python_version not in pythons:
        raise ProvisionError(
            f"oneccl_bind_pt {version} exists for Python {', '.join(pythons)}; the nodes have {python_version}",
            advice="name another interpreter with `stack.python`, or use `backend: gloo`",
        )


def _ipex(stack: Stack, torch: Version | None, machine: str, *, wanted: bool) -> tuple[list[str], list[str]]:
    last = Version(facts()["intel_extension_for_pytorch"]["last"])
    available = torch is not None and torch <= Version(f"{last.major}.{last.minor}.99") and machine == "x86_64"
    if wanted and available and torch is not None:
        return [f"intel_extension_for_pytorch=={torch.major}.{torch.minor}.*"], []
    if stack.ipex is True:
        return [], [f"ipex: intel_extension_for_pytorch ended with {last}; torch {stack.torch} runs without it"]
    return [], []


def _mpi(stack: Stack, machine: str) -> list[str]:
    if stack.mpi == "system":
        return []
    row = facts()["mpi"][stack.mpi]
    if machine not in row["machines"]:
        fitting = [name for name, other in facts()["mpi"].items() if machine in other["machines"]]
        raise ProvisionError(
            f"mpi: {stack.mpi} has no wheel for {machine}",
            advice=f"use `mpi: {' or '.join(fitting) or 'system'}` in the inventory's stack",
        )
    return [row["requirement"]]


def _requirement(name: str, wanted: str | None, limit: str = "") -> str:
    """`torch` and "2.13.0" make "torch==2.13.0"; specifiers are kept, and a limit of our own is added."""
    specifier = "" if wanted is None else wanted if wanted[:1] in "<>=!~" else f"=={wanted}"
    both = SpecifierSet(specifier) & SpecifierSet(limit)
    return f"{name}{both}"
