"""The command line: what it teaches, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ClusterTrain

COMMANDS = ("up", "provision", "doctor", "status", "logs", "stop", "runs", "init", "teardown")


def test_help_names_every_command_and_an_example(cluster_train: ClusterTrain) -> None:
    """A newcomer learns from --help what to type."""
    ran = cluster_train("--help")
    assert ran.exit_code == 0 and all(f"  {name}" in ran.stdout for name in COMMANDS)
    assert "cluster-train up inventories/lab.yml -- train.py" in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cluster_train: ClusterTrain, command: str) -> None:
    """--help of a command says what it does and what its options mean."""
    ran = cluster_train(command, "--help")
    assert ran.exit_code == 0 and "--json" in ran.stdout and len(ran.stdout.splitlines()) > 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "no-such.yml"], "no such file"),
        (["up", "inventories/local.yml", "--", "no-such-script.py"], "no such file or directory: no-such-script.py"),
        (["up", "inventories/local.yml", "--detatch"], "--detach"),
        (["launch"], "No such command"),
        (["logs", "inventories/local.yml", "--rank", "x"], "--rank"),
        (["runs", "--limit", "0", "--local"], "--limit"),
    ],
)
def test_wrong_words_are_usage_errors(cluster_train: ClusterTrain, arguments: list[str], said: str) -> None:
    """Exit code 2, a message that names the word, no stack trace."""
    ran = cluster_train(*arguments)
    assert ran.exit_code == 2 and said in ran.stderr and "Traceback" not in ran.stderr


def test_a_wrong_inventory_names_file_line_and_key(cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """The nearest legal key is offered; --json has the same as a document."""
    path = tmp_path / "lab.yml"
    path.write_text("nodes:\n  - {host: 10.0.0.1, prot: 22}\n")
    ran = cluster_train("up", path)
    assert ran.exit_code == 2 and f"{path}:2: nodes[0].prot" in ran.stderr and '"port"' in ran.stderr
    told = json.loads(cluster_train("up", path, "--json").stdout)
    assert told["event"] == "error" and told["exit_code"] == 2 and "prot" in told["message"]


def test_an_inventory_without_a_script_says_how_to_name_one(cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """`up` needs something to run."""
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 slots=2\n")
    ran = cluster_train("up", path)
    assert ran.exit_code == 2 and "-- train.py" in ran.stderr


def test_the_inventory_may_come_from_the_environment(cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """$CLUSTER_TRAIN_INVENTORY stands in for the argument."""
    ran = cluster_train("status", env={"CLUSTER_TRAIN_INVENTORY": str(tmp_path / "mine.yml")})
    assert ran.exit_code == 2 and str(tmp_path / "mine.yml") in ran.stderr


def test_init_does_not_overwrite(cluster_train: ClusterTrain, tmp_path: Path) -> None:
    """An inventory that exists is a person's work."""
    path = tmp_path / "lab.yml"
    path.write_text("mine")
    ran = cluster_train("init", "127.0.0.1", "-o", path)
    assert ran.exit_code == 2 and path.read_text() == "mine"


def test_teardown_asks_first(cluster_train: ClusterTrain) -> None:
    """Without a yes, given or typed, nothing is removed."""
    ran = cluster_train("teardown", "inventories/local.yml")
    assert ran.exit_code == 2 and "Remove everything" in ran.stderr and "--yes" in ran.stderr


def test_local_runs_ask_no_node(cluster_train: ClusterTrain) -> None:
    """`runs --local` reads the records of this machine, and says so where there are none."""
    ran = cluster_train("runs", "--local")
    assert ran.exit_code == 0 and ran.stdout == "no runs yet\n"
