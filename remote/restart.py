"""Whether a run is attempted again after it failed, when, and with which order. Used by `supervise.py`, in its one thread.

The order's "restart": {"restarts", "min_nodes", "patterns", "is_trainer", "resume_option", "accumulates", "addresses"};
without it nothing is attempted again. "from_run": the name of another run, from whose newest complete checkpoint the first
attempt goes on. What the next attempt needs is prepared by `resume.py`.
"""

import os
import signal
import sys
import time

import attempt
import children
import outposts
import records
import runs
import verdicts

LONGEST_WAIT_S = 60.0
PREPARATION_LIMIT_S = 48 * 3600.0  # for checkpoints of any size over any network
FINAL_KINDS = ("run_timeout",)  # verdicts after which nothing is attempted again


class Stopped(Exception):
    """Somebody asked the run to stop while nothing of it was running."""


def first_order(run: runs.Run, order: dict, reply, posts: outposts.Outposts) -> tuple:
    """(What to attempt first, or None; the outcome where there is none): from another run's checkpoint if that is asked for.

    reply: is called with what `start` answers, as soon as it takes time.
    """
    try:
        posts.take(wait)
    except Stopped:
        reply({"run_id": run.status["run_id"], "supervisor": run.status["supervisor"]})
        return None, attempt.Outcome("stopped", None, None, None, None)
    if not order.get("from_run"):
        return order, None
    reply({"run_id": run.status["run_id"], "supervisor": run.status["supervisor"]})
    other = records.read_record(os.path.join(os.path.dirname(run.run_dir), order["from_run"], "status.json")) or {}
    try:
        answer = prepare(run, 1, other.get("ended_unix_s") or time.time())
    except Stopped:
        return None, attempt.Outcome("stopped", None, None, None, None)
    if "order" not in answer:
        return None, attempt.Outcome("failed", answer["error"], None, None, verdicts.limit("resume", answer["error"]))
    run.set(resume=answer["resume"])
    tell(run, *answer["notes"])
    return answer["order"], None


def next_order(run: runs.Run, order: dict, outcome: attempt.Outcome, posts: outposts.Outposts) -> tuple:
    """(What to attempt next, or None where the run has ended; the outcome, which is "stopped" where that was asked for)."""
    restarts = order.get("restart", {}).get("restarts", 0)
    number = order["launch"].get("attempt", 1)
    if outcome.state != "failed" or not run.status["mpirun"] or outcome.verdict["kind"] in FINAL_KINDS:
        return None, outcome
    failed_unix_s = time_of_failure(run)
    keep(run, number, outcome)
    while number <= restarts:
        number += 1
        wait_s = min(LONGEST_WAIT_S, 2.0 ** (number - 2))
        why = "attempt %d failed: %s; restart %d of %d in %d s" % (number - 1, outcome.reason, number - 1, restarts, wait_s)
        run.set(state="restarting", reason=why, mpirun=None, nodes={}, stall=None)
        tell(run, why)
        try:
            posts.take(wait)
            wait(wait_s)
            answer = prepare(run, number, failed_unix_s)
        except Stopped:
            return None, outcome._replace(state="stopped", reason=None, verdict=None)
        error = answer.get("error") or posts.in_the_way(answer["order"]["launch"]) or begin(run, number, answer)
        if not error:
            return answer["order"], outcome
        tell(run, "attempt %d could not begin: %s" % (number, error))
        outcome = outcome._replace(reason=error)
    return None, outcome


def time_of_failure(run: runs.Run) -> float:
    """When the first rank here ended: what was written shortly before or after may be half of something."""
    ends = [rank["exit"]["ended_unix_s"] for rank in run.ranks_here() if rank["exit"]]
    return min(ends) if ends else time.time() - attempt.SETTLE_S


def keep(run: runs.Run, number: int, outcome: attempt.Outcome) -> None:
    """Put an attempt that failed into the run's history."""
    history = run.status.get("attempts", [])
    run.set(attempts=history + [dict(outcome.status(), attempt=number, ended_unix_s=time.time())])


def tell(run: runs.Run, *texts: str) -> None:
    """Add to the notices of the run, which whoever follows it is shown."""
    run.set(notices=run.status["notices"] + list(texts))


def wait(limit_s: float, child: children.Child = None) -> None:
    """Wait so long, or for a child's end; raises Stopped."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not (child and child.status is not None):
        event = signal.sigtimedwait(attempt.WATCHED, max(0.0, deadline - time.monotonic()))
        if event is not None and event.si_signo != signal.SIGCHLD:
            if child:
                child.send(signal.SIGKILL)
            raise Stopped
        if child:
            child.reap()


def prepare(run: runs.Run, number: int, failed_unix_s: float) -> dict:
    """What `resume.py` finds for the next attempt."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "resume.py")
    words = [sys.executable, "-S", "-E", program, run.run_dir, str(number), repr(failed_unix_s)]
    environment = {os.fsencode(name): os.fsencode(os.environ[name]) for name in attempt.KEPT_VARIABLES if name in os.environ}
    logs = [os.path.join(run.run_dir, name) for name in ("resume.out", "resume.err")]
    try:
        child = children.start([os.fsencode(word) for word in words], environment, logs, "/", signal.SIGKILL)
    except children.StartError as error:
        return {"error": str(error)}
    wait(PREPARATION_LIMIT_S, child)
    answer = records.read_record(records.attempt_file(run.run_dir, number))
    return answer or {"error": "the next attempt could not be prepared: see resume.err in %s" % run.run_dir}


def begin(run: runs.Run, number: int, answer: dict) -> str:
    """Make the run's directory ready for an attempt; what went wrong, or None."""
    hostfile = answer["order"]["files"]["hostfile"]
    try:
        archive(run)
        records.write_text(os.path.join(run.run_dir, "hostfile"), hostfile["text"], hostfile["mode"])
    except OSError as error:
        return "%s could not be made ready: %s" % (run.run_dir, error)
    run.set(attempt=number, reason=None, resume=answer["resume"])
    tell(run, *["attempt %d: %s" % (number, note) for note in answer["notes"]])
    return None


def archive(run: runs.Run) -> None:
    """Put the ranks' records of the last attempt away: they must not speak for the next one."""
    for name in os.listdir(run.run_dir):
        if name.startswith("rank-") and name.endswith(".json"):
            records.put_away(os.path.join(run.run_dir, name))
