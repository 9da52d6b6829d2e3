"""One attempt at a run: start mpirun, watch it and its ranks, see them off, and judge how it ended. Used by `supervise.py`.

It returns an outcome as a value; whether there is another attempt is not decided here. What is heard of the ranks comes from
their heartbeats (`listener.py`), and from their records on this node's disk; mpirun's own word is the last to be asked: Intel
MPI goes on after a rank has failed, and Open MPI ends with 0 where a node was killed. Whatever ends an attempt, the ranks are
told so, so that they end alike under every MPI.
"""

import collections
import os
import re
import selectors
import signal
import time

import children
import evidence
import listener
import processes
import reasons
import records
import runs
import stalls
import verdicts

WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
LOOK_S = 0.25
START_LOOK_S = 1.0
STOP_MARGIN_S = 5.0  # beyond the ranks' grace, before mpirun is forced
ABORT_S = 2.0  # for ranks that are told that the job is lost, before mpirun is forced
LOST_S = 0.5  # the same where a node was lost: mpirun would wait for it for ever
# How mpirun is forced, and what each step is given: a second SIGINT makes hydra clean up on all nodes.
FORCE = ((signal.SIGINT, 0.5), (signal.SIGINT, 2.0), (signal.SIGKILL, 60.0))
FORCE_LOST = ((signal.SIGINT, 0.3), (signal.SIGINT, 0.7), (signal.SIGKILL, 60.0))
DOUBT_S = 3.0  # of which every living rank says something in each second
SETTLE_S = 5.0  # for ranks to record their end after mpirun has gone
KEPT_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TMPDIR", "TZ")
NO_LIMITS = {"start_timeout_s": 0, "run_timeout_s": 0, "stall_timeout_s": 0, "stall_action": "report"}
ASKED, FAILED = "asked", "failed"  # why an attempt is being ended, beside the verdict of a limit
NODE_STATES = ("quiet", "starting", "heard", "ended")  # of a node's ranks, the most telling first
NO_HEARTBEAT = re.compile(r"cluster-train: rank (\d+) on \S+: no heartbeat to (.*); it runs on without")


class Outcome(collections.namedtuple("Outcome", "state reason mpirun_exit mpirun_signal verdict")):
    """How an attempt ended: succeeded, failed, or stopped (because somebody asked for it); `verdict` as in `verdicts`."""

    def status(self) -> dict:
        """The outcome as part of the run's status."""
        return dict(self._asdict())


def attempt(run: runs.Run, order: dict, tell) -> Outcome:
    """Start mpirun as the order says and see it to its end; how that was.

    tell: called with what `start` answers, as soon as mpirun runs or cannot be started.
    """
    selector = selectors.DefaultSelector()
    head = listen(run, order["launch"], selector)
    command = [records.to_bytes(word) for word in order["mpirun"]["argv"]]
    logs = evidence.logs(run.run_dir)
    began_bytes = [size_bytes(path) for path in logs]
    try:
        # hydra goes to mpirun's directory on every node: it must be one that is everywhere. Without a supervisor nobody
        # would see a stop through: mpirun's death is what ends all ranks for certain.
        mpirun = children.start(command, mpirun_environment(order, head and head.beat), logs, "/", signal.SIGKILL)
    except children.StartError as error:
        tell({"error": str(error)})
        return Outcome("failed", str(error), None, None, verdicts.limit("mpirun", str(error)))
    run.set(state="starting" if head else "running", mpirun=processes.identity(mpirun.pid))
    tell({"run_id": run.status["run_id"], "supervisor": run.status["supervisor"]})
    watch = Watch(run, order, mpirun, head, selector, began_bytes)
    watch.until_over()
    if head:
        head.close()
    selector.close()
    runs.settle(run, order["grace_s"] if watch.cause == ASKED else SETTLE_S)
    return watch.outcome()


