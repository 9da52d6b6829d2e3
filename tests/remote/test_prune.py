"""Which environments, wheels, jobs and agents a node is freed of, told from the runs that it headed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ENV_A, ENV_B, ENV_C = ("a" * 16, "b" * 16, "c" * 16)
JOB_A, JOB_B = ("1" * 16, "2" * 16)
WHEEL_A, WHEEL_B, WHEEL_C = ("a" * 64, "b" * 64, "c" * 64)
AGENT = "d" * 16
NOTHING: dict[str, list[str]] = {"envs": [], "wheels": [], "jobs": [], "agents": [], "installers": []}


class Root:
    """A root directory as runs leave it, and prune.py on it."""

    def __init__(self, path: Path, repository: Path) -> None:
        self.path = path
        self._script = repository / "remote" / "prune.py"

    def call(self, command: str, *arguments: str, keep: dict[str, list[str]] | None = None) -> dict[str, Any]:
        argv = [sys.executable, self._script, command, self.path, *arguments]
        done = subprocess.run(argv, input=json.dumps(keep), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def add(self, kind: str, name: str, *, size_bytes: int = 1000, wheels: tuple[str, ...] = ()) -> Path:
        directory = self.path / kind / name
        directory.mkdir(parents=True)
        (directory / "content").write_bytes(b"x" * size_bytes)
        if kind == "envs":
            (directory / "complete.json").write_text(json.dumps({"wheels": [{"sha256": wheel} for wheel in wheels]}))
        if kind == "jobs":
            (self.path / "jobs" / ".manifests").mkdir(exist_ok=True)
            (self.path / "jobs" / ".manifests" / f"{name}.json").write_text('{"files": []}')
        return directory

    def add_run(self, age_s: float, env: str, job: str, state: str = "succeeded") -> None:
        """What the supervisor writes; the older the run, the larger `age_s`."""
        run_dir = self.path / "runs" / f"run-{age_s:g}"
        run_dir.mkdir(parents=True)
        launch = {"python": f"{self.path}/envs/{env}/bin/python", "job_dir": f"{self.path}/jobs/{job}"}
        launch["agent_dir"] = f"{self.path}/agent/{AGENT}"
        (run_dir / "run.json").write_text(json.dumps({"launch": launch}))
        status = {"state": state, "machine": "another", "supervisor": None, "started_unix_s": time.time() - age_s}
        (run_dir / "status.json").write_text(json.dumps({"run_id": run_dir.name, **status}))

    def left(self, kind: str) -> list[str]:
        return sorted(path.name for path in (self.path / kind).glob("[!.]*"))


@pytest.fixture
def root(tmp_path: Path, repository: Path) -> Root:
    return Root(tmp_path / "root", repository)


def test_the_newest_runs_and_those_that_go_on_are_told(root: Root) -> None:
    """Of three ended runs the newest counts, and besides it the one that has not ended, however old; ranks' records do not."""
    root.add_run(10, ENV_A, JOB_A)
    root.add_run(20, ENV_B, JOB_A)
    root.add_run(3000, ENV_C, JOB_B, state="running")
    (root.path / "runs" / "ranks-only").mkdir()
    assert root.call("used", "1") == {"envs": [ENV_A, ENV_C], "jobs": [JOB_A, JOB_B], "agents": [AGENT]}
    assert root.call("used", "2")["envs"] == [ENV_A, ENV_B, ENV_C]


def test_a_node_without_anything_uses_nothing(root: Root) -> None:
    """Neither a root nor runs: nothing to tell, nothing to remove."""
    assert root.call("used", "10") == {"envs": [], "jobs": [], "agents": []}
    assert root.call("remove", keep=NOTHING) == {"removed": [], "in_use": []}


