"""Everything that provisioning does on a node, on every Python that is on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from interpreters import INTERPRETERS, every_interpreter, minor_version
from wheels_by_hand import install_plan_for, make_wheel

from orchestrator.actions import agent
from orchestrator.actions.sync import JobFiles, collect, sync
from orchestrator.errors import FleetError, ProvisionError
from orchestrator.nodes.archive import Entry, archive
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.local import LocalTransport
from orchestrator.nodes.transport import run
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Job

FOREIGN_KEYS = b"# mine\r\nssh-rsa AAAAB3 j\xf6rg@home\nssh-ed25519 AAAAC3 last line without an end"


class ANode:
    """This machine with a home and a root of its own and one of its Pythons, reached as every node is."""

    def __init__(self, home: Path, python: Path) -> None:
        self.root = str(home / "root with blank")
        self.python = str(python)
        self.transport = LocalTransport("here")

    def call(self, script: str, *arguments: str, stdin: bytes = b"") -> dict[str, object]:
        return agent.call(self.transport, self.root, self.python, script, arguments, stdin=stdin)

    def facts(self) -> NodeFacts:
        return NodeFacts.from_json("here", self.call("probe.py", "--root", self.root))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with authorized keys that are not ours; the locale is the poorest that a node can have."""
    made = tmp_path / "home"
    (made / ".ssh").mkdir(parents=True)
    (made / ".ssh" / "authorized_keys").write_bytes(FOREIGN_KEYS)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("LC_ALL", "C")
    return made


@every_interpreter
def test_a_node_is_made_ready_and_left_as_it_was(interpreter: Path, home: Path, tmp_path: Path) -> None:
    """The agent ships itself, a wheel and a job arrive, files come back, a key is allowed; removal leaves nothing of it."""
    node = ANode(home, interpreter)
    before = node.facts()  # ships the agent, as `python3 -c`
    assert before.state.agents == (agent.digest(),) and before.authorized == ()
    digest = send_wheel(node, b"content")
    job = send_job(node, before, tmp_path)
    assert fetched(node, f"{node.root}/jobs/{job.digest}", "train.py") == b"print('\xc3\xa9')\n"
    key = str(node.call("authorize.py", "key", node.root)["public"])
    for _ in range(2):
        node.call("authorize.py", "allow", "cluster-train:c0ffee:10.0.0.1", "10.0.0.1", stdin=key.encode())
    ready = node.facts()
    assert (ready.state.wheels, ready.state.jobs) == ((digest,), (job.digest,))
    assert (ready.cluster_key, ready.authorized) == (key, ("cluster-train:c0ffee:10.0.0.1",))
    assert node.call("prune.py", "used", node.root, "10") == {"envs": [], "jobs": [], "agents": []}
    keep = {"envs": [], "wheels": [digest], "jobs": [], "agents": [agent.digest()], "installers": []}
    pruned = node.call("prune.py", "remove", node.root, stdin=json.dumps(keep).encode())
    assert pruned == {"removed": [f"{node.root}/jobs/{job.digest}"], "in_use": []}
    assert node.call("remove.py", "machine", node.root) == {"removed": [], "revoked": ["cluster-train:c0ffee:10.0.0.1"]}
    assert node.call("remove.py", "root", node.root)["left"] == []
    assert sorted(path.name for path in home.iterdir()) == [".ssh"]
    assert (home / ".ssh" / "authorized_keys").read_bytes() == FOREIGN_KEYS


