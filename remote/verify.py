"""Verify this node's environment for real: import its modules, read what is installed, ask its MPI; change nothing.

Usage: verify.py ROOT < order

The order: {"digest", "modules": [module, ...], "mpi": a launcher, relative to the environment, absolute, or a bare name that is
looked up on PATH}. Prints one JSON object, also where the environment is broken or not there at all:

{"state": "complete" | "missing" | "unfinished" (no complete.json) | "broken" (its interpreter does not run),
 "error": why it is broken, or null,                       "python": "3.11.2" or null,
 "recorded": {name: SHA-256 of its wheel} as the installer recorded it, "distributions": {name: version} as installed now,
 "damaged": {name: what is wrong with its files},
 "modules": {module: {"version": what it says of itself, "error": the last line of what it raised, or null}},
 "mpi": {"program", "version": the line in which it tells its version, "error"}}

Files are compared with the sizes that their package's RECORD names; launchers in `bin` and byte code, which the installer
writes itself, need only be there or not even that. The modules are imported by the environment's own interpreter, one after
the other in one process; where that process dies of one, the rest is tried in another.
"""

import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

IMPORT_LIMIT_S = 240.0  # for all modules together: torch from a cold disk takes its time
READ_LIMIT_S = 60.0
MPI_LIMIT_S = 20.0
SHOWN_CHARACTERS = 300


def main(arguments):
    """Verify what the order on stdin names; 0 whatever was found, 1 where the order is none."""
    if arguments[:1] == ["--inside"]:
        return inside(arguments[1:])
    try:
        order = json.load(sys.stdin)
        environment = os.path.join(os.path.expanduser(arguments[0]), "envs", order["digest"])
        report = verify(environment, order["modules"], order["mpi"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        sys.stderr.write("verify: the order cannot be read: {!r}\n".format(error))
        return 1
    print(json.dumps(report))
    return 0


def verify(environment, modules, mpi):
    """Everything that can be told about an environment."""
    report = {"state": "complete", "error": None, "python": None}
    report.update({"recorded": {}, "distributions": {}, "damaged": {}, "modules": {}})
    report["mpi"] = ask_mpi(environment, mpi)
    if not os.path.isdir(environment):
        report["state"] = "missing"
        return report
    try:
        report["recorded"] = recorded(environment)
    except (OSError, ValueError, KeyError, TypeError):
        report["state"] = "unfinished"
    python = os.path.join(environment, "bin", "python")
    found, error = call_inside(python, ["read"], READ_LIMIT_S)
    if not found:
        report.update(state="broken", error=error)
        return report
    report.update(found[0])
    report["modules"] = import_all(python, modules)
    return report


def recorded(environment):
    """Name to SHA-256 of every wheel that the installer put into the environment."""
    with open(os.path.join(environment, "complete.json")) as stream:
        return {wheel["name"]: wheel["sha256"] for wheel in json.load(stream)["wheels"]}


def import_all(python, modules):
    """What each module says of itself, or the error of those that do not import."""
    report, left, deadline = {}, list(modules), time.time() + IMPORT_LIMIT_S
    while left:
        limit_s = deadline - time.time()
        found, error = call_inside(python, ["import"] + left, limit_s) if limit_s > 0 else ([], "not tried: no time was left")
        report.update({one["module"]: {"version": one["version"], "error": one["error"]} for one in found})
        left = left[len(found) :]
        if left:  # a module may end the interpreter, with 0 too
            report[left.pop(0)] = {"version": None, "error": error or "importing it ended the interpreter"}
    return report


def call_inside(python, arguments, limit_s):
    """(JSON lines, None or why there are not more of them) of this script's `--inside`, run by another interpreter."""
    command = [python, "-I", os.path.abspath(__file__), "--inside"] + arguments
    code, output, errors = call(command, sourced(os.path.dirname(os.path.dirname(python))), limit_s)
    lines = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    if code == 0:
        return lines, None
    return lines, errors if code is None else "{} ({})".format(how_it_ended(code), last_line(errors))


def ask_mpi(directory, mpi):
    """The version line of an MPI's launcher."""
    program = os.path.join(directory, mpi) if "/" in mpi else mpi
    path = shutil.which(program)
    if path is None:
        return {"program": program, "version": None, "error": "there is no {}".format(program)}
    # One that the machine brings may be made by a module system out of variables; one of ours needs none.
    environment = plain_environment() if "/" in mpi else dict(os.environ)
    # Open MPI, which starts nothing for root unless it is told to (orchestrator/planning/mpirun.py), tells its version to all.
    code, output, errors = call([path, "--version"], environment, MPI_LIMIT_S)
    telling = [line.strip() for line in output.splitlines() if re.search(r"\d+\.\d+", line)]
    if code == 0 and telling:
        return {"program": path, "version": telling[0], "error": None}
    error = errors if code is None else "{} ({})".format(how_it_ended(code), last_line(errors or output))
    return {"program": path, "version": None, "error": error}


def sourced(directory):
    """plain_environment() after the setvars.sh of an environment that has one: some bindings import only then."""
    import setvars  # not above: with -I, `--inside` does not see our other scripts

    try:
        return setvars.applied(setvars.recorded(directory), plain_environment())
    except (OSError, ValueError, KeyError):  # no record that could be read, which is told as "unfinished"
        return plain_environment()


def plain_environment():
    """What a program needs and no more: nothing that a start-up file set can make a broken environment look whole."""
    kept = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "TMPDIR") if name in os.environ}
    return dict(kept, PATH=os.defpath)


