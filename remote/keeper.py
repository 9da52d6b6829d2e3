"""The inner of a rank's two processes: starts the script, watches it, ends what it left behind, and records its end."""

import os
import select
import signal
import time

import children
import ending
import locks
import marks
import place
import processes
import pulse
import reasons
import records
import segments
import stacks

ABORT_GRACE_S = 1.0  # between SIGTERM and SIGKILL when the job is lost anyway
LOST = {signal.SIGHUP, signal.SIGTERM}
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}


def keep(rank: place.Rank, command: list, environment: dict, guard_pid: int) -> int:
    """Run the script to its end, whatever that is; the exit code. Raises StartError, OSError where it cannot be started."""
    os.setsid()  # what mpirun sends to the rank's process group is for the guard, which hands it on
    children.adopt_orphans()
    children.die_with(guard_pid, signal.SIGHUP)
    lock = locks.Joined(rank.launch["run_id"])
    oom_before = reasons.oom_kills()
    logs = (rank.file("out"), rank.file("err"))
    began = (size_bytes(logs[1]), size_bytes(logs[0]))
    script = children.start(command, environment, logs, rank.work_dir, signal.SIGKILL)
    launcher = ending.launcher(rank)
    ending.put(rank, "json", rank_record(rank, script, guard_pid, launcher))
    keeper = Keeper(rank, script, guard_pid, launcher, environment)
    keeper.watch()
    end = {"exit_code": script.exit_code, "signal": script.signal, "ended_by": keeper.ended_by}
    ending.tell_end(keeper.pulse, dict(rank.who(), **end))  # at once: what failed first is what is heard of first
    left = ending.kill_tree(rank, script)
    keeper.segments.remove()
    keeper.marks.note()
    lock.leave()
    record = ending.exit_record(rank, script, ended_by=keeper.ended_by, left=left)
    if script.shell_code and not keeper.ended_by:
        record.update(reasons.explain(rank.run_dir, logs[1], logs[0], end, oom_before, began))
    ending.put(rank, "exit.json", record)
    ending.tell_end(keeper.pulse, record)
    if keeper.ended_by == "orphaned" and not ending.is_ended_by_mpirun(launcher):
        ending.abort_job(script.shell_code or ending.BROKEN)
    if script.shell_code and not keeper.ended_by:
        ending.abort_job(script.shell_code)
    if keeper.ended_by == "cut_off":
        processes.send(launcher, signal.SIGKILL)  # MPI's own daemon waits for the head for ever; a SIGTERM it hands on as a stop
    keeper.pulse.part(0.0 if keeper.ended_by == "cut_off" else ending.PART_S)
    return script.shell_code


class Keeper:
    """Waits for the script; `ended_by` tells what ended it: stop, interrupt, abort, orphaned, cut_off; None: itself."""

    def __init__(self, rank: place.Rank, script: children.Child, guard_pid: int, launcher: dict, environment: dict) -> None:
        self.ended_by = None
        self.pulse = ending.connect(rank)
        self.marks = marks.Marks(rank.run_dir, rank.number)
        self.segments = segments.Segments()
        self._rank = rank
        self._script = script
        self._guard_pid = guard_pid
        self._launcher = launcher  # MPI's daemon, or None
        self._environment = environment
        self._deadline = None  # when the script is killed
        self._tick_s = time.monotonic()
        self._dump = None
        self._has_complained = False

    def watch(self) -> None:
        """Until the script has ended: pass signals on, show that we live, do what the supervisor says."""
        signals = children.signal_descriptor(WATCHED)
        while self._script.status is None:
            left_s = max(0.0, min(self._tick_s, self._deadline or self._tick_s) - time.monotonic())
            connection = self.pulse.connection
            readable = select.select([signals, connection] if connection else [signals], [], [], left_s)[0]
            for signum in children.read_signals(signals):
                self._obey(signum)
            if connection in readable:
                self._hear(self.pulse.hear())
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                ending.kill_tree(self._rank, self._script)
                self._deadline = None
            if now >= self._tick_s and self._script.status is None:
                self._tick()
                self._tick_s = time.monotonic() + pulse.EVERY_S
        os.close(signals)

    def _obey(self, signum: int) -> None:
        if signum != signal.SIGCHLD:
            self.segments.note(self._script.pid)
        now, grace_s = time.monotonic(), self._rank.launch["grace_s"]
        if signum == signal.SIGCHLD:
            self._script.reap()
        elif signum == self._rank.stop_signal:
            self._script.send(signal.SIGTERM)
            self.ended_by, self._deadline = self.ended_by or "stop", self._deadline or now + grace_s
        elif signum == signal.SIGINT:
            self._script.send(signal.SIGINT)
            self._deadline = now + (0.0 if self.ended_by else grace_s)
            self.ended_by = self.ended_by or "interrupt"
        elif signum in LOST:
            has_parents = os.getppid() == self._guard_pid and processes.parent(self._guard_pid) == self._rank.launcher_pid
            self._give_up("abort" if has_parents else "orphaned")
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._script.send(signum)

    def _give_up(self, why: str) -> None:
        """End the script: the job is lost."""
        # After a stop MPI may clean up when the first rank leaves: one that still saves keeps its time.
        if self.ended_by != "stop":
            self._script.send(signal.SIGTERM)
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + ABORT_GRACE_S)
        self.ended_by = self.ended_by or why

    def _hear(self, said: list) -> None:
        """Do what the supervisor says."""
        for word in said:
            if word.get("end"):
                self._give_up("abort")
            if word.get("stacks") and not self._dump:
                path, python = self._rank.file("stacks"), records.to_path(self._rank.launch["python"])
                self._dump = stacks.Dump(python, self._script.pid, path, self._environment)

    def _tick(self) -> None:
        self.marks.note()
        self.segments.note(self._script.pid)
        logs = (self._rank.file("out"), self._rank.file("err"))
        used_s = processes.cpu_seconds(self._script.pid) + self._script.cpu_s
        report = {"cpu_s": round(used_s, 2), "log_bytes": sum(map(size_bytes, logs))}
        if self._launcher:
            report["launched"] = processes.count_children(self._launcher["pid"])
        self._hear(self.pulse.tick(report))
        if self.pulse.is_cut_off and not self.ended_by:
            self._give_up("cut_off")
        found = self._dump.poll() if self._dump else None
        if found:
            self._dump = None
            self.pulse.tell(dict(found, kind="stacks"))
        if self.pulse.problem and not self._has_complained:
            self._has_complained = True
            who = (self._rank.number, self._rank.plan["node"], self.pulse.problem)
            records.complain("cluster-train: rank %d on %s: no heartbeat to %s; it runs on without" % who)


def size_bytes(path: str) -> int:
    """How much is in a log; 0 where it is gone."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def rank_record(rank: place.Rank, script: children.Child, guard_pid: int, launcher: dict) -> dict:
    """Which processes are this rank."""
    guarding = processes.identity(guard_pid) or {"pid": guard_pid, "start_ticks": None}
    return dict(
        rank.who(),
        keeper=processes.identity(os.getpid()),
        child=processes.identity(script.pid),
        launcher=launcher,
        **guarding,
    )
