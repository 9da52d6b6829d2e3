"""How jobs on the `ccl` backend end: well, with an error, or because a rank does not come."""

from __future__ import annotations

from pathlib import Path

import pytest
from ccl_ranks import SCRIPTS, Ended, start
from one_machine import free_ports

pytestmark = pytest.mark.stack

SIZE = 3
PROMPT_S = 60.0  # what a start takes on a loaded machine, and a few seconds; far below the time limit of a collective
NEVER = {"LIMIT_S": "600"}
SOON = {"LIMIT_S": "8"}


def run(python: Path, ending: str, **variables: str) -> Ended:
    return start(python, SIZE, SCRIPTS / "ccl_life.py", ending, limit_s=240, **variables)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("ends", "destroyed False"),
        ("ends_without_destroying", ""),
        ("begins_again", "began again"),
        ("leaves_work_behind", "left 50"),
        ("has_overlapping_groups", "overlapped"),
    ],
)
def test_a_job_that_is_well_ends_with_0(training_python: Path, ending: str, said: str) -> None:
    """No destructor aborts, nobody waits for somebody who has gone, objects and overlapping groups are right."""
    ended = run(training_python, ending, FORM_PORTS=",".join(map(str, free_ports(3))))
    assert ended.exit_code == 0, ended.output
    assert ended.output.count(said) >= SIZE or not said


def test_a_job_outlives_the_time_limit_of_its_collectives(training_python: Path) -> None:
    """The limit is of one operation: messages between pairs and a good end come after any time."""
    ended = run(training_python, "outlives_the_limit", **SOON)
    assert ended.exit_code == 0, ended.output
    assert ended.output.count("sent after the limit 1.0") == SIZE


@pytest.mark.parametrize("ending", ["raises", "exits_with_3", "is_killed"])
def test_a_rank_that_fails_ends_the_job_at_once(training_python: Path, ending: str) -> None:
    """The others wait in a collective with a limit of ten minutes; the communicator is not destroyed."""
    ended = run(training_python, ending, **NEVER)
    assert ended.exit_code != 0 and ended.duration_s < PROMPT_S, ended.output
    if ending == "raises":
        assert "ValueError: rank 1 is broken" in ended.output
    if ending == "exits_with_3":
        assert "all_reduce (number 22 of group 0) cannot complete: rank 1 has left after all_reduce (number 21)" in ended.output


@pytest.mark.parametrize("ending", ["never_arrives", "never_arrives_for_a_future"])
def test_a_collective_that_never_completes_names_who_is_missing(training_python: Path, ending: str) -> None:
    """Also where nothing but a future is waited for, as DistributedDataParallel does in its backward pass."""
    ended = run(training_python, ending, **SOON)
    number = {"never_arrives": 5, "never_arrives_for_a_future": 2}[ending]
    assert ended.exit_code != 0
    assert (
        f"all_reduce (number {number} of group 0) did not complete within its timeout of 8 s: rank 1 did not arrive (its last was"
        in ended.output
    )


def test_a_wait_with_a_limit_leaves_the_group_usable(training_python: Path) -> None:
    """The operation goes on, and completes when the rank comes."""
    ended = run(training_python, "waits_with_a_limit")
    assert ended.exit_code == 0, ended.output
    assert "too late: all_reduce (number 2 of group 0) did not complete within its timeout of 1 s" in ended.output


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("disagrees_on_the_shape", ["rank 0: all_reduce SUM float32 [3]", "rank 2: all_reduce SUM float32 [5]"]),
        ("disagrees_on_the_operation", ["rank 0: broadcast from 0 float32 [4]", "rank 1: all_reduce SUM float32 [4]"]),
    ],
)
def test_what_the_ranks_disagree_on_is_told(training_python: Path, ending: str, said: list[str]) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares each operation before it is run."""
    ended = run(training_python, ending, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert ended.exit_code != 0
    assert all(f"the ranks disagree on operation 4 of group 0: {said[0]}" in ended.output and one in ended.output for one in said)