def listen(run: runs.Run, launch: dict, selector: selectors.BaseSelector) -> listener.Listener:
    """What hears the ranks' heartbeats; None where the launch wants none, or this node cannot listen (which is recorded)."""
    beat = launch.get("beat")
    if not beat or not beat["timeout_s"]:
        return None
    try:
        return listener.Listener(beat, [(plan["rank"], plan["node"]) for plan in launch["ranks"]], selector)
    except OSError as error:
        text = "no heartbeats: this node cannot listen on %s (%s)" % (beat["address"], error)
        run.set(notices=run.status["notices"] + [text])
        return None


def mpirun_environment(order: dict, beat: dict) -> dict:
    """mpirun's environment as bytes: what a login has, what the plan gives, and what rank.py counts on.

    beat: where the ranks find the supervisor; it stands in for the launch document's own, and never touches a disk.
    """
    try:
        launch = records.encode_launch(dict(order["launch"], beat=beat) if beat else order["launch"])
        records.decode_launch(launch)
    except (KeyError, ValueError) as error:
        raise runs.Problem(str(error))
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables.update(order["mpirun"]["env"])
    # Intel MPI's own clean-up comes to rank.py as SIGHUP, which it can tell from a stop (and survive to record it).
    variables["I_MPI_JOB_ABORT_SIGNAL"] = str(int(signal.SIGHUP))
    variables.update({records.LAUNCH_VARIABLE: launch, records.RUN_VARIABLE: order["launch"]["run_id"]})
    return {records.to_bytes(name): records.to_bytes(value) for name, value in variables.items()}


