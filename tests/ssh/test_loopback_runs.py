"""`cluster-train up` over real sshd's on loopback, with a real mpirun: logs, failures, Ctrl-C, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import COMMAND, REPOSITORY, ClusterTrain, LocalStack, Ran
from jobs import FAILS_ON_RANK_2, SAVES_AT_THE_END, script
from labs import loopback_inventory
from sshd import SshdNode, SshdNodes

pytestmark = pytest.mark.stack

LIMIT_S = 60.0

HELLO = "import os; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['CLUSTER_TRAIN_NODE'])"
BYTES = r"""
import os, sys
out = os.fdopen(1, "wb")
out.write(b"10%\r50%\r100%\n\xff\xfe broken\n")
out.write(b"".join(b"line %d of rank " % i + os.environb[b"RANK"] + b"\n" for i in range(5000)))
print("warning", file=sys.stderr)
"""
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for tick in range(3000):
    print("tick", tick)
    time.sleep(0.1)
"""
LONG = """
import os, time
for tick in range(600):
    print("tick", tick)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def nodes(session_sshd_factory: SshdNodes) -> list[SshdNode]:
    return session_sshd_factory(2)


@pytest.fixture
def root(tmp_path: Path, local_stack: LocalStack) -> Path:
    """A root of this test's own that finds the installed stack: nothing is installed twice for a test."""
    return local_stack.borrowed(tmp_path / "root")


@pytest.fixture
def inventory(tmp_path: Path, root: Path, nodes: list[SshdNode]) -> Callable[..., Path]:
    """Writes an inventory of the two sshd's with the stack of inventories/local.yml, and job keys of the test's choice."""

    def write(**job: Any) -> Path:
        return loopback_inventory(tmp_path, root, nodes, **{"ppn": 2, "grace_s": 3, **job})

    return write


def lines_of(ran: Ran) -> list[str]:
    return sorted(line for line in ran.stdout.splitlines() if line.startswith("["))


def ours(nodes: list[SshdNode], root: Path) -> list[str]:
    """What lives on the nodes and has to do with this root: supervisors, mpirun, its helpers, ranks."""
    return [" ".join(process.argv) for node in nodes for process in node.processes() if str(root) in " ".join(process.argv)]


def test_four_ranks_on_two_nodes(cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path) -> None:
    """node0 lets itself in on node1 with a key of its own, mpirun starts the ranks, every log line bears its rank."""
    ran = cluster_train("up", inventory(), "--", script(tmp_path, HELLO))
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert lines_of(ran) == [f"[node{r // 2} r{r}] hello from {r} of 4 node{r // 2}" for r in range(4)]
    again = cluster_train("up", inventory(), "--", script(tmp_path, HELLO))
    assert again.exit_code == 0 and "nothing to install" in again.stderr and "files sent" not in again.stderr


def test_a_failing_rank_is_named_and_nothing_is_left(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path, nodes: list[SshdNode], root: Path
) -> None:
    """Rank 2 exits with 3 while the others would run on: all end, the verdict names it, its last words are shown."""
    ran = cluster_train("up", inventory(), "--json", "--", script(tmp_path, FAILS_ON_RANK_2))
    assert ran.exit_code == 1
    result = ran.result
    assert (result["state"], result["rank"], result["node"], result["exit_code"]) == ("failed", 2, "node1", 3)
    assert result["tail"] == ["last words"]
    assert ours(nodes, root) == []


