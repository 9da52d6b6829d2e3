"""What a script is doing that says nothing: the stacks of its threads, by py-spy where the environment has it, else from within.

Within the script, bootstrap.py has faulthandler write them into `rank-<n>.stacks` at a signal that scripts do not use. The
signal is sent only where the process catches it: otherwise it would end it.
"""

import os
import signal
import time

import children
import processes

SIGNAL = signal.SIGRTMIN + 7  # bootstrap.py has the same number
VARIABLE = "CLUSTER_TRAIN_STACKS"  # names the file
PY_SPY_S, HANDLER_S = 15.0, 2.0
LONGEST_BYTES = 32 * 1024


class Dump:
    """One attempt to see a script's stacks; `poll` until there is an answer."""

    def __init__(self, python: str, pid: int, path: str, environment: dict) -> None:
        self._pid = pid
        self._path = path
        self._begin = _size(path)
        self._spy = None
        self._notes = []
        self._deadline = time.monotonic() + PY_SPY_S
        spy = os.path.join(os.path.dirname(python), "py-spy")
        if os.access(spy, os.X_OK):
            try:
                command = [os.fsencode(word) for word in (spy, "dump", "--nonblocking", "--pid", str(pid))]
                child = children.start(command, environment, (path, path), "/", signal.SIGKILL)
                self._spy = processes.identity(child.pid)
            except (children.StartError, OSError) as error:
                self._notes.append("py-spy: %s" % error)
        if self._spy is None:
            self._ask()

    def poll(self) -> dict:
        """{"by", "text"}: who told, and the stacks or why there are none; None as long as there is no answer."""
        is_late = time.monotonic() > self._deadline
        if self._spy:
            if processes.is_alive(self._spy) and not is_late:
                return None
            text = self._new_text()
            if "Thread " in text:
                return {"by": "py-spy", "text": text}
            self._notes.append("py-spy: %s" % (text.strip().splitlines() or ["it did not answer"])[-1])
            processes.send(self._spy, signal.SIGKILL)
            self._spy, self._begin = None, _size(self._path)
            self._ask()
            return None
        text = self._new_text()
        if text and is_late:
            return {"by": "faulthandler", "text": text}
        if is_late:
            return {"by": None, "text": "; ".join(self._notes + ["the script does not answer the signal"])}
        return None

    def _ask(self) -> None:
        self._deadline = time.monotonic() + HANDLER_S
        if catches(self._pid, SIGNAL):
            try:
                os.kill(self._pid, SIGNAL)
            except ProcessLookupError:
                pass

    def _new_text(self) -> str:
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._begin)
                return stream.read(LONGEST_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for this signal."""
    try:
        with open("/proc/%d/status" % pid) as stream:
            caught = next(line for line in stream if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0
