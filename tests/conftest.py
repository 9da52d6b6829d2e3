"""What all tests share: the checkout, the command, and the training stack as `cluster-train provision` makes it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
from commands import COMMAND, COMMAND_LIMIT_S, REPOSITORY, ClusterTrain, LocalStack, Ran
from small_stack import install_mpi

from orchestrator.planning.mpirun import Flavour

pytest_plugins = ["plugin_required"]


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests are not in the way of whatever else runs on this machine."""
    os.environ["CLUSTER_TRAIN_LOCKS"] = str(tmp_path_factory.mktemp("locks") / "locks")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture
def cluster_train(tmp_path: Path) -> ClusterTrain:
    """Runs the installed command as a person would, with records of runs in a directory of this test."""

    def call(*arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> Ran:
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), **(env or {})}
        done = subprocess.run(
            [COMMAND, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )
        return Ran(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return call


@pytest.fixture(scope="session")
def local_stack() -> LocalStack:
    """What `cluster-train provision inventories/local.yml` makes, in its usual place, so that a second test run finds it."""
    done = subprocess.run(
        [COMMAND, "provision", "inventories/local.yml", "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return LocalStack(root=Path.home() / ".cluster-train", digest=json.loads(done.stdout.splitlines()[-1])["stack"])


@pytest.fixture(scope="session")
def uv_wheel(local_stack: LocalStack) -> Path:
    """The wheel of uv that the stack was installed with."""
    return next(iter((local_stack.root / "wheelhouse").glob("*/uv-*.whl")))


@pytest.fixture(scope="session")
def mpi_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flavour], Path]:
    """The launcher of each real MPI, installed by itself when it is first asked for."""
    return cache(lambda flavour: install_mpi(flavour, tmp_path_factory.mktemp("mpi")))


@pytest.fixture(scope="session")
def training_python(request: pytest.FixtureRequest) -> Path:
    """An interpreter with the whole training stack; $CLUSTER_TRAIN_TEST_PYTHON names another one for a quick try."""
    chosen = os.environ.get("CLUSTER_TRAIN_TEST_PYTHON")
    return Path(chosen) if chosen else request.getfixturevalue("local_stack").python
