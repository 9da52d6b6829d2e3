"""On node0: the owner of a run. Starts mpirun in a session of its own, records its state, stops it, ends its remains.

    start                        one JSON document on stdin; returns once mpirun runs, the supervisor stays
    stop   --root R --run ID     ask the supervisor to stop the run, and wait until it has
    status --root R [--run ID]   the runs in this node's directory, newest first
    sweep  --root R --run ID     on any node: end every process of this run there

The document for `start`: {"launch": the launch document, "mpirun": {"argv": [...], "env": {...}}, "grace_s": number,
"files": {name: {"text", "mode"}} for the run's directory, "label": anything, kept in `status.json`, "restart": see
`restart.py`}.

The state is starting, running, restarting, stopping, and in the end succeeded, failed or stopped; beside a dead supervisor it is
reported as `lost`. A run outlives the connection that started it, but not its supervisor: mpirun is killed with it.
"""

import argparse
import json
import os
import signal
import sys
import time

import attempt
import locks
import outposts
import processes
import records
import restart
import runs

FULL_DISK_S = 600.0  # for somebody to make room for the last status


def main() -> int:
    """Carry out one command; 1 where it failed, with {"error": ...} on stdout and the same for people on stderr."""
    options = parse(sys.argv[1:])
    try:
        return options.command(options)
    except runs.Problem as problem:
        sys.stderr.write("%s\n" % problem)
        say({"error": str(problem)})
        return 1


def start(options: argparse.Namespace) -> int:
    """Make the run's directory and leave a supervisor with it; prints once mpirun has been started."""
    order = read_order(sys.stdin.read())
    attempt.mpirun_environment(order, None)  # refused here, it leaves no directory
    run = runs.Run(make_run_directory(order), first_status(order))
    answer, report = os.pipe()
    if os.fork() == 0:
        os._exit(become_supervisor(run, order, report))
    os.close(report)
    with open(answer, "rb") as stream:
        reply = json.loads(stream.read().decode("ascii") or "{}")
    os.wait()
    if "supervisor" not in reply:
        raise runs.Problem(reply.get("error") or "the supervisor ended at once: see supervise.log in %s" % run.run_dir)
    return say(reply)


def stop(options: argparse.Namespace) -> int:
    """Stop a run and print its final status; Problem where it has not ended within the limit."""
    run = runs.find(options.root, options.run)
    if run.status["state"] is None:
        raise runs.Problem("there is no run %s on this node" % options.run)
    if not run.is_ours:
        raise runs.Problem("run %s was started on another node: stop it there" % options.run)
    limit_s = options.limit_s or run.status["grace_s"] + 3 * attempt.STOP_MARGIN_S
    if not runs.stop(run, signal.SIGINT if options.now else signal.SIGTERM, limit_s):
        raise runs.Problem("run %s has not ended within %d s: sweep its nodes" % (options.run, limit_s))
    return say(run.status)


def status(options: argparse.Namespace) -> int:
    """Print runs with the records of their ranks in this directory."""
    found = [runs.find(options.root, options.run)] if options.run else runs.find_all(options.root, options.limit)
    told = [dict(run.status, ranks=run.ranks()) for run in found if os.path.isdir(run.run_dir)]
    beginning = [one for one in locks.beginning(options.root) if options.run in (None, one["run_id"])]
    return say({"runs": (beginning + told)[: options.limit]})


def sweep(options: argparse.Namespace) -> int:
    """End what is left of a run on this node; print what was ended, and what would not die."""
    return say(runs.sweep(runs.find(options.root, options.run), options.patience_s))


def parse(arguments: list) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="supervise.py")
    commands = parser.add_subparsers()
    commands.add_parser("start").set_defaults(command=start)
    parsers = {}
    for command in (stop, status, sweep):
        parsers[command] = commands.add_parser(command.__name__)
        parsers[command].set_defaults(command=command)
        parsers[command].add_argument("--root", required=True)
        parsers[command].add_argument("--run", required=command is not status)
    parsers[stop].add_argument("--now", action="store_true", help="do not wait for the ranks to save")
    parsers[stop].add_argument("--limit-s", type=float, help="how long to wait for the end")
    parsers[status].add_argument("--limit", type=int, default=50, help="how many runs")
    parsers[sweep].add_argument("--patience-s", type=float, default=5.0, help="between SIGTERM and SIGKILL")
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):
        parser.error("give one of start, stop, status, sweep")
    return options


def say(document: dict) -> int:
    """Print the one JSON object of this command."""
    print(json.dumps(document))
    return 0


