"""What mpirun itself says of ends that nobody else is left to tell of: a rank killed before it had begun, its own helpers.

The forms are those of Intel MPI 2021.18, MPICH 5.0 and Open MPI 5.0 (seen), some on stdout, some on stderr. MPICH does not tell
the rank, but the number of its process; Open MPI calls its helpers by number, the head's being 0.
"""

import re
import signal

INTEL = re.compile(r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\n=\s+KILLED BY SIGNAL: (?P<signal>\d+)")
MPICH = re.compile(
    r"=\s+PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\n(?:=.*\n)+YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*"
    r"\(signal (?P<signal>\d+)\)"
)
OPEN_MPI = re.compile(
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+)\s+on\s+node\s+(?P<host>\S+)\s+exited\s+on\s+signal\s+(?P<signal>\d+)"
)

INTEL_HELPER = re.compile(r"[Dd]ownstream from host (?P<host>\S+) (?:was killed by signal|exited abnormally|exited with status)")
OPEN_MPI_HELPER = re.compile(r"lost communication with a remote daemon(?:.*\n)+?\s*Remote daemon: \[[^]]*@0,(?P<number>\d+)\]")
OPEN_MPI_SPAWN = re.compile(r"A daemon failed to report back after being spawned(?:.*\n)+?\s*Remote host:\s+(?P<remote>\S+)")
SSH = re.compile(r"^Connection to (?P<host>\S+) closed by remote host|^client_loop: send disconnect", re.M)


def first(text: str) -> dict:
    """{"rank" (or None), "pid", "host", "signal": its name} of the first that was killed, or None where mpirun tells of none."""
    found = [match for match in (form.search(text) for form in (INTEL, MPICH, OPEN_MPI)) if match]
    if not found:
        return None
    told = found[0].groupdict()
    number = told.get("rank")
    return {
        "rank": None if number is None else int(number),
        "pid": int(told["pid"]),
        "host": told["host"],
        "signal": signal_name(int(told["signal"])),
    }


def lost_helper(text: str) -> dict:
    """{"host", "number", "remote"} of the first node where mpirun has lost its helper: one of them; None where it lost none.

    remote: the host name of a node that is not the head.
    """
    found = [match for match in (form.search(text) for form in (INTEL_HELPER, OPEN_MPI_HELPER, SSH, OPEN_MPI_SPAWN)) if match]
    if not found:
        return None
    told = dict({"host": None, "number": None, "remote": None}, **found[0].groupdict())
    return dict(told, number=told["number"] and int(told["number"]))


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "SIG%d" % number
