"""An environment is complete or not there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest


def make_wheel(directory: Path, name: str, source: str) -> dict[str, str]:
    """A real, minimal wheel with one module, put into a wheelhouse by its hash."""
    filename = f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    path = directory / filename
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\nsay-{name} = {name}:say\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    place = directory / digest / filename
    place.parent.mkdir()
    path.rename(place)
    return {"name": name, "version": "1.0", "sha256": digest, "filename": filename}


def plan(root: Path, *wheels: dict[str, str]) -> dict[str, Any]:
    names = [wheel["name"] for wheel in wheels]
    return {"root": str(root), "digest": "d1", "python": sys.executable, "wheels": list(wheels), "uv": None, "verify": names}


def install(repository: Path, document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, repository / "remote" / "install.py"], input=json.dumps(document), capture_output=True, text=True
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root with blank"


def test_wheels_become_an_environment_whose_scripts_work(repository: Path, root: Path) -> None:
    """After the rename the modules import, and console scripts name the final directory."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "__version__ = '1.0'\ndef say(): print('said')\n")
    done = install(repository, plan(root, wheel))
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["installed"], last["versions"]) == (True, {"goodone": "1.0"})
    said = subprocess.run([root / "envs/d1/bin/say-goodone"], capture_output=True, text=True)
    assert said.stdout == "said\n", said.stderr


def test_the_second_time_nothing_is_done(repository: Path, root: Path) -> None:
    """The same plan again finds the environment complete."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    install(repository, plan(root, wheel))
    before = (root / "envs/d1/complete.json").stat().st_mtime_ns
    done = install(repository, plan(root, wheel))
    assert json.loads(done.stdout.splitlines()[-1])["installed"] is False
    assert (root / "envs/d1/complete.json").stat().st_mtime_ns == before


def test_an_environment_that_does_not_import_is_not_kept(repository: Path, root: Path) -> None:
    """A wheel that raises at import is an error with its own words, and no environment is left."""
    wheel = make_wheel(root / "wheelhouse", "badone", "raise ImportError('undefined symbol: xyz')\n")
    done = install(repository, plan(root, wheel))
    assert done.returncode == 1 and "undefined symbol: xyz" in done.stderr
    assert not (root / "envs/d1").exists()


def test_a_wheel_that_changed_in_the_wheelhouse_is_refused(repository: Path, root: Path) -> None:
    """Hashes are required: content that differs from the lock is never installed."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    path = root / "wheelhouse" / wheel["sha256"] / wheel["filename"]
    path.write_bytes(path.read_bytes() + b"x")
    done = install(repository, plan(root, wheel))
    assert done.returncode == 1 and "hash" in done.stderr.lower()
    assert not (root / "envs/d1").exists()


def test_what_a_dead_installer_left_is_cleared(repository: Path, root: Path) -> None:
    """A directory without complete.json, and one half built, are replaced."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    (root / "envs/d1/bin").mkdir(parents=True)
    (root / "envs/.d1.building/bin").mkdir(parents=True)
    done = install(repository, plan(root, wheel))
    assert done.returncode == 0, done.stderr
    assert (root / "envs/d1/complete.json").exists() and not (root / "envs/.d1.building").exists()


def test_a_missing_wheel_is_named(repository: Path, root: Path) -> None:
    """What the wheelhouse lacks is said by its file name."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    (root / "wheelhouse" / wheel["sha256"] / wheel["filename"]).unlink()
    done = install(repository, plan(root, wheel))
    assert done.returncode == 1 and "the wheelhouse lacks goodone-1.0" in done.stderr


def test_two_installers_at_once_make_one_environment(repository: Path, root: Path) -> None:
    """The second waits for the first and finds the work done."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    command = [sys.executable, str(repository / "remote" / "install.py")]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        assert one.stdin
        one.stdin.write(json.dumps(plan(root, wheel)))
        one.stdin.close()
    answers = []
    for one in both:
        assert one.stdout
        answers.append(json.loads(one.stdout.read().splitlines()[-1])["installed"])
        one.stdout.close()
        assert one.wait() == 0
    assert sorted(answers) == [False, True]
