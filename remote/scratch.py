"""The directory of a run in this machine's memory, where MPI is told to put what it shares between processes.

`/dev/shm/cluster-train-<run id>` is the machine's own, however far away the root is, and its path is short enough for a socket.
What a killed mpirun leaves in it goes with it: at the end of the run's processes here, and with `teardown`. A directory that
belongs to somebody else is not ours, whatever it is called.
"""

import os
import shutil
import stat

PREFIX = "/dev/shm/cluster-train-"


def path(run_id):
    """Where a run's directory is on every machine (the plan has it from orchestrator/planning/mpirun.py)."""
    return PREFIX + run_id


def make(run_id):
    """Make the directory, private; where that cannot be, MPI says so if it needs it."""
    try:
        os.mkdir(path(run_id), 0o700)
    except OSError:
        pass


def remove(run_id):
    """Remove a run's directory with all that is in it; its path, or None where there is none of ours."""
    place = path(run_id)
    if os.path.basename(run_id) != run_id or not is_ours(place):
        return None
    shutil.rmtree(place, ignore_errors=True)
    return place


def is_ours(place):
    """Whether this is a real directory of the user that we are."""
    try:
        status = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
