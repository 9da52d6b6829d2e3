"""Why a rank failed, as far as this node can tell: its last words, the kernel's counters, the disk."""

import os
import re

TAIL_LINES = 20
LINE_CHARACTERS = 500
READ_BYTES = 64 * 1024
FULL_BYTES = 64 * 1024  # with less than this left, a disk is full: what could not be written is the reason

CGROUP_ROOT = "/sys/fs/cgroup"
# Version 2 of control groups counts in memory.events, version 1 in memory.oom_control; the line is the same.
CGROUP_FILES = ("memory.events", "memory.oom_control")

RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.M)  # which torch puts before every line of a traceback
FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$')
TRACEBACK = "Traceback (most recent call last):"
# What gloo, torch's store and oneCCL say (torch 2.13, oneCCL 2022.1); a rank whose peer has gone says so too.
OUT_OF_TIME = re.compile(
    r"Timed out waiting \d+ ?ms|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms"
    r"|collective operation timeout|[Ss]ocket [Tt]imeout|DistStoreError"
)
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|recvValue failed|Broken pipe.*TCPStore"
    r"|(gloo|connectFullMesh).*(Connection refused|timed out)|failed to recv, got 0 bytes|DistNetworkError"
)
CHILD_KILLED = re.compile(r"killed by signal: Killed|SIGKILL")  # PyTorch of a DataLoader's worker; Python of its pools
NO_SPACE = re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded")


def oom_kills() -> dict:
    """How often the kernel has killed for want of memory, by counter: of our control groups, and of the machine."""
    counts = {}
    for path in _oom_counters():
        try:
            with open(path) as stream:
                words = stream.read().split()
            counts[path] = int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError, IndexError):
            pass  # this kernel does not count there
    return counts


def explain(run_dir: str, err: str, out: str, end: dict, oom_before: dict, began: tuple = (0, 0)) -> dict:
    """The end of a failed rank's log, and the reason of its failure where it is known.

    err, out: paths of its logs. end: `exit_code` and `signal`. began: how long the two logs were when this attempt at the
    run began: what an earlier one wrote says nothing of this end. Returns {"tail": lines, "tail_of": "err" or "out",
    "reason": {"kind", "text"} or None}; kinds: out_of_memory, disk_full, collective_timeout, peer_lost, exception.
    """
    text, tail_of = last_text(err, began[0]), "err"
    if not text.strip():
        text, tail_of = last_text(out, began[1]), "out"
    raised = exception(text)
    what = raised["text"] if raised else ""
    tail = last_lines(text)
    words = "\n".join(tail) + "\n" + what
    memory = out_of_memory(end, words, oom_before)
    if memory:
        reason = _reason("out_of_memory", memory)
    elif NO_SPACE.search(words) or (not raised and free_bytes(run_dir) < FULL_BYTES):  # a whole traceback found room
        reason = _reason("disk_full", what if NO_SPACE.search(what) else "the disk that holds %s is full" % run_dir)
    elif OUT_OF_TIME.search(words):
        reason = _reason("collective_timeout", what or _line_with(OUT_OF_TIME, tail))
    elif PEER_LOST.search(words):
        reason = _reason("peer_lost", what or _line_with(PEER_LOST, tail))
    else:
        reason = _reason("exception", what) if raised else None
    return {"tail": tail, "tail_of": tail_of, "reason": reason}


def exception(text: str) -> dict:
    """The last exception whose traceback ends this text: {"type", "file", "line", "function", "text"}, or None."""
    text = RANK_PREFIX.sub("", text)
    lines = text[text.rfind(TRACEBACK) :].splitlines() if TRACEBACK in text else []
    frame = None
    for line in lines[1:]:
        match = FRAME.match(line)
        if match:
            frame = match.groups()
        elif frame and line and not line.startswith(" "):
            where = "%s:%s in %s" % (os.path.basename(frame[0]), frame[1], frame[2])
            said = line[:LINE_CHARACTERS]
            return {
                "type": said.split(":")[0],
                "file": frame[0],
                "line": int(frame[1]),
                "function": frame[2],
                "text": "%s (%s)" % (said, where),
            }
    return None


def out_of_memory(end: dict, words: str, before: dict) -> str:
    """What the kernel did, where it killed this rank or a process that it needed for want of memory; else None.

    The counters are those of all that runs beside it: they say why something was killed, not that this rank was.
    """
    grown = [path for path, count in oom_kills().items() if count > before.get(path, count)]
    is_killed = end["signal"] == "SIGKILL"
    if not grown or not (is_killed or CHILD_KILLED.search(words)):
        return None
    whose = "the memory limit of its control group" if any(CGROUP_ROOT in path for path in grown) else "the machine's memory"
    killed = "the kernel killed it" if is_killed else "the kernel killed a process that it had started"
    return "out of memory: %s (%s was used up)" % (killed, whose)


def free_bytes(path: str) -> int:
    """How much a person may still write on the disk of this path."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return FULL_BYTES
    return disk.f_bavail * disk.f_frsize


def last_text(path: str, began_bytes: int = 0) -> str:
    """The end of a log, from there on at most, without the bytes that are no text."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(began_bytes, os.fstat(stream.fileno()).st_size - READ_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def last_lines(text: str) -> list:
    """The last lines of a log, shortened; of a progress bar what it showed last."""
    lines = [line.rstrip("\r").split("\r")[-1] for line in text.rstrip().split("\n")]
    return [line[:LINE_CHARACTERS] for line in lines[-TAIL_LINES:]]


def _reason(kind: str, text: str) -> dict:
    return {"kind": kind, "text": text}


def _line_with(pattern, lines: list) -> str:
    return next((line.strip() for line in reversed(lines) if pattern.search(line)), "")


def _oom_counters() -> list:
    """Files that may hold a counter: along the path of our own control groups, as seen from here, and the machine's."""
    places = ["/proc/vmstat"]
    try:
        with open("/proc/self/cgroup") as stream:
            groups = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        mount = os.path.join(CGROUP_ROOT, controllers)
        while True:
            places += [os.path.join(mount, path.lstrip("/"), name) for name in CGROUP_FILES]
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return places
