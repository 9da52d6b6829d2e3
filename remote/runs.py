"""The runs in one node's directory: their status, their ranks' records, and which processes of theirs are alive here.

`status.json` is written by the run's supervisor alone while that lives. A directory on a disk shared by nodes holds
records of other machines too: process numbers are compared on the machine that wrote them only, and in the same boot of it.
"""

import os
import sys
import time

import processes
import records
import scratch

FINAL = ("succeeded", "failed", "stopped")
RESERVE, RESERVE_BYTES = "reserve", 64 * 1024  # room that is given back where a full disk does not take the last status
SUPERVISOR_DIED = "its supervisor on the head was killed, and with it mpirun"
REBOOTED = "the head was started anew while it was going on"


class Problem(Exception):
    """What was asked cannot be done; the message says why."""


class Run:
    """One run's directory and its status, on disk after every change."""

    def __init__(self, run_dir: str, status: dict) -> None:
        self.run_dir = run_dir
        self.status = status
        self.lock = None  # the supervisor's part in the lock of this machine

    @property
    def is_final(self) -> bool:
        """Whether the state will not change any more."""
        return self.status["state"] in FINAL

    @property
    def is_ours(self) -> bool:
        """Whether its supervisor was started on this machine, maybe before a reboot."""
        return self.status["machine"] == processes.machine()

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the process numbers in its status are this machine's present ones."""
        return self.is_ours and self.status.get("boot") == processes.boot()

    @property
    def is_lost(self) -> bool:
        """Whether it has not ended, and has no supervisor any more. Only its own machine can tell."""
        is_supervised = self.is_of_this_boot and processes.is_alive(self.status["supervisor"])
        return not self.is_final and self.is_ours and not is_supervised

    @property
    def why_lost(self) -> str:
        """What became of the supervisor of a lost run."""
        return SUPERVISOR_DIED if self.is_of_this_boot else REBOOTED

    @property
    def is_over(self) -> bool:
        """Whether there is nobody left who would change the state."""
        return self.is_final or self.is_lost

    def set(self, **changes: object) -> bool:
        """Change the status; False where a full disk takes it in memory only, until the next change."""
        self.status.update(changes)
        is_saved = self._save()
        if self.is_final:
            self._give_back_reserve()
        return is_saved or (self.is_final and self._save())

    def _save(self) -> bool:
        try:
            records.write_record(os.path.join(self.run_dir, "status.json"), self.status)
        except OSError as error:
            records.complain("status.json could not be written: %s" % error)
            return False
        return True

    def _give_back_reserve(self) -> None:
        try:
            os.unlink(os.path.join(self.run_dir, RESERVE))
        except OSError:
            pass  # it was given back before

    def refresh(self) -> None:
        """Read what the supervisor has written meanwhile."""
        self.status = records.read_record(os.path.join(self.run_dir, "status.json"))

    def ranks(self) -> list:
        """The rank records of this directory, by rank, each with its exit record (or None) under `exit`."""
        by_rank = {}
        names = os.listdir(self.run_dir) if os.path.isdir(self.run_dir) else []
        for name in [name for name in names if name.startswith("rank-") and name.endswith(".json")]:
            record = records.read_record(os.path.join(self.run_dir, name))
            if record and name.endswith(".exit.json"):
                known = {"rank": record["rank"], "node": record["node"]}  # all there is of a rank that ended before it began
                by_rank.setdefault(record["rank"], known)["exit"] = record
            elif record:
                by_rank.setdefault(record["rank"], {"exit": None}).update(record)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def ranks_here(self) -> list:
        """The records of the ranks that started on this machine."""
        here = (processes.machine(), processes.boot())
        return [rank for rank in self.ranks() if (rank.get("machine"), rank.get("boot")) == here]

    def watchers(self) -> list:
        """The identities of this machine's living rank.py processes of this run, one for each rank."""
        pairs = [(processes.identity_in(rank), rank["keeper"]) for rank in self.ranks_here()]
        living = [[who for who in pair if processes.is_alive(who)] for pair in pairs]
        return [those[0] for those in living if those]

    def remains(self) -> list:
        """The identities of all processes of this run on this machine, except its supervisor."""
        found = self.living(processes.tagged({records.RUN_VARIABLE: self.status["run_id"]}))
        for who in list(found):
            found += processes.descendants(who["pid"])
        return processes.unique(found)

    def living(self, tagged: list) -> list:
        """The identities of the processes that are on record here and live, with those that were found by the run's tag."""
        recorded = [self.status["mpirun"]] if self.status.get("mpirun") and self.is_of_this_boot else []
        for rank in self.ranks_here():
            recorded += [processes.identity_in(rank), rank["keeper"], rank["child"], rank["launcher"]]
        return processes.unique([who for who in recorded if who and processes.is_alive(who)] + tagged)