def interrupted(command: Sequence[str | Path], tmp_path: Path, signals: Sequence[str]) -> tuple[int, str]:
    """Start a command and send it SIGINT each time the next of `signals` is seen in what it prints; exit code and output."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    seen: list[str] = []
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) as process:  # type: ignore[call-overload]
        for awaited in signals:
            for line in process.stdout:
                seen.append(line)
                if awaited in line:
                    break
            process.send_signal(signal.SIGINT)
        seen += list(process.stdout)
        return process.wait(LIMIT_S), "".join(seen)


def test_ctrl_c_stops_every_node(inventory: Callable[..., Path], tmp_path: Path, nodes: list[SshdNode], root: Path) -> None:
    """SIGINT to `up` ends the ranks everywhere, the exit code is 130, and what the ranks last said is still shown."""
    command = [COMMAND, "up", inventory(), "--", script(tmp_path, SAVES_AT_THE_END)]
    code, said = interrupted(command, tmp_path, ["r3] tick 3"])
    assert code == 130 and "was stopped" in said
    assert all(f"[node{r // 2} r{r}] saved" in said for r in range(4)), said
    assert ours(nodes, root) == []


def test_a_second_ctrl_c_does_not_wait(inventory: Callable[..., Path], tmp_path: Path, nodes: list[SshdNode], root: Path) -> None:
    """Ranks that ignore SIGTERM have a minute's grace; the second SIGINT ends them at once, on every node."""
    started = time.monotonic()
    command = [COMMAND, "up", inventory(grace_s=60), "--", script(tmp_path, IGNORES_SIGTERM)]
    code, said = interrupted(command, tmp_path, ["r3] tick 3", "Ctrl-C again"])
    assert code == 130 and "ending them at once" in said
    assert time.monotonic() - started < 45
    assert ours(nodes, root) == []


def test_a_run_outlives_its_command(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path, nodes: list[SshdNode], root: Path
) -> None:
    """--detach returns; status, logs and stop from new processes find the run by the inventory alone."""
    path = inventory()
    started = cluster_train("up", path, "--detach", "--", script(tmp_path, LONG))
    assert started.exit_code == 0 and "goes on by itself" in started.stderr
    found = cluster_train("status", path, "--json").result
    assert found["state"] in ("starting", "running")
    deadline = time.monotonic() + LIMIT_S
    while "tick 2" not in (text := cluster_train("logs", path, "--rank", "3").stdout):
        assert time.monotonic() < deadline, text
    assert "[node1 r3] tick 2" in text and "r0]" not in text
    stopped = cluster_train("stop", path, "--json")
    assert stopped.exit_code == 0 and stopped.result["state"] == "stopped"
    assert cluster_train("status", path, "--json").result["state"] == "stopped"
    assert [run["state"] for run in cluster_train("runs", path, "--json").result["runs"]] == ["stopped"]
    assert ours(nodes, root) == []


