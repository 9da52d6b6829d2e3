"""What the setvars.sh of the retired oneCCL bindings does, as its effect on an environment instead of a script to source.

Usage: setvars.py ROOT DIGEST

Prints {"effect": null} where the environment has no such script (or is not there), else

{"effect": {"module": the bindings' module, "file": path of the script,
            "set": {name: value}, "prepended": {name: directories to be put before what a rank has already}}}

as the installer recorded it in complete.json: the script runs once, while the environment is made, in a clean shell. Lists of
directories that a person may have too (PATH, LD_LIBRARY_PATH, ...) are told as what is added, so that a rank keeps its own.
"""

import json
import os
import shutil
import subprocess
import sys

MODULES = ("oneccl_bindings_for_pytorch", "torch_ccl")  # the bindings' names since 1.12 and before
SCRIPT = os.path.join("env", "setvars.sh")
LIMIT_S = 300.0  # importing torch from a cold disk takes its time

# Lists of directories, with a value that the script's additions are told apart from. PATH must find what scripts call.
LISTS = dict(
    {
        name: "/nonexistent"
        for name in (
            *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH"),
            *("PYTHONPATH", "MANPATH", "INFOPATH", "CLASSPATH", "CMAKE_PREFIX_PATH", "NLSPATH"),
        )
    },
    PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
)
SHELLS_OWN = ("PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV")

# A sourced script sees the positional parameters of the shell: it must get none, for it takes them for its options.
SOURCE = 'file=$1; set --; . "$file" >/dev/null; export CLUSTER_TRAIN_SOURCED=$?; unset file; exec /usr/bin/env -0'
STATUS = "CLUSTER_TRAIN_SOURCED"

# Some releases load their libraries only once the script has been sourced: then the directory is found without importing.
LOCATE = """
import importlib, importlib.util, os, sys
name = sys.argv[1]
try:
    module = importlib.import_module(name)
    directory = getattr(module, "cwd", None) or os.path.dirname(os.path.abspath(module.__file__))
except ModuleNotFoundError:
    raise
except Exception:
    directory = os.path.dirname(importlib.util.find_spec(name).origin)
print(directory)
"""


class SetvarsError(Exception):
    """The script could not be run; the message says why."""


def main(arguments):
    """Print the recorded effect; 0, or 1 after saying on stderr what was wrong."""
    try:
        root, digest = arguments
        effect = recorded(os.path.join(os.path.expanduser(root), "envs", digest))
    except (OSError, ValueError) as error:
        sys.stderr.write("setvars: {}\n".format(error))
        return 1
    print(json.dumps({"effect": effect}))
    return 0


def recorded(environment):
    """The effect that the installer wrote down; None where it wrote none, or nothing is installed."""
    path = os.path.join(environment, "complete.json")
    if not os.path.exists(path):
        return None
    with open(path) as record:
        return json.load(record).get("environment")


def effect_in(environment, modules):
    """The effect of the script that the bindings among `modules` bring into an environment; None where there is none.

    Raises SetvarsError where the script is there and cannot be run.
    """
    for module in MODULES:
        path = os.path.join(locate(environment, module), SCRIPT) if module in modules else ""
        if os.path.isfile(path):
            return dict(effect_of(path), module=module, file=path)
    return None


def locate(environment, module):
    """The directory in which the bindings keep `env/`; "" where they cannot be found."""
    command = [os.path.join(environment, "bin", "python"), "-c", LOCATE, module]
    code, output, _ = call(command, dict(base(), PYTHONPATH=""))
    lines = output.decode("utf-8", "surrogateescape").splitlines()
    return lines[-1] if code == 0 and lines else ""


def effect_of(path):
    """{"set", "prepended"}: what sourcing a script changes in a clean environment.

    A last command that fails is common and no error; a script that fails and does nothing is one, and so is bad syntax, after
    which a shell would go on with half of the script.
    """
    shell = shutil.which("bash") or "/bin/sh"
    code, _, errors = call([shell, "-n", path], base())
    if code != 0:
        raise refusal(path, errors)
    before, _ = variables(shell, os.devnull)
    after, errors = variables(shell, path)
    failed = after.pop(STATUS) != before.pop(STATUS)
    effect = {"set": {}, "prepended": {}}
    for name in sorted(set(after) - set(SHELLS_OWN)):
        old, new = before.get(name), after[name]
        if new == old:
            continue
        if name in LISTS and old in new:
            front, _, back = new.partition(old)
            effect["prepended"][name] = ":".join(part.strip(":") for part in (front, back) if part.strip(":"))
        else:
            effect["set"][name] = new
    if failed and not (effect["set"] or effect["prepended"]):
        raise refusal(path, errors)
    return effect


def variables(shell, path):
    """(environment of a shell that has sourced a script, by name; what it said on stderr)."""
    code, output, errors = call([shell, "-c", SOURCE, "setvars", path], base())
    found = dict(entry.split("=", 1) for entry in output.decode("utf-8", "surrogateescape").split("\0") if "=" in entry)
    if code != 0 or STATUS not in found:
        raise refusal(path, errors)
    return found, errors


def refusal(path, errors):
    last = errors.decode("utf-8", "replace").strip().splitlines()[-3:]
    return SetvarsError("{} cannot be sourced: {}".format(path, "\n".join(last) or "it ends the shell"))


def base():
    """What a program needs and no more: nothing that a start-up file set can show in the effect."""
    kept = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "TMPDIR") if name in os.environ}
    return dict(kept, **LISTS)


def call(argv, environment):
    """(exit code, stdout, stderr) of a command that is given a limited time."""
    process = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SetvarsError("{} took longer than {:.0f} s".format(argv[0], LIMIT_S))
    return process.returncode, output, errors


def moved(effect, building, final):
    """The effect once its environment has been renamed."""

    def new(text):
        for old in (os.path.realpath(building), building):
            text = text.replace(old, final)
        return text

    if effect is None:
        return None
    told = {kind: {name: new(value) for name, value in effect[kind].items()} for kind in ("set", "prepended")}
    return dict(told, module=effect["module"], file=new(effect["file"]))


def applied(effect, environment):
    """A copy of an environment with an effect applied; None changes nothing."""
    changed = dict(environment)
    if effect:
        changed.update(effect["set"])
        for name, directories in effect["prepended"].items():
            changed[name] = directories + (":" + changed[name] if changed.get(name) else "")
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
