"""A run's directory in memory: made private, removed with all in it, and nobody else's ever touched."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.planning import mpirun


@pytest.fixture
def scratch(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("scratch_under_test", repository / "remote" / "scratch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_id(scratch: ModuleType) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    scratch.remove(name)


def test_it_is_private_and_goes_with_what_is_in_it(scratch: ModuleType, run_id: str) -> None:
    """Mode 0700; making it twice is fine; removing it tells where it was, and twice that there is none."""
    scratch.make(run_id)
    scratch.make(run_id)
    place = Path(scratch.path(run_id))
    assert place.stat().st_mode & 0o777 == 0o700
    (place / "ompi.1" / "0").mkdir(parents=True)
    assert scratch.remove(run_id) == str(place) and not place.exists()
    assert scratch.remove(run_id) is None


def test_a_link_or_another_name_is_left_alone(scratch: ModuleType, run_id: str, tmp_path: Path) -> None:
    """What a link of that name leads to stays, and a name that leads elsewhere is none of a run."""
    (tmp_path / "mine").touch()
    link = Path(scratch.path(run_id))
    link.symlink_to(tmp_path)
    try:
        assert scratch.remove(run_id) is None and (tmp_path / "mine").exists()
    finally:
        link.unlink()
    assert scratch.remove(f"x/../../..{tmp_path}") is None and (tmp_path / "mine").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory that belongs to somebody else")
def test_somebody_elses_directory_stays(scratch: ModuleType, run_id: str) -> None:
    """Another user's directory that happens to bear the name."""
    scratch.make(run_id)
    os.chown(scratch.path(run_id), 12345, 12345)
    try:
        assert scratch.remove(run_id) is None and Path(scratch.path(run_id)).is_dir()
    finally:
        os.chown(scratch.path(run_id), os.getuid(), -1)


def test_both_sides_mean_the_same_place(scratch: ModuleType) -> None:
    """The plan tells MPI the directory that the nodes remove."""
    assert scratch.PREFIX == mpirun.SCRATCH
