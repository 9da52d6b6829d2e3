"""Shared memory to which MPICH's library gives a name of its own: it cannot be placed, and stays where a rank was killed.

Ranks that leave MPI in the usual way remove it themselves. What a killed or stopped one had mapped is removed after its end, if
it is the very file that was mapped: the data that a script itself shares in /dev/shm is never touched.
"""

import os
import threading

MAPS = "/proc/%d/maps"
PATIENCE_S = 0.2
PREFIX = b"/dev/shm/mpich_shm_"


class Segments:
    """The segments that a rank's processes have been seen to map."""

    def __init__(self) -> None:
        self._inodes = {}
        self._looking = None

    def note(self, pid: int) -> None:
        """Look at what a process has mapped now, as soon as the kernel shows it; does not wait for that.

        A process that changes its memory, and gets no processor meanwhile, shows it when it is through: nobody who has to give
        a sign of life can wait so long.
        """
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, args=(pid,), daemon=True)
            self._looking.start()
            self._looking.join(PATIENCE_S)

    def _look(self, pid: int) -> None:
        try:
            with open(MAPS % pid, "rb") as maps:
                lines = [line.split(None, 5) for line in maps if PREFIX in line]
        except OSError:
            return  # it has ended
        for fields in lines:
            path = fields[5].rstrip(b"\n")
            if path.startswith(PREFIX) and b"/" not in path[len(PREFIX) :] and not path.endswith(b" (deleted)"):
                self._inodes[path] = int(fields[4])

    def remove(self) -> None:
        """Remove what is still there of them."""
        for path, inode in list(self._inodes.items()):
            try:
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
            except OSError:
                pass  # gone, or another person's
