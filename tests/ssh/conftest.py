"""Nodes for the tests of this folder: throw-away sshd processes on loopback.

    def test_something(sshd_factory):
        node0, node1 = sshd_factory(2, MaxStartups="3")

`sshd_factory` ends its nodes with the test; `session_sshd_factory`, for nodes that take long to prepare, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import switched
from labs import Lab, make_wheels
from netlab import Machine, NetworkLab
from sshd import SSHD, SshdNodes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ssh)


@pytest.fixture
def sshd_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshdNodes]:
    """Starts nodes that live as long as this test: `sshd_factory(count, **sshd_config) -> list[SshdNode]`."""
    yield from _factory(tmp_path_factory)


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Two network namespaces and a switch between them and us, as address -> name: to MPI they are different machines."""
    try:
        with switched.machines() as made:
            yield made
    except switched.NoNamespaces as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def session_sshd_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshdNodes]:
    """Starts nodes that live as long as the test session."""
    yield from _factory(tmp_path_factory)


@pytest.fixture(scope="session")
def lab(session_sshd_factory: SshdNodes, tmp_path_factory: pytest.TempPathFactory, uv_wheel: Path) -> Lab:
    """One node and a small stack; what is resolved once serves all tests."""
    wheels = make_wheels(tmp_path_factory.mktemp("wheels"), uv_wheel)
    return Lab(nodes=session_sshd_factory(1), wheels=wheels, cache=tmp_path_factory.mktemp("cache"))


def _factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshdNodes]:
    if SSHD is None:
        pytest.skip("no sshd on this machine: install openssh-server (`make system`)")
    nodes = SshdNodes(tmp_path_factory.mktemp("sshd"))
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NetworkLab]]:
    """Starts labs of machines in namespaces that live as long as the test: see netlab.py."""
    labs: list[NetworkLab] = []

    def make(*machines: Machine) -> NetworkLab:
        labs.append(NetworkLab(tmp_path_factory.mktemp("lab"), machines))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