def test_files_that_become_shorter_are_not_taken_for_whole(home: Path, tmp_path: Path) -> None:
    """They shrink between the look at them and their last byte: it fails at once, says so, and leaves nothing half there."""
    node = ANode(home, INTERPRETERS[-1])
    facts = node.facts()
    script, data = tmp_path / "train.py", tmp_path / "data"
    script.write_text("")
    data.write_bytes(b"d" * 3_000_000)
    files = collect(Job(script=str(script), sync=[str(data)]))
    os.truncate(data, 1_000_000)
    with pytest.raises(FleetError, match="data became shorter while it was being sent") as failed:
        sync(Fleet({"here": node.transport}, 1), [facts], files, lambda event: None)
    assert failed.value.exit_code == 4
    jobs = Path(node.root) / "jobs"
    assert [path.name for path in jobs.rglob("*") if path.is_file() or path.name.endswith(".part")] == []
    argv = agent.command(node.root, node.python, "unpack.py", [f"{node.root}/wheelhouse"])
    entries = [Entry(name=f"whole/{number}", source=data, size_bytes=1_000_000) for number in range(2)]
    with pytest.raises(ProvisionError, match="became shorter"):
        run(node.transport, argv, stdin=archive([*entries, replace(entries[0], size_bytes=1_000_001)]), idle_timeout_s=3600)
    assert list((Path(node.root) / "wheelhouse").iterdir()) == []


def send_wheel(node: ANode, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        member = tarfile.TarInfo(f"{digest}/some-1.0-py3-none-any.whl")
        member.size = len(content)
        made.addfile(member, io.BytesIO(content))
    answer = node.call("unpack.py", "--sha256", f"{node.root}/wheelhouse", stdin=stream.getvalue())
    assert answer == {"unpacked": [digest], "kept": []}
    return digest


def send_job(node: ANode, facts: NodeFacts, tmp_path: Path) -> JobFiles:
    script = tmp_path / "train.py"
    script.write_text("print('é')\n", encoding="utf-8")
    files = collect(Job(script=str(script)))
    sync(Fleet({"here": node.transport}, 1), [facts], files, lambda event: None)
    return files


def fetched(node: ANode, directory: str, name: str) -> bytes:
    packed = run(node.transport, agent.command(node.root, node.python, "pack.py", [directory, name]), idle_timeout_s=30)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as unpacked:
        content = unpacked.extractfile(name)
        assert content
        return content.read()


@pytest.mark.parametrize("interpreter", [INTERPRETERS[0], INTERPRETERS[-1]], ids=str)
def test_pip_builds_an_environment_on_the_oldest_and_the_newest(interpreter: Path, home: Path) -> None:
    """Where uv does not reach, the node's own pip makes the environment: its modules import, its scripts run."""
    node = ANode(home, interpreter)
    node.facts()
    plan = install_plan_for(node.root, node.python, make_wheel(Path(node.root) / "wheelhouse", "goodone"))
    assert_installs(node, plan)


@pytest.mark.stack
@pytest.mark.parametrize("interpreter", [python for python in INTERPRETERS if minor_version(python) >= (3, 8)], ids=str)
def test_uv_builds_an_environment_from_3_8_on(interpreter: Path, uv_wheel: Path, home: Path) -> None:
    """uv needs neither pip nor venv on the node, and takes every Python that it supports."""
    node = ANode(home, interpreter)
    node.facts()
    root = Path(node.root)
    plan = install_plan_for(node.root, node.python, make_wheel(root / "wheelhouse", "goodone"))
    sha256 = hashlib.sha256(uv_wheel.read_bytes()).hexdigest()
    (root / "wheelhouse" / sha256).mkdir()
    shutil.copy(uv_wheel, root / "wheelhouse" / sha256)
    assert_installs(node, {**plan, "uv": {"sha256": sha256, "filename": uv_wheel.name}})


def assert_installs(node: ANode, plan: dict[str, object]) -> None:
    argv = agent.command(node.root, node.python, "install.py", [])
    done = run(node.transport, argv, stdin=json.dumps(plan).encode(), idle_timeout_s=60)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["versions"] == {"goodone": "1.0"}
    said = run(node.transport, [f"{node.root}/envs/d1/bin/say-goodone"], idle_timeout_s=30)
    assert said.stdout == b"said\n", said.stderr
    assert node.facts().state.envs == ("d1",)
