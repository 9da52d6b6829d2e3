"""On node0, before an attempt at a run: what it goes on from, with whom, and its checkpoint on every node.

Usage: resume.py RUN_DIR ATTEMPT FAILED_UNIX_S       ATTEMPT: the number of the attempt to come

The first attempt may go on from another run (the order's "from_run"), whose checkpoint is copied into this one.

Started by the supervisor as a process of its own, so that a stop need not wait for it. Everything follows from the run's
first order (`run.json`), so a node that was left out is taken in again once it answers. Other nodes are reached with the
run's own ssh_config. On every node the remains of what failed are ended first.

Writes `attempt-<ATTEMPT>.json` into the run's directory: {"order": the order, "resume": path or null, "notes": [...]},
or {"error": why there can be no attempt now}.
"""

import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
import time

import completeness
import records
import regroup

LIMIT_S = 120.0  # for a node to answer; a survey reads headers only
COPY_LIMIT_S = 24 * 3600.0
SECOND_TRY_S = 1.0  # before a node that did not answer is asked once more
ATTEMPT_FILE = re.compile(r"attempt-(\d+)\.json$")
PATIENCE_S = "2"  # between SIGTERM and SIGKILL, for what is left of the failed attempt


class Unreachable(Exception):
    """A node did not answer."""


class Failed(Exception):
    """There can be no attempt now; the message says why."""


class Place:
    """Where a run, and what it goes on from, lives on every node, and how its nodes are reached from here."""

    def __init__(self, run_dir: str, order: dict, source_dir: str) -> None:
        self.run_dir = run_dir
        self.source_dir = source_dir  # the run that failed: an earlier attempt at this one, or another one
        self.work = os.path.join(source_dir, "work")
        self.launch = order["launch"]
        self.addresses = order["restart"]["addresses"]  # of all nodes but the head

    def argv(self, node: str, script: str, arguments: list) -> list:
        """The command line that runs one of our scripts on a node."""
        path = os.path.join(self.launch["agent_dir"], script)
        argv = [self.launch["python"], "-S", "-E", path] + arguments
        if node not in self.addresses:
            return argv
        config = os.path.join(self.run_dir, "ssh_config")
        return ["ssh", "-F", config, self.addresses[node], " ".join(shlex.quote(word) for word in argv)]

    def call(self, node: str, script: str, *arguments: str, limit_s: float = LIMIT_S) -> dict:
        """What a script prints on a node; Unreachable where SSH does not get through, Failed where the script fails."""
        argv = self.argv(node, script, list(arguments))
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unreachable("no answer within %d s" % LIMIT_S)
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == 255 and node in self.addresses:
            raise Unreachable(said.splitlines()[-1] if said else "ssh ended with 255")
        if done.returncode:
            raise Failed("%s: %s: %s" % (node, script, said or "exit code %d" % done.returncode))
        return json.loads(done.stdout.decode("ascii"))


def main(arguments: list) -> int:
    """Write the record of the next attempt."""
    run_dir, attempt, failed_unix_s = arguments[0], int(arguments[1]), float(arguments[2])
    order = records.read_record(os.path.join(run_dir, "run.json"))
    source_dir = run_dir if attempt > 1 else os.path.join(os.path.dirname(run_dir), order["from_run"])
    try:
        answer = prepare(Place(run_dir, order, source_dir), order, attempt, failed_unix_s)
    except (Failed, Unreachable) as error:
        answer = {"error": str(error)}
    records.write_record(records.attempt_file(run_dir, attempt), answer)
    return 0


def prepare(place: Place, order: dict, attempt: int, failed_unix_s: float) -> dict:
    """The record of the next attempt, with its checkpoint on every node that takes part."""
    nodes = regroup.nodes_of(order["launch"])
    surveys, lost = survey(place, nodes, order["restart"]["patterns"], failed_unix_s)
    order, changes = without_lost(order, list(surveys), lost)
    path, notes = choose(place, order, surveys)
    return {"order": resumed(order, attempt, path, place.run_dir), "resume": path, "notes": changes + notes}


