"""Unpack a tar stream from stdin into a directory, each top-level entry whole or not at all.

Usage: unpack.py [--sha256] DIRECTORY

The one way by which anything is copied to a node. Every top-level entry of the stream (`<digest>/...`) is written under a
name that begins with "." and renamed when the next one begins, so a broken connection leaves what was complete and
nothing half. With --sha256 each top-level entry is a directory named by the SHA-256 of the one file in it, and is refused
if that does not hold. An entry that exists already is left as it is. Prints {"unpacked": [...], "kept": [...]}.

Also runs as `python3 -c SOURCE DIRECTORY`, which is how it reaches a node for the first time.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile


def main(arguments):
    """Unpack stdin below the directory that the arguments name; 0, or 1 after saying on stderr what was wrong."""
    check_sha256 = "--sha256" in arguments
    directory = os.path.expanduser(arguments[-1])
    os.makedirs(directory, mode=0o700, exist_ok=True)
    report = {"unpacked": [], "kept": []}
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            unpack(archive, directory, check_sha256, report)
    except (ValueError, OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write("unpack: {}\n".format(error))
        return 1
    print(json.dumps(report))
    return 0


def unpack(archive, directory, check_sha256, report):
    """Extract a tar stream below `directory`; raises ValueError for an entry that must not be unpacked."""
    current, partial = None, None
    try:
        for member in archive:
            top = top_level(member)
            if top != current:
                finish(directory, current, partial, check_sha256, report)
                current, partial = top, new_partial(directory, top)
            extract(archive, member, partial)
        finish(directory, current, partial, check_sha256, report)
        partial = None
    finally:
        if partial:
            shutil.rmtree(partial, ignore_errors=True)


def top_level(member):
    """The first component of a member's name; raises ValueError for names that lead outside and for special files."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or parts[0] in ("", "."):
        raise ValueError("refused: a name that leads outside: {!r}".format(member.name))
    if not (member.isfile() or member.isdir()):
        raise ValueError("refused: neither a file nor a directory: {!r}".format(member.name))
    return parts[0]


def new_partial(directory, top):
    partial = os.path.join(directory, ".{}.{}.part".format(top, os.getpid()))
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)
    return partial


def extract(archive, member, partial):
    target = os.path.join(partial, *member.name.split("/"))
    if member.isdir():
        os.makedirs(target, exist_ok=True)
        return
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        os.makedirs(parent)
    with open(target, "wb") as out:
        shutil.copyfileobj(archive.extractfile(member), out, 1 << 20)
    if os.path.getsize(target) != member.size:
        raise ValueError("cut short: {!r}".format(member.name))
    os.chmod(target, member.mode & 0o777)


def finish(directory, top, partial, check_sha256, report):
    """Give a complete entry its name; another process may have been first, which is as good."""
    if top is None:
        return
    made, final = os.path.join(partial, top), os.path.join(directory, top)
    if check_sha256:
        verify(made)
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


def verify(made):
    """Raise ValueError unless `made` is a directory named by the SHA-256 of the one file in it."""
    (name,) = os.listdir(made)
    digest = hashlib.sha256()
    with open(os.path.join(made, name), "rb") as wheel:
        for block in iter(lambda: wheel.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != os.path.basename(made):
        raise ValueError("{} arrived damaged: its SHA-256 is {}".format(name, digest.hexdigest()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
