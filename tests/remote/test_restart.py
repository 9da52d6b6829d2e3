"""What a supervisor does after an attempt at a run has failed: waits, prepares, tries again, gives up, or is stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import MpiNode, records, tagged, until

pytestmark = pytest.mark.stack

# Fails as often as it is told, then goes on to the end.
FAILS = (
    "import os, sys, time\n"
    "attempt = int(os.environ['CLUSTER_TRAIN_ATTEMPT'])\n"
    "print('attempt', attempt, 'of rank', os.environ['RANK'], 'from', os.environ.get('CLUSTER_TRAIN_RESUME'), *sys.argv[2:])\n"
    "sys.stdout.write('cut off')\n"
    "here = 'here-%d' % attempt\n"
    "if os.environ['RANK'] == '0': open(here, 'w').close()\n"
    "while not os.path.exists(here): time.sleep(0.05)\n"
    "if attempt <= int(sys.argv[1]) and os.environ['RANK'] == '1': sys.exit(5)\n"
    "if attempt <= int(sys.argv[1]): time.sleep(60)\n"
)
# Writes checkpoints of which the last one is half, then fails once.
SAVES = (
    "import os, sys, time, zipfile\n"
    "resume = os.environ.get('CLUSTER_TRAIN_RESUME')\n"
    "if resume: print('from', os.path.relpath(resume), open(resume, 'rb').read(2)); sys.exit()\n"
    "for step in (9, 10, 11):\n"
    "    with zipfile.ZipFile('step-%d.pt' % step, 'w') as out: out.writestr('x', b'y' * 100)\n"
    "os.truncate('step-11.pt', 50)\n"
    "sys.exit(5)\n"
)
PLAN = {
    "restarts": 2,
    "min_nodes": 1,
    "patterns": [],
    "is_trainer": False,
    "resume_option": None,
    "accumulates": False,
    "addresses": {},
}


@pytest.fixture
def node(tmp_path: Path, training_python: Path) -> Iterator[MpiNode]:
    node = MpiNode(tmp_path / "root", str(training_python))
    yield node
    for run_dir in node.root.glob("runs/*"):
        node.stop(run_dir.name, "--now")
        node.sweep(run_dir.name, "--patience-s", "0")


def start(node: MpiNode, run_id: str, source: str, *arguments: str, size: int = 2, **plan: Any) -> None:
    node.restart = {**PLAN, **plan}
    node.start_mpi(node.launch(run_id, source, *arguments, size=size))


def status_file(node: MpiNode, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = records.read_record(str(node.run_dir(run_id) / "status.json"))
    return found


def test_it_tries_again_until_it_works(node: MpiNode) -> None:
    """Two attempts fail, the third ends well: logs go on in one file per rank, the records of all attempts are there."""
    start(node, "again", FAILS, "2")
    status = node.until_final("again")
    assert (status["state"], status["attempt"], status["reason"], status["verdict"]) == ("succeeded", 3, None, None)
    assert [(past["attempt"], past["state"]) for past in status["attempts"]] == [(1, "failed"), (2, "failed")]
    assert all("rank 1 on node0 ended with exit code 5" in past["reason"] for past in status["attempts"])
    assert [rank["exit"]["attempt"] for rank in status["ranks"]] == [3, 3]
    for rank in (0, 1):
        assert node.output("again", rank).splitlines() == [
            line for attempt in (1, 2, 3) for line in (f"attempt {attempt} of rank {rank} from None", "cut off")
        ]
        marks = [line for line in node.output("again", rank, "err").splitlines() if line.startswith("cluster-train:")]
        assert marks == [f"cluster-train: attempt {attempt}, from the beginning" for attempt in (2, 3)]
    kept = [records.read_record(str(node.run_dir("again") / f"attempt-{n}.rank-1.exit.json"))["exit_code"] for n in (1, 2)]
    assert kept == [5, 5]
    assert [text.split(":")[0] for text in status["notices"]].count("attempt 1 failed") == 1


def test_it_gives_up(node: MpiNode) -> None:
    """After the last restart the run has failed, for the last attempt's reason, and nothing is left."""
    start(node, "never", FAILS, "9", restarts=1)
    status = node.until_final("never")
    assert (status["state"], status["attempt"], len(status["attempts"])) == ("failed", 2, 2)
    assert status["verdict"]["rank"] == 1 and "exit code 5" in status["reason"]
    assert tagged("never") == []


