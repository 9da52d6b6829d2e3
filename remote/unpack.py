"""Unpack a tar stream from stdin into a directory, each top-level entry whole or not at all.

Usage: unpack.py [--sha256] DIRECTORY

The one way by which anything is copied to a node. Every top-level entry of the stream (`<digest>/...`) is written under a
name that begins with "." and renamed when the next one begins, so a broken connection leaves what was complete and
nothing half; what a killed one left under such a name is removed by the next. With --sha256 each top-level entry is a
directory named by the SHA-256 of the one file in it, and is refused if that does not hold. An entry that exists already is
left as it is. Prints {"unpacked": [...], "kept": [...]}.

Also runs as `python3 -c SOURCE DIRECTORY`, which is how it reaches a node for the first time.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import tarfile
import time

PART = ".part"
END_BYTES = 2 * tarfile.BLOCKSIZE  # of zeros, at the end of every archive
ABANDONED_S = 24 * 3600  # a copy that another machine began on a shared disk, and has not touched for so long


def main(arguments):
    """Unpack stdin below the directory that the arguments name; 0, or 1 after saying on stderr what was wrong."""
    check_sha256 = "--sha256" in arguments
    directory = os.path.expanduser(arguments[-1])
    report = {"unpacked": [], "kept": []}
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        stream = Stream(sys.stdin.buffer)
        with sharing(directory), tarfile.open(fileobj=stream, mode="r|") as archive:
            unpack(archive, directory, check_sha256, report, stream)
    except (ValueError, OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write("unpack: {}\n".format(error))
        return 1
    print(json.dumps(report))
    return 0


class Stream:
    """A tar stream that can tell whether it came to its end: tarfile takes one that is cut between two files for whole."""

    def __init__(self, source):
        self.source = source
        self.tail = b""
        self.size_bytes = 0

    def read(self, size):
        """As of a file."""
        data = self.source.read(size)
        self.tail = (self.tail + data if len(data) < END_BYTES else data)[-END_BYTES:]
        self.size_bytes += len(data)
        return data

    def check_end(self, offset):
        """Read what is left; raises ValueError where the archive's end is not at `offset` or behind it."""
        while self.read(1 << 16):
            pass
        if self.tail.strip(b"\0") or self.size_bytes < offset + END_BYTES:
            raise ValueError("the stream was cut")


def unpack(archive, directory, check_sha256, report, stream):
    """Extract a tar stream below `directory`; raises ValueError for an entry that must not be unpacked."""
    current, partial, hashes = None, None, []
    try:
        for member in archive:
            top = top_level(member)
            if top != current:
                finish(directory, current, partial, report)
                current, partial, hashes = top, partial_name(directory, top), []
                make_partial(partial)
            hashes += extract(archive, member, partial)
            if check_sha256:
                verify(member, hashes)
        stream.check_end(archive.offset)
        finish(directory, current, partial, report)
        partial = None
    finally:
        if partial:
            remove(partial)


def remove(*entries):
    """Remove what is half made, undisturbed: a caller that gives up closes stdin, and then sends SIGINT as well."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for entry in entries:
        shutil.rmtree(entry, ignore_errors=True)
    signal.signal(signal.SIGINT, before)


def top_level(member):
    """The first component of a member's name; raises ValueError for names that lead outside and for special files."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or parts[0] in ("", "."):
        raise ValueError("refused: a name that leads outside: {!r}".format(member.name))
    if not (member.isfile() or member.isdir()):
        raise ValueError("refused: neither a file nor a directory: {!r}".format(member.name))
    return parts[0]


def make_partial(partial):
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)


def partial_name(directory, name):
    """Where this process makes an entry, to be called within `sharing(directory)`."""
    return os.path.join(directory, ".{}.{}.{}{}".format(name, os.uname().nodename, os.getpid(), PART))


@contextlib.contextmanager
def sharing(directory):
    """While this lasts, nobody clears the entries that we are making below `directory`.

    All who make entries share a lock on the directory, which ends with its holders, however they end. Who holds it alone
    knows that no entry of this machine is being made, and removes those that are left.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        clear_abandoned(directory, is_locked(descriptor, fcntl.LOCK_EX))
        is_locked(descriptor, fcntl.LOCK_SH, patient=True)
        yield
    finally:
        os.close(descriptor)


def is_locked(descriptor, kind, patient=False):
    """Whether we got the lock; False where others hold it, and where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, kind if patient else kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def clear_abandoned(directory, alone):
    """Remove the entries that nobody finishes: this machine's if we are alone, and any that are older than a day."""
    mark = ".{}.".format(os.uname().nodename)
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.startswith(".") and name.endswith(PART) and ((alone and mark in name) or age_s(path) > ABANDONED_S):
            shutil.rmtree(path, ignore_errors=True)


def age_s(path):
    """Seconds since a file was last added to an entry; 0 for one that is gone."""
    try:
        return time.time() - max(os.stat(where).st_mtime for where, _, _ in os.walk(path))
    except (OSError, ValueError):
        return 0


def extract(archive, member, partial):
    """Write one member; the SHA-256 of what was written if it is a file, as a list."""
    target = os.path.join(partial, *member.name.split("/"))
    if member.isdir():
        os.makedirs(target, exist_ok=True)
        return []
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        os.makedirs(parent)
    content, digest = archive.extractfile(member), hashlib.sha256()
    with open(target, "wb") as out:
        for block in iter(lambda: content.read(1 << 20), b""):
            out.write(block)
            digest.update(block)
    if os.path.getsize(target) != member.size:
        raise ValueError("cut short: {!r}".format(member.name))
    os.chmod(target, member.mode & 0o777)
    return [digest.hexdigest()]


def finish(directory, top, partial, report):
    """Give a complete entry its name; another process may have been first, which is as good."""
    if top is None:
        return
    made, final = os.path.join(partial, top), os.path.join(directory, top)
    if os.path.lexists(final):
        report["kept"].append(top)
    else:
        try:
            os.rename(made, final)
            report["unpacked"].append(top)
        except OSError:
            if not os.path.isdir(final):
                raise
            report["kept"].append(top)
    shutil.rmtree(partial, ignore_errors=True)


def verify(member, hashes):
    """Raise ValueError unless an entry's files so far are the one that the entry is named by."""
    if hashes and hashes != [member.name.split("/")[0]]:
        raise ValueError("{} arrived damaged: its SHA-256 is {}".format(os.path.basename(member.name), hashes[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
