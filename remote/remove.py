"""Remove from this node what was put there: the directories below ROOT that are ours, and our lines in authorized_keys.

Usage: remove.py ROOT

Prints {"removed": [path, ...], "revoked": [comment, ...], "left": [path, ...]}: anything else below ROOT is not ours, and stays.
"""

import json
import os
import shutil
import sys

import authorize

OURS = ("envs", "cache", "wheelhouse", "jobs", "runs", "bin", "ssh", "agent")


def main(arguments):
    """Remove everything of ours; 0, or 1 after saying on stderr what could not be removed."""
    root = os.path.expanduser(arguments[0])
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
    print(json.dumps({"removed": removed, "revoked": authorize.revoke()["removed"], "left": left}))
    sys.stderr.write("".join(line + "\n" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
