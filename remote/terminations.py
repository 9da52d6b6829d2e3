"""Which process mpirun itself says was killed first: known where nobody else is left to tell, as before a rank had begun.

The forms are those of Intel MPI 2021.18, MPICH 5.0 and Open MPI 5.0 (seen; hydra writes them to stdout, Open MPI to stderr).
MPICH does not tell the rank, but the number of its process.
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


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "SIG%d" % number
