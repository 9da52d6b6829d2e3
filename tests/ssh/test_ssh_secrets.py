"""Secrets of the job reach its ranks and nobody else: not the terminal, not a record, not another user's `ps`."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
import zlib
from pathlib import Path

import pytest
import yaml
from commands import COMMAND, REPOSITORY, ClusterTrain, LocalStack
from jobs import script
from sshd import SshdNode, SshdNodes

TOKEN = "tok\"en\\with'quotes é"
URL = "postgres://me:pw123456@db"
SECRETS = (TOKEN, URL)
LIMIT_S = 240.0

TELLS_ALL = """
import os, sys, time
print("token", os.environ["HF_TOKEN"])
print("url", os.environ["DB_URL"], file=sys.stderr)
open("started", "w").close()
while not os.path.exists("go-on"):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def nodes(session_sshd_factory: SshdNodes) -> list[SshdNode]:
    return session_sshd_factory(2)


def inventory(tmp_path: Path, root: Path, nodes: list[SshdNode]) -> Path:
    local = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())
    content = {
        "root": str(root),
        "ssh": {"key": str(nodes[0].key), "known_hosts": str(nodes[0].known_hosts), "port": nodes[0].port},
        "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
        "stack": local["stack"],
        "job": {
            "ppn": 1,
            "env": {"HF_TOKEN": TOKEN, "DB_URL": URL},
            "secrets": ["DB_URL"],
            "args": ["--database", URL],
            "script": script(tmp_path, TELLS_ALL),
        },
    }
    path = tmp_path / "secrets.yml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.stack
def test_only_the_ranks_have_them(tmp_path: Path, nodes: list[SshdNode], local_stack: LocalStack) -> None:
    """No launcher's command line holds them, later only 0600 files of the run do; all that is shown has ***."""
    root = local_stack.borrowed(tmp_path / "root")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [COMMAND, "up", inventory(tmp_path, root, nodes)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
        try:
            work = started(root, process)
            seen = [" ".join(one.argv) for node in nodes for one in node.processes()]
        finally:
            for path in root.glob("runs/*/work"):
                (path / "go-on").touch()
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and work, said
    launchers = [line for line in seen if "train.py" not in line]  # the ranks' own arguments are what the person wrote
    assert any("mpi" in line for line in launchers)
    assert not [line for line in launchers if shows(line) or "CLUSTER_TRAIN_LAUNCH=" in line]
    assert said.count("token ***") == 2 and said.count("url ***") == 2 and not shows(said)
    for path in (*(root / "runs").rglob("*"), *(tmp_path / "state").rglob("*")):
        if path.is_file() and shows(path.read_text(errors="replace")):
            assert path.stat().st_mode & 0o077 == 0, path
            assert path.suffix in (".out", ".err") or path.is_relative_to(root), path


def test_what_is_printed_before_the_start(tmp_path: Path, nodes: list[SshdNode], cluster_train: ClusterTrain) -> None:
    """`--dry-run`, as text and as JSON: masked as written, as quoted, and inside the encoded launch document."""
    file = inventory(tmp_path, tmp_path / "root", nodes)
    for option in ((), ("--json",)):
        ran = cluster_train("up", file, "--dry-run", *option)
        assert ran.exit_code == 0 and "DB_URL" in ran.stdout, ran.stderr
        assert not shows(ran.stdout + ran.stderr) and "***" in ran.stdout
        text = ran.result["script"] if option else ran.stdout
        word = next(line for line in text.splitlines() if line.startswith("export CLUSTER_TRAIN_LAUNCH="))
        document = zlib.decompress(base64.urlsafe_b64decode(word.split("=", 1)[1])).decode()
        assert not shows(document) and json.loads(document)["argv"][-1] == "***"
        assert "export it first" in text and "NOT COMPLETE" in text


def started(root: Path, process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not list(root.glob("runs/*/work/started")):
        assert time.monotonic() < deadline
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return True


def shows(text: str) -> list[str]:
    """The secrets that stand in a text, in any form that a person could read."""
    forms = {form for secret in SECRETS for form in (secret, json.dumps(secret)[1:-1], secret.replace("'", "'\"'\"'"))}
    return [form for form in forms if form in text]
