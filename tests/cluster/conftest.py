"""The two containers for the tests of this folder: pytest-docker starts docker/compose.yaml once per test session.

Project, network and keys belong to this session alone: several of them, and a cluster started by hand, live side by
side on one engine.
"""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import standins
from commands import ClusterTrain
from containers import DOCKER, PLACE, ClusterNode, ContainerCluster, DockerError, cluster_command
from faulty import ROWS, FaultLab
from pytest_docker.plugin import Services
from small_stack import STAND_INS, make_wheels

HERE = Path(__file__).parent
START_LIMIT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def docker_engine() -> Any:
    """The engine, with the base image on it; where none answers, the tests that need it are skipped."""
    try:
        engine = cluster_command.find_engine()
    except DockerError as error:
        pytest.skip(str(error))
    cluster_command.ensure_base_image(engine.docker)
    return engine


@pytest.fixture(scope="session")
def docker_compose_command(docker_engine: Any) -> str:
    return shlex.join(docker_engine.compose)


@pytest.fixture(scope="session")
def docker_compose_file() -> list[str]:
    return [str(DOCKER / "compose.yaml"), str(HERE / "small-disk.yaml")]


@pytest.fixture(scope="session")
def docker_compose_project_name(docker_engine: Any) -> Iterator[str]:
    """A name of this session's own; what bears it is removed at the end, and when the start fails half-way too."""
    name = f"cluster-train-test-{uuid.uuid4().hex[:8]}"
    yield name
    cluster_command.remove_project(docker_engine.docker, name)


@pytest.fixture(scope="session")
def docker_setup(cluster_state: Path) -> list[str]:
    """Build before starting: both services use the image that only node0 builds."""
    return ["build", "up --detach"]


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return []  # docker_compose_project_name removes everything


@pytest.fixture(scope="session")
def cluster_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of this session's key, which compose learns from the environment as it does by hand."""
    directory = tmp_path_factory.mktemp("cluster-state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER_TRAIN_AUTHORIZED_KEY", cluster_command.make_user_key(directory))
        yield directory


@pytest.fixture(scope="session")
def container_cluster(
    docker_engine: Any, docker_services: Services, docker_compose_project_name: str, cluster_state: Path
) -> ContainerCluster:
    """Both containers, answering to SSH."""
    docker, project = docker_engine.docker, docker_compose_project_name
    nodes = cluster_command.wait_for_ssh(docker, project, timeout_s=START_LIMIT_S)
    cluster_command.write_known_hosts(cluster_state / "known_hosts", docker, nodes)
    return ContainerCluster(
        docker=docker,
        nodes=tuple(ClusterNode(name=node.name, address=node.address, container=node.container) for node in nodes),
        user=cluster_command.USER,
        key=cluster_state / "id_ed25519",
        known_hosts=cluster_state / "known_hosts",
    )


@pytest.fixture
def pair(container_cluster: ContainerCluster, tmp_path: Path) -> Iterator[ContainerCluster]:
    """Two more containers of the cluster's image, as new, with one volume between them."""
    run, docker = cluster_command.run, container_cluster.docker
    volume = run((docker, "volume", "create", f"cluster-train-test-{uuid.uuid4().hex[:8]}"), limit_s=30).strip()
    try:
        with more_containers(container_cluster, tmp_path, [("--volume", f"{volume}:{PLACE}")] * 2) as cluster:
            cluster.exec("node0", ("chown", cluster.user, PLACE))
            yield cluster
    finally:
        run((docker, "volume", "rm", volume), limit_s=60)


@pytest.fixture
def containers_with(container_cluster: ContainerCluster, tmp_path: Path) -> Iterator[Callable[..., ContainerCluster]]:
    """Makes more containers of the cluster's image, one for each tuple of `docker run` options, that live as long as the test."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(more_containers(container_cluster, tmp_path, options))


@contextmanager
def more_containers(like: ContainerCluster, directory: Path, options: Sequence[Sequence[str]]) -> Iterator[ContainerCluster]:
    """Further containers, node0 first; what is needed to log in lies in `directory`."""
    docker, run = like.docker, cluster_command.run
    public = like.key.with_suffix(".pub").read_text().strip()
    containers: list[str] = []
    try:
        for index, own in enumerate(options):
            usual = ("--detach", "--init", "--env", f"AUTHORIZED_KEY={public}", "--hostname", f"node{index}")
            containers.append(run((docker, "run", *usual, *own, "cluster-train-node"), limit_s=60).strip())
        nodes = [_node(docker, index, container) for index, container in enumerate(containers)]
        deadline = time.monotonic() + START_LIMIT_S
        while not all(cluster_command.ssh_answers(node) for node in nodes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cluster_command.write_known_hosts(directory / "known_hosts", docker, nodes)
        yield ContainerCluster(
            docker=docker,
            nodes=tuple(ClusterNode(name=node.name, address=node.address, container=node.container) for node in nodes),
            user=like.user,
            key=like.key,
            known_hosts=directory / "known_hosts",
        )
    finally:
        if containers:
            run((docker, "rm", "--force", *containers), limit_s=60)


def _node(docker: str, index: int, container: str) -> Any:
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = cluster_command.run((docker, "inspect", "--format", template, container), limit_s=30).strip()
    return cluster_command.Node(name=f"node{index}", container=container, address=address, running=True, made_by="")


@pytest.fixture
def small_stack(uv_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with stand-ins for the stack and the real uv; all that is started has it alone, and its own cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / uv_wheel.name).symlink_to(uv_wheel)
    for name, version in STAND_INS.items():
        standins.build(standins.package(name, version), wheels)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return wheels


@pytest.fixture(scope="session")
def small_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of a stack that takes seconds to install."""
    return make_wheels(tmp_path_factory.mktemp("small-wheels"))


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of these tests' own: stand-ins must not be taken for the real packages later."""
    return tmp_path_factory.mktemp("small-cache")


@pytest.fixture
def fault_lab(
    container_cluster: ContainerCluster,
    small_wheels: Path,
    small_cache: Path,
    cluster_train: ClusterTrain,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[FaultLab]:
    """The containers with the small stack; afterwards nothing runs on them, however the test ended."""
    lab = FaultLab(
        cluster=container_cluster,
        wheels=small_wheels,
        cache=small_cache,
        directory=tmp_path,
        cluster_train=cluster_train,
        row=request.node.originalname.removeprefix("test_").replace("_", " "),
    )
    yield lab
    lab.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The fault table as it went: what was done, on which MPI, the verdict, and the seconds until `up` returned."""
    if ROWS:
        terminalreporter.section("fault table")
    for row in ROWS:
        seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
        terminalreporter.write_line(f"{row.name[:60]:60} {row.mpi:8} {row.state:10} {seconds:>8}  {row.summary[:100]}")
