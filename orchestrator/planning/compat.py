"""Which backend and which extra packages go with the torch that was asked for. Data: compat.yaml beside this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from orchestrator.errors import ProvisionError
from orchestrator.specs.inventory import Stack

BINDINGS = "oneccl_bind_pt"
IPEX = "intel_extension_for_pytorch"
ONECCL = "cluster_train_oneccl"  # our wheel of the libraries that remote/ccl_group.py needs; made by actions/oneccl.py


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

    @property
    def has_oneccl(self) -> bool:
        """Whether oneCCL itself makes the collectives, not the retired bindings."""
        return ONECCL in self.modules

    @property
    def may_do_without(self) -> frozenset[str]:
        """The modules that need not import: nobody asked for oneCCL by name."""
        return frozenset({ONECCL}) if self.has_oneccl and self.asked_backend is None else frozenset()

    @property
    def bindings(self) -> str | None:
        """The module of the retired bindings, where these are used."""
        return next((row.module for row in all_bindings() if row.module in self.modules), None)

    def without_oneccl(self, why: str) -> StackChoice:
        """The same stack on gloo, with a note of the reason."""
        return replace(
            self,
            backend="gloo",
            requirements=tuple(one for one in self.requirements if one != oneccl_requirement()),
            modules=tuple(module for module in self.modules if module != ONECCL),
            notes=(*self.notes, _gloo_instead(self.asked_backend, why)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """One release of oneccl_bind_pt.

    Args:
        torch: the one torch that it was built for.
        pythons: the CPython versions that it exists for; None where no source tells.
        module: the name that it is imported by.
    """

    version: str
    torch: Version
    pythons: tuple[str, ...] | None
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Where the stack is to run: interpreter ("3.11"), kind of machine, the oldest glibc, and the nodes as messages list them."""

    python: str
    machine: str
    glibc: tuple[int, int] | None
    nodes: tuple[str, ...]

    @property
    def has(self) -> str:
        return f"the nodes have {', '.join(self.nodes) or f'Python {self.python} {self.machine}'}"


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # by libyaml, ten times as fast, where PyYAML was built with it


