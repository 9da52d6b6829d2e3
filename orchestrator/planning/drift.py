"""What the nodes really have against what the lock says: a table, and every difference in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from orchestrator.planning.compat import StackChoice, facts
from orchestrator.planning.mpirun import PROGRAM
from orchestrator.planning.tables import table
from orchestrator.specs.lock import Lock

State = Literal["complete", "missing", "unfinished", "broken"]
Kind = Literal["missing", "damaged", "machine", "note"]

# Distributions that a virtual environment brings along, and modules whose distribution is named otherwise.
FROM_VENV = frozenset({"pip", "setuptools", "wheel"})
DISTRIBUTION = {"oneccl_bindings_for_pytorch": "oneccl-bind-pt", "torch_ccl": "oneccl-bind-pt"}
NAMED_AT_MOST = 5

PROVISION = "cluster-train provision"
REPAIR = "cluster-train provision --repair   installs this environment anew from the wheels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a module, or MPI's launcher, says of itself; `error` where it does not work."""

    version: str | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One node's environment as `remote/verify.py` found it.

    Args:
        state: missing and unfinished are what `provision` makes; broken has no interpreter that runs.
        error: why it is broken.
        python: the full version of its interpreter.
        recorded: canonical package name to the SHA-256 of the wheel that it was installed from.
        distributions: canonical package name to the version that is installed.
        damaged: canonical package name to what is wrong with its files.
    """

    node: str
    state: State
    error: str | None
    python: str | None
    recorded: Mapping[str, str]
    distributions: Mapping[str, str]
    damaged: Mapping[str, str]
    modules: Mapping[str, Answer]
    mpi: Answer

    @classmethod
    def from_json(cls, node: str, document: Mapping[str, Any]) -> Environment:
        """Of what verify.py printed; raises KeyError, TypeError or ValueError when it is something else."""
        if document["state"] not in get_args(State):
            raise ValueError(f"state {document['state']!r} is not known")
        return cls(
            node=node,
            state=document["state"],
            error=document["error"],
            python=document["python"],
            recorded=dict(document["recorded"]),
            distributions=dict(document["distributions"]),
            damaged=dict(document["damaged"]),
            modules={name: Answer(version=one["version"], error=one["error"]) for name, one in document["modules"].items()},
            mpi=Answer(version=document["mpi"]["version"], error=document["mpi"]["error"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One thing that is not as the lock says.

    Args:
        kind: missing is what `provision` makes, damaged what `provision --repair` makes again, machine what the node itself
            lacks; a note is a difference that does no harm.
    """

    node: str
    kind: Kind
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: what the lock says, what each node has, and on which nodes that differs."""

    package: str
    locked: str
    found: Mapping[str, str]
    differs: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The nodes against the lock."""

    rows: tuple[Row, ...]
    drift: tuple[Drift, ...]

    @property
    def in_order(self) -> bool:
        """Whether every node has what the lock says."""
        return all(drift.kind == "note" for drift in self.drift)

    @property
    def to_make(self) -> frozenset[str]:
        """The nodes whose environment has to be made, for the first time or again."""
        return frozenset(drift.node for drift in self.drift if drift.kind in ("missing", "damaged"))

    def to_json(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        rows = {
            row.package: {"locked": row.locked or None, "nodes": dict(row.found), "differs": sorted(row.differs)}
            for row in self.rows
        }
        return {"in_order": self.in_order, "packages": rows, "drift": [asdict(drift) for drift in self.drift]}

    def text(self) -> str:
        """The table, differences marked with "!", and the drift in words."""
        nodes = list(self.rows[0].found)
        lines = [("package", "lock", *nodes)]
        for row in self.rows:
            cells = [("! " if node in row.differs else "  ") + row.found[node] for node in nodes]
            lines.append((row.package, row.locked, *cells))
        words = []
        for (node, remedy), alike in groupby(self.drift, key=lambda drift: (drift.node, drift.remedy)):
            words += [*(f"{node}: {drift.what}" for drift in alike), f"   do: {remedy}"]
        off = {drift.node for drift in self.drift if drift.kind != "note"}
        closing = f"{len(off)} of {len(nodes)} nodes are not as the lock says" if off else "every node is as the lock says"
        return "\n".join([table(lines), *words, closing])


def launcher(mpi: str) -> str:
    """MPI's launcher as verify.py looks for it: inside the environment, or on PATH where the nodes bring their own."""
    return "mpirun" if mpi == "system" else f"bin/{PROGRAM[mpi]}"  # type: ignore[index]


def compare(lock: Lock, choice: StackChoice, mpi: str, environments: Sequence[Environment]) -> Comparison:
    """What the nodes have against what the lock says.

    Args:
        mpi: the inventory's `stack.mpi`.
        environments: one for each node, in the inventory's order.
    """
    rows = [_python_row(environments), *_package_rows(lock, choice, mpi, environments), _mpi_row(environments)]
    drift = [drift for environment in environments for drift in _drift(lock, mpi, environment)]
    drift += _differences_between(mpi, rows)
    return Comparison(rows=tuple(rows), drift=tuple(drift))


def _package_rows(lock: Lock, choice: StackChoice, mpi: str, environments: Sequence[Environment]) -> Iterator[Row]:
    """The packages that the stack is about, then every other one that an environment has otherwise than the lock says."""
    about = {DISTRIBUTION.get(module, canonicalize_name(module)): module for module in choice.modules}
    if mpi != "system":
        about[canonicalize_name(Requirement(facts()["mpi"][mpi]["requirement"]).name)] = ""
    there = {environment.node for environment in environments if environment.state in ("complete", "unfinished")}
    seen = {name for environment in environments for name in environment.distributions} - FROM_VENV
    for package in [*about, *sorted((seen | set(lock.versions)) - set(about))]:
        row = _package_row(package, about.get(package, ""), lock, environments)
        if package in about or row.differs & there:
            yield row


def _package_row(package: str, module: str, lock: Lock, environments: Sequence[Environment]) -> Row:
    locked, found, differs = lock.versions.get(package, ""), {}, set()
    for environment in environments:
        version = environment.distributions.get(package, "")
        trouble = "damaged" if package in environment.damaged else ""
        answer = environment.modules.get(module)
        if answer and answer.error:
            trouble = "does not import"
        found[environment.node] = f"{version} {trouble}".strip() or "-"
        if version != locked or trouble:
            differs.add(environment.node)
    return Row(package=package, locked=locked, found=found, differs=frozenset(differs))


def _python_row(environments: Sequence[Environment]) -> Row:
    found = {environment.node: environment.python or "-" for environment in environments}
    return Row(package="python", locked="", found=found, differs=_unlike_the_first(found))


def _mpi_row(environments: Sequence[Environment]) -> Row:
    found = {environment.node: _number(environment.mpi) for environment in environments}
    silent = frozenset(environment.node for environment in environments if environment.mpi.version is None)
    return Row(package="MPI launcher", locked="", found=found, differs=silent | _unlike_the_first(found))


def _number(mpi: Answer) -> str:
    number = re.search(r"\d+(\.\d+)+\S*", mpi.version or "")
    return number.group() if number else mpi.version or "-"


def _unlike_the_first(found: Mapping[str, str]) -> frozenset[str]:
    """The nodes that are not as the first that has anything."""
    first = next((value for value in found.values() if value != "-"), "-")
    return frozenset(node for node, value in found.items() if value != first)


def _drift(lock: Lock, mpi: str, environment: Environment) -> Iterator[Drift]:
    """What is wrong with one node's environment; where there is none, only that."""
    if environment.state in ("missing", "unfinished"):
        text = "is not there" if environment.state == "missing" else "was never finished"
        yield Drift(node=environment.node, kind="missing", what=f"environment {lock.digest} {text}", remedy=PROVISION)
    elif environment.state == "broken":
        what = f"its environment's interpreter does not run: {environment.error}"
        yield Drift(node=environment.node, kind="damaged", what=what, remedy=REPAIR)
    else:
        for what in (*_wrong_packages(lock, environment), *_wrong_files(environment), *_wrong_modules(environment)):
            yield Drift(node=environment.node, kind="damaged", what=what, remedy=REPAIR)
        if environment.mpi.error and mpi != "system":
            what = f"its MPI launcher does not run: {environment.mpi.error}"
            yield Drift(node=environment.node, kind="damaged", what=what, remedy=REPAIR)
    if environment.mpi.error and mpi == "system":
        remedy = "install it, or load its module in a start-up file that non-interactive shells read; or use `mpi: impi`"
        yield Drift(node=environment.node, kind="machine", what=f"mpi: system: {environment.mpi.error}", remedy=remedy)


def _wrong_packages(lock: Lock, environment: Environment) -> Iterator[str]:
    locked, installed = lock.versions, environment.distributions
    if gone := sorted(set(locked) - set(installed)):
        yield f"not installed any more: {_listed(gone)}"
    if other := [f"{name} {installed[name]} instead of {locked[name]}" for name in locked if _is_other(name, locked, installed)]:
        yield f"changed: {_listed(other)}"
    if more := sorted(set(installed) - set(locked) - FROM_VENV):
        yield f"not in the lock: {_listed(f'{name} {installed[name]}' for name in more)}"
    hashes = {wheel.name: wheel.sha256 for wheel in lock.wheels}
    if hashes != environment.recorded:
        wrong = sorted(name for name, _ in hashes.items() ^ environment.recorded.items())
        yield f"installed from other wheels than the lock's: {_listed(dict.fromkeys(wrong))}"


def _is_other(name: str, locked: Mapping[str, str], installed: Mapping[str, str]) -> bool:
    return name in installed and installed[name] != locked[name]


def _wrong_files(environment: Environment) -> Iterator[str]:
    if environment.damaged:
        yield f"damaged: {_listed(f'{name} ({what})' for name, what in sorted(environment.damaged.items()))}"


def _wrong_modules(environment: Environment) -> Iterator[str]:
    for name, answer in environment.modules.items():
        if answer.error:
            yield f"{name} does not import: {answer.error}"


def _differences_between(mpi: str, rows: Iterable[Row]) -> Iterator[Drift]:
    """What no lock fixes: the interpreter's patch level, which does no harm, and an MPI of the nodes' own, which does."""
    for row in rows:
        for node in sorted(row.differs) if row.package in ("python", "MPI launcher") else ():
            if row.found[node] == "-":
                continue  # told already
            what = f"{row.package} is {row.found[node]} here, and not on every node"
            if row.package == "python":
                remedy = "nothing need be done: wheels and pickles are the same within one minor version"
                yield Drift(node=node, kind="note", what=what, remedy=remedy)
            elif mpi == "system":
                yield Drift(node=node, kind="machine", what=what, remedy="install one version on all nodes, or use `mpi: impi`")


def _listed(items: Iterable[str]) -> str:
    texts = list(items)
    more = f" and {len(texts) - NAMED_AT_MOST} more" if len(texts) > NAMED_AT_MOST else ""
    return ", ".join(texts[:NAMED_AT_MOST]) + more
