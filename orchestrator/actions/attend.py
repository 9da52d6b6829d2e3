"""Be with a run until it is over: follow it, stop it at a Ctrl-C, see that nothing is left, say how it ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.actions import launch
from orchestrator.actions.fetch import fetch
from orchestrator.actions.follow import Followed, Follower, RunReference
from orchestrator.actions.record import RunRecord
from orchestrator.errors import ClusterTrainError, Interrupted
from orchestrator.nodes.fleet import Fleet
from orchestrator.planning.verdict import SHOWN_LINES, Verdict, judge
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.inventory import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run that was followed ended; `tail` is the end of the log of the rank that failed first."""

    run_id: str
    verdict: Verdict
    record: Path
    tail: tuple[str, ...] = ()


def attend(fleet: Fleet, job: Job, run: RunReference, record: RunRecord, emit: Emit, start: Callable[[], object]) -> Outcome:
    """Start a run and follow it to its end; Ctrl-C asks it to stop and goes on following, a second one ends it at once.

    Raises:
        Interrupted: after a Ctrl-C, once the run is over on every node.
        UnreachableError: the connection broke; the run goes on.
    """
    follower = Follower(fleet, run, record, emit)
    with _interrupts(follower.interrupt):
        start()
        outcome = _follow_to_the_end(fleet, job, run, follower, record, emit)
    record.write("verdict.json", outcome.verdict.to_json())
    _fetch(fleet, job, run, record, emit, is_needed=outcome.verdict.state == "succeeded")
    return outcome


def start_only(fleet: Fleet, job: Job, run: RunReference, emit: Emit, start: Callable[[], object]) -> None:
    """Start a run that is to be left to itself; a Ctrl-C meanwhile ends it again. Raises Interrupted after one."""
    interrupts: list[int] = []
    with _interrupts(lambda: interrupts.append(1)):
        start()
        if interrupts:
            launch.stop(fleet.head, run.root, run.python, run.run_id, job.grace_s, now=True)
            sweep(fleet, run.root, run.python, run.run_id, job.grace_s, emit)
            raise Interrupted(f"run {run.run_id} was stopped")


def outcome_of(run: RunReference, record: RunRecord, followed: Followed) -> Outcome:
    """How a run ended, as far as it was followed."""
    verdict = judge(followed.status, followed.exits.values())
    tail = verdict.tail or (_last_lines(record, verdict.rank) if verdict.rank is not None else ())
    return Outcome(run_id=run.run_id, verdict=verdict, record=record.path, tail=tail)


def sweep(fleet: Fleet, root: str, python: str, run_id: str, grace_s: float, emit: Emit) -> None:
    """End what is left of the run on every node, and name it."""
    for node, found in launch.sweep(fleet, root, python, run_id, grace_s).items():
        for what, text in (("killed", "was left running and has been ended"), ("left", "COULD NOT BE ENDED")):
            for process in found[what]:
                emit(Notice(text=f"{node}: process {process['pid']} of run {run_id} {text}"))


def _follow_to_the_end(fleet: Fleet, job: Job, run: RunReference, follower: Follower, record: RunRecord, emit: Emit) -> Outcome:
    stop = partial(launch.stop, fleet.head, run.root, run.python, run.run_id, job.grace_s)
    stoppers: list[threading.Thread] = []

    def on_interrupt(count: int) -> bool:
        wait = f"the ranks have {job.grace_s:g} s to end by themselves; Ctrl-C again ends them at once"
        emit(Notice(text=f"stopping: {wait}" if count == 1 else "ending them at once"))
        stoppers.append(threading.Thread(target=_quietly, args=(partial(stop, now=count > 1),), daemon=True))
        stoppers[-1].start()
        return count == 1

    follower.start()
    followed = follower.follow(on_interrupt)
    if stoppers:
        stoppers[-1].join(job.grace_s + launch.START_TIMEOUT_S)
        sweep(fleet, run.root, run.python, run.run_id, job.grace_s, emit)
        raise Interrupted(f"run {run.run_id} was stopped", advice=f"its record: {record.path}")
    outcome = outcome_of(run, record, followed)
    if outcome.verdict.state != "succeeded":
        sweep(fleet, run.root, run.python, run.run_id, job.grace_s, emit)
    return outcome


@contextmanager
def _interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at every Ctrl-C, instead of breaking off wherever the program happens to be."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quietly(action: Callable[[], Any]) -> None:
    """Run an action in a thread; what it could not do is found by the sweep that follows."""
    try:
        action()
    except ClusterTrainError:
        pass


def _last_lines(record: RunRecord, rank: int) -> tuple[str, ...]:
    """The end of a rank's stderr, or of its stdout where it wrote nothing there."""
    for stream in ("err", "out"):
        path = record.path / f"rank-{rank}.{stream}"
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            return tuple(text.splitlines()[-SHOWN_LINES:])
    return ()


def _fetch(fleet: Fleet, job: Job, run: RunReference, record: RunRecord, emit: Emit, *, is_needed: bool) -> None:
    """Bring back what the job wrote, also where it failed; that nothing could be brought must not hide why it failed."""
    paths = job.fetch
    if not paths:
        return
    try:
        missing = fetch(fleet.head, run.root, run.python, f"{run.run_dir}/work", paths, record.path)
    except ClusterTrainError as error:
        if is_needed:
            raise
        emit(Notice(text=f"job.fetch: {error.message}"))
        return
    for path in missing:
        emit(Notice(text=f"job.fetch: the run left no {path} on {fleet.head.node}"))
    for path in sorted(set(paths) - set(missing)):
        emit(Step(text=f"fetched {record.path / path}"))
