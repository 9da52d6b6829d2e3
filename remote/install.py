"""Make one environment on this node from the wheelhouse: build beside, verify, rename.

Usage: install.py < plan

The plan: {"root", "digest", "python", "wheels": [{"name", "version", "sha256", "filename"}], "verify": [module, ...],
"try": [module that need not import, ...], "uv": {"sha256", "filename"} or null}. Nothing is fetched from anywhere: every wheel
lies in `<root>/wheelhouse/<sha256>/` already and is installed with its hash required. An environment `<root>/envs/<digest>`
either exists and is complete (it holds complete.json, in which stands what a setvars.sh of its does: see setvars.py; and
unusable.json, {module: why}, where one of "try" does not import) or does not exist. Two installers of one digest wait for each
other on a lock that dies with its owner and with what the owner started: an orphaned pip never writes into the directory of the
next installer.

An installer whose caller has gone finishes all the same: the next `provision` finds its environment, or waits for it.

Prints JSON lines: {"step": ..., "detail": ...} while it works, {"installed": bool, "versions": {...}, "unusable": {module: why},
"seconds": ...} at the end; an error is told on stderr with exit code 1, after {"damaged": [path, ...]} where files here are to
blame: repair.py removes them.
"""

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from urllib.parse import quote

import repair
import setvars
import unpack

COMPLETE = "complete.json"
UNUSABLE = "unusable.json"  # as in probe.py
BUILDING = ".building"


class InstallError(Exception):
    """The environment could not be made; the message says why."""


class DamagedError(InstallError):
    """What is here already is damaged; `paths` are for repair.py to remove."""

    def __init__(self, paths, why):
        InstallError.__init__(self, "damaged: {} ({})".format(", ".join(paths), why))
        self.paths = paths


def main():
    """Carry out the plan on stdin; 0, or 1 after saying on stderr what was wrong."""
    plan = json.load(sys.stdin)
    root = os.path.expanduser(plan["root"])
    started = time.time()
    try:
        versions, installed = ensure(root, plan)
        unusable = unusable_in(os.path.join(root, "envs", plan["digest"]))
    except (InstallError, setvars.SetvarsError, OSError, ValueError, KeyError) as error:
        if isinstance(error, DamagedError):
            say({"damaged": error.paths})
        sys.stderr.write("install: {}\n".format(error))
        return 1
    say({"installed": installed, "versions": versions, "unusable": unusable, "seconds": round(time.time() - started, 3)})
    return 0


def say(document):
    try:
        print(json.dumps(document))
        sys.stdout.flush()
    except BrokenPipeError:  # nobody listens any more, and the environment is wanted all the same
        sys.stdout = open(os.devnull, "w")


def ensure(root, plan):
    """(versions, whether anything was installed) of a complete environment."""
    envs = os.path.join(root, "envs")
    final = os.path.join(envs, plan["digest"])
    os.makedirs(envs, mode=0o700, exist_ok=True)
    with locked(envs, plan["digest"]) as lock:
        if os.path.exists(os.path.join(final, COMPLETE)):
            return versions_of(final), False
        building = building_path(envs, plan["digest"])
        clear_unfinished(envs, plan["digest"])
        try:
            versions = build(root, plan, building, final, lock)
            os.rename(building, final)
        finally:
            remove_all(building, building + ".txt")
        return versions, True


def versions_of(environment):
    """What the record of a complete environment says is in it; raises DamagedError where it cannot be used."""
    python = os.path.join(environment, "bin", "python")
    if not os.access(python, os.X_OK):
        raise DamagedError([environment], "its interpreter {} cannot be run".format(os.path.realpath(python)))
    try:
        with open(os.path.join(environment, COMPLETE)) as record:
            return json.load(record)["versions"]
    except (ValueError, KeyError) as error:
        raise DamagedError([environment], "its {} cannot be read: {!r}".format(COMPLETE, error))


def unusable_in(environment):
    """{module: why} of what need not import in a complete environment, and does not."""
    path = os.path.join(environment, UNUSABLE)
    if not os.path.exists(path):
        return {}
    with open(path) as record:
        return json.load(record)


