"""Programs this process starts: how they begin, how they die with us, and what they used.

Meant for a process with one thread that waits with `signal.sigtimedwait` while the signals it cares for are blocked;
what it starts gets them unblocked. No descriptor is closed: PMI's own must reach a rank.
"""

import ctypes
import os
import signal
import struct

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGSET_BYTES, SIGINFO_BYTES = 128, 128  # of C's sigset_t and the kernel's signalfd_siginfo
UNSTARTED = 127  # exit code of a child that never became the program it should be

_libc = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The program could not be started."""


class Child:
    """One child: its wait status once it has ended, and what it and all that we adopted have used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = None
        self.cpu_s = 0.0
        self.max_rss_bytes = 0

    def reap(self) -> None:
        """Collect every child of this process that has ended."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.cpu_s += used.ru_utime + used.ru_stime
            self.max_rss_bytes = max(self.max_rss_bytes, used.ru_maxrss * 1024)
            if pid == self.pid:
                self.status = status

    @property
    def exit_code(self) -> int:
        """Its exit code; None while it runs, or where a signal ended it."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or None."""
        return _signal_name(os.WTERMSIG(self.status)) if self.status is not None and self.exit_code is None else None

    @property
    def shell_code(self) -> int:
        """Its exit code as a shell tells it: 128 + the number of the signal that ended it."""
        return 128 + os.WTERMSIG(self.status) if self.exit_code is None else self.exit_code

    def send(self, signum: int) -> None:
        """Signal its whole process group."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            pass  # it has ended, and its SIGCHLD is on its way


def start(command: list, environment: dict, logs: tuple, directory: str, death_signal: int) -> Child:
    """Start a program in a session of its own, and see it running.

    command, environment: bytes. logs: paths for its stdout and stderr, appended to and private. death_signal: what it
    gets when this process dies. Raises StartError.
    """
    descriptors = [os.open(os.devnull, os.O_RDONLY)] + [_open_log(path) for path in logs]
    parent, (answer, report) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become_program(descriptors, directory, death_signal, parent)
            os.execvpe(command[0], command, environment)
        except BaseException as error:  # whatever it is, a second copy of this process must not go on
            os.write(report, str(getattr(error, "strerror", None) or error).encode("utf-8", "replace"))
        os._exit(UNSTARTED)
    for descriptor in descriptors + [report]:
        os.close(descriptor)
    with open(answer, "rb") as stream:
        problem = stream.read().decode("utf-8")  # ends when exec closes the other end
    if problem:
        os.waitpid(pid, 0)
        raise StartError("%s could not be started: %s" % (os.fsdecode(command[0]), problem))
    return Child(pid)


def die_with(parent: int, signum: int) -> None:
    """Get `signum` when `parent` dies, also if it is dead already."""
    _libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_descriptor(signals: set) -> int:
    """A descriptor from which these signals, which must be blocked, can be read as they come (signalfd); see `read_signals`."""
    mask = sum(1 << (number - 1) for number in signals)
    words = struct.pack("=Q", mask).ljust(SIGSET_BYTES, b"\0")
    descriptor = _libc.signalfd(-1, words, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return descriptor


def read_signals(descriptor: int) -> list:
    """The numbers of the signals that have come to a `signal_descriptor`."""
    try:
        data = os.read(descriptor, SIGINFO_BYTES * 64)
    except BlockingIOError:
        return []
    return [struct.unpack_from("=I", data, offset)[0] for offset in range(0, len(data), SIGINFO_BYTES)]


def _become_program(descriptors: list, directory: str, death_signal: int, parent: int) -> None:
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with(parent, death_signal)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.chdir(directory)


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "SIG%d" % number  # the real-time ones have no name
