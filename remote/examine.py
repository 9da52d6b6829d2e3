"""Facts of this node that only a search for faults wants: what the probe leaves out, because every launch waits for that.

Nothing here raises for what cannot be read: it is null, zero or empty then.
"""

import os
import resource
import time

import probe
import processes
import records
import topology

PROGRAMS = ("mpirun", "mpiexec.hydra", "hydra_bstrap_proxy", "hydra_pmi_proxy", "orted", "prted", "numactl", "ssh")
NFS_LIKE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "fuse.sshfs", "9p")
KEY_MARK = "cluster-train:"


def examine(root):
    """All of it; `root` is absolute."""
    tree = topology.Tree()
    home = os.path.expanduser("~")
    mounts = read_mounts(tree)
    place = nearest_directory(root)
    return {
        "home": describe_place(home, mounts),
        "root": dict(describe_place(place, mounts), error=writing_error(place), free_inodes=free_inodes(place)),
        "shm": {"total_bytes": total_bytes("/dev/shm"), "error": writing_error("/dev/shm")},
        "smt": tree.text("/sys/devices/system/cpu/smt/active") == "1",
        "governors": governors(tree),
        "limits": limits(),
        "has_rdma": bool(probe.list_names("/sys/class/infiniband")),
        "programs": {name: found for name, found in ((name, which(name)) for name in PROGRAMS) if found},
        "path": os.environ.get("PATH", ""),
        "ours": our_processes(),
        "keys": cluster_keys(os.path.join(home, ".ssh", "authorized_keys")),
        "busiest": busiest(),
        "time_unix_s": time.time(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Places


def read_mounts(tree):
    """[(mount point, kind of file system)]; a later mount hides an earlier one at the same place."""
    mounts = []
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        fields, _, kind = line.partition(" - ")
        words, kinds = fields.split(), kind.split()
        if len(words) > 4 and kinds:
            mounts.append((words[4].encode().decode("unicode_escape", "replace"), kinds[0]))
    return mounts


def describe_place(path, mounts):
    """Where a path lies: {"path", "filesystem", "is_remote"}."""
    real = os.path.realpath(path)
    above = [(len(point), index, kind) for index, (point, kind) in enumerate(mounts) if is_below(real, point)]
    kind = max(above)[2] if above else ""
    return {"path": path, "filesystem": kind, "is_remote": kind in NFS_LIKE}


def is_below(path, directory):
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def nearest_directory(path):
    """The nearest directory on the way to `path` that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def writing_error(directory):
    """Why no file can be written there; None where one can. Rights alone do not tell: disks fill, NFS refuses."""
    path = os.path.join(directory, ".cluster-train-doctor-%d" % os.getpid())
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, b"\0" * 4096)
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return None


def free_inodes(directory):
    """How many files can still be made there; None where the file system does not count them."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_favail if found.f_files else None


def total_bytes(directory):
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


# ---------------------------------------------------------------------------------------------------------------------
# The machine and its limits


def governors(tree):
    """The frequency governors of the CPUs, each once."""
    place = topology.CPU_DIRECTORY
    found = {tree.text("%s/cpu%d/cpufreq/scaling_governor" % (place, cpu)) for cpu in tree.numbered(place, "cpu")}
    return sorted(found - {None, ""})


def limits():
    """{name: [soft, hard]}; None stands for no limit."""
    names = {"open_files": resource.RLIMIT_NOFILE, "locked_bytes": resource.RLIMIT_MEMLOCK, "processes": resource.RLIMIT_NPROC}
    return {
        name: [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)]
        for name, number in names.items()
    }


def which(name):
    """The program that PATH has under this name, or None. PATH is that of a non-interactive login: the one mpirun will meet."""
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, name)
        if directory and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What runs here


def our_processes():
    """Living processes of runs: [{"pid", "run_id", "command"}]. Told by the variable that all processes of a run have."""
    found = []
    mark = (records.RUN_VARIABLE + "=").encode()
    for pid in pids():
        for variable in environment(pid):
            if variable.startswith(mark):
                run_id = variable[len(mark) :].decode("utf-8", "replace")
                found.append({"pid": pid, "run_id": run_id, "command": processes.command_line(pid)[:200]})
    return found


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def environment(pid):
    """The variables a process was started with; none of other people's, or of one that has gone."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def busiest():
    """{"user", "command"} of the process that has used most CPU time; None where nothing can be seen."""
    best = None
    for pid in pids():
        try:
            with open("/proc/%d/stat" % pid) as stream:
                fields = stream.read().rpartition(")")[2].split()
            ticks, uid = int(fields[11]) + int(fields[12]), os.stat("/proc/%d" % pid).st_uid
        except (OSError, ValueError, IndexError):
            continue
        if fields[0] == "R" and (best is None or ticks > best[0]):
            best = (ticks, pid, uid)
    return best and {"pid": best[1], "user": user_name(best[2]), "command": processes.command_line(best[1])[:200]}


def user_name(uid):
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def cluster_keys(path):
    """The keys of cluster-train that may log in: [{"comment", "is_restricted", "from"}]."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return []
    keys = []
    for line in lines:
        options, _, comment = line.partition(" ssh-")[0], None, line.rpartition(" ")[2]
        if comment.startswith(KEY_MARK) and not line.startswith("#"):
            origin = options.partition('from="')[2].partition('"')[0]
            keys.append({"comment": comment, "is_restricted": options.startswith("restrict"), "from": origin})
    return keys