def run_directory(root: str, run_id: str) -> str:
    """Where a run lives below a node's root; Problem for what is no name of a run."""
    if os.path.basename(run_id) != run_id or run_id in ("", ".", ".."):
        raise Problem("%r is no name of a run" % run_id)
    return os.path.join(os.path.expanduser(root), "runs", run_id)


def read_status(run_dir: str) -> dict:
    """A run's status, where `lost` stands for one that has not ended and has no supervisor any more; None without one."""
    status = records.read_record(os.path.join(run_dir, "status.json"))
    if status is None or not Run(run_dir, status).is_lost:
        return status
    status = records.read_record(os.path.join(run_dir, "status.json"))  # the supervisor may just have finished
    return dict(status, state="lost", reason=Run(run_dir, status).why_lost) if Run(run_dir, status).is_lost else status


def find(root: str, run_id: str) -> Run:
    """The run of this name. Its state is None where this node only holds ranks of it, or nothing but its processes."""
    run_dir = run_directory(root, run_id)
    status = read_status(run_dir)
    started = os.stat(run_dir).st_mtime if os.path.isdir(run_dir) else 0.0
    return Run(run_dir, status or {"schema": 1, "run_id": run_id, "state": None, "started_unix_s": started})


def find_all(root: str, limit: int = sys.maxsize) -> list:
    """The newest runs in a node's directory, newest first; no more than these are read."""
    parent = os.path.dirname(run_directory(root, "any"))
    names = os.listdir(parent) if os.path.isdir(parent) else []
    newest = sorted(names, key=lambda name: began_unix_s(os.path.join(parent, name)), reverse=True)[:limit]
    return sorted([find(root, name) for name in newest], key=lambda run: run.status["started_unix_s"], reverse=True)


def began_unix_s(run_dir: str) -> float:
    """When a run's directory was made: on its head by its order, which is never written again."""
    for path in (os.path.join(run_dir, "run.json"), run_dir):
        try:
            return os.stat(path).st_mtime
        except OSError:
            pass
    return 0.0


def stop(run: Run, signum: int, limit_s: float) -> bool:
    """Have the supervisor stop its run, or do it for a dead one; whether it has ended within the limit."""
    deadline = time.monotonic() + limit_s
    if not run.is_final and run.is_of_this_boot:
        processes.send(run.status["supervisor"], signum)
    while not run.is_over and time.monotonic() < deadline:
        time.sleep(0.02)
        run.refresh()
    run.refresh()
    if run.is_lost:
        sweep(run, deadline - time.monotonic())
        run.set(state="failed", reason=run.why_lost, ended_unix_s=time.time())
    return run.is_final


def sweep(run: Run, patience_s: float) -> dict:
    """End every process of this run on this machine; what was ended and what is left, with command lines."""
    commands = {}

    def remains():
        found = run.remains()
        for who in found:
            commands.setdefault(who["pid"], processes.command_line(who["pid"]))
        return found

    # rank.py knows how to end its rank; where none is left, everything is asked.
    found, left = processes.end(remains, run.watchers() or remains(), patience_s)
    if not left:
        scratch.remove(run.status["run_id"])
    named = {True: [], False: []}
    for who in found:
        named[who in left].append(dict(who, command=commands[who["pid"]]))
    return {"killed": named[False], "left": named[True]}


def settle(run: Run, patience_s: float) -> None:
    """After mpirun's end: wait until the ranks here have recorded theirs, then end what is left on this machine."""
    deadline = time.monotonic() + patience_s
    while run.watchers() and time.monotonic() < deadline:
        time.sleep(processes.POLL_S)
    if not processes.kill_all(run.remains)[1]:
        scratch.remove(run.status["run_id"])