def without_lost(order: dict, left: list, lost: dict) -> tuple:
    """The order for the nodes that are left, the head first; what to say. lost: node -> why."""
    if not lost:
        return order, []
    missed = ["%s cannot be reached from %s (%s)" % (node, left[0], why) for node, why in sorted(lost.items())]
    needed, before = order["restart"]["min_nodes"], order["launch"]["world_size"]
    if len(left) < needed:
        raise Failed("%s, and the job needs %d nodes (job.min_nodes)" % ("; ".join(missed), needed))
    order, batch = with_batch(regroup.without(order, list(lost)), before)
    ranks = "%d instead of %d ranks, on %s" % (order["launch"]["world_size"], before, ", ".join(left))
    return order, ["%s: left out" % text for text in missed] + [ranks, batch]


def choose(place: Place, order: dict, surveys: dict) -> tuple:
    """The newest complete checkpoint, which is then on every node, or None; what to say. Others are put aside."""
    ranks, is_trainer, is_own = homes(place), order["restart"]["is_trainer"], place.source_dir == place.run_dir
    choice = completeness.newest_complete(surveys, ranks, is_trainer)
    notes = ["%s is skipped: %s" % pair for pair in sorted(choice.skipped.items())]
    if choice.skipped and is_own:
        aside = ["--work", place.work, "--", "aside"] + sorted(choice.skipped)
        on_all(lambda node: place.call(node, "checkpoints.py", *aside), surveys)
    if choice.path is None and not is_own:
        raise Failed("run %s left no complete checkpoint to go on from" % os.path.basename(place.source_dir))
    if choice.path is None:
        return None, notes + ["there is no complete checkpoint: it starts from the beginning"]
    notes += ["it goes on from %s" % choice.path] + bring(place, list(surveys), choice.path, ranks)
    stateless = completeness.stateless_ranks(choice.files, order["launch"]["world_size"]) if is_trainer else []
    if stateless:
        numbers = ", ".join(map(str, stateless))
        notes.append("it holds no random state for rank %s, whose random numbers (dropout) start anew" % numbers)
    return choice.path, notes


def survey(place: Place, nodes: list, patterns: list, failed_unix_s: float) -> tuple:
    """The checkpoints on every node that answers, and why the others do not. On each, what is left of the run is ended."""
    root, run_id = os.path.dirname(os.path.dirname(place.source_dir)), os.path.basename(place.source_dir)
    words = ["--pattern=%s" % pattern for pattern in patterns]

    def look(node, is_last=False):
        try:
            place.call(node, "supervise.py", "sweep", "--root", root, "--run", run_id, "--patience-s", PATIENCE_S)
            found = place.call(node, "checkpoints.py", "--work", place.work, *words, "survey")
            return quiet(found, failed_unix_s, time.time())
        except Failed as error:  # a disk that was made anew, or is full: the node is as good as lost
            return str(error)
        except Unreachable as error:
            if is_last:
                return str(error)
        time.sleep(SECOND_TRY_S)
        return look(node, is_last=True)

    found = on_all(look, nodes)
    lost = {node: found[node] for node in nodes if isinstance(found[node], str)}
    if nodes[0] in lost:
        raise Failed("%s: %s" % (nodes[0], lost[nodes[0]]))
    return {node: found[node] for node in nodes if node not in lost}, lost


def quiet(found: dict, failed_unix_s: float, now_unix_s: float) -> dict:
    """The checkpoints of a node with `quiet_s`, from that node's own clock: at least so long before the failure."""
    since_failure_s = now_unix_s - failed_unix_s
    for checkpoint in found["checkpoints"].values():
        checkpoint["quiet_s"] = found["now_unix_s"] - checkpoint["changed_unix_s"] - since_failure_s
    return found["checkpoints"]