def test_logs_are_kept_per_rank_and_byte_for_byte(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    """Progress bars, broken characters and 5000 lines: the record equals the file on the node, to the byte."""
    ran = cluster_train("up", inventory(), "--json", "--", script(tmp_path, BYTES))
    assert ran.exit_code == 0, ran.stdout[-2000:]
    record = Path(ran.result["record"])
    for rank in range(4):
        on_node = (root / "runs" / ran.result["run_id"] / f"rank-{rank}.out").read_bytes()
        assert (record / f"rank-{rank}.out").read_bytes() == on_node and on_node.endswith(b"line 4999 of rank %d\n" % rank)
        assert (record / f"rank-{rank}.err").read_bytes() == b"warning\n"
    bar = [event["text"] for event in ran.events if event["event"] == "logtext" and event["rank"] == 0 and event["transient"]]
    assert bar == ["10%", "50%"]


def test_the_lock_in_a_runs_record_gives_the_same_stack_again(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    """`lock.json` can be handed to `up --locked`: nothing is resolved, and the environment is the same one."""
    path = inventory()
    first = cluster_train("up", path, "--json", "--", script(tmp_path, HELLO))
    lock = Path(first.result["record"]) / "lock.json"
    again = cluster_train("up", path, "--locked", lock, "--", script(tmp_path, HELLO), env={"XDG_CACHE_HOME": str(tmp_path)})
    assert again.exit_code == 0 and "nothing to install" in again.stderr, again.stderr
    assert "resolving" not in again.stderr and "fetching" not in again.stderr


def test_outputs_are_fetched_and_inputs_synced(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    """`sync` arrives beside the script, `fetch` comes back into the record, and only a changed file is sent again."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "one.txt").write_text("1")
    (data / "big.bin").write_bytes(os.urandom(200_000))
    text = (
        "import os, pathlib\n"
        "if os.environ['RANK'] == '0':\n"
        "    pathlib.Path('out').mkdir()\n"
        "    pathlib.Path('out/sum').write_text(pathlib.Path('data/one.txt').read_text() * 3)\n"
    )
    path = inventory(sync=[str(data)], fetch=["out", "missing"])
    first = cluster_train("up", path, "--", script(tmp_path, text))
    assert first.exit_code == 0, first.stderr
    assert "3 of 3 files sent" in first.stderr and "left no missing" in first.stderr
    (record,) = (tmp_path / "state" / "cluster-train" / "runs").iterdir()
    assert (record / "out" / "sum").read_text() == "111"
    (data / "one.txt").write_text("2")
    assert "1 of 3 files sent" in cluster_train("up", path, "--", script(tmp_path, text)).stderr


def test_outputs_and_logs_come_back_from_a_run_that_failed(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    """What rank 0 had written when another rank failed is in the record, and so is every rank's log."""
    text = (
        "import os, pathlib, sys, time\n"
        "rank = os.environ['RANK']\n"
        "print('rank', rank, 'was here')\n"
        "if rank == '0': pathlib.Path('out').mkdir(), pathlib.Path('out/part').write_text('half a result')\n"
        "pathlib.Path('begun-' + rank).touch()\n"
        "awaited = [pathlib.Path('out/part'), *(pathlib.Path('begun-%d' % other) for other in range(4))]\n"
        "while rank == '2' and not all(path.exists() for path in awaited): time.sleep(0.05)\n"
        "if rank == '2': sys.exit(4)\n"
        "time.sleep(60)\n"
    )
    ran = cluster_train("up", inventory(fetch=["out"]), "--json", "--", script(tmp_path, text))
    assert ran.exit_code == 1 and ran.result["exit_code"] == 4, ran.stdout[-2000:]
    record = Path(ran.result["record"])
    assert (record / "out" / "part").read_text() == "half a result"
    assert [(record / f"rank-{rank}.out").read_text() for rank in range(4)] == [f"rank {rank} was here\n" for rank in range(4)]


def test_what_dry_run_prints_can_be_pasted(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path, nodes: list[SshdNode], root: Path
) -> None:
    """The script it prints, run on node0 after `provision`, starts the ranks; a secret stays out of it."""
    path = inventory(env={"API_TOKEN": "very-secret-value"})
    text = "import os; print('token is', os.environ['API_TOKEN'], os.environ['RANK'])"
    arguments = (path, "--", script(tmp_path, text))
    assert cluster_train("provision", *arguments).exit_code == 0
    printed = cluster_train("up", path, "--dry-run", "--json", "--", str(tmp_path / "train.py"))
    assert "very-secret-value" not in printed.stdout + printed.stderr
    pasted = printed.result["script"]
    done = subprocess.run(
        nodes[0].ssh("API_TOKEN=very-secret-value sh -eu"), input=pasted, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = (root / "runs").iterdir()
    assert [(run_dir / f"rank-{r}.out").read_text() for r in range(4)] == [f"token is very-secret-value {r}\n" for r in range(4)]


def test_secrets_are_masked_in_logs(cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path) -> None:
    """A job that prints its token shows *** on the terminal."""
    text = "import os; print('token is', os.environ['API_TOKEN'])"
    ran = cluster_train("up", inventory(env={"API_TOKEN": "very-secret-value"}), "--", script(tmp_path, text))
    assert ran.exit_code == 0 and "token is ***" in ran.stdout and "very-secret-value" not in ran.stdout + ran.stderr


def test_a_node_that_is_down_is_named_before_anything_starts(
    cluster_train: ClusterTrain, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    """One unreachable node: exit code 3, its name, the other node untouched."""
    path = inventory()
    content = yaml.safe_load(path.read_text())
    content["nodes"].append({"name": "node2", "host": "127.0.0.99"})
    path.write_text(yaml.safe_dump(content))
    ran = cluster_train("up", path, "--json", "--", script(tmp_path, HELLO))
    assert ran.exit_code == 3
    assert list(json.loads(ran.stdout.splitlines()[-1])["nodes"]) == ["node2"]
