"""Remove from this node what was put there.

Usage: remove.py machine ROOT   what lies on this machine outside of ROOT: our lines in authorized_keys, what runs left in
                                memory, the directory of locks if it is ours and nobody has one in it;
                                prints {"removed": [path, ...], "revoked": [comment, ...]}
       remove.py root ROOT      the directories below ROOT that are ours; prints {"removed": [path, ...], "left": [path, ...]}:
                                anything else below ROOT is not ours, and stays

The first goes by the names of the runs below ROOT, and so comes before the second.
"""

import json
import os
import shutil
import sys

import authorize
import locks
import scratch

OURS = ("envs", "cache", "wheelhouse", "jobs", "runs", "bin", "ssh", "agent")


def main(arguments):
    """Carry out one of the two commands; 0, or 1 after saying on stderr what could not be removed."""
    command, root = arguments[0], os.path.expanduser(arguments[1])
    try:
        answer, failed = (from_machine if command == "machine" else from_root)(root)
    except (OSError, ValueError) as error:
        sys.stderr.write("remove: {}\n".format(error))
        return 1
    print(json.dumps(answer))
    sys.stderr.write("".join(line + "\n" for line in failed))
    return 1 if failed else 0


def from_machine(root):
    names = os.listdir(os.path.join(root, "runs")) if os.path.isdir(os.path.join(root, "runs")) else []
    removed = [place for place in (*map(scratch.remove, names), locks.remove_directory()) if place]
    return {"removed": removed, "revoked": authorize.revoke()["removed"]}, []


def from_root(root):
    removed, failed = [], []
    for name in OURS:
        path = os.path.join(root, name)
        if os.path.isdir(path):
            shutil.rmtree(path, onerror=lambda _, where, error: failed.append("{}: {}".format(where, error[1])))
            removed.append(path)
    for name in os.listdir(root) if os.path.isdir(root) else []:
        if name.startswith(".nonce-"):  # of a nonce.py whose node was lost
            os.unlink(os.path.join(root, name))
    left = sorted(os.path.join(root, name) for name in os.listdir(root)) if os.path.isdir(root) else []
    if os.path.isdir(root) and not left:
        os.rmdir(root)
    return {"removed": removed, "left": left}, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
