"""Processes of this machine, known by pid AND start time, so that a number used again never means another process.

An identity is `{"pid": int, "start_ticks": int}` (field 22 of /proc/<pid>/stat). A zombie counts as dead.
Nothing here goes by a process's name.
"""

import collections
import os
import signal
import time

# Between two looks at /proc while waiting for processes to end.
POLL_S = 0.01
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Stat = collections.namedtuple("Stat", "pid ppid start_ticks alive")


def machine() -> str:
    """What tells this machine from others, also after it was started anew: the system's own number and the host name.

    Machines that were copied with their number still have names of their own.
    """
    return "%s/%s" % (_line("/etc/machine-id"), os.uname().nodename)


def boot() -> str:
    """What tells this machine's process numbers from those of its earlier lives: the boot and the pid namespace."""
    return "%s/%s" % (_line("/proc/sys/kernel/random/boot_id"), os.readlink("/proc/self/ns/pid"))


def identity(pid: int) -> dict:
    """The identity of a living process, or None."""
    stat = _read_stat(pid)
    return _identity(stat) if stat and stat.alive else None


def identity_in(record: dict) -> dict:
    """The identity that a record holds among other facts; None where it holds none."""
    return {"pid": record["pid"], "start_ticks": record["start_ticks"]} if record.get("start_ticks") else None


def unique(identities: list) -> list:
    """Each process once, by pid."""
    return [dict(pairs) for pairs in sorted({tuple(sorted(who.items())) for who in identities})]


def is_alive(who: dict) -> bool:
    """Whether this very process still runs."""
    living = identity(who["pid"]) if who else None
    return living is not None and living == identity_in(who)


def send(who: dict, signum: int) -> bool:
    """Send a signal to this very process; False where it is gone (or became another person's)."""
    if not is_alive(who):
        return False
    try:
        os.kill(who["pid"], signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def command_line(pid: int) -> str:
    """What a process was started with, for people; empty for one that has gone."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            return stream.read(2000).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list:
    """Identities of the living children of `pid`, their children, and so on; never the caller's own."""
    children = collections.defaultdict(list)
    for stat in _all():
        children[stat.ppid].append(stat)
    found, parents = [], [pid]
    while parents:
        below = children.pop(parents.pop(), [])
        found.extend(stat for stat in below if stat.alive and stat.pid != os.getpid())
        parents.extend(stat.pid for stat in below)
    return [_identity(stat) for stat in found]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of its ended children, and of its living descendants that its main threads have started."""
    total, pids = 0, [pid]
    while pids:
        one = pids.pop()
        try:
            with open("/proc/%d/stat" % one, "rb") as stream:
                text = stream.read()
            total += sum(map(int, text[text.rfind(b")") + 2 :].split()[11:15]))
            # Where the kernel does not list them (CONFIG_PROC_CHILDREN), living descendants are left out.
            with open("/proc/%d/task/%d/children" % (one, one), "rb") as stream:
                pids += map(int, stream.read().split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass
    return total / TICKS_PER_S


def tagged(variables: dict) -> list:
    """Identities of our living processes that were started with all these environment variables.

    The caller and its ancestors are never among them.
    """
    wanted = {("%s=%s" % item).encode("utf-8", "surrogateescape") for item in variables.items()}
    spared = _lineage()
    return [
        _identity(stat) for stat in _all() if stat.alive and stat.pid not in spared and wanted.issubset(_environment(stat.pid))
    ]


def by_variable(name: str) -> dict:
    """Identities of our living processes by the value of an environment variable that they were started with.

    The caller and its ancestors are never among them.
    """
    found, spared, prefix = collections.defaultdict(list), _lineage(), ("%s=" % name).encode()
    for stat in _all():
        if stat.alive and stat.pid not in spared:
            for variable in _environment(stat.pid):
                if variable.startswith(prefix):
                    found[variable[len(prefix) :].decode("utf-8", "surrogateescape")].append(_identity(stat))
    return found


def count_children(pid: int) -> int:
    """How many living children a process has; None where the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    try:
        threads = os.listdir("/proc/%d/task" % pid)
        texts = [_line("/proc/%d/task/%s/children" % (pid, thread)) for thread in threads]
        if not os.path.exists("/proc/self/task/%d/children" % os.getpid()):
            return None
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return sum(identity(int(child)) is not None for text in texts for child in text.split())


def parent(pid: int) -> int:
    """The process that a process was started by, or was left to; 0 where there is none."""
    stat = _read_stat(pid)
    return stat.ppid if stat else 0


def end(find, ask: list, patience_s: float, signum: int = signal.SIGTERM) -> tuple:
    """End all that `find()` lists: `signum` to `ask`, then SIGKILL to whatever is listed after `patience_s`.

    Returns identities: all that were found, and those left (stuck in the kernel, where no signal reaches).
    """
    found = find()
    for who in ask:
        send(who, signum)
    deadline = time.monotonic() + patience_s
    while find() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    killed, left = kill_all(find)
    return unique(found + killed), left


def kill_all(find, limit_s: float = 5.0) -> tuple:
    """SIGKILL all that `find()` lists until it lists nothing (or `limit_s` is over): identities found, and left."""
    deadline = time.monotonic() + limit_s
    found, left = [], find()
    while left and time.monotonic() < deadline:
        found.extend(left)
        for who in left:
            send(who, signal.SIGKILL)
        time.sleep(POLL_S)
        left = find()
    return unique(found), left


def _line(path):
    try:
        with open(path) as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _identity(stat):
    return {"pid": stat.pid, "start_ticks": stat.start_ticks}


def _all():
    stats = (_read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat]


def _read_stat(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            text = stream.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command's name stands in parentheses and may itself hold blanks and parentheses.
    fields = text[text.rfind(b")") + 2 :].split()
    # A main thread that has ended looks like a zombie while other threads of the process still run.
    alive = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return Stat(pid, int(fields[1]), int(fields[19]), alive)


def _environment(pid):
    """The variables a process was started with; none where it is not ours to read."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as stream:
            return set(stream.read().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()


def _lineage():
    lineage, pid = set(), os.getpid()
    while pid and pid not in lineage:
        lineage.add(pid)
        stat = _read_stat(pid)
        pid = stat.ppid if stat else 0
    return lineage