def read_order(text: str) -> dict:
    """The document for `start`; Problem where it is none."""
    try:
        order = json.loads(text)
        order["grace_s"] = float(order["grace_s"])
        order.setdefault("files", {})
        order.setdefault("label", {})
        names = [name for name in order["files"] if name in ("", ".", "..") or os.path.basename(name) != name]
        if names or not order["mpirun"]["argv"]:
            raise ValueError("no file can be called %s" % names if names else "mpirun has no command line")
    except (KeyError, TypeError, ValueError) as error:
        raise runs.Problem("no run can be started from this document: %s %s" % (type(error).__name__, error))
    return order


def make_run_directory(order: dict) -> str:
    """The run's directory with its files; Problem where it is taken, or cannot be made."""
    run_dir = records.to_path(order["launch"]["run_dir"])
    try:
        records.make_private_dir(os.path.dirname(run_dir))
        try:
            os.mkdir(run_dir, 0o700)
        except FileExistsError:
            raise runs.Problem(what_is_at(run_dir))
        for name, file in order["files"].items():
            records.write_text(os.path.join(run_dir, name), file["text"], file["mode"])
        records.write_record(os.path.join(run_dir, "run.json"), order)
        records.write_text(os.path.join(run_dir, runs.RESERVE), " " * runs.RESERVE_BYTES)
    except FileExistsError as error:
        raise runs.Problem("%s is no directory, so no run can be kept below it: move it away" % error.filename)
    except OSError as error:
        raise runs.Problem("the run's directory could not be made: %s" % error)
    return run_dir


def what_is_at(run_dir: str) -> str:
    """Why no run's directory can be made here."""
    if not os.path.isdir(run_dir):
        return "%s is there already and is no directory: move it away" % run_dir
    status = runs.read_status(run_dir)
    if status is None:
        return "%s is there already, without a status: another start is making it, or broke off; start again" % run_dir
    return "there is a run in %s already (%s)" % (run_dir, status["state"])


def first_status(order: dict) -> dict:
    """The status of a run that is about to start."""
    return {
        "schema": 1,
        "run_id": order["launch"]["run_id"],
        "state": "starting",
        "reason": None,
        "machine": processes.machine(),
        "boot": processes.boot(),
        "supervisor": None,
        "mpirun": None,
        "mpirun_exit": None,
        "mpirun_signal": None,
        "started_unix_s": time.time(),
        "ended_unix_s": None,
        "attempt": 1,
        "restarts": order.get("restart", {}).get("restarts", 0),
        "grace_s": order["grace_s"],
        "label": order["label"],
        "verdict": None,
        "nodes": {},
        "stall": None,
        "notices": [],
    }


def become_supervisor(run: runs.Run, order: dict, report: int) -> int:
    """In a forked child: leave the session of whoever called, and own the run until it has ended."""
    os.setsid()
    if os.fork():
        return 0
    try:
        detach(os.path.join(run.run_dir, "supervise.log"), report)
        run.set(supervisor=processes.identity(os.getpid()))
        run.lock = locks.Joined(run.status["run_id"])
        supervise(run, order, report)
    except BaseException:
        run.set(state="failed", reason="its supervisor failed: see supervise.log", ended_unix_s=time.time())
        raise
    return 0


def detach(log: str, kept: int) -> None:
    """Let go of every descriptor of the caller except `kept`, so that its connection can close."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the directory
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir("/")


def supervise(run: runs.Run, order: dict, report: int) -> None:
    """Attempt the run until it has ended, and record how; whoever asked for it is told once its mpirun has started."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, attempt.WATCHED)

    unanswered = [report]  # once: a later descriptor may have its number

    def tell(reply):
        if unanswered:
            answer(unanswered.pop(), reply)

    posts = outposts.Outposts(run, order)
    order, outcome = restart.first_order(run, order, tell, posts)
    while order:
        outcome = attempt.attempt(run, order, tell)
        order, outcome = restart.next_order(run, order, outcome, posts)
    posts.leave()
    run.lock.leave()  # whoever sees the end may start the next run
    ended_unix_s, deadline = time.time(), time.monotonic() + FULL_DISK_S
    while not run.set(ended_unix_s=ended_unix_s, **outcome.status()) and time.monotonic() < deadline:
        time.sleep(1.0)


def answer(report: int, reply: dict) -> None:
    """What `start` prints; whoever asked may have gone."""
    try:
        os.write(report, json.dumps(reply).encode("ascii"))
    except OSError:
        pass
    os.close(report)


if __name__ == "__main__":
    sys.exit(main())