class Watch:
    """Watches one attempt and brings it to its end; `cause` is why it is being ended: None, ASKED, FAILED or a verdict."""

    def __init__(self, run: runs.Run, order: dict, mpirun: children.Child, head, selector, began_bytes: list) -> None:
        self.cause = None
        self._run = run
        self._order = order
        self._limits = dict(NO_LIMITS, **order.get("limits", {}))
        self._mpirun = mpirun
        self._head = head
        self._selector = selector
        self._stalls = stalls.Stalls(head, self._limits["stall_timeout_s"]) if head else None
        self._signals = children.signal_descriptor(WATCHED)
        selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        self._deadline = None  # when mpirun is forced, by the next of the steps
        self._steps = list(FORCE)
        self._has_forced = False
        self._began_s = time.monotonic()
        self._looked_s = self._start_looked_s = 0.0
        self._doubted_s = None  # since when some rank seems to have been killed before it began
        self._is_started = head is None
        self._began_bytes, self._read_bytes = began_bytes, began_bytes[1]  # of mpirun's logs, and of its stderr

    def until_over(self) -> None:
        """Until mpirun has ended, and every rank that can still be heard has told its end."""
        while self._mpirun.status is None:
            self._turn()
        if self._head:
            deadline = time.monotonic() + (self._order["grace_s"] if self.cause == ASKED else SETTLE_S)
            if self.cause != ASKED:
                self._head.send({"end": "abort"}, self._head.living())  # without mpirun no rank goes on
            while self._unheard() and time.monotonic() < deadline:
                self._turn()
            self._head.send({"end": "abort"}, self._head.living())
        os.close(self._signals)

    def outcome(self) -> Outcome:
        """How the attempt ended."""
        mpirun = self._mpirun
        passed = self.cause if isinstance(self.cause, dict) else None
        ending = {"exit_code": mpirun.exit_code, "signal": mpirun.signal, "is_ours": self._has_forced}
        found = evidence.gather(self._run, self._order["launch"], self._head)
        said = "\n".join(evidence.last_texts(self._run.run_dir, self._began_bytes))
        ending["killed"] = evidence.killed_first(self._run, self._order, self._head, found, said)
        ending["lost_helper"] = evidence.lost_helper(self._order, said)
        verdict = None if self.cause == ASKED else verdicts.judge(found, ending, passed)
        state = "stopped" if self.cause == ASKED else "failed" if verdict else "succeeded"
        mute = [one.rank for one in found if not one.has_begun]  # who has no log; whoever shows the verdict finds the others'
        if verdict and (verdict["kind"] == "mpirun" or (verdict["kind"] == "vanished" and verdict["rank"] in mute + [None])):
            verdict["tail"], verdict["tail_of"] = self._last_words(), "mpirun"
        return Outcome(state, verdict["summary"] if verdict else None, mpirun.exit_code, mpirun.signal, verdict)

    def _turn(self) -> None:
        """Wait for whatever comes first, and do what it asks for."""
        now = time.monotonic()
        left_s = min(LOOK_S, LOOK_S if self._deadline is None else max(0.0, self._deadline - now))
        for key, _ in self._selector.select(left_s):
            key.data()
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._mpirun.status is None:
            self._force()
        if self._head and (self._head.has_news or now - self._looked_s >= LOOK_S):
            self._looked_s = now
            self._head.has_news = False
            self._head.look()
            self._look(now)
        elif not self._head:
            self._pass_limits(now)

    def _take_signals(self) -> None:
        for signum in children.read_signals(self._signals):
            if signum == signal.SIGCHLD:
                self._mpirun.reap()
                continue
            if self.cause is None:
                self.cause = ASKED
                self._run.set(state="stopping")
                self._ask()
            if signum == signal.SIGINT:
                self._deadline = time.monotonic()

    def _ask(self) -> None:
        """Have mpirun stop the ranks, which may save."""
        if self._mpirun.status is None:
            os.kill(self._mpirun.pid, records.stop_signal(self._order["launch"]))
        self._deadline = time.monotonic() + self._order["grace_s"] + STOP_MARGIN_S

    def _abort(self, patience_s: float, steps: tuple) -> None:
        """End all ranks that can be reached, at once; then mpirun, if it has not gone with them."""
        if self._head:
            self._head.send({"end": "abort"}, self._head.living())
        self._deadline, self._steps = time.monotonic() + patience_s, list(steps)

    def _force(self) -> None:
        signum, patience_s = self._steps.pop(0) if self._steps else FORCE[-1]
        self._has_forced = True
        os.kill(self._mpirun.pid, signum)
        self._deadline = time.monotonic() + patience_s

    def _look(self, now: float) -> None:
        self._note_start(now)
        self._note_nodes(now)
        if self.cause is None:
            ended = [rank.ended for rank in self._head.ranks.values() if rank.ended]
            missing = self._missing(now)
            if any(verdicts.is_failure(end) or end["ended_by"] == "orphaned" for end in ended):
                self.cause = FAILED
                self._abort(ABORT_S, FORCE)
            elif missing:
                for rank in missing:
                    rank.lost_s = rank.missing_since(now, self._head.timeout_s)
                self.cause = FAILED
                self._abort(LOST_S, FORCE_LOST)
            else:
                self._pass_limits(now)
        if self.cause is None:
            self._note_unbegun(now)
        if self.cause is None:
            self._note_stall()

    def _note_unbegun(self, now: float) -> None:
        """End the attempt where a rank was killed before it could say a word, which Intel MPI keeps to itself."""
        unbegun = [] if self._is_started else self._head.unbegun()
        self._doubted_s = (self._doubted_s or now) if unbegun else None
        if unbegun and now - self._doubted_s > DOUBT_S:
            those = [verdicts.Evidence(rank.number, rank.node, None, None, None, has_begun=False) for rank in unbegun]
            self.cause = verdicts.never_began(those)
            self._abort(LOST_S, FORCE_LOST)

    def _pass_limits(self, now: float) -> None:
        """End the attempt where it has taken too long."""
        lasted_s, limits = now - self._began_s, self._limits
        if self.cause is None and not self._is_started and 0 < limits["start_timeout_s"] < lasted_s:
            late = [rank for rank in self._head.ranks.values() if not rank.has_reported]
            names = ", ".join("rank %d on %s" % (rank.number, rank.node) for rank in late)
            text = "%s did not start within %g s" % (names, limits["start_timeout_s"])
            self.cause = verdicts.limit("start_timeout", text, rank=late[0].number, node=late[0].node)
            self._abort(LOST_S, FORCE_LOST)
        elif self.cause is None and 0 < limits["run_timeout_s"] < lasted_s:
            self.cause = verdicts.limit("run_timeout", "it ran longer than job.run_timeout_s (%g s)" % limits["run_timeout_s"])
            self._run.set(state="stopping")
            self._ask()

    def _note_start(self, now: float) -> None:
        """Find out whether every rank has started, also one that cannot be heard."""
        unheard = [rank for rank in self._head.ranks.values() if not rank.hello]
        if unheard and now - self._start_looked_s >= START_LOOK_S:
            self._start_looked_s = now
            silent = self._silent_ranks()
            for rank in unheard:
                is_on_disk = any(here["rank"] == rank.number for here in self._run.ranks())
                rank.without = silent.get(rank.number, rank.without or ("not heard yet" if is_on_disk else None))
        if not self._is_started and all(rank.has_reported for rank in self._head.ranks.values()):
            self._is_started = True
            if self._run.status["state"] == "starting":
                self._run.set(state="running")

    def _silent_ranks(self) -> dict:
        """Ranks that have said through mpirun that they run without a heartbeat, and why; of what is new in its stderr."""
        text = read_from(os.path.join(self._run.run_dir, "mpirun.err"), self._read_bytes)
        whole = text[: text.rfind("\n") + 1]
        self._read_bytes += len(whole.encode("utf-8", "surrogateescape"))
        return {int(rank): why for rank, why in NO_HEARTBEAT.findall(whole)}

    def _note_nodes(self, now: float) -> None:
        """Keep in the status what is heard of each node."""
        states = {}
        for rank in self._head.ranks.values():
            states.setdefault(rank.node, set()).add(self._state_of(rank, now))
        nodes = {
            node: next(text for text in NODE_STATES + tuple(sorted(found)) if text in found) for node, found in states.items()
        }
        if nodes != self._run.status.get("nodes"):
            self._run.set(nodes=nodes)

    def _state_of(self, rank, now: float) -> str:
        if rank.ended:
            return "ended"
        if rank.hello:
            quiet_s = min(listener.QUIET_S, self._head.timeout_s / 2)
            return "quiet" if rank.gone_s is not None or now - rank.heard_s > quiet_s else "heard"
        return "no heartbeat: " + rank.without if rank.without and rank.without != "not heard yet" else "starting"

    def _note_stall(self) -> None:
        if self._is_started and self._stalls.look():
            told = self._stalls.told
            self._run.set(state="stalled" if told else "running", stall=told)
        if self._stalls.told and self._stalls.is_known and self._limits["stall_action"] == "stop":
            self.cause = verdicts.limit("stalled", self._stalls.summary())
            self._run.set(state="stopping")
            self._ask()

    def _missing(self, now: float) -> list:
        return [rank for rank in self._head.ranks.values() if rank.missing_since(now, self._head.timeout_s) is not None]

    def _unheard(self) -> list:
        """The ranks whose end is still to be heard, and can be."""
        now = time.monotonic()
        waited = [rank for rank in self._head.ranks.values() if rank.hello and not rank.is_over]
        lost_nodes = {rank.node for rank in self._missing(now)}
        return [rank for rank in waited if rank.node not in lost_nodes and (rank.link or not rank.ended)]

    def _last_words(self) -> list:
        """What mpirun wrote last, preferably as an error."""
        out, err = evidence.last_texts(self._run.run_dir, self._began_bytes)
        return reasons.last_lines(err if err.strip() else out)


def size_bytes(path: str) -> int:
    """How long a file is; 0 where there is none."""
    return os.path.getsize(path) if os.path.exists(path) else 0


def read_from(path: str, offset: int) -> str:
    """What a file has from there on."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as stream:
        stream.seek(offset)
        return stream.read().decode("utf-8", "surrogateescape")
