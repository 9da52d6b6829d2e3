"""Send wheels from this node's wheelhouse to other nodes over SSH, to all at once.

Usage: feed.py < plan

The plan: {"wheelhouse", "directory", "files": {name: text}, "nodes": [{"node", "address", "command",
"wheels": [[sha256, filename], ...]}, ...]}. `files` (an ssh_config and a known_hosts) are written to `directory`, which is
ours alone and removed at the end. For each node `ssh -F <directory>/ssh_config ADDRESS COMMAND` reads a tar stream of
`<sha256>/<filename>` members.

Prints JSON lines: {"node", "sent_bytes"} while it works, {"node", "error": text or null} at the end of each node. What one
node lacks in the end is no error of ours: the exit code is 0 once every node has been tried.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

PROGRESS_EVERY_S = 0.25
BLOCK_BYTES = 1 << 20
SAYING = threading.Lock()


class Silenced(Exception):
    """Whoever asked for this is gone."""


def main():
    """Carry out the plan on stdin; 0, or 1 after saying on stderr why nothing could be sent."""
    plan = json.load(sys.stdin)
    if shutil.which("ssh") is None:
        sys.stderr.write("feed: there is no ssh here (Debian: openssh-client)\n")
        return 1
    try:
        os.makedirs(plan["directory"], mode=0o700)
        try:
            for name, text in plan["files"].items():
                with open(os.path.join(plan["directory"], name), "w") as out:
                    out.write(text)
            feed_all(plan)
        finally:
            shutil.rmtree(plan["directory"], ignore_errors=True)
    except OSError as error:
        sys.stderr.write("feed: {}\n".format(error))
        return 1
    return 0


def feed_all(plan):
    config = os.path.join(plan["directory"], "ssh_config")
    threads = [threading.Thread(target=feed_one, args=(node, config, plan["wheelhouse"])) for node in plan["nodes"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def feed_one(node, config, wheelhouse):
    """Send one node its wheels and tell how that ended; who cannot be told is gone, and then nothing more is sent."""
    try:
        try:
            error = send(node, config, wheelhouse)
        except OSError as failure:
            error = str(failure)
        say({"node": node["node"], "error": error})
    except Silenced:
        pass


def send(node, config, wheelhouse):
    """None, or what ssh or the node said against it. Raises Silenced when nobody listens to us."""
    with tempfile.TemporaryFile() as said:
        command = ["ssh", "-F", config, node["address"], node["command"]]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said)
        cut = None
        try:
            write_archive(Progress(process.stdin, node["node"]), node["wheels"], wheelhouse)
            process.stdin.close()
        except BrokenPipeError as error:  # ssh has ended, and says itself why
            cut = error
        except BaseException:  # a wheel that cannot be read, or nobody who listens: the node must not take half for all
            process.kill()
            raise
        finally:
            code = process.wait()
        said.seek(0)
        last = said.read().decode("utf-8", "replace").strip().splitlines()[-3:]
    if code == 0 and cut is None:
        return None
    return "; ".join(last) or "ssh ended with {}{}".format(code, ": {}".format(cut) if cut else "")


def write_archive(out, wheels, wheelhouse):
    with tarfile.open(fileobj=out, mode="w|", bufsize=BLOCK_BYTES, format=tarfile.PAX_FORMAT) as archive:
        for sha256, filename in wheels:
            path = os.path.join(wheelhouse, sha256, filename)
            member = tarfile.TarInfo("{}/{}".format(sha256, filename))
            member.size = os.path.getsize(path)
            with open(path, "rb") as content:
                archive.addfile(member, content)


class Progress:
    """A stream that tells now and then how much went through it."""

    def __init__(self, stream, node):
        self.stream = stream
        self.node = node
        self.sent_bytes = 0
        self.told = time.time()

    def write(self, data):
        self.stream.write(data)
        self.sent_bytes += len(data)
        if time.time() - self.told >= PROGRESS_EVERY_S:
            self.told = time.time()
            say({"node": self.node, "sent_bytes": self.sent_bytes})


def say(document):
    try:
        with SAYING:
            os.write(1, (json.dumps(document) + "\n").encode())
    except OSError:
        raise Silenced()


if __name__ == "__main__":
    sys.exit(main())
