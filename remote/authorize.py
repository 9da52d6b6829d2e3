"""The cluster's own SSH key: made on node0, never leaving it, and allowed on the other nodes.

Usage: authorize.py key ROOT                     makes <root>/ssh/id_ed25519 if it is not there; prints {"public", "identity"}
       authorize.py allow COMMENT ADDRESS        < public key    allows it in ~/.ssh/authorized_keys, from ADDRESS only
       authorize.py person COMMENT               < public key    allows a person's own key there, unless it is allowed already;
                                                 prints {"is_new", "loose": [path, ...]}, see `loose_places`
       authorize.py revoke                       removes every key of ours; prints {"removed": [comment, ...]}

Keys of ours are known by their comment, which begins with "cluster-train:". The cluster's are `restrict`ed: commands only, no
forwarding, no terminal. All stand before the other lines of the file, whose bytes are never changed.
"""

import contextlib
import fcntl
import json
import os
import stat
import subprocess
import sys

import unpack

MARK = "cluster-train:"


def main(arguments):
    """Run one of the four commands; 0, or 1 after saying on stderr what was wrong."""
    try:
        if arguments[0] == "key":
            answer = make_key(os.path.expanduser(arguments[1]))
        elif arguments[0] == "allow":
            answer = allow(arguments[1], arguments[2], sys.stdin.read())
        elif arguments[0] == "person":
            answer = let_in(arguments[1], sys.stdin.read())
        else:
            answer = revoke()
    except (OSError, ValueError) as error:
        sys.stderr.write("authorize: {}\n".format(error))
        return 1
    print(json.dumps(answer))
    return 0


def make_key(root):
    directory = os.path.join(root, "ssh")
    identity = os.path.join(directory, "id_ed25519")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if not os.path.exists(identity):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", MARK, "-f", identity]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate()
        if process.returncode != 0 and not os.path.exists(identity):
            raise ValueError("ssh-keygen failed: {}".format(output.decode("utf-8", "replace").strip()))
    with open(identity + ".pub") as public:
        return {"public": public.read().strip(), "identity": identity}


def allow(comment, address, public):
    """Add the key once; an older key of ours for the same cluster stays until `revoke`."""
    kind, blob = public.split()[:2]
    if not comment.startswith(MARK) or any(character in comment + address for character in ' "\n'):
        raise ValueError("not a comment or address of ours: {!r} {!r}".format(comment, address))
    with exclusive():
        lines = authorized_lines()
        if comment not in [comment_of(line) for line in lines]:
            line = 'restrict,from="{}" {} {} {}\n'.format(address, kind, blob, comment)
            write_authorized([line.encode("ascii")] + lines)
    return {"comment": comment}


def let_in(comment, public):
    """Add the key once, whoever added it; our two places get the modes without which sshd's StrictModes passes over them."""
    kind, blob = public.split()[:2]
    if not comment.startswith(MARK) or any(character in comment for character in ' "\n'):
        raise ValueError("not a comment of ours: {!r}".format(comment))
    with exclusive():
        lines = authorized_lines()
        is_new = not any(blob.encode("ascii") in line.split() for line in lines if not line.startswith(b"#"))
        if is_new:
            write_authorized(["{} {} {}\n".format(kind, blob, comment).encode("ascii")] + lines)
        for path in (authorized_path(), os.path.dirname(authorized_path())):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & 0o022:
                os.chmod(path, mode & ~0o022)
    return {"is_new": is_new, "loose": loose_places()}


def loose_places():
    """Where somebody else may write, from the file up to the home: sshd's StrictModes then takes no key from the file."""
    found, path, home = [], authorized_path(), os.path.realpath(os.path.expanduser("~"))
    while True:
        seen = os.stat(path)
        if seen.st_uid not in (0, os.getuid()) or seen.st_mode & 0o022:
            found.append(path)
        if path in (home, "/"):
            return found
        path = os.path.dirname(path)


def revoke():
    """Remove every line of ours, and the file where it held nothing else."""
    if not os.path.isdir(os.path.dirname(authorized_path())):
        return {"removed": []}
    with exclusive():
        lines = authorized_lines()
        ours = [line for line in lines if comment_of(line).startswith(MARK)]
        if len(ours) < len(lines) and ours:
            write_authorized([line for line in lines if line not in ours])
        elif ours:
            os.unlink(authorized_path())
    return {"removed": [comment_of(line) for line in ours]}


@contextlib.contextmanager
def exclusive():
    """While this lasts no other of us changes the file (the lock of its directory dies with its holder)."""
    directory = os.path.dirname(authorized_path())
    os.makedirs(directory, mode=0o700, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        unpack.is_locked(descriptor, fcntl.LOCK_EX, patient=True)
        yield
    finally:
        os.close(descriptor)


def comment_of(line):
    """The last word of a line: keys of ours have a comment without blanks."""
    return (line.split()[-1:] or [b""])[0].decode("ascii", "replace")


def authorized_lines():
    """The file's lines as they are, with their ends."""
    try:
        with open(authorized_path(), "rb") as stream:
            return stream.read().splitlines(True)
    except FileNotFoundError:
        return []


def write_authorized(lines):
    path = authorized_path()
    mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o600
    temporary = path + ".cluster-train.part"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(b"".join(lines))
        os.fchmod(out.fileno(), mode)
    os.rename(temporary, path)


def authorized_path():
    return os.path.realpath(os.path.expanduser("~/.ssh/authorized_keys"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