def call(argv, environment, limit_s):
    """(exit code, stdout, stderr) of a command; where it did not start or took too long, (None, its stdout, the reason)."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return None, "", "{} cannot be started: {}".format(argv[0], error.strerror)
        try:
            code, said = process.wait(limit_s), None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code, said = None, "took longer than {:.0f} s".format(limit_s)
        return code, read_back(output), said or read_back(errors)


def read_back(stream):
    stream.seek(0)
    return stream.read().decode("utf-8", "replace")


def how_it_ended(code):
    if code >= 0:
        return "exit code {}".format(code)
    try:
        return "killed by {}".format(signal.Signals(-code).name)
    except ValueError:
        return "killed by signal {}".format(-code)


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:SHOWN_CHARACTERS] if lines else "it said nothing"


# ---------------------------------------------------------------------------------------------------------------------
# By the environment's interpreter


def inside(arguments):
    """`read`, or `import MODULE...`: one JSON object a line, on the stdout that modules cannot reach."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if arguments[0] == "read":
        answers = iter([dict(read_distributions(), python=sys.version.split()[0])])
    else:
        answers = (import_one(name) for name in arguments[1:])
    for answer in answers:
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)  # without the modules' own exit handlers: threads of theirs may hang there


def import_one(name):
    """Import a module; anything that it raises, SystemExit included, is its error."""
    try:
        module = importlib.import_module(name)
        return {"module": name, "version": str(getattr(module, "__version__", "")) or None, "error": None}
    except BaseException as error:
        text = str(error).strip().splitlines()
        return {"module": name, "version": None, "error": "{}: {}".format(type(error).__name__, text[-1] if text else "")}


def read_distributions():
    """Versions, and damaged files, of all that is installed. (importlib.metadata would do, but came with Python 3.8.)"""
    versions, damaged = {}, {}
    for directory in [entry for entry in sys.path if os.path.isdir(entry)]:
        for info in sorted(name for name in os.listdir(directory) if name.endswith(".dist-info")):
            name, version = name_and_version(directory, info)
            versions.setdefault(name, version)
            trouble = file_trouble(directory, info)
            if trouble:
                damaged[name] = trouble
    return {"distributions": versions, "damaged": damaged}


def name_and_version(directory, info):
    """From METADATA; where that cannot be read, from the directory's name, without a version."""
    headers = {"Name": info.partition("-")[0], "Version": "?"}
    try:
        with open(os.path.join(directory, info, "METADATA"), encoding="utf-8", errors="replace") as stream:
            for line in stream:
                key, colon, value = line.partition(":")
                if not colon:
                    break
                if key in headers:
                    headers[key] = value.strip()
    except OSError:
        pass  # a version of "?" is what no lock holds
    return re.sub(r"[-_.]+", "-", headers["Name"]).lower(), headers["Version"]


def file_trouble(directory, info):
    """How many files of a distribution are not as its RECORD says, and the first of them; None when all are."""
    try:
        with open(os.path.join(directory, info, "RECORD"), encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if len(row) == 3]
    except (OSError, ValueError, csv.Error):
        return "its RECORD cannot be read"
    wrong = [row[0] for row in rows if not is_as_recorded(os.path.join(directory, row[0]), row[2])]
    return "{} of {} files missing or changed: {}".format(len(wrong), len(rows), wrong[0]) if wrong else None


def is_as_recorded(path, size):
    if path.endswith(".pyc"):
        return True
    try:
        found = os.stat(path).st_size
    except OSError:
        return False
    return not size.isdigit() or found == int(size) or os.path.basename(os.path.dirname(path)) == "bin"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
