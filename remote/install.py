"""Make one environment on this node from the wheelhouse: build beside, verify, rename.

Usage: install.py < plan

The plan: {"root", "digest", "python", "wheels": [{"name", "version", "sha256", "filename"}], "verify": [module, ...],
"uv": {"sha256", "filename"} or null}. Nothing is fetched from anywhere: every wheel lies in `<root>/wheelhouse/<sha256>/`
already and is installed with its hash required. An environment `<root>/envs/<digest>` either exists and is complete (it holds
complete.json) or does not exist. Two installers of one digest wait for each other on a lock that dies with its owner.

Prints JSON lines: {"step": ..., "detail": ...} while it works, {"installed": bool, "versions": {...}, "seconds": ...} at the end;
an error is told on stderr with exit code 1.
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
from urllib.request import pathname2url

COMPLETE = "complete.json"


class InstallError(Exception):
    """The environment could not be made; the message says why."""


def main():
    """Carry out the plan on stdin; 0, or 1 after saying on stderr what was wrong."""
    plan = json.load(sys.stdin)
    root = os.path.expanduser(plan["root"])
    started = time.time()
    try:
        versions, installed = ensure(root, plan)
    except (InstallError, OSError, ValueError, KeyError) as error:
        sys.stderr.write("install: {}\n".format(error))
        return 1
    say({"installed": installed, "versions": versions, "seconds": round(time.time() - started, 3)})
    return 0


def say(document):
    print(json.dumps(document))
    sys.stdout.flush()


def ensure(root, plan):
    """(versions, whether anything was installed) of a complete environment."""
    envs = os.path.join(root, "envs")
    final = os.path.join(envs, plan["digest"])
    os.makedirs(envs, mode=0o700, exist_ok=True)
    with open(os.path.join(envs, ".{}.lock".format(plan["digest"])), "w") as lock:
        say({"step": "lock", "detail": plan["digest"]})
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(final, COMPLETE)):
            with open(os.path.join(final, COMPLETE)) as record:
                return json.load(record)["versions"], False
        clear_unfinished(envs, plan["digest"])
        building = os.path.join(envs, ".{}.building".format(plan["digest"]))
        versions = build(root, plan, building, final)
        os.rename(building, final)
        return versions, True


def clear_unfinished(envs, digest):
    """Remove what an installer that died left behind; we hold the lock, so nobody else is at it."""
    for name in (".{}.building".format(digest), digest):
        path = os.path.join(envs, name)
        if os.path.isdir(path):
            shutil.rmtree(path)


def build(root, plan, building, final):
    uv = ensure_uv(root, plan["uv"]) if plan["uv"] else None
    requirements = building + ".txt"
    with open(requirements, "w") as out:
        for wheel in plan["wheels"]:
            path = os.path.join(root, "wheelhouse", wheel["sha256"], wheel["filename"])
            if not os.path.exists(path):
                raise InstallError("the wheelhouse lacks {}".format(wheel["filename"]))
            out.write("{} @ file://{} --hash=sha256:{}\n".format(wheel["name"], pathname2url(path), wheel["sha256"]))
    try:
        say({"step": "install", "detail": "{} wheels with {}".format(len(plan["wheels"]), "uv" if uv else "pip")})
        if uv:
            install_with_uv(root, uv, plan["python"], building, requirements)
        else:
            install_with_pip(plan["python"], building, requirements)
        rename_in_scripts(building, final)
        say({"step": "verify", "detail": ", ".join(plan["verify"])})
        versions = verify(os.path.join(building, "bin", "python"), plan["verify"])
        with open(os.path.join(building, COMPLETE), "w") as out:
            json.dump({"digest": plan["digest"], "versions": versions, "wheels": plan["wheels"]}, out)
        return versions
    finally:
        os.unlink(requirements)


def ensure_uv(root, wheel):
    """The path of uv's static binary, unpacked from its wheel; None where it does not run on this machine."""
    path = os.path.join(root, "bin", "uv-{}".format(wheel["sha256"][:16]))
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        archive = os.path.join(root, "wheelhouse", wheel["sha256"], wheel["filename"])
        temporary = "{}.{}.part".format(path, os.getpid())
        with zipfile.ZipFile(archive) as files, open(temporary, "wb") as out:
            (member,) = [name for name in files.namelist() if name.endswith(".data/scripts/uv")]
            with files.open(member) as source:
                shutil.copyfileobj(source, out)
        os.chmod(temporary, 0o700)
        os.rename(temporary, path)
    link = os.path.join(root, "bin", "uv")
    if not os.path.exists(link):
        temporary = "{}.{}.part".format(link, os.getpid())
        os.symlink(os.path.basename(path), temporary)
        os.rename(temporary, link)
    try:
        call([path, "--version"], {})
    except InstallError as error:
        sys.stderr.write("install: uv does not run here, pip is used: {}\n".format(error))
        return None
    return path


def install_with_uv(root, uv, python, building, requirements):
    environment = {
        "UV_CACHE_DIR": os.path.join(root, "cache", "uv"),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    call([uv, "venv", "--quiet", "--python", python, building], environment)
    call(
        [uv, "pip", "install", "--quiet", "--no-index", "--no-deps", "--require-hashes"]
        + ["--python", os.path.join(building, "bin", "python"), "-r", requirements],
        environment,
    )


def install_with_pip(python, building, requirements):
    environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    call([python, "-m", "venv", building], environment)
    call(
        [os.path.join(building, "bin", "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        + ["--require-hashes", "-r", requirements],
        environment,
    )


def call(argv, environment):
    """Run a command to its end; raises InstallError with the end of what it said."""
    full = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV"))}
    full.update(environment)
    process = subprocess.Popen(argv, env=full, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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


CHECK = """
import importlib, importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    versions[name] = str(getattr(module, "__version__", "")) or importlib.metadata.version(name)
print(json.dumps(versions))
"""


def verify(python, modules):
    """The versions that the modules say of themselves; raises InstallError when one cannot be imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    process = subprocess.Popen(
        [python, "-c", CHECK] + modules,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate()
    if process.returncode != 0:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-6:]
        raise InstallError("the new environment does not import: {}".format("\n".join(last)))
    return json.loads(output.decode().strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
