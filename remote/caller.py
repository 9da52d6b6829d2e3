"""Whoever started one of our scripts from elsewhere, as heard on stdin: gone at its end, or after too long a silence.

A cut network closes nothing: TCP alone would let a script wait for hours for a caller that is lost, and a node's lock with it.
So a caller that means to stay says a word now and then, and a script that was promised one ends without it.
"""

import fcntl
import os
import select
import signal
import struct
import termios
import time

ALIVE = b"alive\n"  # the word that asks for nothing
BEAT_S = 5.0  # how often our own callers say it
SILENCE_S = 30.0  # how long they may be silent
EXIT_CODE = 75  # of a script that its caller has left without a word
ASLEEP_S = 5.0  # so much later than it was set, an alarm tells that this process slept, not that the caller is gone
LONGEST_WAIT_S = 3600.0


class Gone(Exception):
    """Nothing was heard for too long. Raised wherever the script happens to be, also where it waits to write."""


class Caller:
    """Reads stdin; `heard` is what came and was not taken yet.

    silence_s: for how long the caller may say nothing; 0: as long as stdin is open.
    """

    def __init__(self, silence_s: float = 0.0) -> None:
        self.heard = b""
        self.has_gone = False  # stdin has ended
        self.was_alive = False  # `alive` was said since this was last set to False
        self._silence_s = 0.0
        self._heard_s = time.monotonic()
        self._waiting_bytes = 0  # of which was known at the last alarm
        self.expect(silence_s)

    def expect(self, silence_s: float) -> None:
        """From now on such a silence raises Gone."""
        self._silence_s = silence_s
        if silence_s:
            signal.signal(signal.SIGALRM, self._on_silence)
            self._note()

    def hears(self, wait_s: float) -> bool:
        """Read what comes within a time; whether stdin has ended."""
        if not self.has_gone and select.select([0], [], [], min(wait_s, LONGEST_WAIT_S))[0]:
            data = os.read(0, 4096)
            self.has_gone = not data
            self.heard += data
            self._note()
            if ALIVE in self.heard:
                self.heard = self.heard.replace(ALIVE, b"")
                self.was_alive = True
        return self.has_gone

    def _note(self, waiting_bytes: int = 0) -> None:
        self._heard_s, self._waiting_bytes = time.monotonic(), waiting_bytes
        if self._silence_s:
            signal.setitimer(signal.ITIMER_REAL, 0.0 if self.has_gone else self._silence_s)

    def _on_silence(self, *_: object) -> None:
        if self.has_gone:
            return
        late_s = time.monotonic() - self._heard_s - self._silence_s
        waiting = waiting_bytes()
        if waiting <= self._waiting_bytes and late_s < ASLEEP_S:
            raise Gone("nothing was heard from there for %d s" % self._silence_s)
        self._note(waiting)


def waiting_bytes() -> int:
    """How much has come on stdin and was not read yet."""
    return struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, b"\0" * 4))[0]
