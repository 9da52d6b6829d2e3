"""verify.py tells what an environment really is, whatever state it is in; repair.py takes away what is damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from interpreters import every_interpreter

GOOD = '__version__ = "1.0"\n'
LAUNCHER = '#!/bin/sh\necho "HYDRA build details:"\necho "    Version:           5.0.2"\n'
LIMIT_S = 120


class AnEnvironment:
    """An environment of one-module packages as an installer leaves it, and what verify.py says of it."""

    def __init__(self, repository: Path, root: Path, interpreter: Path, modules: Mapping[str, str]) -> None:
        self.repository, self.root, self.modules = repository, root, list(modules)
        self.path = root / "envs" / "d1"
        subprocess.run([interpreter, "-m", "venv", "--without-pip", self.path], check=True, timeout=LIMIT_S)
        (self.site,) = self.path.glob("lib/python*/site-packages")
        for name, source in modules.items():
            self._install(name, source)
        self.launcher = self.path / "bin" / "mpiexec.hydra"
        self.launcher.write_text(LAUNCHER)
        self.launcher.chmod(0o755)
        wheels = [{"name": name, "version": "1.0", "sha256": name * 2, "filename": f"{name}.whl"} for name in modules]
        (self.path / "complete.json").write_text(json.dumps({"digest": "d1", "versions": {}, "wheels": wheels}))

    def verified(self, *, by: Path | str = sys.executable, mpi: str = "bin/mpiexec.hydra", **variables: str) -> dict[str, Any]:
        order = {"digest": "d1", "modules": self.modules, "mpi": mpi}
        done = self.run("verify.py", order, by, {**os.environ, **variables})
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def repaired(self, *wheels: str) -> dict[str, Any]:
        done = self.run("repair.py", {"digest": "d1", "wheels": list(wheels), "only_look": False}, sys.executable, None)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run(
        self, script: str, order: object, by: Path | str, environment: Mapping[str, str] | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [by, self.repository / "remote" / script, str(self.root)],
            input=json.dumps(order),
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def _install(self, name: str, source: str) -> None:
        info = self.site / f"{name}-1.0.dist-info"
        info.mkdir()
        (self.site / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\nName: not this\n")
        (info / "RECORD").write_text(f"{name}.py,sha256=x,{len(source)}\n__pycache__/{name}.pyc,,\n{info.name}/RECORD,,\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root with blank"


@every_interpreter
def test_a_sound_environment_is_told_in_full(repository: Path, root: Path, interpreter: Path) -> None:
    """Each Python verifies an environment of its own kind: versions, modules, files and the launcher's version line."""
    found = AnEnvironment(repository, root, interpreter, {"alpha": GOOD, "Beta_x": GOOD}).verified(by=interpreter)
    assert (found["state"], found["error"], found["damaged"]) == ("complete", None, {})
    assert found["distributions"] == {"alpha": "1.0", "beta-x": "1.0"}
    assert found["recorded"] == {"alpha": "alphaalpha", "Beta_x": "Beta_xBeta_x"}
    assert found["modules"] == {name: {"version": "1.0", "error": None} for name in ("alpha", "Beta_x")}
    assert found["mpi"]["version"] == "Version:           5.0.2" and found["mpi"]["error"] is None


def test_modules_that_fail_in_any_way_are_told_and_the_rest_is_tried(repository: Path, root: Path) -> None:
    """An exception's last line, an exit, a signal and noise on stdout: none hides what comes after it."""
    sources = {
        "raises": "raise ImportError('first line\\nundefined symbol: xyz')\n",
        "leaves": "import sys; sys.exit('no licence')\n",
        "dies": "import os, signal; os.kill(os.getpid(), signal.SIGILL)\n",
        "shouts": 'print("{}"); __version__ = "1.0"\n',
        "ends": "import os, sys; sys.stderr.write('gone\\n'); os._exit(7)\n",
        "stops": "import os; os._exit(0)\n",
        "fine": GOOD,
    }
    found = AnEnvironment(repository, root, Path(sys.executable), sources).verified()["modules"]
    assert {name: one["error"] for name, one in found.items()} == {
        "raises": "ImportError: undefined symbol: xyz",
        "leaves": "SystemExit: no licence",
        "dies": "killed by SIGILL (it said nothing)",
        "shouts": None,
        "ends": "exit code 7 (gone)",
        "stops": "importing it ended the interpreter",
        "fine": None,
    }
    assert found["fine"]["version"] == "1.0"