def locked(envs, digest):
    """The open file that holds the lock of a digest; waits for whoever has it."""
    lock = open(os.path.join(envs, ".{}.lock".format(digest)), "w")
    say({"step": "lock", "detail": digest})
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def building_path(envs, digest):
    return os.path.join(envs, ".{}{}".format(digest, BUILDING))


def clear_unfinished(envs, digest):
    """Remove what installers that died left behind: of our digest, whose lock we hold, and of those whose lock is free."""
    remove_all(os.path.join(envs, digest), building_path(envs, digest), building_path(envs, digest) + ".txt")
    for name in os.listdir(envs):
        other = name[1 : -len(BUILDING)]
        if name.startswith(".") and name.endswith(BUILDING) and other != digest:
            with open(os.path.join(envs, ".{}.lock".format(other)), "w") as lock:
                if unpack.is_locked(lock.fileno(), fcntl.LOCK_EX):
                    remove_all(building_path(envs, other), building_path(envs, other) + ".txt")


def remove_all(*paths):
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.unlink(path)


def build(root, plan, building, final, lock):
    """Make the environment in `building`, fit to be renamed to `final`; the versions in it."""
    try:
        return build_from_wheels(root, plan, building, final, lock)
    except (InstallError, zipfile.BadZipfile) as error:
        wheels = plan["wheels"] + ([plan["uv"]] if plan["uv"] else [])
        houses = [os.path.join(root, "wheelhouse", wheel["sha256"]) for wheel in wheels]
        damaged = [house for house in houses if os.path.isdir(house) and not repair.is_sound(house)]
        if not damaged:
            raise
        paths = [os.path.join(house, name) for house in damaged for name in os.listdir(house)]
        raise DamagedError(paths, error)


def build_from_wheels(root, plan, building, final, lock):
    uv = ensure_uv(root, plan["uv"]) if plan["uv"] else None
    requirements = building + ".txt"
    with open(requirements, "w") as out:
        for wheel in plan["wheels"]:
            path = os.path.join(root, "wheelhouse", wheel["sha256"], wheel["filename"])
            if not os.path.exists(path):
                raise InstallError("the wheelhouse lacks {}".format(wheel["filename"]))
            # The pip of Python 3.6 takes no name before a URL, uv wants one.
            named = "{} @ ".format(wheel["name"]) if uv else ""
            out.write("{}file://{} --hash=sha256:{}\n".format(named, quote(path), wheel["sha256"]))
    say({"step": "install", "detail": "{} wheels with {}".format(len(plan["wheels"]), "uv" if uv else "pip")})
    if uv:
        install_with_uv(root, uv, plan["python"], building, requirements, lock)
    else:
        install_with_pip(plan["python"], building, requirements, lock)
    rename_in_scripts(building, final)
    say({"step": "verify", "detail": ", ".join(plan["verify"])})
    effect = setvars.effect_in(building, plan["verify"])
    versions = verify(os.path.join(building, "bin", "python"), plan["verify"], effect)
    try_modules(building, plan.get("try", ()), effect)
    record = {"digest": plan["digest"], "versions": versions, "wheels": plan["wheels"]}
    with open(os.path.join(building, COMPLETE), "w") as out:
        json.dump(dict(record, environment=setvars.moved(effect, building, final)), out)
    return versions


def ensure_uv(root, wheel):
    """The path of uv's static binary, unpacked from its wheel; None where it does not run on this machine."""
    directory = os.path.join(root, "bin")
    name = "uv-{}".format(wheel["sha256"][:16])
    path, link = os.path.join(directory, name), os.path.join(directory, "uv")
    if not (os.path.exists(path) and os.path.exists(link)):
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with unpack.sharing(directory):
            partial = unpack.partial_name(directory, name)
            try:
                unpack.make_partial(partial)
                extract_uv(os.path.join(root, "wheelhouse", wheel["sha256"], wheel["filename"]), os.path.join(partial, name))
                os.rename(os.path.join(partial, name), path)
                os.symlink(name, os.path.join(partial, "uv"))
                os.rename(os.path.join(partial, "uv"), link)
            finally:
                unpack.remove(partial)
    try:
        call([path, "--version"], {})
    except InstallError as error:
        sys.stderr.write("install: uv does not run here, pip is used: {}\n".format(error))
        return None
    return path


