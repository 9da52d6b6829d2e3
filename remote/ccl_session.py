"""How a process with `ccl` groups leaves its job: with everybody, or at once. For ccl_group.py; needs torch >= 2.9.

MPI's end waits for all ranks and spins meanwhile, and never comes where a rank has failed. So the ranks first agree, by
their store, that all of them are at their ends.
"""

import atexit
import os
import sys
import time

import ccl_library
import torch.distributed as dist
from ccl_line import LINE

FAREWELL_LOOK_S = 0.1
INTERRUPTED = 130


class Session:
    """What the groups of this process have in common."""

    def __init__(self):
        self.groups = []
        self.failure = None  # the exit code, where it is known that an error ends this process
        self.owns_mpi = self._has_tried = False
        self._pid = self._shown = None

    def add(self, group):
        """Note a new group; the first one is the job's."""
        if not self.groups:
            self._pid = os.getpid()
            atexit.register(self.leave)
            self._shown = sys.excepthook
            sys.excepthook = self._see
        self.groups.append(group)

    def _see(self, kind, error, trace):
        self.failure = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        self._shown(kind, error, trace)

    def start_mpi(self):
        if not self._has_tried:
            self._has_tried = True
            self.owns_mpi = ccl_library.start_mpi()

    def leave(self):
        """At the interpreter's end: with everybody through MPI_Finalize, or at once where somebody failed."""
        if os.getpid() != self._pid:
            return  # a fork of the rank has no part in the job
        if not self._has_tried:
            LINE.stop()
            return
        if self.failure is not None:
            self._leave_at_once()
        everybody = LINE.broken is None and self._everybody_leaves()
        LINE.stop()
        if self.owns_mpi:
            if everybody and ccl_library.mpi_world_size() == self.groups[0].size():
                ccl_library.stop_mpi()
            ccl_library.leave_with_exit_code()

    def _leave_at_once(self):
        """Nothing of what these libraries do at an end: it waits for ranks that wait for this one."""
        atexit.unregister(self.leave)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.failure)

    def _everybody_leaves(self):
        """Say farewell and wait until all have, however long some still work; False where somebody is lost."""
        try:
            for group in self.groups:
                group.shutdown()
            first = self.groups[0]
            store = dist.PrefixStore("farewell", first.own_store)
            store.set(str(first.rank()), "")
            keys = [str(rank) for rank in range(first.size())]
            while not store.check(keys):
                if first.lost or LINE.broken is not None:
                    return False
                time.sleep(FAREWELL_LOOK_S)
            first.dismiss_guard()
            return True
        except RuntimeError:
            return False  # the store has gone with the job's first rank, or an operation failed


SESSION = Session()
