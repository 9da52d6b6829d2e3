"""Take a damaged environment away, with all that could bring the damage back, so that it is installed again.

Usage: repair.py ROOT < order

The order: {"digest", "wheels": [sha256, ...], "only_look": bool}. Removed are the environment; those wheels of the order that
are not what their name says; uv's cache, whose files are hard links to those of the environments; and the unpacked uv. Each is
renamed first, so nothing is ever seen half removed. Prints {"removed": [path, ...], "in_use": [command line, ...]}: while
processes run in the environment, and where the order is only to look, nothing is removed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys

import unpack


def main(arguments):
    """Carry out the order on stdin; 0, or 1 after saying on stderr what was wrong."""
    try:
        root = os.path.abspath(os.path.expanduser(arguments[0]))
        order = json.load(sys.stdin)
        if order["only_look"]:
            answer = {"removed": [], "in_use": users_of(os.path.join(root, "envs", order["digest"]))}
        else:
            answer = take_away(root, order["digest"], order["wheels"])
        print(json.dumps(answer))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        sys.stderr.write("repair: {!r}\n".format(error))
        return 1
    return 0


def take_away(root, digest, wheels):
    """What was removed, or who is in the way."""
    envs = os.path.join(root, "envs")
    environment = os.path.join(envs, digest)
    os.makedirs(envs, mode=0o700, exist_ok=True)
    with open(os.path.join(envs, ".{}.lock".format(digest)), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the installer's lock: nobody builds this environment meanwhile
        in_use = users_of(environment)
        if in_use:
            return {"removed": [], "in_use": in_use}
        houses = [os.path.join(root, "wheelhouse", sha256) for sha256 in wheels]
        doomed = [environment] + [house for house in houses if os.path.isdir(house) and not is_sound(house)]
        doomed += [os.path.join(root, "cache", "uv")] + unpacked_uvs(os.path.join(root, "bin"))
        return {"removed": [path for path in doomed if remove(path)], "in_use": []}


def users_of(path):
    """The command lines of the processes on this machine that name the path, or something below it."""
    found = []
    for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        try:
            with open("/proc/{}/cmdline".format(pid), "rb") as stream:
                words = os.fsdecode(stream.read()).split("\0")
        except OSError:
            continue  # it has ended, or is none of ours
        if any(word == path or word.startswith(path + os.sep) for word in words):
            found.append(" ".join(words).strip())
    return found


def is_sound(house):
    """Whether a directory of the wheelhouse holds the one file whose SHA-256 is its name."""
    names = os.listdir(house)
    if len(names) != 1:
        return False
    digest = hashlib.sha256()
    with open(os.path.join(house, names[0]), "rb") as wheel:
        for block in iter(lambda: wheel.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest() == os.path.basename(house)


def unpacked_uvs(directory):
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return [os.path.join(directory, name) for name in names if name == "uv" or name.startswith("uv-")]


def remove(path):
    """Remove a file, link or directory under another name; whether it was there."""
    aside = unpack.partial_name(*os.path.split(path))
    try:
        os.rename(path, aside)
    except OSError:
        if os.path.lexists(path):
            raise
        return False
    if os.path.isdir(aside) and not os.path.islink(aside):
        shutil.rmtree(aside)
    else:
        os.unlink(aside)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