@cache
def facts() -> Mapping[str, Any]:
    """The version facts of compat.yaml."""
    text = Path(__file__).with_name("compat.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=LOADER)
    return loaded


@cache
def all_bindings() -> tuple[Bindings, ...]:
    """Every release of oneccl_bind_pt, oldest first."""
    rows: Mapping[str, Any] = facts()[BINDINGS]
    return tuple(
        Bindings(
            version=version,
            torch=Version(row["torch"]),
            pythons=tuple(row["python"]) if isinstance(row["python"], list) else None,
            module=row["module"],
        )
        for version, row in rows.items()
    )


def choose_stack(
    stack: Stack, *, python_version: str, machine: str, glibc: tuple[int, int] | None = None, nodes: Sequence[str] = ()
) -> StackChoice:
    """One consistent set of requirements for an interpreter ("3.11") on a machine ("x86_64").

    Args:
        glibc: the oldest of the nodes'; None takes any to be new enough.
        nodes: what each node has, for messages: "node0 Python 3.11.2 x86_64".

    Raises ProvisionError, with the versions that would work, when no set satisfies what was asked.
    """
    site = _Site(python=python_version, machine=machine, glibc=glibc, nodes=tuple(nodes))
    bindings, notes = _bindings(stack, site)
    oneccl, oneccl_notes = ([], []) if bindings else _oneccl(stack, site)
    torch = str(bindings.torch) if bindings and not pinned(stack.torch) else stack.torch
    ipex, ipex_notes = _ipex(stack, torch, machine, wanted=bool(bindings) if stack.ipex == "auto" else stack.ipex)
    requirements = [
        _requirement("torch", torch),
        *_libraries(stack, with_ccl=bindings is not None, with_ipex=bool(ipex)),
        _requirement("datasets", stack.datasets),
        *([f"{BINDINGS}=={bindings.version}"] if bindings else []),
        *oneccl,
        *ipex,
        *_numpy(torch),
        *_mpi(stack, site),
        *stack.extra,
    ]
    _refuse_contradictions(requirements, stack, site, with_ccl=bindings is not None)
    return StackChoice(
        backend="ccl" if bindings or oneccl else "gloo",
        asked_backend=None if stack.backend == "auto" else stack.backend,
        requirements=tuple(requirements),
        modules=(
            *("torch", "transformers", "accelerate", "datasets"),
            *([bindings.module] if bindings else []),
            *([ONECCL] if oneccl else []),
            *([IPEX] if ipex else []),
        ),
        notes=tuple(notes + oneccl_notes + ipex_notes + _library_notes(stack, with_ipex=bool(ipex))),
    )


def _bindings(stack: Stack, site: _Site) -> tuple[Bindings | None, list[str]]:
    """The release of oneccl_bind_pt, if the backend needs one, and what to tell."""
    if stack.backend == "mpi":
        raise ProvisionError(
            "backend: mpi cannot be had: the torch wheels are built without MPI",
            advice="use `backend: auto` (the ranks are started by mpirun all the same), or a torch that you built yourself",
        )
    if stack.backend != "ccl":
        return None, []
    last = all_bindings()[-1].torch
    if _is_newer(stack.torch, last):
        return None, []  # of these torch versions, _oneccl knows
    if site.machine != "x86_64":
        raise _conflict(stack, site, f"{BINDINGS} exists for x86_64 only", "`backend: gloo`")
    built = [row for row in all_bindings() if admits(stack.torch, row.torch)]
    if not built:
        raise _conflict(stack, site, f"{BINDINGS} is built for exactly one torch, and none for this one", _working(site))
    fitting = [row for row in built if row.pythons is None or site.python in row.pythons]
    if not fitting:
        exists = "; ".join(f"{BINDINGS} {row.version} exists for Python {', '.join(row.pythons or ())}" for row in built)
        raise _conflict(stack, site, exists, f"another interpreter in `stack.python`; {_working(site)}")
    chosen = fitting[-1]
    ranged = f"backend ccl: torch {chosen.torch} is the newest in {stack.torch} that {BINDINGS} exists for"
    return chosen, [] if pinned(stack.torch) else [ranged]


def _oneccl(stack: Stack, site: _Site) -> tuple[list[str], list[str]]:
    """oneCCL itself, for a torch that has no bindings any more; where it cannot be had, gloo is used and the reason is told."""
    is_wanted = stack.backend == "ccl" or (stack.backend == "auto" and facts()["oneccl"]["auto"])
    if not is_wanted:
        return [], []
    if reason := _no_oneccl(stack, site):
        return [], [_gloo_instead(None if stack.backend == "auto" else stack.backend, reason)]
    return [oneccl_requirement()], []


def _no_oneccl(stack: Stack, site: _Site) -> str | None:
    """Why oneCCL does not go with this stack on these nodes; None where it does."""
    row, last = facts()["oneccl"], all_bindings()[-1].torch
    if not _is_newer(stack.torch, last):  # with `backend: ccl` such a torch has bindings
        return f"oneCCL is taken for torch above {last.major}.{last.minor}, and the stack has {stack.torch}"
    if site.machine not in row["machines"]:
        return f"oneCCL exists for {', '.join(row['machines'])} only"
    if stack.mpi not in row["mpi"]:
        return f"its ranks must be started by `mpi: {' or '.join(row['mpi'])}`, not {stack.mpi}"
    if Version(site.python) < Version(row["first_python"]):
        return f"it needs Python {row['first_python']}, the nodes have {site.python}"
    if site.glibc and site.glibc < tuple(row["first_glibc"]):
        return "it needs glibc {}.{}, and a node has {}.{}".format(*row["first_glibc"], *site.glibc)
    return None


def oneccl_requirement() -> str:
    """The wheel of oneCCL's libraries, as the resolver is asked for it."""
    return f"{ONECCL.replace('_', '-')}=={facts()['oneccl']['version']}"


def _gloo_instead(asked: str | None, why: str) -> str:
    return f"backend {asked or 'auto'}: {why}; gloo is used instead"


def _conflict(stack: Stack, site: _Site, why: str, works: str) -> ProvisionError:
    return ProvisionError(f"torch {stack.torch} with backend ccl cannot be had: {why}; {site.has}", advice=f"what works: {works}")


def _working(site: _Site) -> str:
    """The torch versions that would do, from the table; those of which no source tells the interpreters are left out."""
    pythons = sorted({python for row in all_bindings() for python in row.pythons or ()}, key=Version)
    versions = [str(row.torch) for row in all_bindings() if row.pythons and site.python in row.pythons]
    if versions:
        return f"with Python {site.python} and backend ccl torch {', '.join(versions)}; any torch with `backend: gloo`"
    return f"backend ccl with Python {pythons[0]} to {pythons[-1]}; any torch with `backend: gloo`"


def pinned(wanted: str) -> Version | None:
    """The one version that is wanted; None for a range."""
    try:
        return Version(wanted)
    except InvalidVersion:
        return None


def admits(wanted: str, version: Version) -> bool:
    """Whether the version, or its build for CPUs, is what is wanted."""
    specifier = _specifier(wanted)
    return any(specifier.contains(build, prereleases=True) for build in (str(version), f"{version}+cpu"))


def _is_newer(wanted: str, last: Version) -> bool:
    """Whether a version or range lies wholly above the release series of `last` (2.8.0: above 2.8)."""
    one = pinned(wanted)
    if one:
        return one.release[:2] > last.release[:2]
    return not any(admits(wanted, version) for version in _grid(last.major, last.minor))


def _grid(major: int, minor: int) -> Iterable[Version]:
    """Every version that there may have been up to a release series, newest first: a range that holds none of them is above."""
    every = ((a, b) for a in range(major, -1, -1) for b in range(99, -1, -1))
    return (Version(f"{a}.{b}.{patch}") for a, b in every if (a, b) <= (major, minor) for patch in range(10))


def _ipex(stack: Stack, torch: str, machine: str, *, wanted: bool) -> tuple[list[str], list[str]]:
    """Intel's extension, whose major.minor is torch's."""
    last = Version(facts()[IPEX]["last"])
    if not wanted:
        return [], []
    one = pinned(torch)
    if machine != "x86_64" or _is_newer(torch, last):
        return [], [f"ipex: {IPEX} ended with {last}, for x86_64; torch {torch} runs without it"] if stack.ipex is True else []
    if one is None:
        raise ProvisionError(
            f"ipex: true cannot be had for the range torch {torch}: {IPEX} has to match torch's major.minor",
            advice=f'pin one torch, such as `torch: "{last}"`',
        )
    return [f"{IPEX}=={one.major}.{one.minor}.*"], []


def _numpy(torch: str) -> list[str]:
    """NumPy 1 for a torch that was compiled for it: with NumPy 2 such a torch imports, and then has no arrays."""
    one, row = pinned(torch), facts()["numpy"]
    return [f"numpy{row['limit']}"] if one and one < Version(row["before_torch"]) else []


def _mpi(stack: Stack, site: _Site) -> list[str]:
    if stack.mpi == "system":
        return []
    row = facts()["mpi"][stack.mpi]
    if site.machine not in row["machines"]:
        fitting = [name for name, other in facts()["mpi"].items() if site.machine in other["machines"]]
        raise ProvisionError(
            f"mpi: {stack.mpi} has no wheel for {site.machine}; {site.has}",
            advice=f"use `mpi: {' or '.join(fitting) or 'system'}` in the inventory's stack",
        )
    return [row["requirement"]]


def _libraries(stack: Stack, *, with_ccl: bool, with_ipex: bool) -> list[str]:
    """Transformers and Accelerate. Beside retired packages the last that use them, unless others are asked for.

    The extra `torch` makes the resolver heed which torch a Transformers works with; without it an old torch gets a new one.
    """
    asked = stack.transformers if _asks_transformers(stack) else None
    if not with_ccl and (asked or not with_ipex):
        return [_requirement("transformers", stack.transformers), _requirement("accelerate", stack.accelerate)]
    limits: dict[str, str] = dict(facts()["ccl_limits"])
    if with_ipex and not asked:
        limits |= facts()["ipex_limits"]
    return [
        _requirement("transformers[torch]", asked, limits["transformers"]),
        _requirement("accelerate", stack.accelerate, limits["accelerate"]),
    ]


def _library_notes(stack: Stack, *, with_ipex: bool) -> list[str]:
    if not with_ipex or _asks_transformers(stack):
        return []
    limit = facts()["ipex_limits"]["transformers"]
    return [f"ipex: transformers {limit}, the last whose --use_ipex does anything; name another in `stack.transformers`"]


def _asks_transformers(stack: Stack) -> bool:
    """Whether the inventory names a Transformers; its default is no wish."""
    return "transformers" in stack.model_fields_set


def _requirement(name: str, wanted: str | None, limit: str = "") -> str:
    """`torch` and "2.13.0" make "torch==2.13.0"; specifiers are kept, and a limit of our own is added."""
    return f"{name}{_specifier(wanted or '') & SpecifierSet(limit)}"


def _specifier(wanted: str) -> SpecifierSet:
    return SpecifierSet(wanted if not wanted or wanted[0] in "<>=!~" else f"=={wanted}")


def _refuse_contradictions(requirements: Sequence[str], stack: Stack, site: _Site, *, with_ccl: bool) -> None:
    """Raise ProvisionError, naming all of them, when requirements for one package exclude each other."""
    problems = []
    for name, asked in _by_package(requirements).items():
        together = SpecifierSet(",".join(str(one) for one in asked))
        if _is_empty(together):
            problems.append(f"{name} {' and '.join(str(one) for one in asked)}")
    if not problems:
        return
    limits = [f"{name} {limit}" for name, limit in facts()["ccl_limits"].items()]
    raise ProvisionError(
        f"the stack contradicts itself: no version is both {', nor '.join(problems)}"
        + (f" (torch {stack.torch}, backend ccl)" if with_ccl else "")
        + f"; {site.has}",
        advice=f"what works: with backend ccl {', '.join(limits)}; any of them with `backend: gloo`"
        if with_ccl
        else "name each package once, in one version or range",
    )


def _by_package(requirements: Sequence[str]) -> dict[str, list[SpecifierSet]]:
    """What is asked of each package; URLs and markers are the resolver's business."""
    asked: dict[str, list[SpecifierSet]] = {}
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # pip says what is wrong with it
        if requirement.marker is None and requirement.url is None:
            specifiers = [SpecifierSet(str(one)) for one in requirement.specifier]
            asked.setdefault(canonicalize_name(requirement.name), []).extend(specifiers)
    return asked


def _is_empty(together: SpecifierSet) -> bool:
    """Whether surely no version satisfies all: versions at, just above and just below each bound are tried."""
    if any(one.operator == "===" for one in together):
        return False
    bounds = [Version(one.version.removesuffix(".*")) for one in together]
    tried = [near for bound in bounds for near in (bound, *_neighbours(bound))]
    return bool(bounds) and not any(together.contains(version, prereleases=True) for version in tried)


def _neighbours(version: Version) -> tuple[Version, Version]:
    """A version a little above and one a little below: 5.1 gives 5.1.0.0.1 and 5.0.99."""
    release = list(version.release)
    above = [*release, 0, 0, 1]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    below = [*release[:-1], max(release[-1] - 1, 0), 99]
    above_text, below_text = (f"{version.epoch}!{'.'.join(map(str, parts))}" for parts in (above, below))
    return Version(above_text), Version(below_text)