def test_an_earlier_attempts_words_are_not_this_ones(node: MpiNode) -> None:
    """The exception of the first attempt is not the reason of the second, which said nothing before it was killed."""
    source = "import os\nif os.environ['CLUSTER_TRAIN_ATTEMPT'] == '1': raise ValueError('first')\nos.kill(os.getpid(), 9)"
    start(node, "words", source, size=1, restarts=1)
    status = node.until_final("words")
    assert "ValueError: first" in status["attempts"][0]["reason"]
    assert (status["verdict"]["signal"], status["verdict"]["tail"]) == ("SIGKILL", [""]), status["verdict"]
    assert "first" not in status["reason"]


def test_it_goes_on_from_the_newest_whole_checkpoint(node: MpiNode) -> None:
    """step-11 is half: it is named and put aside. The script is told of step-10, by variable and by its own option."""
    start(node, "saved", SAVES, size=1, patterns=["step-*.pt"], resume_option="--resume_from_checkpoint")
    status = node.until_final("saved")
    assert (status["state"], status["resume"]) == ("succeeded", "step-10.pt")
    assert node.output("saved", 0).splitlines() == ["from step-10.pt b'PK'"]
    said = "\n".join(status["notices"])
    assert "attempt 2: step-11.pt is skipped: step-11.pt on node0 is cut off or damaged" in said
    work = node.run_dir("saved") / "work"
    assert (work / ".half-step-11.pt").exists() and not (work / "step-11.pt").exists()
    order = json.loads((node.run_dir("saved") / "attempt-2.json").read_text())["order"]
    assert order["launch"]["argv"][1:] == [f"--resume_from_checkpoint={work}/step-10.pt"]


def test_a_stop_while_it_waits(node: MpiNode) -> None:
    """Between attempts nothing runs, and a stop ends the run at once: it was stopped, it did not fail."""
    start(node, "waits", FAILS, "9", restarts=9)
    until(lambda: "restart 4" in (status_file(node, "waits")["reason"] or ""), "a wait of 8 s", 90.0)
    assert status_file(node, "waits")["state"] == "restarting"
    started = time.monotonic()
    code, status = node.stop("waits")
    assert (code, status["state"], status["reason"]) == (0, "stopped", None) and time.monotonic() - started < 7.0
    assert tagged("waits") == []


def test_a_stop_is_final(node: MpiNode) -> None:
    """A run that is stopped is not started again, and neither is one that passed its time limit or never began."""
    start(node, "stopped", "import time; print('up'); time.sleep(60)")
    node.until_all_say("stopped", "up", 2)
    code, status = node.stop("stopped")
    assert (code, status["state"], status["attempt"]) == (0, "stopped", 1)
    code, answer = node.start(node.launch("unstarted", FAILS, "9"), ["/nowhere/mpirun"])
    assert code == 1 and "/nowhere/mpirun" in answer["error"]
    assert (node.until_final("unstarted")["state"], status_file(node, "unstarted")["attempt"]) == ("failed", 1)


def test_a_node_that_is_needed_is_missed(node: MpiNode) -> None:
    """Where a node cannot be reached and all are needed, the run fails and says so."""
    launch = node.launch("needed", FAILS, "1", size=2)
    launch["ranks"][1]["node"] = "node1"
    node.restart = {**PLAN, "restarts": 1, "min_nodes": 2, "addresses": {"node1": "127.0.0.9"}}
    node.hostfile = "127.0.0.1:1\n127.0.0.9:1\n"
    node.start_mpi(launch)
    needed = node.until_final("needed")
    assert needed["state"] == "failed" and "node1 cannot be reached from node0 (" in needed["reason"]
    assert "the job needs 2 nodes (job.min_nodes)" in needed["reason"]
    assert (node.run_dir("needed") / "hostfile").read_text() == node.hostfile
