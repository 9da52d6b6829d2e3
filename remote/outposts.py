"""The other nodes' locks, as the supervisor has them held while its run may be attempted again.

Ranks hold the lock of their machine, but between two attempts there are none, and whoever started the run may be gone. So a
process beside the supervisor holds those locks over SSH (`holding.py`); it and they end with the supervisor, however that ends.
"""

import os
import signal
import sys
import time

import attempt
import children
import locks
import processes
import records
import regroup
import runs

RECORD = "outposts.json"
TAKE_LIMIT_S = 20.0  # for all nodes to answer; the run starts without the locks of those that do not
LEAVE_LIMIT_S = 5.0


class Outposts:
    """The process that holds the locks; there is none where nothing is attempted again, or there is one node."""

    def __init__(self, run: runs.Run, order: dict) -> None:
        plan = order.get("restart") or {}
        self._run = run
        self._is_wanted = bool(plan.get("addresses") and (plan["restarts"] or order.get("from_run")))
        self._who = None

    def take(self, wait) -> None:
        """Have the locks held from now on, where they are not yet. wait: is called with seconds, and may raise."""
        if not self._is_wanted or processes.is_alive(self._who):
            return
        self._forget()
        self._start()
        deadline = time.monotonic() + TAKE_LIMIT_S
        while self._known().get("asked", True) and processes.is_alive(self._who) and time.monotonic() < deadline:
            wait(0.02)

    def in_the_way(self, launch: dict) -> str:
        """Who else has nodes of this launch by now; None where nobody has."""
        busy = self._known().get("busy", {})
        return "; ".join("%s is in use: %s" % (node, busy[node]) for node in regroup.nodes_of(launch) if node in busy) or None

    def leave(self) -> None:
        """Let go of all nodes, and see it done."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        processes.send(self._who, signal.SIGTERM)
        while processes.is_alive(self._who) and time.monotonic() < deadline:
            time.sleep(processes.POLL_S)
        processes.send(self._who, signal.SIGKILL)

    def _start(self) -> None:
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "holding.py")
        argv = [sys.executable, "-S", "-E", program, self._run.run_dir]
        kept = attempt.KEPT_VARIABLES + (locks.VARIABLE,)
        environment = {os.fsencode(name): os.fsencode(os.environ[name]) for name in kept if name in os.environ}
        logs = [os.path.join(self._run.run_dir, name) for name in ("holding.out", "holding.err")]
        try:
            child = children.start([os.fsencode(word) for word in argv], environment, logs, "/", signal.SIGTERM)
            self._who = processes.identity(child.pid)
        except (children.StartError, OSError) as error:
            records.complain("the locks of the other nodes are not held: %s" % error)

    def _known(self) -> dict:
        """{"asked": nodes that have not answered yet, "busy": {node: who has it}}, as `holding.py` keeps it."""
        return records.read_record(os.path.join(self._run.run_dir, RECORD)) or {}

    def _forget(self) -> None:
        try:
            os.unlink(os.path.join(self._run.run_dir, RECORD))
        except OSError:
            pass
