"""How large a rank's logs were at which time, so that `--since` knows where to begin: a line a second while they grow.

`rank-<n>.marks` holds lines `UNIX_S OUT_BYTES ERR_BYTES`. What a rank wrote after a time lies behind the last mark that is not
later; up to EVERY_S of what it wrote before may lie there too.
"""

import os
import time

import records

EVERY_S = 1.0
STREAMS = ("out", "err")


class Marks:
    """Writes the marks of one rank."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._logs = [records.rank_file(run_dir, rank, stream) for stream in STREAMS]
        self._path = records.rank_file(run_dir, rank, "marks")
        self._last = None

    def note(self) -> None:
        """Mark the logs' sizes, if they have changed; without room for it nothing is marked."""
        sizes = [size_bytes(path) for path in self._logs]
        if sizes == self._last:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.write(descriptor, ("%.3f %d %d\n" % (time.time(), sizes[0], sizes[1])).encode("ascii"))
            self._last = sizes
        except OSError:
            pass
        finally:
            os.close(descriptor)


def offset_at(run_dir: str, rank: int, stream: str, unix_s: float) -> int:
    """Where in a rank's log begins what was written after a time."""
    column, found = STREAMS.index(stream) + 1, 0
    try:
        with open(records.rank_file(run_dir, rank, "marks")) as marks:
            for line in marks:
                words = line.split()
                if len(words) != 3 or float(words[0]) > unix_s:
                    break  # also at a half one, which a full disk left
                found = int(words[column])
    except (OSError, ValueError):
        pass
    return found


def size_bytes(path: str) -> int:
    """How much is in a log; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