def extract_uv(archive, target):
    with zipfile.ZipFile(archive) as files, open(target, "wb") as out:
        (member,) = [name for name in files.namelist() if name.endswith(".data/scripts/uv")]
        with files.open(member) as source:
            shutil.copyfileobj(source, out)
    os.chmod(target, 0o700)


def install_with_uv(root, uv, python, building, requirements, lock):
    environment = {
        "UV_CACHE_DIR": os.path.join(root, "cache", "uv"),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    call([uv, "venv", "--quiet", "--python", python, building], environment, lock)
    call(
        [uv, "pip", "install", "--quiet", "--no-index", "--no-deps", "--require-hashes"]
        + ["--python", os.path.join(building, "bin", "python"), "-r", requirements],
        environment,
        lock,
    )


def install_with_pip(python, building, requirements, lock):
    try:
        call([python, "-c", "import ensurepip, venv"], {}, lock)
    except InstallError as error:
        hint = "Debian: apt-get install python3-venv; uv, which needs neither, takes Python 3.8 and newer"
        raise InstallError("{} lacks the module venv or ensurepip ({}): {}".format(python, hint, error))
    environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    call([python, "-m", "venv", building], environment, lock)
    call(
        [os.path.join(building, "bin", "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        + ["--require-hashes", "-r", requirements],
        environment,
        lock,
    )


def call(argv, environment, lock=None):
    """Run a command, which shares in `lock`, to its end; raises InstallError with the end of what it said."""
    full = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV"))}
    full.update(environment)
    process = subprocess.Popen(
        argv,
        env=full,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[lock.fileno()] if lock else [],
    )
    output, _ = process.communicate()
    if process.returncode != 0:
        last = output.decode("utf-8", "replace").strip().splitlines()[-8:]
        raise InstallError("{} failed ({}): {}".format(os.path.basename(argv[0]), process.returncode, "\n".join(last)))


def rename_in_scripts(building, final):
    """Console scripts and `activate` name the directory that they were installed in: give them its final name."""
    directory = os.path.join(building, "bin")
    old, new = building.encode(), final.encode()
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) or os.path.getsize(path) > 1 << 20:
            continue
        with open(path, "rb") as source:
            content = source.read()
        if old in content and b"\0" not in content:
            with open(path, "wb") as out:
                out.write(content.replace(old, new))


ANSWER = "imported: "  # stands before what CHECK tells; a module may print as well

# Collecting garbage, of which importing leaves none to speak of, is a tenth of the time that importing takes; taking apart
# what was imported, as an interpreter does at its end, is another.
CHECK = """
import gc, importlib, json, os, sys
gc.disable()
versions = {}
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    versions[name] = str(getattr(module, "__version__", ""))
    if not versions[name] and sys.version_info >= (3, 8):
        import importlib.metadata
        versions[name] = importlib.metadata.version(name)
print(sys.argv[1] + json.dumps(versions), flush=True)
os._exit(0)
"""


def try_modules(building, modules, effect):
    """Note which of the modules that need not import do not: probe.py tells it to whoever chooses what a run uses."""
    unusable = {}
    for module in modules:
        _, said = import_in(os.path.join(building, "bin", "python"), [module], effect)
        if said:
            unusable[module] = said[-1]
    if unusable:
        with open(os.path.join(building, UNUSABLE), "w") as out:
            json.dump(unusable, out)


def verify(python, modules, effect):
    """The versions that the modules say of themselves; raises InstallError when one cannot be imported."""
    versions, said = import_in(python, modules, effect)
    if said:
        raise InstallError("the new environment does not import: {}".format("\n".join(said)))
    return versions


def import_in(python, modules, effect):
    """(versions, nothing), or (None, the last lines of what was said) where a module cannot be imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = setvars.applied(effect, environment)
    process = subprocess.Popen(
        [python, "-c", CHECK, ANSWER] + list(modules),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate()
    answer = output.decode("utf-8", "replace").rpartition(ANSWER)[2]
    if process.returncode != 0 or ANSWER.encode() not in output:  # a module may end the interpreter, with 0 too
        said = errors.decode("utf-8", "replace").strip().splitlines()[-6:]
        return None, said or ["importing it ended with {}".format(process.returncode)]  # -4: by SIGILL
    return json.loads(answer), []


if __name__ == "__main__":
    sys.exit(main())
