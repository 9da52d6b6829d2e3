"""The small wheel of oneCCL, put together from wheels that are made here."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

import pytest

from orchestrator.actions import oneccl
from orchestrator.errors import ResolveError
from orchestrator.planning.compat import facts

NEEDED = facts()["oneccl"]["files"]


def source(directory: Path, requirement: str, *, without: str = "") -> Path:
    """A wheel in the layout of Intel's, with ballast that is not taken."""
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    path = directory / f"{stem}-py2.py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for library in {*NEEDED[requirement]["libraries"], "libballast.so"} - {without}:
            wheel.writestr(f"{stem}.data/data/lib/{library}", f"{library} of {name}")
        wheel.writestr(f"{stem}.data/data/share/doc/licensing/license.txt", f"the licence of {name}")
    return path


def test_unchanged_files_and_licences_become_a_wheel_that_is_always_the_same(tmp_path: Path) -> None:
    """A lock names it by its hash, wherever and whenever it is made; RECORD lists every file of it."""
    made = []
    for directory in (tmp_path / "one", tmp_path / "two"):
        directory.mkdir()
        for requirement in NEEDED:
            source(directory, requirement)
        made.append(oneccl.make_wheel(oneccl.sources_in(directory), directory))
    assert made[0].read_bytes() == made[1].read_bytes()
    with zipfile.ZipFile(made[0]) as wheel:
        names = wheel.namelist()
        assert wheel.read("cluster_train_oneccl/lib/libmpi.so.12") == b"libmpi.so.12 of impi-rt"
        assert (
            wheel.read("cluster_train_oneccl-2022.1.2.dist-info/licenses/oneccl-cpu/license.txt") == b"the licence of oneccl-cpu"
        )
        recorded = [row[0] for row in csv.reader(io.StringIO(wheel.read(names[-1]).decode()))]
    assert recorded == names and not any("ballast" in name for name in names)


def test_a_source_without_a_needed_library_is_refused(tmp_path: Path) -> None:
    """Another release may have other names: nothing is made that could not be loaded."""
    for requirement in NEEDED:
        source(tmp_path, requirement, without="libccl.so.1")
    with pytest.raises(ResolveError, match=r"oneccl-cpu==2022\.1\.2 has no libccl\.so\.1"):
        oneccl.make_wheel(oneccl.sources_in(tmp_path), tmp_path)
    assert not (tmp_path / oneccl.filename()).exists()


def test_every_source_is_pinned_by_its_hash() -> None:
    """pip refuses what is not the tested file."""
    lines = oneccl.pins().splitlines()
    assert len(lines) == 3 and all(line.split(" --hash=sha256:")[1].isalnum() for line in lines)
