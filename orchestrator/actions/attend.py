"""Be with a run until it is over: follow it, stop it at a Ctrl-C, see that nothing is left, say how it ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.actions import launch
from orchestrator.actions.fetch import fetch
from orchestrator.actions.follow import Followed, Follower, RunReference
from orchestrator.actions.record import RunRecord
from orchestrator.errors import ClusterTrainError, Interrupted
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport
from orchestrator.planning.verdict import FINAL_STATES, SHOWN_LINES, Verdict, judge
from orchestrator.specs.events import Emit, Notice, Step
from orchestrator.specs.inventory import Job

STOP_LIMIT_S = 60.0  # for the head to be reached at all
NOW_LIMIT_S = 10.0


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
        Interrupted: after a Ctrl-C, once the run is over on every node and what it wrote has been brought back.
        UnreachableError: a connection broke and could not be made again; the run goes on.
    """
    follower = Follower(fleet, run, record, emit)
    with _interrupts(follower.interrupt):
        start()
        outcome, was_stopped = _follow_to_the_end(fleet, job, run, follower, record, emit)
    if outcome.verdict.state in FINAL_STATES:
        record.write("verdict.json", outcome.verdict.to_json())
    if was_stopped:
        _fetch_unless_interrupted(fleet, job, run, record, emit, is_wanted=follower.interrupts == 1)
        raise Interrupted(f"run {run.run_id} was stopped", advice=f"its record: {record.path}")
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


def sweep(
    fleet: Fleet, root: str, python: str, run_id: str, grace_s: float, emit: Emit, *, gone: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """End what is left of the run on every node, list again, and name what was ended and what is left.

    Args:
        gone: nodes that are not asked, and why.

    Returns: per node {"killed": [...], "left": [...]}, or {"unknown": why it could not be asked}.
    """
    answers: dict[str, dict[str, Any]] = {node: {"unknown": why} for node, why in (gone or {}).items()}

    def sweep_one(transport: Transport) -> dict[str, Any]:
        try:
            return launch.sweep(transport, root, python, run_id, grace_s)
        except ClusterTrainError as error:
            return {"unknown": error.message}

    answers |= fleet.each(sweep_one, [node for node in fleet.transports if node not in answers])
    for node, found in answers.items():
        if "unknown" in found:
            emit(Notice(text=f"{node}: could not be asked what is left of run {run_id} ({found['unknown']})"))
            continue
        for what, text in (("killed", "was left running and has been ended"), ("left", "COULD NOT BE ENDED")):
            for process in found[what]:
                command = f" ({process['command'][:100]})" if process.get("command") else ""
                emit(Notice(text=f"{node}: process {process['pid']} of run {run_id}{command} {text}"))
    return answers


def _follow_to_the_end(
    fleet: Fleet, job: Job, run: RunReference, follower: Follower, record: RunRecord, emit: Emit
) -> tuple[Outcome, bool]:
    """How it ended, and whether that was because of a Ctrl-C."""
    stopper = _Stopper(fleet, run, job.grace_s)

    def on_interrupt(count: int) -> bool:
        wait = f"the ranks have {job.grace_s:g} s to end by themselves; Ctrl-C again ends them at once"
        emit(Notice(text=f"stopping: {wait}" if count == 1 else "ending them at once"))
        stopper.ask(now=count > 1)
        return count == 1

    follower.start()
    followed = follower.follow(on_interrupt)
    if stopper.was_asked:
        stopper.see_through()
    is_good = followed.status.get("state") == "succeeded" and not stopper.was_asked
    if not is_good:
        sweep(fleet, run.root, run.python, run.run_id, job.grace_s, emit, gone=followed.unheard)
    follower.finish(look_again=not is_good)
    if stopper.was_asked:  # of a follower that was given up the last word is not known
        followed.status.setdefault("state", "stopped")
    return outcome_of(run, record, followed), stopper.was_asked


class _Stopper:
    """Asks the head to stop a run, in threads, through broken connections: the follower makes them again."""

    def __init__(self, fleet: Fleet, run: RunReference, grace_s: float) -> None:
        self._fleet, self._run, self._grace_s = fleet, run, grace_s
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    @property
    def was_asked(self) -> bool:
        """Whether anybody wanted the run to stop."""
        return bool(self._threads)

    def ask(self, *, now: bool) -> None:
        """Have the run stopped, with `now` without the ranks' grace."""
        self._failures.clear()
        self._threads.append(threading.Thread(target=self._stop, args=(now,), daemon=True))
        self._threads[-1].start()

    def see_through(self) -> None:
        """Wait until it has stopped. Raises Interrupted where the head could not be asked: the run may go on."""
        self._threads[-1].join(self._grace_s + launch.START_TIMEOUT_S)
        if self._threads[-1].is_alive() or self._failures:
            why = self._failures[-1] if self._failures else f"{self._fleet.head.node} does not answer"
            again = self._run.again.replace("logs -f", "stop", 1)
            raise Interrupted(f"run {self._run.run_id} could NOT be stopped and may go on: {why}", advice=again)

    def _stop(self, now: bool) -> None:
        run, deadline = self._run, time.monotonic() + (NOW_LIMIT_S if now else STOP_LIMIT_S)
        while True:
            try:
                launch.stop(self._fleet.head, run.root, run.python, run.run_id, self._grace_s, now=now)
                return
            except ClusterTrainError as error:
                if time.monotonic() > deadline:
                    self._failures.append(error.message)
                    return
            time.sleep(1.0)


@contextmanager
def _interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at every Ctrl-C, instead of breaking off wherever the program happens to be."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _last_lines(record: RunRecord, rank: int) -> tuple[str, ...]:
    """The end of a rank's stderr, or of its stdout where it wrote nothing there."""
    for stream in ("err", "out"):
        path = record.path / f"rank-{rank}.{stream}"
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            return tuple(text.splitlines()[-SHOWN_LINES:])
    return ()


def _fetch_unless_interrupted(
    fleet: Fleet, job: Job, run: RunReference, record: RunRecord, emit: Emit, *, is_wanted: bool
) -> None:
    """Bring back what the job saved before it was stopped, unless Ctrl-C was or is pressed again."""
    if not job.fetch:
        return
    try:
        if is_wanted:
            emit(Step(text=f"fetching {', '.join(job.fetch)}; Ctrl-C again leaves it on {fleet.head.node}"))
            _fetch(fleet, job, run, record, emit, is_needed=False)
            return
    except KeyboardInterrupt:
        pass
    emit(Notice(text=f"job.fetch: left on {fleet.head.node}, in {run.run_dir}/work"))


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
