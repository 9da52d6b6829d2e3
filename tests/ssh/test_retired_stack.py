"""`backend: ccl` over real sshd's, with stand-in wheels of the retired Intel stack, real pip, real uv and the real Intel MPI."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standins
import yaml
from commands import ClusterTrain, LocalStack, Ran
from interpreters import INTERPRETERS, minor_version
from sshd import SshdNode, SshdNodes

pytestmark = pytest.mark.stack

SHOWS_ITS_ENVIRONMENT = """
import json, os
import oneccl_bindings_for_pytorch, torch
shown = {name: os.environ.get(name) for name in ("CCL_ROOT", "CCL_CONFIGURATION", "LD_LIBRARY_PATH", "FI_PROVIDER_PATH")}
shown["here"] = oneccl_bindings_for_pytorch.cwd
if os.environ["RANK"] == "1":
    print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def nodes(session_sshd_factory: SshdNodes) -> list[SshdNode]:
    return session_sshd_factory(2)


@pytest.fixture
def wheels(tmp_path: Path, local_stack: LocalStack) -> Path:
    """A directory of stand-ins for torch 2.8.0's stack, with the real uv and the real Intel MPI among them."""
    directory = tmp_path / "wheels"
    standins.retired_stack(directory, "2.8.0", mpi=False)
    for name in ("uv", "impi-rt"):
        if standins.borrow(local_stack.root / "wheelhouse", name, directory) is None:
            pytest.skip(f"the wheelhouse of the installed stack lacks {name}")
    return directory


@pytest.fixture
def provisioned(cluster_train: ClusterTrain, tmp_path: Path, wheels: Path, nodes: list[SshdNode]) -> Callable[..., Ran]:
    """Runs a command for the two nodes with a root and a cache of this test's own; pip asks no index."""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}

    def run(command: str, *arguments: str, stack: dict[str, Any] | None = None, **job: Any) -> Ran:
        content = {
            "cluster": "retired",
            "root": str(tmp_path / "root"),
            "ssh": {"key": str(nodes[0].key), "known_hosts": str(nodes[0].known_hosts), "port": nodes[0].port},
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
            "stack": {"python": sys.executable, "torch": "2.8.0", "backend": "ccl", "find_links": [str(wheels)], **(stack or {})},
            "job": {"ppn": 1, **job},
        }
        path = tmp_path / "retired.yml"
        path.write_text(yaml.safe_dump(content))
        return cluster_train(command, path, *arguments, env=environment)

    return run


