"""What failed first, told apart from what died of it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planning.verdict import judge


def ended(rank: int, at_s: float, code: int | None = 0, signal: str | None = None, stopped: bool = False) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": f"node{rank // 2}",
        "exit_code": code,
        "signal": signal,
        "ended_unix_s": at_s,
        "stopped": stopped,
    }


def test_the_first_failure_is_named() -> None:
    """Of several failures the earliest counts; ranks that were told to stop do not."""
    exits = [ended(0, 1.0, None, "SIGTERM", stopped=True), ended(2, 3.0, 3), ended(3, 4.0, 1)]
    verdict = judge({"state": "failed", "mpirun_exit": 3}, exits)
    assert (verdict.rank, verdict.node, verdict.exit_code) == (2, "node1", 3)
    assert verdict.summary == "rank 2 on node1 ended with exit code 3"


def test_a_killed_rank_is_named_with_its_signal() -> None:
    """A signal is told by its name."""
    verdict = judge({"state": "failed", "mpirun_exit": 255}, [ended(1, 1.0, None, "SIGKILL")])
    assert verdict.summary == "rank 1 on node0 was killed by SIGKILL"


def test_a_failure_without_a_rank_tells_what_mpirun_said() -> None:
    """Where no rank failed, the reason on record or mpirun's exit code is all there is."""
    assert "255" in judge({"state": "failed", "mpirun_exit": 255}, []).summary
    assert judge({"state": "lost", "reason": "the supervisor died"}, []).summary == "the supervisor died"


def test_a_rank_that_could_not_go_on_tells_why() -> None:
    """What rank.py itself found wrong (cores that are not allowed, a rank on the wrong node) is the reason."""
    refused = {**ended(1, 1.0, 97), "error": "core 7 is not allowed here"}
    assert judge({"state": "failed", "mpirun_exit": 97}, [refused]).summary.endswith(
        "could not go on: core 7 is not allowed here"
    )


def test_an_orphan_is_named_where_no_rank_failed_by_itself() -> None:
    """When a helper of mpirun was killed, the first rank that lost its parent shows where."""
    orphans = [
        {**ended(rank, at_s, None, "SIGKILL", stopped=True), "ended_by": "orphaned"} for rank, at_s in ((0, 2.0), (3, 1.0))
    ]
    verdict = judge({"state": "failed", "mpirun_exit": 255}, orphans)
    assert verdict.rank == 3 and "lost its parent" in verdict.summary


def test_a_good_end_and_a_stop_are_no_failures() -> None:
    """Success and a stop that was asked for name no culprit."""
    assert judge({"state": "succeeded"}, [ended(0, 1.0)]).rank is None
    assert judge({"state": "stopped"}, [ended(0, 1.0, None, "SIGTERM", stopped=True)]).summary == "the run was stopped"


def test_what_the_supervisor_has_judged_holds() -> None:
    """It knows more than the records: what it heard first, which node it lost."""
    found = {
        "kind": "node_lost",
        "summary": "node1 was lost",
        "rank": None,
        "node": "node1",
        "exit_code": None,
        "signal": None,
        "reason": None,
        "tail": [],
        "tail_of": None,
        "others": [{"rank": 0, "node": "node0", "summary": "ended with the others"}],
    }
    verdict = judge({"state": "failed", "mpirun_exit": 0, "verdict": found}, [ended(0, 1.0, 3)])
    assert (verdict.kind, verdict.rank, verdict.node, verdict.summary) == ("node_lost", None, "node1", "node1 was lost")
    assert verdict.to_json()["others"] == found["others"]


def test_a_lost_run_is_not_blamed_on_a_rank() -> None:
    """Where the supervisor was killed, that is the reason, whatever its orphans say."""
    orphan = {**ended(0, 1.0, None, "SIGTERM", stopped=True), "ended_by": "orphaned"}
    assert judge({"state": "lost", "reason": "its supervisor was killed"}, [orphan]).summary == "its supervisor was killed"


def test_only_the_last_attempt_counts() -> None:
    """Records of an attempt that was tried again say nothing of the run's end, and a good end says which attempt it was."""
    exits = [{**ended(1, 1.0, 7), "attempt": 1}, {**ended(0, 9.0, 3), "attempt": 2}]
    verdict = judge({"state": "failed", "mpirun_exit": 3, "attempt": 2}, exits)
    assert (verdict.rank, verdict.exit_code) == (0, 3)
    assert judge({"state": "succeeded", "attempt": 2}, exits).summary == "every rank ended well, in attempt 2"


SCRIPT = '  File "/root/.cluster-train/jobs/abc/train.py", line 3, in <module>'
PACKAGE = '  File "/root/.cluster-train/envs/0bbe42f41a858897/lib/python3.11/site-packages/torch/__init__.py", line 9, in {}'


@pytest.mark.parametrize(
    ("said", "frames", "is_told"),
    [
        ("OSError: libtorch_cpu.so: cannot open shared object file (__init__.py:376 in __init__)", [PACKAGE], True),
        ("ImportError: cannot import name 'x' from 'torch._C' (__init__.py:9 in <module>)", [PACKAGE], True),
        ("ModuleNotFoundError: No module named 'torch._C' (__init__.py:9 in <module>)", ["[rank1]: " + PACKAGE], True),
        ("ModuleNotFoundError: No module named 'torch' (train.py:3 in <module>)", [], True),
        ("ModuleNotFoundError: No module named 'torchvision' (train.py:3 in <module>)", [], False),
        ("OSError: [Errno 5] Input/output error (train.py:3 in <module>)", [], False),
        ("ValueError: bad split (__init__.py:9 in load)", [PACKAGE], False),
    ],
)
def test_a_damaged_environment_is_recognised(said: str, frames: list[str], is_told: bool) -> None:
    """An import that fails within the stack leads to `provision --repair`; a fault of the script does not."""
    tail = ["Traceback (most recent call last):", SCRIPT, *(frame.format("<module>") for frame in frames), said]
    own: dict[str, Any] = {"kind": "exception", "summary": "rank 1 on node0 ended", "tail": tail, "tail_of": "err", "others": []}
    own |= {"rank": 1, "node": "node0", "exit_code": 1, "signal": None, "reason": {"kind": "exception", "text": said}}
    verdict = judge({"state": "failed", "verdict": own}, [])
    assert ("provision --repair" in verdict.advice) == is_told


def test_a_library_that_fails_at_work_is_not_damaged() -> None:
    """The same exception from a function of the stack that the script has called."""
    said = "OSError: no file named model.safetensors found (modeling_utils.py:9 in load)"
    tail = ["Traceback (most recent call last):", SCRIPT, PACKAGE.format("from_pretrained"), said]
    own: dict[str, Any] = {"kind": "exception", "summary": "", "tail": tail, "tail_of": "err", "others": []}
    own |= {"rank": 1, "node": "node0", "exit_code": 1, "signal": None, "reason": {"kind": "exception", "text": said}}
    assert judge({"state": "failed", "verdict": own}, []).advice == ""
