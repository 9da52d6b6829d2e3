"""Answer a doctor's questions about this node, one after the other, until stdin ends.

Usage: doctor.py ROOT [A-B]     A-B: the ports of which free ones are wanted

Each line of stdin is a JSON object with `id` and `ask`, each answer a line with the same `id` and either `answer` or `error`:

clock                                        this machine's time
facts                                        what probe.py and examine.py tell of it
resolve {names}                              the addresses that it finds for each name
occupied                                     who has this machine, and what crashed runs left here: see locks.py
runnable {paths}                             those of these programs that are there and may be run
listen {address, ports, token}               listen on these ports (0: any): those it got, or null
meet {targets, token, limit_s}               call other nodes' ports: see meet.py
run {files, commands, limit_s}               run programs at the same time: exit code, stderr, seconds

Changes nothing: files that commands need lie in a directory that is gone with this process. What only the head needs is
imported when it is asked for: starting this is most of what a doctor costs.
"""

import json
import os
import socket
import sys
import threading
import time

import examine
import meet
import probe

RESOLVE_TIMEOUT_S = 2.0


class Doctor:
    """What is kept between questions."""

    def __init__(self, root, ports):
        self.root = root
        self.ports = ports
        self.listeners = []
        self.directory = None

    def clock(self, _):
        return time.time()

    def facts(self, _):
        return {"probe": probe.live_facts(self.root, self.ports), "health": examine.examine(self.root)}

    def resolve(self, asked):
        found = {}

        def look_up(name):
            try:
                found[name] = sorted({answer[4][0] for answer in socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)})
            except (OSError, UnicodeError):
                found[name] = []

        in_parallel(look_up, asked["names"], RESOLVE_TIMEOUT_S)
        return dict(found)

    def occupied(self, _):
        import locks
        import processes
        import runs

        try:
            return dict(locks.look(self.root), machine=processes.machine(), locks=locks.holders())
        except runs.Problem as problem:
            return {"problem": str(problem)}

    def runnable(self, asked):
        return [path for path in asked["paths"] if os.path.isfile(path) and os.access(path, os.X_OK)]

    def listen(self, asked):
        listener = meet.Listener(asked["address"], asked["ports"], asked["token"])
        self.listeners.append(listener)
        return {"ports": listener.ports}

    def meet(self, asked):
        return meet.meet_all(asked["targets"], asked["token"], asked["limit_s"])

    def run(self, asked):
        """`files`: name to text, made for the commands, in which {directory} stands for where they lie."""
        import tempfile

        self.directory = self.directory or tempfile.mkdtemp(prefix="cluster-train-doctor-")
        for name, text in asked.get("files", {}).items():
            with open(os.path.join(self.directory, name), "w") as stream:
                stream.write(text.replace("{directory}", self.directory))
        commands = [[word.replace("{directory}", self.directory) for word in command] for command in asked["commands"]]
        results = {}

        def run_one(index):
            results[index] = run_command(commands[index], asked["limit_s"])

        in_parallel(run_one, range(len(commands)), asked["limit_s"] + 5)
        return [results.get(index) for index in range(len(commands))]

    def close(self):
        for listener in self.listeners:
            listener.close()
        if self.directory:
            import shutil

            shutil.rmtree(self.directory, ignore_errors=True)


def run_command(command, timeout_s):
    """{"code", "stderr", "seconds"}; code None where it did not end in time or is not there."""
    import subprocess

    started = time.monotonic()
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        return {"code": None, "stderr": "%s: %s" % (command[0], error.strerror), "seconds": 0.0}
    try:
        stderr = process.communicate(timeout=timeout_s)[1]
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stderr, code = process.communicate()[1], None
    return {"code": code, "stderr": stderr.decode("utf-8", "replace")[-500:], "seconds": time.monotonic() - started}


def in_parallel(action, items, timeout_s):
    """Call the action for every item in threads; those that take longer are not waited for."""
    threads = [threading.Thread(target=action, args=(item,)) for item in items]
    for thread in threads:
        thread.daemon = True
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def main(arguments):
    """Serve until stdin ends."""
    root = os.path.abspath(os.path.expanduser(arguments[0]))
    ports = probe.port_range(arguments[1]) if len(arguments) > 1 else probe.DEFAULT_PORTS
    doctor = Doctor(root, ports)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            answer = {"id": asked["id"]}
            try:
                answer["answer"] = getattr(doctor, asked["ask"])(asked)
            except OSError as error:
                answer["error"] = "%s: %s" % (asked["ask"], error)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        doctor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