def on_all(action, nodes) -> dict:
    """Do something on all nodes at once; node -> its result."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        pending = {node: pool.submit(action, node) for node in nodes}
        return {node: pending[node].result() for node in pending}


def homes(place: Place) -> dict:
    """rank -> node, of the last attempt that was made at what failed."""
    numbers = [int(match.group(1)) for match in map(ATTEMPT_FILE.match, os.listdir(place.source_dir)) if match]
    made = [records.read_record(records.attempt_file(place.source_dir, number)) for number in sorted(numbers, reverse=True)]
    orders = [attempt["order"] for attempt in made if "order" in attempt]
    orders.append(records.read_record(os.path.join(place.source_dir, "run.json")))
    return {rank["rank"]: rank["node"] for rank in orders[0]["launch"]["ranks"]}


def with_batch(order: dict, before: int) -> tuple:
    """The order with the global batch of `before` ranks where the script can be told; what to say."""
    launch = order["launch"]
    after = launch["world_size"]
    if not order["restart"]["accumulates"]:
        return order, regroup.other_batch(before, after, "no --gradient_accumulation_steps can be passed to this script")
    argv, note = regroup.keep_batch(launch["argv"][1:], before, after)
    return dict(order, launch=dict(launch, argv=launch["argv"][:1] + argv)), note


def bring(place: Place, nodes: list, path: str, homes: dict) -> list:
    """The union of a checkpoint's files on all nodes, by hash: nothing is sent to a node that has it. What to say."""
    look = ["--work", place.work, "--", "manifest", path]
    have = on_all(lambda node: place.call(node, "checkpoints.py", *look, limit_s=COPY_LIMIT_S)["files"], nodes)
    source = {}
    for node in nodes:
        for name in have[node]:
            if name not in source or completeness.home(name, homes) == node:
                source[name] = node
    wanted = {name: have[node][name] for name, node in source.items()}
    head, notes = nodes[0], []
    # Over the head, which alone reaches all: first what it lacks, then to each what that one lacks.
    for node in nodes[1:]:
        notes += copy(place, path, node, head, [name for name in wanted if source[name] == node], wanted, have)
    sent = on_all(lambda node: copy(place, path, head, node, sorted(wanted), wanted, have), nodes[1:])
    notes += [note for node in nodes[1:] for note in sent[node]]
    if place.source_dir != place.run_dir and not os.path.isabs(os.path.expanduser(path)):
        clone = ["--work", place.work, "--", "clone", path, os.path.join(place.run_dir, "work")]
        on_all(lambda node: place.call(node, "checkpoints.py", *clone, limit_s=COPY_LIMIT_S), nodes)
    return notes


def copy(place: Place, path: str, source: str, target: str, names: list, wanted: dict, have: dict) -> list:
    """Send the files that the target lacks, and compare what arrived; what to say."""
    missing = [name for name in names if have[target].get(name) != wanted[name]]
    if not missing:
        return []
    sender = place.argv(source, "checkpoints.py", ["--work", place.work, "--", "send", path] + missing)
    receiver = place.argv(target, "checkpoints.py", ["--work", place.work, "--", "receive", path])
    sending = subprocess.Popen(sender, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    received = subprocess.run(
        receiver, stdin=sending.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=COPY_LIMIT_S
    )
    sending.stdout.close()
    if sending.wait() or received.returncode:
        said = received.stderr.decode("utf-8", "replace").strip() or "see resume.err"
        raise Failed("%s could not be brought from %s to %s: %s" % (path, source, target, said))
    arrived = json.loads(received.stdout.decode("ascii"))["files"]
    if arrived != {name: wanted[name] for name in missing}:
        raise Failed("%s was changed on its way from %s to %s" % (path, source, target))
    have[target].update(arrived)
    size_mb = sum(wanted[name]["size_bytes"] for name in missing) / 1e6
    return ["%s: %d files, %.1f MB, brought from %s to %s" % (path, len(missing), size_mb, source, target)]


def resumed(order: dict, attempt: int, path: str, run_dir: str) -> dict:
    """The order of the next attempt: its number, and the checkpoint for the script."""
    launch = dict(order["launch"], attempt=attempt)
    option = order["restart"]["resume_option"]
    if path is not None:
        launch["resume"] = os.path.join(run_dir, "work", os.path.expanduser(path))
        if option:
            launch["argv"] = launch["argv"][:1] + with_option(launch["argv"][1:], option, launch["resume"])
    return dict(order, launch=launch)


def with_option(argv: list, option: str, value: str) -> list:
    """Arguments with an option set: the last one counts, so it stands behind all others, before a bare `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end] + ["%s=%s" % (option, value)] + argv[end:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
