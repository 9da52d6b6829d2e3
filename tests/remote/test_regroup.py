"""A run without some of its nodes: ranks, hostfile, world size and batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from supervised import REMOTE

sys.path.insert(0, str(REMOTE))

import regroup


def order() -> dict[str, Any]:
    ranks = [{"rank": n, "node": f"node{n // 2}", "local_rank": n % 2, "local_world_size": 2} for n in range(6)]
    return {
        "launch": {"ranks": ranks, "world_size": 6, "argv": ["train.py", "--lr", "1"]},
        "files": {
            "hostfile": {"text": "10.0.0.1:2\n10.0.0.2:2\n10.0.0.3:2\n", "mode": 0o600},
            "ssh": {"text": "x", "mode": 0o700},
        },
        "mpirun": {"argv": ["mpiexec.hydra", "-f", "hostfile", "-n", "6", "-ppn", "2", "python", "rank.py"], "env": {}},
    }


def test_a_lost_node_is_left_out() -> None:
    """Ranks are renumbered without a gap and keep their logs; the first order stays as it was."""
    first = order()
    left = regroup.without(first, ["node1"])
    assert [(rank["rank"], rank["log"], rank["node"], rank["local_rank"]) for rank in left["launch"]["ranks"]] == [
        (0, 0, "node0", 0),
        (1, 1, "node0", 1),
        (2, 4, "node2", 0),
        (3, 5, "node2", 1),
    ]
    assert left["launch"]["world_size"] == 4
    assert left["files"]["hostfile"] == {"text": "10.0.0.1:2\n10.0.0.3:2\n", "mode": 0o600}
    assert left["mpirun"]["argv"] == ["mpiexec.hydra", "-f", "hostfile", "-n", "4", "-ppn", "2", "python", "rank.py"]
    assert first == order()
    assert regroup.nodes_of(left["launch"]) == ["node0", "node2"]


@pytest.mark.parametrize(
    ("hostfile", "left"),
    [
        ("10.0.0.1 slots=2\n10.0.0.2 slots=2\n10.0.0.3 slots=2\n", "10.0.0.1 slots=2\n10.0.0.3 slots=2\n"),
        ("fd77::1\nfd77::2\nfd77::3\n", "fd77::1\nfd77::3\n"),
        ("fd77::1\nfd77::1\nfd77::2\nfd77::2\nfd77::3\n", "fd77::1\nfd77::1\nfd77::3\n"),
    ],
)
def test_every_dialect_of_hostfiles_loses_the_node(hostfile: str, left: str) -> None:
    """Open MPI's, and Intel's with IPv6, where a host is repeated if the nodes differ."""
    first = order()
    first["files"]["hostfile"]["text"] = hostfile
    assert regroup.without(first, ["node1"])["files"]["hostfile"]["text"] == left


@pytest.mark.parametrize(
    ("argv", "ranks", "kept", "said"),
    [
        (["--lr", "1"], (4, 2), ["--lr", "1", "--gradient_accumulation_steps", "2"], "stays as it was"),
        (["--gradient_accumulation_steps", "3", "--x"], (4, 2), ["--gradient_accumulation_steps", "6", "--x"], "6 instead of 3"),
        (["--gradient-accumulation-steps=2", "-y"], (3, 2), ["--gradient_accumulation_steps=3", "-y"], "3 instead of 2"),
        (["--a", "--", "b"], (2, 1), ["--a", "--gradient_accumulation_steps", "2", "--", "b"], "2 instead of 1"),
        (["--lr", "1"], (3, 2), ["--lr", "1"], "becomes 2/3 of what it was (3 ranks x 1 accumulation steps do not divide by 2)"),
        (["--gradient_accumulation_steps", "x"], (4, 2), ["--gradient_accumulation_steps", "x"], "x is no number"),
    ],
)
def test_the_global_batch_is_kept_where_it_divides(argv: list[str], ranks: tuple[int, int], kept: list[str], said: str) -> None:
    """Fewer ranks accumulate more; where that does not come out even, nothing is changed and it is said."""
    changed, note = regroup.keep_batch(argv, *ranks)
    assert changed == kept and said in note
