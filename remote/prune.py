"""Remove from this node the environments, wheels, jobs, agents and installers that are not to be kept.

Usage: prune.py used ROOT COUNT      prints {"envs": [name, ...], "jobs": [...], "agents": [...]}: what the newest COUNT runs that
                                     were started from this node use, and all its runs that have not ended
       prune.py survey ROOT < keep   prints {"envs": [{"name", "size_bytes"}, ...], "wheels": ..., "jobs": ..., "agents": ...,
                                     "installers": ..., "freed_bytes"}: what `remove` would take away
       prune.py busy ROOT < keep     prints {"envs": [name, ...], ...}: what of that processes of this machine work in
       prune.py remove ROOT < keep   prints {"removed": [path, ...], "in_use": [path, ...]}

`keep` is {"envs": [name, ...], "wheels": [...], "jobs": [...], "agents": [...], "installers": [...]}; the wheels of kept
environments are kept too. Only what bears one of our names is ever touched, and nothing through a symbolic link. What a
process works in, or an installer builds, is left, and named. Where an environment goes, uv's cache goes with it: its files
are the same ones.
"""

import fcntl
import json
import os
import re
import sys

import records
import repair
import runs
import unpack

DIRECTORIES = {"envs": "envs", "wheels": "wheelhouse", "jobs": "jobs", "agents": "agent", "installers": "bin"}
NAMES = {"envs": "[0-9a-f]{16}", "wheels": "[0-9a-f]{64}", "jobs": "[0-9a-f]{16}", "agents": "[0-9a-f]{16}"}
NAMES["installers"] = "uv-[0-9a-f]{16}"
COMMANDS = ("survey", "busy", "remove")


def main(arguments):
    """Carry out one of the four commands; 0, or 1 after saying on stderr what was wrong."""
    try:
        command, root = arguments[0], os.path.abspath(os.path.expanduser(arguments[1]))
        if command == "used":
            answer = used(root, int(arguments[2]))
        else:
            doomed = not_kept(root, json.load(sys.stdin))
            answer = (survey, busy, remove)[COMMANDS.index(command)](root, doomed)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        sys.stderr.write("prune: {!r}\n".format(error))
        return 1
    print(json.dumps(answer))
    return 0


def used(root, count):
    """What recent runs, and runs that may still go on, were started with."""
    found = {"envs": set(), "jobs": set(), "agents": set()}
    headed = [(run, records.read_record(os.path.join(run.run_dir, "run.json"))) for run in runs.find_all(root)]
    for index, (run, order) in enumerate((run, order) for run, order in headed if order):
        if index < count or not run.is_final:
            launch = order["launch"]
            found["envs"].add(os.path.basename(os.path.dirname(os.path.dirname(launch["python"]))))
            found["agents"].add(os.path.basename(launch["agent_dir"]))
            found["jobs"].add(os.path.basename(launch["job_dir"] or ""))
    return {kind: sorted(names - {""}) for kind, names in found.items()}


def not_kept(root, keep):
    """{kind: [name, ...]} of what is here, complete, ours, and not to be kept."""
    wheels = set(keep["wheels"])
    for name in keep["envs"]:
        record = records.read_record(os.path.join(root, "envs", name, "complete.json"))
        wheels.update(wheel["sha256"] for wheel in (record["wheels"] if record else []))
    kept = dict(keep, wheels=wheels)
    return {kind: [name for name in ours(root, kind) if name not in kept[kind]] for kind in DIRECTORIES}


def ours(root, kind):
    directory = os.path.join(root, DIRECTORIES[kind])
    if os.path.islink(directory) or not os.path.isdir(directory):
        return []
    names = [name for name in sorted(os.listdir(directory)) if re.match(NAMES[kind] + "$", name)]
    is_ours = os.path.isfile if kind == "installers" else os.path.isdir
    paths = {name: os.path.join(directory, name) for name in names}
    return [name for name in names if is_ours(paths[name]) and not os.path.islink(paths[name])]


def is_real_directory(path):
    return os.path.isdir(path) and not os.path.islink(path)


def path_of(root, kind, name):
    return os.path.join(root, DIRECTORIES[kind], name)


def survey(root, doomed):
    """The size of each, and what the disk gets back: files that stay linked elsewhere free nothing."""
    report, links = {}, {}
    for kind, names in doomed.items():
        report[kind] = [{"name": name, "size_bytes": measure(path_of(root, kind, name), links)} for name in names]
    if doomed["envs"]:
        measure(uv_cache(root), links)
    report["freed_bytes"] = sum(size for size, count, found in links.values() if found >= count)
    return report


def measure(path, links):
    """The bytes of a file or of all below a path, each once; `links` counts what was seen of it: {id: [size, links, found]}."""
    sizes = {}
    found = [path] if os.path.isfile(path) else []
    found += [os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names]
    for each in found:
        status = os.lstat(each)
        identity = (status.st_dev, status.st_ino)
        sizes[identity] = status.st_size
        links.setdefault(identity, [status.st_size, status.st_nlink, 0])[2] += 1
    return sum(sizes.values())


def busy(root, doomed):
    """What a process of this machine works in: on a disk that several share, each has to be asked."""
    return {kind: [name for name in names if repair.users_of(path_of(root, kind, name))] for kind, names in doomed.items()}


def remove(root, doomed):
    """Take away what can be; a directory is renamed first, so that nothing is ever seen half removed."""
    answer = {"removed": [], "in_use": []}
    for kind, names in doomed.items():
        if names:
            with unpack.sharing(os.path.join(root, DIRECTORIES[kind])):  # clears what a killed one of us left
                for name in names:
                    path = path_of(root, kind, name)
                    answer["removed" if remove_one(root, kind, name, path) else "in_use"].append(path)
    for name in doomed["jobs"]:
        manifest = os.path.join(root, "jobs", ".manifests", name + ".json")
        if not os.path.isdir(path_of(root, "jobs", name)) and os.path.exists(manifest):
            os.unlink(manifest)
    link = os.path.join(root, "bin", "uv")
    if os.path.islink(link) and not os.path.exists(link):
        os.unlink(link)  # the next installer makes it again
    if doomed["envs"] and is_real_directory(uv_cache(root)):
        repair.remove(uv_cache(root))
    return answer


def remove_one(root, kind, name, path):
    """Whether it is gone; False for what is in use."""
    if kind != "envs":
        return is_removed(path)
    with open(os.path.join(root, "envs", ".{}.lock".format(name)), "w") as lock:  # the installer's
        return unpack.is_locked(lock.fileno(), fcntl.LOCK_EX) and is_removed(path)


def is_removed(path):
    if repair.users_of(path):
        return False
    repair.remove(path)  # it may have gone meanwhile, where several nodes share a disk
    return True


def uv_cache(root):
    return os.path.join(root, "cache", "uv")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
