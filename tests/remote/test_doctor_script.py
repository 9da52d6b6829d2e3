"""The node's half of the doctor, on every Python that is on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import REPOSITORY
from interpreters import every_interpreter

from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import NodeHealth

sys.path.insert(0, str(REPOSITORY / "remote"))
import examine
import topology

TOKEN = "a token of this test"


class Script:
    """`doctor.py`, started on one interpreter."""

    def __init__(self, python: Path, root: Path, *, home: Path) -> None:
        argv = [python, "-S", "-E", REPOSITORY / "remote" / "doctor.py", root, "30000-30099"]
        environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LC_ALL": "C", "CLUSTER_TRAIN_LOCKS": str(home / "locks")}
        self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: str, **details: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"id": question, "ask": question, **details}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["id"] == question
        return answer.get("answer", answer.get("error"))

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0


@every_interpreter
def test_facts_ports_and_programs(interpreter: Path, tmp_path: Path) -> None:
    """What it answers can be read; it listens, calls itself, runs programs with their files, and leaves nothing."""
    with Script(interpreter, tmp_path / "root", home=tmp_path) as script:
        told = script.ask("facts")
        facts, health = NodeFacts.from_json("here", told["probe"]), NodeHealth.from_json("here", told["health"])
        assert all(30000 <= port <= 30099 for port in facts.free_ports) and facts.free_ports
        assert health.root_error is None and health.home.path == str(tmp_path) and health.home.filesystem
        assert health.programs["ssh"] == "/usr/bin/ssh" and health.limits["open_files"] != 0
        assert script.ask("runnable", paths=["/usr/bin/env", "/etc/passwd", "/no/such"]) == ["/usr/bin/env"]
        told = script.ask("occupied")
        assert told["locks"] == told["living"] == [] and told["states"] == {} and told["machine"]
        assert script.ask("resolve", names=["localhost", "no such name"])["no such name"] == []
        taken = socket.create_server(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        port, none = script.ask("listen", address="127.0.0.1", ports=[0, busy], token=TOKEN)["ports"]
        assert none is None
        (met,) = meet(script, {"address": "127.0.0.1", "port": port, "bytes": 300_000})
        assert met["state"] == "open" and met["seen_as"] == "127.0.0.1" and met["bytes_per_s"] > 0 and met["latency_s"] > 0
        taken.close()
        assert [one["state"] for one in meet(script, {"address": "127.0.0.1", "port": busy, "bytes": 0})] == ["rejected"]
        (show,) = (["cat", "{directory}/said"],)
        ran = script.ask(
            "run", files={"said": "in {directory}"}, commands=[show, ["sh", "-c", "echo no >&2; exit 7"], ["no-such"]], limit_s=5
        )
        assert [one["code"] for one in ran] == [0, 7, None] and ran[1]["stderr"] == "no\n" and "No such file" in ran[2]["stderr"]
    assert list(tmp_path.iterdir()) == []


@every_interpreter
def test_a_stranger_on_the_port(interpreter: Path, tmp_path: Path) -> None:
    """Another program that answers is not taken for the other node, and a listener tells nothing to strangers."""
    with Script(interpreter, tmp_path, home=tmp_path) as script, socket.create_server(("127.0.0.1", 0)) as other:
        port = script.ask("listen", address="127.0.0.1", ports=[0], token=TOKEN)["ports"][0]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'{"token": "another", "bytes": 1}\n')
            assert stranger.recv(100) == b""
        greet = "import socket,sys; s=socket.socket(fileno=int(sys.argv[1])); c,_=s.accept(); c.sendall(b'220 hello')"
        answering = subprocess.Popen(["python3", "-c", greet, str(other.fileno())], pass_fds=[other.fileno()])
        (met,) = meet(script, {"address": "127.0.0.1", "port": other.getsockname()[1], "bytes": 0})
        assert met["state"] == "stranger"
        answering.wait(timeout=30)


def meet(script: Script, *targets: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = script.ask("meet", targets=targets, token=TOKEN, limit_s=3)
    return found


def test_a_disk_that_other_machines_share_is_known_by_its_kind(tmp_path: Path) -> None:
    """A mount table of a machine whose homes come over NFS and whose scratch disk is mounted over that: no kernel that tests run
    on need have NFS. The deepest mount counts, and of two at one place the later."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 20 0:50 / /home rw - autofs systemd-1 rw\n"
        "31 20 0:51 /exports/home /home rw - nfs4 server:/exports/home rw,vers=4.2\n"
        "32 31 8:2 / /home/scratch\\040disk rw - xfs /dev/sdb1 rw\n"
    )
    mounts = examine.read_mounts(topology.Tree(str(tmp_path)))
    places = [examine.describe_place(path, mounts) for path in ("/home/ada", "/home/scratch disk/x", "/homes")]
    assert [(place["filesystem"], place["is_remote"]) for place in places] == [("nfs4", True), ("xfs", False), ("ext4", False)]
