"""Write files and directories below a directory to stdout as a tar stream, for `job.fetch`.

Usage: pack.py DIRECTORY PATH...

Paths that do not exist are named on stderr and left out. Symbolic links are followed, so that what arrives is content.
"""

import os
import sys
import tarfile


def main(arguments):
    """Pack the paths; always 0 once the stream is whole."""
    directory = os.path.expanduser(arguments[0])
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as archive:
        for path in arguments[1:]:
            name = os.path.normpath(path)
            source = os.path.join(directory, name)
            if os.path.isabs(name) or name.startswith("..") or not os.path.exists(source):
                sys.stderr.write("{}\n".format(path))
                continue
            archive.add(source, arcname=name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