def test_what_is_not_kept_goes(root: Root) -> None:
    """An environment's wheels stay with it; a job's manifest goes with the job; agents that are kept stay."""
    root.add("envs", ENV_A, wheels=(WHEEL_A,))
    root.add("envs", ENV_B, wheels=(WHEEL_A, WHEEL_B))
    for wheel in (WHEEL_A, WHEEL_B, WHEEL_C):
        root.add("wheelhouse", wheel)
    root.add("jobs", JOB_A)
    root.add("jobs", JOB_B)
    root.add("agent", AGENT)
    keep = {"envs": [ENV_A], "wheels": [WHEEL_C], "jobs": [JOB_A], "agents": [AGENT], "installers": []}
    survey = root.call("survey", keep=keep)
    assert {kind: [item["name"] for item in survey[kind]] for kind in NOTHING} == {
        "envs": [ENV_B],
        "wheels": [WHEEL_B],
        "jobs": [JOB_B],
        "agents": [],
        "installers": [],
    }
    assert len(root.call("remove", keep=keep)["removed"]) == 3
    assert (root.left("envs"), root.left("wheelhouse"), root.left("jobs")) == ([ENV_A], [WHEEL_A, WHEEL_C], [JOB_A])
    assert [path.name for path in (root.path / "jobs" / ".manifests").iterdir()] == [f"{JOB_A}.json"]
    assert root.left("agent") == [AGENT]


def test_what_is_linked_elsewhere_frees_nothing(root: Root) -> None:
    """uv links environments to its cache: the cache goes with an environment, a link from a kept one holds the bytes."""
    gone, kept = root.add("envs", ENV_B, size_bytes=5000), root.add("envs", ENV_A, size_bytes=7000)
    (root.path / "cache" / "uv").mkdir(parents=True)
    os.link(gone / "content", root.path / "cache" / "uv" / "one")
    os.link(kept / "content", gone / "also")
    survey = root.call("survey", keep={**NOTHING, "envs": [ENV_A]})
    (item,) = survey["envs"]
    record_bytes = (gone / "complete.json").stat().st_size
    assert item["size_bytes"] == 12000 + record_bytes and survey["freed_bytes"] == 5000 + record_bytes
    root.call("remove", keep={**NOTHING, "envs": [ENV_A]})
    assert not (root.path / "cache" / "uv").exists() and (kept / "content").exists()


def test_what_is_not_ours_is_never_touched(root: Root, tmp_path: Path) -> None:
    """Other names, links, and directories reached through a link stay, and are not counted."""
    root.add("envs", "notes")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / WHEEL_A).mkdir(parents=True)
    (root.path / "wheelhouse").symlink_to(elsewhere)
    (root.path / "envs" / ENV_A).symlink_to(elsewhere)
    assert root.call("remove", keep=NOTHING) == {"removed": [], "in_use": []}
    assert root.left("envs") == [ENV_A, "notes"] and (elsewhere / WHEEL_A).is_dir()


def test_an_environment_that_a_process_works_in_stays(root: Root) -> None:
    """Whatever the records say: a living process whose command line names it keeps it, and it is named."""
    program = root.add("envs", ENV_A) / "sleep"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "300"]) as process:
        answer = root.call("remove", keep=NOTHING)
        process.kill()
    assert answer == {"removed": [], "in_use": [str(program.parent)]}
    assert root.call("remove", keep=NOTHING)["removed"] == [str(program.parent)]


def test_an_older_installer_goes_and_its_link_with_it(root: Root) -> None:
    """Sizes are told; the kept uv stays; a file of the person's own beside them stays; no link is left that leads nowhere."""
    (root.path / "bin").mkdir(parents=True)
    old, new, foreign = (root.path / "bin" / name for name in ("uv-" + "a" * 16, "uv-" + "b" * 16, "uvx"))
    for path, size_bytes in ((old, 3000), (new, 500), (foreign, 10)):
        path.write_bytes(b"x" * size_bytes)
    (root.path / "bin" / "uv").symlink_to(old.name)
    keep = {**NOTHING, "installers": [new.name]}
    survey = root.call("survey", keep=keep)
    assert survey["installers"] == [{"name": old.name, "size_bytes": 3000}] and survey["freed_bytes"] == 3000
    assert root.call("remove", keep=keep)["removed"] == [str(old)]
    assert sorted(path.name for path in (root.path / "bin").iterdir()) == sorted([new.name, foreign.name])


def test_what_is_in_use_here_is_told_to_whoever_removes_elsewhere(root: Root) -> None:
    """On a root in common the other machines are asked what their processes work in; nothing is removed by asking."""
    program = root.add("envs", ENV_A) / "sleep"
    program.symlink_to("/bin/sleep")
    root.add("envs", ENV_B)
    with subprocess.Popen([program, "300"]) as process:
        answer = root.call("busy", keep=NOTHING)
        process.kill()
    assert answer == {"envs": [ENV_A], "wheels": [], "jobs": [], "agents": [], "installers": []}
    assert root.left("envs") == [ENV_A, ENV_B]
