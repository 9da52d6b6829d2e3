"""Runs that fail and go on by themselves, on two sshd's with a disk each: from which checkpoint, with whom, to which weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import BORROWED, REPOSITORY, ClusterTrain, LocalStack
from pairs import Pair, notices, steps_of, weights
from sshd import SshdNodes

pytestmark = pytest.mark.stack

SCRIPTS = REPOSITORY / "tests" / "scripts"
STEPS, SAVE_STEPS = 12, 3
TRAINER = (
    str(SCRIPTS / "resumable_trainer.py"),
    *("--output_dir", "out", "--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS), "--report_to", "none"),
    *("--per_device_train_batch_size", "2", "--disable_tqdm", "true"),
)
DDP = (str(SCRIPTS / "resumable_ddp.py"), str(STEPS), str(SAVE_STEPS))


@pytest.fixture
def pair(
    sshd_factory: SshdNodes,
    machines: dict[str, str],
    tmp_path: Path,
    local_stack: LocalStack,
    cluster_train: ClusterTrain,
) -> Iterator[Pair]:
    root = tmp_path / "root"
    root.mkdir()
    nodes = sshd_factory(2, disk=root, machines=machines)
    for node in nodes:
        for name in BORROWED:
            (node.disk / name).symlink_to(local_stack.root / name)
    yield Pair(nodes, root, tmp_path / "pair.yml", cluster_train)


@pytest.mark.parametrize("command", [TRAINER, DDP], ids=["trainer", "ddp"])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(pair: Pair, command: tuple[str, ...]) -> None:
    """A rank is killed after a checkpoint, once with its node's working directory gone too.

    Both ranks go on from that checkpoint, though only node0's disk held it, and end with the same bits.
    """
    job = {} if command is TRAINER else {"checkpoints": "states/step-*.pt"}
    whole = pair.up(*command, **job)
    assert whole.exit_code == 0, whole.stdout[-3000:]
    assert len(weights(whole)) == 2 and len(set(weights(whole))) == 1
    chance = random.Random(4)
    for variables in ({}, {"WIPE": "1"}):
        fate = chance.randint(SAVE_STEPS + 1, STEPS - 1)
        cut = pair.up(*command, restarts=1, env={"DIE_AT": f"1:{fate}", **variables}, **job)
        assert cut.exit_code == 0, cut.stdout[-3000:]
        assert weights(cut) == weights(whole)
        assert steps_of(cut, 1) == [*range(fate + 1), *range(fate // SAVE_STEPS * SAVE_STEPS, STEPS)]
        assert "brought from node0 to node1" in notices(cut) and "SIGKILL" in notices(cut), notices(cut)
        is_told = "it holds no random state for rank 1" in notices(cut)
        assert is_told == (command is TRAINER and "WIPE" in variables)


@pytest.mark.parametrize(
    ("command", "newest", "file"),
    [(TRAINER, "out/checkpoint-9", "optimizer.pt"), (DDP, "states/step-9.pt", "")],
    ids=["trainer", "ddp"],
)
def test_a_half_written_checkpoint_is_skipped(pair: Pair, command: tuple[str, ...], newest: str, file: str) -> None:
    """Of the newest checkpoint half a file is there: it is named and put aside, and the one before serves."""
    job = {} if command is TRAINER else {"checkpoints": "states/step-*.pt"}
    ran = pair.up(*command, restarts=1, env={"DIE_AT": "0:10", "CUT": f"{newest}/{file}".rstrip("/")}, **job)
    assert ran.exit_code == 0, ran.stdout[-3000:]
    assert f"{newest} is skipped: " in notices(ran) and "cut off or damaged" in notices(ran)
    assert steps_of(ran, 1)[-6:] == [*range(6, STEPS)]
    work = pair.run_dir(ran, 0) / "work"
    assert (work / newest).with_name(f".half-{Path(newest).name}").exists() and (work / newest).exists()


def test_a_new_run_goes_on_from_an_earlier_one(pair: Pair) -> None:
    """`--resume` takes the newest complete checkpoint of a run that failed, and leaves that run as it is."""
    failed = pair.up(*DDP, checkpoints="states/step-*.pt", env={"DIE_AT": "1:8"})
    assert failed.exit_code == 1 and failed.result["rank"] == 1
    resumed = pair.up(*DDP, options=["--resume", "newest"], checkpoints="states/step-*.pt")
    assert resumed.exit_code == 0, resumed.stdout[-3000:]
    assert steps_of(resumed, 0) == steps_of(resumed, 1) == [*range(6, STEPS)]
    assert (pair.run_dir(failed, 0) / "work/states/step-6.pt").exists()
    nothing = pair.up(*DDP, options=["--resume", failed.result["run_id"]], checkpoints="other-*")
    assert nothing.exit_code == 1 and "left no complete checkpoint to go on from" in nothing.result["summary"]


def test_a_lost_node_is_left_out(pair: Pair, sshd_factory: SshdNodes) -> None:
    """node1 is gone for good: its rank's share of the batch is accumulated, and it is said what changed."""
    command = (*TRAINER, "--gradient_accumulation_steps", "3")
    started = pair.starting(*command, restarts=1, min_nodes=1, env={"SLEEP_AT": "7"})
    started.until("step 7 ")
    sshd_factory.stop(pair.nodes[1])
    ran = started.ended()
    assert ran.exit_code == 0, ran.stdout[-3000:]
    assert (pair.run_dir(ran, 0) / "hostfile").read_text() == f"{pair.nodes[0].host}:1\n"
    assert "step 6 of 1 ranks, accumulation 6" in ran.stdout
    assert steps_of(ran, 0)[-6:] == [*range(6, STEPS)]
    assert "node1 cannot be reached from node0 (" in notices(ran) and "): left out" in notices(ran)
    assert "--gradient_accumulation_steps 6 instead of 3" in notices(ran)
    (status,) = pair.cluster_train("status", pair.inventory(count=1), "--json").events[-1:]
    assert (status["state"], [rank["node"] for rank in status["ranks"]]) == ("succeeded", ["node0"])
