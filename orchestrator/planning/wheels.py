"""What to resolve, and what each node still needs. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import ProvisionError, ResolveError
from orchestrator.planning.compat import StackChoice, choose_stack
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Stack
from orchestrator.specs.lock import Lock, LockedWheel, Target

INSTALLER = "uv"
OLDEST_GLIBC_MINOR = 5  # manylinux1
UV_MINIMUM_PYTHON = (3, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRequest:
    """One resolution: the requirements, for one target, from these places."""

    choice: StackChoice
    target: Target
    find_links: tuple[str, ...]
    extra_index: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Names the lock that answers this request."""
        content = [
            self.choice.requirements,
            self.target.python_version,
            self.target.platforms,
            self.find_links,
            self.extra_index,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def plan_stack(stack: Stack, nodes: Sequence[NodeFacts]) -> StackRequest:
    """The one resolution that serves all nodes.

    Raises:
        ProvisionError: the nodes' interpreters or architectures differ (wheels and pickles must match), or nothing fits.
    """
    machines = {node.name: node.arch for node in nodes}
    if len(set(machines.values())) > 1:
        raise ProvisionError(f"the nodes are of different architectures: {_listed(machines)}", advice="leave some out")
    pythons = {node.name: _minor(node) for node in nodes}
    if len(set(pythons.values())) > 1:
        raise ProvisionError(
            f"the nodes' interpreters differ: {_listed(pythons)}; wheels and pickles must match",
            advice='install the same Python on all nodes, or name one that all have: `stack: {python: "3.11"}`',
        )
    target = target_of(min(nodes, key=lambda node: _glibc(node)))
    choice = choose_stack(stack, python_version=target.python_version, machine=nodes[0].arch)
    return StackRequest(choice=choice, target=target, find_links=stack.find_links, extra_index=stack.extra_index)


def target_of(node: NodeFacts) -> Target:
    """The wheel tags that a node accepts, by PEP 600: every manylinux up to its own glibc."""
    major, minor = _glibc(node)
    platforms = [f"manylinux_{major}_{version}_{node.arch}" for version in range(minor, OLDEST_GLIBC_MINOR - 1, -1)]
    platforms += [f"{legacy}_{node.arch}" for legacy in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    return Target(python_version=_minor(node), implementation="cp", platforms=tuple(platforms), markers=dict(node.python.markers))


def requirements_of(request: StackRequest) -> tuple[str, ...]:
    """What the resolver is asked for: the stack, and uv, the installer that travels with it."""
    version = tuple(int(part) for part in request.target.python_version.split("."))
    return request.choice.requirements + ((INSTALLER,) if version >= UV_MINIMUM_PYTHON else ())


def refuse_cuda(wheels: Sequence[LockedWheel]) -> None:
    """Raise ResolveError when the resolver picked a CUDA build: gigabytes that a CPU node can never use."""
    culprits = [
        f"{wheel.name} {wheel.version}"
        for wheel in wheels
        if wheel.name.startswith("nvidia-") or (wheel.name == "torch" and "+cu" in wheel.version)
    ]
    if culprits:
        raise ResolveError(
            f"the resolver chose a CUDA build of torch, with {', '.join(culprits[:3])}"
            + (f" and {len(culprits) - 3} more" if len(culprits) > 3 else "")
            + ": over 3 GB per node that a CPU never uses",
            advice="name PyTorch's CPU wheels in the inventory: `stack: {extra_index: [https://download.pytorch.org/whl/cpu]}`, "
            "or a directory that holds them: `stack: {find_links: [DIR]}`",
        )


def missing_wheels(lock: Lock, node: NodeFacts) -> tuple[LockedWheel, ...]:
    """The wheels of a lock that a node's wheelhouse lacks."""
    here = set(node.state.wheels)
    return tuple(wheel for wheel in lock.all_wheels if wheel.sha256 not in here)


def install_plan(lock: Lock, choice: StackChoice, root: str, python: str) -> Mapping[str, object]:
    """The document that remote/install.py reads."""
    names = [
        {"name": wheel.name, "version": wheel.version, "sha256": wheel.sha256, "filename": wheel.filename}
        for wheel in lock.wheels
    ]
    installer = lock.installer
    return {
        "root": root,
        "digest": lock.digest,
        "python": python,
        "wheels": names,
        "uv": {"sha256": installer.sha256, "filename": installer.filename} if installer else None,
        "verify": list(choice.modules),
    }


def _minor(node: NodeFacts) -> str:
    return ".".join(node.python.version.split(".")[:2])


def _glibc(node: NodeFacts) -> tuple[int, int]:
    kind, version = node.libc
    if kind != "glibc":
        raise ProvisionError(
            f"{node.name}: its C library is {kind}, and torch's wheels need glibc",
            advice="use a glibc-based system on the nodes",
        )
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
