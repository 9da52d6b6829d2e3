"""An environment is complete or not there."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from wheels_by_hand import install_plan_for, make_wheel


def plan(root: Path, *wheels: dict[str, str]) -> dict[str, Any]:
    return install_plan_for(root, sys.executable, *wheels)


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: xyz')", "undefined symbol: xyz"),
        ("print('bye'); raise SystemExit(0)", "importing it ended with 0"),
        ("import os; os._exit(0)", "importing it ended with 0"),
    ],
)
def test_an_environment_that_does_not_import_is_not_kept(repository: Path, root: Path, source: str, said: str) -> None:
    """A wheel that raises at import, or ends the interpreter, is an error with its own words, and no environment is left."""
    wheel = make_wheel(root / "wheelhouse", "badone", source + "\n")
    done = install(repository, plan(root, wheel))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr.partition("does not import")[0]
    assert not (root / "envs/d1").exists()


def test_what_need_not_import_and_does_not_is_noted_and_told(repository: Path, root: Path) -> None:
    """The environment is complete without it, also where importing it kills the process; the probe tells it from then on."""
    good, bad = (
        make_wheel(root / "wheelhouse", "goodone", "__version__ = '1.0'\n"),
        make_wheel(root / "wheelhouse", "badone", "import os; os.write(2, b'illegal instruction\\n'); os.abort()\n"),
    )
    document = {**plan(root, good, bad), "verify": ["goodone"], "try": ["badone", "goodone"]}
    for installed in (True, False):
        done = install(repository, document)
        assert done.returncode == 0, done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert (last["installed"], last["versions"], last["unusable"]) == (
            installed,
            {"goodone": "1.0"},
            {"badone": "illegal instruction"},
        )
    probed = subprocess.run([sys.executable, repository / "remote" / "probe.py", "--root", root], capture_output=True, check=True)
    state = json.loads(probed.stdout)["state"]
    assert (state["envs"], state["unusable"]) == (["d1"], [{"env": "d1", "module": "badone", "why": "illegal instruction"}])


def test_a_wheel_that_changed_in_the_wheelhouse_is_refused(repository: Path, root: Path) -> None:
    """Hashes are required: content that differs from the lock is never installed."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    path = root / "wheelhouse" / wheel["sha256"] / wheel["filename"]
    path.write_bytes(path.read_bytes() + b"x")
    done = install(repository, plan(root, wheel))
    assert done.returncode == 1 and "hash" in done.stderr.lower()
    assert not (root / "envs/d1").exists()


def test_what_dead_installers_left_is_cleared(repository: Path, root: Path) -> None:
    """A directory without complete.json, and one half built, are replaced; so is what another stack's installer left."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    for left in ("d1/bin", ".d1.building/bin", ".d0.building/bin"):
        (root / "envs" / left).mkdir(parents=True)
    (root / "envs/.d0.building.txt").touch()
    done = install(repository, plan(root, wheel))
    assert done.returncode == 0, done.stderr
    assert (root / "envs/d1/complete.json").exists() and not list((root / "envs").glob(".*.building*"))


def test_what_is_being_built_is_left_alone(repository: Path, root: Path) -> None:
    """Another stack's installer that lives holds its lock: its directory stays."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    (root / "envs/.d0.building").mkdir(parents=True)
    (root / "wheelhouse" / wheel["sha256"] / wheel["filename"]).unlink()
    with (root / "envs/.d0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert install(repository, plan(root, wheel)).returncode == 1  # a wheel is missing, which takes no time
        assert (root / "envs/.d0.building").exists()
    install(repository, plan(root, wheel))
    assert not (root / "envs/.d0.building").exists()


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


def test_a_killed_installer_leaves_nothing_that_counts(repository: Path, root: Path) -> None:
    """kill -9 in the middle of pip: what pip still writes stays out of the way, the next installer makes the environment."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    command = [sys.executable, str(repository / "remote" / "install.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as killed:
        assert killed.stdin
        killed.stdin.write(json.dumps(plan(root, wheel)).encode())
        killed.stdin.close()
        deadline = time.monotonic() + 30
        while not (root / "envs/.d1.building/bin/python").exists():
            assert time.monotonic() < deadline and killed.poll() is None
        os.kill(killed.pid, signal.SIGKILL)
    assert not (root / "envs/d1").exists() and (root / "envs/.d1.building").exists()
    done = install(repository, plan(root, wheel))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (root / "envs").iterdir()) == [".d1.lock", "d1"]


def test_an_installer_that_nobody_listens_to_finishes(repository: Path, root: Path) -> None:
    """The caller's end of the pipe is closed at once; the environment gets complete all the same."""
    wheel = make_wheel(root / "wheelhouse", "goodone", "def say(): pass\n")
    command = [sys.executable, str(repository / "remote" / "install.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as left_alone:
        assert left_alone.stdin and left_alone.stdout
        left_alone.stdout.close()
        left_alone.stdin.write(json.dumps(plan(root, wheel)).encode())
        left_alone.stdin.close()
        left_alone.wait(60)
    assert (root / "envs/d1/complete.json").exists()


def test_a_python_without_venv_is_told_when_pip_has_to_serve(repository: Path, root: Path, tmp_path: Path) -> None:
    """Debian's python3 without python3-venv: the interpreter, what it lacks, and what to install."""
    wheel = make_wheel(root / "wheelhouse", "goodone")
    lacking = tmp_path / "python3"
    lacking.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -c \'import sys; sys.modules["ensurepip"] = None; exec(sys.argv[2])\' "$@"\n'
    )
    lacking.chmod(0o755)
    done = install(repository, {**plan(root, wheel), "python": str(lacking)})
    assert done.returncode == 1
    assert f"{lacking} lacks the module venv or ensurepip" in done.stderr and "apt-get install python3-venv" in done.stderr
