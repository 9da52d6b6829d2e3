"""Shared memory to which MPICH's library gives a name of its own: it cannot be placed, and stays where a rank was killed.

Ranks that leave MPI in the usual way remove it themselves. What a killed or stopped one had mapped is removed after its end, if
it is the very file that was mapped: the data that a script itself shares in /dev/shm is never touched.
"""

import os

PREFIX = b"/dev/shm/mpich_shm_"


class Segments:
    """The segments that a rank's processes have been seen to map."""

    def __init__(self) -> None:
        self._inodes = {}

    def note(self, pid: int) -> None:
        """Look at what a process has mapped now."""
        try:
            with open("/proc/%d/maps" % pid, "rb") as maps:
                lines = [line.split(None, 5) for line in maps if PREFIX in line]
        except OSError:
            return  # it has ended
        for fields in lines:
            path = fields[5].rstrip(b"\n")
            if path.startswith(PREFIX) and b"/" not in path[len(PREFIX) :] and not path.endswith(b" (deleted)"):
                self._inodes[path] = int(fields[4])

    def remove(self) -> None:
        """Remove what is still there of them."""
        for path, inode in self._inodes.items():
            try:
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
            except OSError:
                pass  # gone, or another person's