def test_the_matching_wheels_are_installed_and_their_setvars_reaches_the_ranks(
    provisioned: Callable[..., Ran], tmp_path: Path, wheels: Path
) -> None:
    """Of newer and older releases the fitting ones are taken; each rank has what setvars.sh sets; run.json tells it."""
    standins.build(standins.bindings("2.8.0+cpu", needs_setvars=True), wheels)
    script = tmp_path / "train.py"
    script.write_text(SHOWS_ITS_ENVIRONMENT)
    ran = provisioned("up", "--", str(script), env={"FI_PROVIDER_PATH": "/of/the/person"})
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert "backend ccl" in ran.stderr
    assert "setvars.sh of oneccl_bindings_for_pytorch applied: CCL_CONFIGURATION, CCL_ROOT" in ran.stderr
    shown = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[node1 r1] {")).partition("] ")[2])
    assert shown["CCL_ROOT"] == shown["here"] and shown["here"].startswith(f"{tmp_path}/root/envs/")
    assert shown["LD_LIBRARY_PATH"].split(":")[0] == f"{shown['here']}/lib"
    assert shown["CCL_CONFIGURATION"] == "cpu"
    assert shown["FI_PROVIDER_PATH"] == "/of/the/person"  # job.env wins
    (record,) = (tmp_path / "root" / "runs").glob("*/run.json")
    launch = json.loads(record.read_text())["launch"]
    assert launch["env"]["CCL_ROOT"] == shown["here"] and launch["prepend"]["LD_LIBRARY_PATH"] == f"{shown['here']}/lib"
    (complete,) = (tmp_path / "root" / "envs").glob("*/complete.json")
    installed = {wheel["name"]: wheel["version"] for wheel in json.loads(complete.read_text())["wheels"]}
    assert installed["oneccl-bind-pt"] == installed["torch"] == installed["intel-extension-for-pytorch"] == "2.8.0+cpu"
    assert (installed["transformers"], installed["accelerate"], installed["numpy"]) == ("4.52.4", "1.12.0", "2.2.0")
    planned = provisioned("up", "--dry-run", "--", str(script))
    assert f"\nLD_LIBRARY_PATH={launch['prepend']['LD_LIBRARY_PATH']}:$LD_LIBRARY_PATH\n" in planned.stdout, planned.stdout
    checked = provisioned("provision", "--check")
    assert checked.exit_code == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("torch", "bindings", "python", "module"),
    [
        stack
        for stack in (
            ("1.12.1", "1.12.100", (3, 10), "oneccl_bindings_for_pytorch"),
            ("1.10.0", "1.10.0", (3, 9), "torch_ccl"),
        )
        if stack[2] in map(minor_version, INTERPRETERS)  # the bindings exist for no newer Python
    ],
)
def test_older_stacks_on_older_pythons(
    provisioned: Callable[..., Ran], wheels: Path, torch: str, bindings: str, python: tuple[int, int], module: str
) -> None:
    """`stack.python` names an interpreter that the bindings exist for; they match to the patch version, by their old name too."""
    interpreter = next(path for path in INTERPRETERS if minor_version(path) == python)
    standins.retired_stack(wheels, torch, python=f"{python[0]}.{python[1]}", mpi=False)
    ran = provisioned("provision", stack={"torch": torch, "python": str(interpreter)})
    assert ran.exit_code == 0, ran.stderr
    (complete,) = (wheels.parent / "root" / "envs").glob("*/complete.json")
    record = json.loads(complete.read_text())
    installed = {wheel["name"]: wheel["version"] for wheel in record["wheels"]}
    assert (installed["torch"], installed["oneccl-bind-pt"]) == (f"{torch}+cpu", f"{bindings}+cpu")
    assert record["versions"][module] == f"{bindings}+cpu" and record["environment"]["module"] == module
    assert record["environment"]["set"]["CCL_ROOT"].startswith(str(complete.parent))


def test_a_torch_that_the_nodes_python_cannot_have_is_one_message(provisioned: Callable[..., Ran]) -> None:
    """What was asked, what each node has, which versions would work; pip is not asked."""
    ran = provisioned("provision", stack={"torch": "2.5.1"})
    assert ran.exit_code == 4 and "resolving" not in ran.stderr and "Traceback" not in ran.stderr
    here = f"Python {platform.python_version()} {platform.machine()}"
    assert "torch 2.5.1 with backend ccl" in ran.stderr and f"node0 {here}" in ran.stderr and f"node1 {here}" in ran.stderr
    assert "2.7.0, 2.8.0" in ran.stderr


def test_bindings_that_do_not_import_are_refused_with_their_own_words(provisioned: Callable[..., Ran], wheels: Path) -> None:
    """A wheel that is there by name and version, but raises at import: exit code 4, and no environment is left."""
    standins.build(standins.broken(standins.bindings("2.8.0+cpu")), wheels)
    ran = provisioned("provision")
    assert ran.exit_code == 4 and "undefined symbol: _ZN3c10" in ran.stderr, ran.stderr
    assert not list((wheels.parent / "root" / "envs").glob("*/complete.json"))


def test_bindings_that_no_place_has_are_told_with_the_remedy(provisioned: Callable[..., Ran], wheels: Path) -> None:
    """Without the wheel the refusal names the package and says where it can be put."""
    for wheel in wheels.glob("oneccl_bind_pt-*.whl"):
        wheel.unlink()
    ran = provisioned("provision")
    assert ran.exit_code == 4 and "oneccl_bind_pt==2.8.0" in ran.stderr and "find_links" in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr
