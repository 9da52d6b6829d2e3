"""Copying to a node: each entry whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest


def archive(entries: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def unpack(repository: Path, directory: Path, data: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, repository / "remote" / "unpack.py", *options, directory]
    return subprocess.run(command, input=data, capture_output=True)


def test_entries_arrive_and_are_reported(repository: Path, tmp_path: Path) -> None:
    """Every top-level entry is there with its files, and the answer names it."""
    done = unpack(repository, tmp_path / "to", archive({"a/x": b"1", "a/sub/y": b"2", "b/z": b"3"}))
    assert json.loads(done.stdout) == {"unpacked": ["a", "b"], "kept": []}
    assert (tmp_path / "to/a/sub/y").read_bytes() == b"2"


def test_what_is_there_already_is_kept(repository: Path, tmp_path: Path) -> None:
    """An entry that exists is named by its content: it is not touched again."""
    unpack(repository, tmp_path, archive({"a/x": b"old"}))
    done = unpack(repository, tmp_path, archive({"a/x": b"new"}))
    assert json.loads(done.stdout) == {"unpacked": [], "kept": ["a"]}
    assert (tmp_path / "a/x").read_bytes() == b"old"


def test_a_stream_that_breaks_leaves_the_complete_entries_and_nothing_half(repository: Path, tmp_path: Path) -> None:
    """Cut in the middle of the second entry: the first is there, of the second nothing."""
    whole = archive({"a/x": b"1" * 600, "b/y": b"2" * 100_000})
    done = unpack(repository, tmp_path, whole[: len(whole) // 2])
    assert done.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("size", [1536, 1700, 2560], ids=["between-files", "in-a-header", "before-the-end"])
def test_a_stream_that_breaks_between_two_files_leaves_nothing_half(repository: Path, tmp_path: Path, size: int) -> None:
    """What has come looks like a whole archive but for its end: it is none."""
    whole = archive({"a/x": b"\0" * 1024, "a/y": b"2" * 512})
    done = unpack(repository, tmp_path, whole[:size])
    assert done.returncode == 1 and b"the stream was cut" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_must_have_the_hash_that_names_it(repository: Path, tmp_path: Path) -> None:
    """With --sha256 a damaged file is refused by name and not kept."""
    good = hashlib.sha256(b"wheel").hexdigest()
    done = unpack(repository, tmp_path, archive({f"{good}/w.whl": b"wheel", "0" * 64 + "/bad.whl": b"wheel"}), "--sha256")
    assert done.returncode == 1 and b"bad.whl arrived damaged" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [good]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "."])
def test_names_that_lead_outside_are_refused(repository: Path, tmp_path: Path, name: str) -> None:
    """A stream cannot write anywhere but below its directory."""
    done = unpack(repository, tmp_path / "to", archive({name: b"x"}))
    assert done.returncode == 1 and b"leads outside" in done.stderr
    assert not (tmp_path / "evil").exists()


def test_what_a_killed_one_left_is_cleared_by_the_next(repository: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of an entry leaves it under a hidden name; the next to unpack there removes that."""
    begun, _ = begin(repository, tmp_path)
    begun.kill()
    begun.communicate()
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    unpack(repository, tmp_path, archive({"b/x": b"2"}))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_another_is_unpacking_is_left_alone(repository: Path, tmp_path: Path) -> None:
    """Two at once into one directory: neither takes the other's half-made entry for an abandoned one."""
    begun, rest = begin(repository, tmp_path)
    unpack(repository, tmp_path, archive({"b/x": b"2"}))
    out, _ = begun.communicate(rest)
    assert json.loads(out) == {"unpacked": ["a"], "kept": []}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_another_machine_left_on_a_shared_disk_is_cleared_after_a_day(repository: Path, tmp_path: Path) -> None:
    """Locks may not reach over the network: a part of another machine counts as abandoned when nothing was added for a day."""
    for name, age_s in (("old", 90_000), ("new", 60)):
        (tmp_path / f".{name}.elsewhere.1.part").mkdir()
        os.utime(tmp_path / f".{name}.elsewhere.1.part", (time.time() - age_s,) * 2)
    unpack(repository, tmp_path, archive({"a/x": b"1"}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.elsewhere.1.part", "a"]


def begin(repository: Path, directory: Path) -> tuple[subprocess.Popen[bytes], bytes]:
    """An unpack.py that is in the middle of entry `a`, and the rest of its stream."""
    whole = archive({"a/x": b"1" * 3_000_000})
    command = [sys.executable, repository / "remote" / "unpack.py", directory]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    process.stdin.write(whole[:1_500_000])
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not list(directory.glob(".a.*.part/a/x")):
        assert time.monotonic() < deadline and process.poll() is None
    return process, whole[1_500_000:]


def test_who_gives_up_twice_leaves_nothing_either(repository: Path, tmp_path: Path) -> None:
    """Stdin is closed, and while what is half made is being removed there comes a SIGINT: it is removed to the end."""
    files = archive({f"large/{number}": b"" for number in range(20_000)})
    command = [sys.executable, repository / "remote" / "unpack.py", tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write(files[: 512 * 20_000])
        process.stdin.close()

        def count() -> int:
            return sum(len(names) for _, _, names in os.walk(tmp_path))

        most = 0
        while (now := count()) >= most or now < 15_000:
            most = max(most, now)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert list(tmp_path.iterdir()) == []
