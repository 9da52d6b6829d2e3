"""Locks as files: written whole, followed to the letter, refused where they do not fit or are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.actions.lockfile import read_lock, write_lock
from orchestrator.errors import InventoryError, ProvisionError
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.wheels import StackRequest, refuse_other_lock
from orchestrator.specs.lock import Lock, LockedWheel, Target

WHEELS = tuple(
    LockedWheel(name=name, version=version, filename=filename, sha256=digit * 64, source=f"https://x/{filename}")
    for name, version, filename, digit in (
        ("numpy", "2.0.0", "numpy-2.0.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "1"),
        ("oneccl-bind-pt", "2.8.0+cpu", "oneccl_bind_pt-2.8.0+cpu-cp311-cp311-linux_x86_64.whl", "2"),
        ("tqdm", "4.67", "tqdm-4.67-py3-none-any.whl", "3"),
    )
)
UV = LockedWheel(name="uv", version="0.9", filename="uv-0.9-py3-none-manylinux_2_28_x86_64.whl", sha256="4" * 64, source="")
LOCK = Lock(requirements=("torch==2.8.0", "evaluate>=0.4"), target="cp311 x86_64", wheels=WHEELS, installer=UV)


def request(*requirements: str, python: str = "3.11", glibc_minor: int = 36) -> StackRequest:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc_minor, 4, -1)]
    return StackRequest(
        choice=StackChoice(
            backend="gloo", asked_backend=None, requirements=requirements or LOCK.requirements, modules=(), notes=()
        ),
        target=Target(
            python_version=python,
            implementation="cp",
            platforms=(*platforms, "manylinux2014_x86_64", "linux_x86_64"),
            markers={"platform_machine": "x86_64"},
        ),
        find_links=(),
        extra_index=(),
    )


def test_a_lock_comes_back_from_its_file(tmp_path: Path) -> None:
    """Writing replaces the file as a whole and leaves nothing beside it; reading gives the same lock."""
    path = tmp_path / "lab.lock"
    path.write_text("an older one")
    write_lock(path, LOCK)
    assert read_lock(path).lock == LOCK and read_lock(path).lock.digest == LOCK.digest
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """The file is named."""
    with pytest.raises(InventoryError, match=r"no-directory/lab\.lock"):
        write_lock(tmp_path / "no-directory" / "lab.lock", LOCK)


def changed(**wheel: Any) -> str:
    """LOCK's text with some keys of its first wheel changed."""
    document = LOCK.to_json()
    document["wheels"][0].update(wheel)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("not json", "Expecting value"),
        ("[]", "is not a lock"),
        ("{}", "'schema' is missing"),
        ('{"schema": 7}', "lock schema 7"),
        (json.dumps(LOCK.to_json())[:-300], "is not a lock"),
        (changed(sha256="12"), "'12' is not a SHA-256"),
        (changed(sha256=None), "are texts"),
        (changed(filename="../../../numpy-2.0.0-py3-none-any.whl"), "Invalid project name"),
        (changed(filename="numpy-2.0.0.tar.gz"), "numpy: "),
        (changed(version="2.0.1"), "is not a wheel of numpy 2.0.1"),
        (changed(name="numpy\n--index-url=http://x"), "not a wheel of"),
        (changed(name="tqdm", version="4.67", filename="tqdm-4.67-py3-none-any.whl"), "two wheels of tqdm"),
        (changed(colour="red"), "colour"),
        (json.dumps({**LOCK.to_json(), "target": 7}), "are texts"),
    ],
)
def test_a_file_that_is_no_lock_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """Cut, foreign or tampered files are usage errors (exit code 2), never a stack trace or a path outside the cache."""
    path = tmp_path / "lab.lock"
    path.write_text(text)
    with pytest.raises(InventoryError) as refused:
        read_lock(path)
    assert str(path) in refused.value.message and said in refused.value.message
    assert "--lock" in refused.value.advice


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """So is a directory, and a file that is not text."""
    for path in (tmp_path / "none.lock", tmp_path):
        with pytest.raises(InventoryError, match="cannot be read"):
            read_lock(path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InventoryError, match="is not a lock"):
        read_lock(tmp_path / "bytes")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from([("schema",), ("requirements",), ("target",), ("wheels",), ("installer",), ("wheels", 1)])
    | st.tuples(st.just("wheels"), st.integers(0, 2), st.sampled_from(["name", "version", "filename", "sha256", "source"])),
    JSON,
)
def test_no_value_in_any_place_makes_a_stack_trace(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    """A lock with any value in any place is either read or refused as a usage error."""
    document = json.loads(json.dumps(LOCK.to_json()))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "lab.lock"
    path.write_text(json.dumps(document))
    try:
        lock = read_lock(path).lock
    except InventoryError as error:
        assert str(path) in error.message
    else:
        assert len(lock.digest) == 16 and all("/" not in wheel.filename for wheel in lock.all_wheels)


def test_a_lock_for_these_nodes_and_this_stack_is_taken() -> None:
    """Spelling and order of the requirements do not matter."""
    refuse_other_lock(LOCK, request("evaluate >= 0.4", "Torch==2.8.0"), "lab.lock")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request(python="3.12"), ["lab.lock is a lock for cp311 x86_64", "the nodes are cp312 x86_64"]),
        (request(glibc_minor=17), ["uv-0.9-py3-none-manylinux_2_28_x86_64.whl does not run", "manylinux_2_17_x86_64"]),
        (request("torch==2.9.0", "evaluate>=0.4"), ["asks for torch==2.9.0", "the lock has torch==2.8.0"]),
        (request("torch==2.8.0"), ["the lock has evaluate>=0.4, the inventory does not"]),
        (request("torch==2.8.0", "evaluate>=0.4", "seqeval"), ["the inventory asks for seqeval, the lock does not"]),
    ],
    ids=["python", "glibc", "version", "less", "more"],
)
def test_a_lock_for_other_nodes_or_another_stack_is_refused(asked: StackRequest, said: list[str]) -> None:
    """Both sides are named, and what to do."""
    with pytest.raises(ProvisionError) as refused:
        refuse_other_lock(LOCK, asked, "lab.lock")
    assert all(words in refused.value.message for words in said), refused.value.message
    assert "--lock" in refused.value.advice


def test_two_machines_kinds_are_never_mixed() -> None:
    """The target names the architecture too."""
    with pytest.raises(ProvisionError, match="cp311 aarch64, and the nodes are cp311 x86_64"):
        refuse_other_lock(replace(LOCK, target="cp311 aarch64"), request(), "lab.lock")
