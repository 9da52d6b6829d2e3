"""What to resolve, and what each node still needs. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from orchestrator.errors import ProvisionError, ResolveError
from orchestrator.planning.compat import StackChoice, choose_stack
from orchestrator.planning.interpreters import minor, refuse_interpreter
from orchestrator.planning.preflight import disagreements, refuse
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Stack
from orchestrator.specs.lock import Lock, LockedWheel, Target

INSTALLER = "uv"
OLDEST_GLIBC_MINOR = 5  # manylinux1
UV_MINIMUM_PYTHON = (3, 8)
# What an installer imports in the place of a module. Importing datasets for the first time costs each node 0.6 s of processor
# time, nearly all of it to compile Python code, pandas' above all, that is the same on every node; pyarrow is what it has of
# compiled libraries but for pandas' own. `provision --check` imports datasets itself, and a job that fails to is told to repair.
IMPORTED_INSTEAD = {"datasets": "pyarrow"}


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
        ProvisionError: the nodes' interpreters or architectures differ (wheels and pickles must match), torch has no wheels for
            them, or nothing fits.
    """
    refuse(disagreements(nodes))
    refuse_interpreter(stack, nodes)
    oldest = min(nodes, key=lambda node: _glibc(node))
    target = target_of(oldest)
    has = [f"{node.name} Python {node.python.version} {node.arch}" for node in nodes]
    choice = choose_stack(stack, python_version=target.python_version, machine=oldest.arch, glibc=_glibc(oldest), nodes=has)
    return StackRequest(choice=choice, target=target, find_links=stack.find_links, extra_index=stack.extra_index)


def target_of(node: NodeFacts) -> Target:
    """The wheel tags that a node accepts, by PEP 600: every manylinux up to its own glibc."""
    major, newest = _glibc(node)
    platforms = [f"manylinux_{major}_{version}_{node.arch}" for version in range(newest, OLDEST_GLIBC_MINOR - 1, -1)]
    platforms += [f"{legacy}_{node.arch}" for legacy in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    return Target(
        python_version=minor(node.python.version),
        implementation="cp",
        platforms=tuple(platforms),
        markers=dict(node.python.markers),
    )


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


def refuse_other_lock(lock: Lock, request: StackRequest, file: str) -> None:
    """Raise ProvisionError unless a lock from a file is one for these nodes and this inventory."""
    if lock.target != request.target.label:
        raise ProvisionError(f"{file} is a lock for {lock.target}, and the nodes are {request.target.label}", advice=_RELOCK)
    fitting = {"any", *request.target.platforms}
    for wheel in lock.all_wheels:
        if not any(tag.platform in fitting for tag in parse_wheel_filename(wheel.filename)[3]):
            best = request.target.platforms[0]
            raise ProvisionError(f"{file}: {wheel.filename} does not run on the nodes, which are {best}", advice=_RELOCK)
    asked, locked = ({_canonical(text): text for text in texts} for texts in (request.choice.requirements, lock.requirements))
    problems = [f"the inventory asks for {asked[one]}, the lock does not" for one in asked if one not in locked]
    problems += [f"the lock has {locked[one]}, the inventory does not" for one in locked if one not in asked]
    if problems:
        raise ProvisionError(
            f"{file} is a lock for another stack:\n    " + "\n    ".join(problems),
            advice=f"make the inventory's `stack` as it was when the lock was written; or {_RELOCK}",
        )


_RELOCK = "write a new lock: cluster-train provision INVENTORY --lock FILE"


def _canonical(requirement: str) -> str:
    """Equal for requirements that mean the same however they are spelt."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return requirement
    return f"{canonicalize_name(parsed.name)} {sorted(parsed.extras)} {parsed.specifier} {parsed.marker} {parsed.url}"


def missing_wheels(lock: Lock, node: NodeFacts) -> tuple[LockedWheel, ...]:
    """The wheels of a lock that a node's wheelhouse lacks."""
    here = set(node.state.wheels)
    return tuple(wheel for wheel in lock.all_wheels if wheel.sha256 not in here)


def unpacked_installer(lock: Lock) -> str | None:
    """The name, below the root's bin/, of the lock's installer once remote/install.py has unpacked it."""
    return f"{INSTALLER}-{lock.installer.sha256[:16]}" if lock.installer else None


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
        "verify": _modules_to_import(lock, choice),
        "try": sorted(choice.may_do_without),
    }


def _modules_to_import(lock: Lock, choice: StackChoice) -> list[str]:
    """What must import in an environment before it is used."""
    locked = {wheel.name for wheel in lock.wheels}
    instead = {module: other for module, other in IMPORTED_INSTEAD.items() if other in locked}
    return [instead.get(module, module) for module in choice.modules if module not in choice.may_do_without]


def _glibc(node: NodeFacts) -> tuple[int, int]:
    kind, version = node.libc
    if kind != "glibc":
        raise ProvisionError(
            f"{node.name}: its C library is {kind}, and torch's wheels need glibc",
            advice="use a glibc-based system on the nodes",
        )
    parts = version.split(".")
    return int(parts[0]), int(parts[1])
