"""Remove from this node what was put there: the directories below ROOT that are ours, and our lines in authorized_keys.

Usage: remove.py ROOT

Prints {"removed": [path, ...], "revoked": [comment, ...]}. Anything else below ROOT is left, and named on stderr.
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
    if os.path.isdir(root):
        left = os.listdir(root)
        if left:
            sys.stderr.write("left in {}: {}\n".format(root, ", ".join(sorted(left))))
        else:
            os.rmdir(root)
    print(json.dumps({"removed": removed, "revoked": authorize.revoke()["removed"]}))
    sys.stderr.write("".join(line + "\n" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