def test_a_module_that_hangs_has_a_time_limit(repository: Path, root: Path) -> None:
    """What does not come back is given up and named, and so is what there was no time left for; nothing is left behind."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"hangs": "import time; time.sleep(600)\n", "late": GOOD})
    code = "import sys, verify; verify.IMPORT_LIMIT_S = 1.0; sys.exit(verify.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        input=json.dumps({"digest": "d1", "modules": ["hangs", "late"], "mpi": "mpirun-that-is-nowhere"}),
        env={**os.environ, "PYTHONPATH": str(repository / "remote")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found = json.loads(done.stdout)
    assert found["modules"]["hangs"]["error"].startswith("took longer than 1 s")
    assert found["modules"]["late"]["error"] == "not tried: no time was left"
    assert found["mpi"]["error"] == "there is no mpirun-that-is-nowhere"
    assert environment.repaired()["in_use"] == []


def test_damaged_files_are_found(repository: Path, root: Path) -> None:
    """A file that is gone or of another size, a RECORD or METADATA that is gone; byte code does not matter."""
    environment = AnEnvironment(
        repository, root, Path(sys.executable), dict.fromkeys(("one", "two", "three", "four", "five"), GOOD)
    )
    (environment.site / "one.py").unlink()
    (environment.site / "two.py").write_text(GOOD + "#")
    (environment.site / "three-1.0.dist-info" / "RECORD").unlink()
    (environment.site / "four-1.0.dist-info" / "METADATA").unlink()
    found = environment.verified()
    assert found["damaged"] == {
        "one": "1 of 3 files missing or changed: one.py",
        "two": "1 of 3 files missing or changed: two.py",
        "three": "its RECORD cannot be read",
    }
    assert (found["distributions"]["four"], found["distributions"]["five"]) == ("?", "1.0")
    assert found["modules"]["one"]["error"] == "ModuleNotFoundError: No module named 'one'"


def test_an_environment_without_an_interpreter_is_reported(repository: Path, root: Path) -> None:
    """A dangling link, a program that is none, and one that fails: broken, with the reason; never a stack trace."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"alpha": GOOD})
    python = environment.path / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python")
    found = environment.verified()
    assert found["state"] == "broken" and "No such file or directory" in found["error"]
    python.unlink()
    python.write_text("\x7fELF rubbish")
    python.chmod(0o755)
    assert environment.verified()["state"] == "broken"
    python.write_text("#!/bin/sh\necho libpython3.so: cannot open >&2\nexit 127\n")
    found = environment.verified()
    assert (found["state"], found["modules"]) == ("broken", {}) and "libpython3.so: cannot open" in found["error"]


def test_what_is_not_there_or_not_finished_is_told(repository: Path, root: Path) -> None:
    """No directory at all, or one without its complete.json."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"alpha": GOOD})
    (environment.path / "complete.json").write_text("{")
    assert environment.verified()["state"] == "unfinished"
    shutil.rmtree(environment.path)
    found = environment.verified()
    assert found["state"] == "missing" and "there is no" in found["mpi"]["error"]
    assert environment.run("verify.py", [], sys.executable, None).returncode == 1


def test_start_up_files_cannot_make_a_broken_environment_look_whole(repository: Path, root: Path, tmp_path: Path) -> None:
    """PYTHONPATH of the login does not count: only what is installed does."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"alpha": GOOD})
    (environment.site / "alpha.py").unlink()
    (tmp_path / "alpha.py").write_text(GOOD)
    assert environment.verified(PYTHONPATH=str(tmp_path))["modules"]["alpha"]["error"]


def test_a_launcher_of_the_nodes_own_is_found_on_path(repository: Path, root: Path, tmp_path: Path) -> None:
    """With a bare name, PATH decides, and the login's variables are handed on; one that fails says why."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {})
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\necho "mpirun (Open MPI) $MODULE_VERSION"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = environment.verified(mpi="mpirun", PATH=path, MODULE_VERSION="4.1.4")["mpi"]
    assert found == {"program": str(program), "version": "mpirun (Open MPI) 4.1.4", "error": None}
    program.write_text("#!/bin/sh\necho libhwloc.so.15: cannot open >&2\nexit 127\n")
    assert "libhwloc.so.15" in environment.verified(mpi="mpirun", PATH=path)["mpi"]["error"]


def test_repair_takes_away_the_environment_and_what_could_bring_the_damage_back(repository: Path, root: Path) -> None:
    """Bad wheels of the lock, uv's cache (hard links to the same files) and the unpacked uv go; sound wheels and others stay."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"alpha": GOOD})
    good = hashlib.sha256(b"good").hexdigest()
    for name, content in ((good, b"good"), ("0" * 64, b"bad"), ("1" * 64, b"of another lock")):
        (root / "wheelhouse" / name).mkdir(parents=True)
        (root / "wheelhouse" / name / "a.whl").write_bytes(content)
    (root / "cache" / "uv").mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin" / "uv-1234").write_text("")
    (root / "bin" / "uv").symlink_to("uv-1234")
    (root / "envs" / "d2").mkdir()
    removed = environment.repaired(good, "0" * 64, "2" * 64)["removed"]
    gone = {"envs/d1", "wheelhouse/" + "0" * 64, "cache/uv", "bin/uv", "bin/uv-1234"}
    assert {str(Path(path).relative_to(root)) for path in removed} == gone
    assert sorted(path.name for path in (root / "wheelhouse").iterdir()) == sorted([good, "1" * 64])
    assert sorted(path.name for path in (root / "envs").iterdir()) == [".d1.lock", "d2"]
    assert list((root / "bin").iterdir()) == []
    assert environment.repaired(good) == {"removed": [], "in_use": []}


def test_repair_touches_nothing_that_is_in_use(repository: Path, root: Path) -> None:
    """While a process runs in the environment, it is named and everything stays."""
    environment = AnEnvironment(repository, root, Path(sys.executable), {"alpha": GOOD})
    command = [environment.path / "bin" / "python", "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        found = environment.repaired()
        assert found["removed"] == [] and str(environment.path) in found["in_use"][0]
        assert environment.verified()["state"] == "complete"
        process.communicate(b"\n", timeout=LIMIT_S)
    assert environment.repaired()["removed"] == [str(environment.path)]
