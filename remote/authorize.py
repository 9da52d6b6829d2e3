"""The cluster's own SSH key: made on node0, never leaving it, and allowed on the other nodes.

Usage: authorize.py key ROOT                     makes <root>/ssh/id_ed25519 if it is not there; prints {"public", "identity"}
       authorize.py allow COMMENT ADDRESS        < public key    allows it in ~/.ssh/authorized_keys, from ADDRESS only
       authorize.py revoke                       removes every key of ours; prints {"removed": [comment, ...]}

Keys of ours are known by their comment, which begins with "cluster-train:". They are `restrict`ed: commands only, no
forwarding, no terminal.
"""

import json
import os
import subprocess
import sys

MARK = "cluster-train:"


def main(arguments):
    """Run one of the three commands; 0, or 1 after saying on stderr what was wrong."""
    try:
        if arguments[0] == "key":
            answer = make_key(os.path.expanduser(arguments[1]))
        elif arguments[0] == "allow":
            answer = allow(arguments[1], arguments[2], sys.stdin.read())
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
    lines = authorized_lines()
    if not any(line.split()[-1:] == [comment] for line in lines):
        lines.append('restrict,from="{}" {} {} {}'.format(address, kind, blob, comment))
        write_authorized(lines)
    return {"comment": comment}


def revoke():
    lines = authorized_lines()
    ours = [line for line in lines if line.split()[-1:] and line.split()[-1].startswith(MARK)]
    if ours:
        write_authorized([line for line in lines if line not in ours])
    return {"removed": [line.split()[-1] for line in ours]}


def authorized_lines():
    try:
        with open(authorized_path()) as text:
            return text.read().splitlines()
    except IOError:
        return []


def write_authorized(lines):
    path = authorized_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = "{}.{}.part".format(path, os.getpid())
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write("".join(line + "\n" for line in lines))
    os.rename(temporary, path)


def authorized_path():
    return os.path.realpath(os.path.expanduser("~/.ssh/authorized_keys"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
