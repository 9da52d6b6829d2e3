"""Find out whether two nodes see one and the same directory, over NFS say: what one writes there, the other sees.

Usage: nonce.py write ROOT NAME      leaves <root>/.nonce-NAME
       nonce.py look ROOT NAME       whether it is there
       nonce.py clear ROOT NAME      takes it away

Each prints {"seen": bool}: whether the file was there. It is looked up by name, never listed: a name that this machine has
not asked for before cannot come from its cache.
"""

import json
import os
import sys


def main(arguments):
    """Run one of the three commands; 0, or 1 after saying on stderr what was wrong."""
    command, root, name = arguments
    path = os.path.join(os.path.expanduser(root), ".nonce-" + name)
    try:
        seen = os.path.exists(path)
        if command == "write":
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        elif command == "clear" and seen:
            os.unlink(path)
    except OSError as error:
        sys.stderr.write("nonce: {}\n".format(error))
        return 1
    print(json.dumps({"seen": seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
