"""Print the facts about this node as one JSON object; change nothing.

Usage: probe.py [--root ROOT] [--ports A-B] [--sys-root DIR]

ROOT is the directory where everything of cluster-train lies on this node ("~" is expanded). With --sys-root, DIR/proc
and DIR/sys are read in place of /proc and /sys (the files of another machine); what does not stand in such files is
then left neutral, and every CPU that is online counts as allowed. What cannot be read is null, zero or empty; a line on
stderr says so where it matters.

Units are in the names; `shm_bytes` and `disk.free_bytes` are what is free now. `cpu.logical` holds only the CPUs we may
use, and its `core` numbers are unique within the machine (see topology.read_topology).
"""

import json
import os
import pwd
import resource
import sys
import time
from importlib.machinery import PathFinder

import addresses
import topology

SCHEMA = 1
DEFAULT_ROOT = "~/.cluster-train"
DEFAULT_PORTS = (29500, 29999)
KEY_MARK = "cluster-train:"
IMPLEMENTATIONS = {"cpython": "CPython", "pypy": "PyPy"}
PYTHONS = range(6, 21)  # the minor versions of Python 3 that are looked for


def main(arguments):
    """Print the facts; 0, or 2 after saying on stderr which option was bad."""
    try:
        root, ports, sys_root = parse_options(arguments)
    except ValueError as error:
        sys.stderr.write("probe: {}\n".format(error))
        return 2
    if sys_root:
        facts = neutral_facts(topology.Tree(sys_root))
    else:
        facts = live_facts(os.path.abspath(os.path.expanduser(root)), ports)
    print(json.dumps(facts, sort_keys=True))
    return 0


def parse_options(arguments):
    """(root, range of ports, sys_root); ValueError for a bad option. argparse would take a third of the probe's time."""
    given = {arguments[index]: arguments[index + 1] for index in range(0, len(arguments) - 1, 2)}
    if len(arguments) % 2 or not set(given) <= {"--root", "--ports", "--sys-root"}:
        raise ValueError("usage: probe.py [--root ROOT] [--ports A-B] [--sys-root DIR]")
    ports = port_range(given["--ports"]) if "--ports" in given else DEFAULT_PORTS
    return given.get("--root", DEFAULT_ROOT), ports, given.get("--sys-root")


def port_range(text):
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536):
        raise ValueError("{!r} is not a range of ports such as 29500-29999".format(text))
    return int(first), int(last)


# ---------------------------------------------------------------------------------------------------------------------
# What stands in files below /proc and /sys


def file_facts(tree, affinity):
    """The facts that files tell. `affinity`: the CPUs the kernel lets us run on; None where only the files count."""
    cpus, nodes = topology.read_topology(tree)
    model, flags = topology.model_and_flags(tree)
    memory = topology.meminfo(tree.text("/proc/meminfo"))
    load = (tree.text("/proc/loadavg") or "0").split()[0]
    return {
        "schema": SCHEMA,
        "hostname": tree.text("/proc/sys/kernel/hostname") or "",
        "kernel": tree.text("/proc/sys/kernel/osrelease") or "",
        "machine": {"boot_id": tree.text("/proc/sys/kernel/random/boot_id") or "", "mount_namespace": ""},
        "cpu": {
            "model": model,
            "flags": flags,
            "logical": allowed_cpus(cpus, affinity, topology.cgroup_cpus(tree)),
            "online": len(cpus),
            "cgroup_cpu_limit": topology.cgroup_cpu_limit(tree),
        },
        "numa": nodes,
        "memory": {
            "total_bytes": memory.get("MemTotal", 0),
            "available_bytes": memory.get("MemAvailable", memory.get("MemFree", 0)),
            "cgroup_limit_bytes": topology.cgroup_memory_limit(tree),
        },
        "load_1m": float(load),
    }


def allowed_cpus(cpus, affinity, cpuset):
    """The CPUs that are in every given set; a set that names none of the machine's CPUs is not believed."""
    for allowed in (affinity, cpuset):
        cpus = [cpu for cpu in cpus if allowed is None or cpu["cpu"] in allowed] or cpus
    return cpus


def neutral_facts(tree):
    """All facts, with nothing about the machine this runs on."""
    facts = {
        "user": "",
        "home": "",
        "root": "",
        "arch": "",
        "libc": ["", ""],
        "python": {"executable": "", "version": "", "markers": {}, "has_venv": False, "others": []},
        "interfaces": [],
        "hostname_resolves_to": [],
        "ssh_connection": None,
        "disk": {"free_bytes": 0, "writable": False},
        "shm_bytes": 0,
        "time_unix_s": 0.0,
        "open_files_limit": 0,
        "free_ports": [],
        "state": {
            "agents": [],
            "envs": [],
            "unusable": [],
            "wheels": [],
            "jobs": [],
            "runs": [],
            "uv": False,
            "nonce_dir_id": None,
        },
        "cluster_key": None,
        "authorized": [],
    }
    facts.update(file_facts(tree, None))
    return facts


# ---------------------------------------------------------------------------------------------------------------------
# What only the running machine tells


def live_facts(root, ports):
    """All facts of this machine; `root` is absolute."""
    names = os.uname()
    libc = libc_version(names.machine)
    resolving = addresses.Resolution(names.nodename)
    facts = file_facts(topology.Tree(), os.sched_getaffinity(0))
    facts["machine"]["mount_namespace"] = mount_namespace()
    facts.update(
        {
            "hostname": names.nodename,
            "kernel": names.release,
            "user": user_name(),
            "home": os.path.expanduser("~"),
            "root": root,
            "arch": names.machine,
            "libc": libc,
            "python": python_facts(names),
            "interfaces": addresses.read_interfaces(),
            "ssh_connection": ssh_connection(os.environ.get("SSH_CONNECTION", "")),
            "disk": disk_facts(root),
            "shm_bytes": free_bytes("/dev/shm"),
            "time_unix_s": time.time(),
            "open_files_limit": open_files_limit(),
            "free_ports": addresses.free_ports(*ports),
            "state": read_state(root),
            "cluster_key": read_cluster_key(root),
            "authorized": authorized_marks(os.path.expanduser("~/.ssh/authorized_keys")),
        }
    )
    facts["hostname_resolves_to"] = resolving.wait()
    return facts


def mount_namespace():
    """Two processes that see the same namespace see the same files: this tells containers of one machine apart."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def user_name():
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run under numbers that have no name
        return os.environ.get("USER") or str(os.getuid())


def libc_version(machine):
    """["glibc", "2.36"], ["musl", "1.2"] or ["", ""]."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):  # not the GNU C library
        name, version = "", ""
    loader = "/lib/ld-musl-{}.so.1".format(machine)
    if not name and os.path.exists(loader):
        with os.popen(loader + " 2>&1") as output:  # without arguments musl's loader tells its version
            return ["musl", musl_version(output.read())]
    return [name, version]


def musl_version(text):
    """The version in "musl libc (x86_64)\\nVersion 1.2.4\\n..."."""
    return text.partition("Version ")[2].partition("\n")[0].strip()


def python_facts(names):
    """This interpreter. `has_venv`: `python -m venv` works (Debian ships ensurepip in a package of its own)."""
    has_venv = all(PathFinder.find_spec(module) is not None for module in ("venv", "ensurepip"))
    markers = environment_markers(names)
    version = markers["python_full_version"]
    facts = {"executable": sys.executable, "version": version, "markers": markers, "has_venv": has_venv}
    return dict(facts, others=pythons_on(os.environ.get("PATH", os.defpath)))


def pythons_on(path):
    """The minor versions of which PATH has a program `pythonX.Y`, oldest first."""
    places = [os.path.join(directory, "python3.{}") for directory in path.split(os.pathsep) if directory]
    return ["3.{}".format(minor) for minor in PYTHONS if any(os.access(place.format(minor), os.X_OK) for place in places)]


def environment_markers(names):
    """PEP 508's environment markers. `platform` would give the same, but takes as long to import as all the rest."""
    implementation = sys.implementation
    return {
        "implementation_name": implementation.name,
        "implementation_version": implementation_version(implementation.version),
        "os_name": os.name,
        "platform_machine": names.machine,
        "platform_python_implementation": IMPLEMENTATIONS.get(implementation.name, implementation.name),
        "platform_release": names.release,
        "platform_system": names.sysname,
        "platform_version": names.version,
        "python_full_version": sys.version.split()[0],
        "python_version": "{}.{}".format(*sys.version_info[:2]),
        "sys_platform": sys.platform,
    }


def implementation_version(version):
    text = "{}.{}.{}".format(version.major, version.minor, version.micro)
    return text if version.releaselevel == "final" else text + version.releaselevel[0] + str(version.serial)


def ssh_connection(text):
    """$SSH_CONNECTION, which sshd sets: who came from where, and to which of our addresses."""
    words = text.split()
    if len(words) != 4 or not (words[1].isdigit() and words[3].isdigit()):
        return None
    return {"client": words[0], "client_port": int(words[1]), "server": words[2], "server_port": int(words[3])}


def disk_facts(root):
    """Of the nearest directory on the way to `root` that exists."""
    directory = root
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return {"free_bytes": free_bytes(directory), "writable": os.access(directory, os.W_OK | os.X_OK)}


def free_bytes(directory):
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def open_files_limit():
    """How many files a process may open; 2**31 - 1 stands for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 - 1 if limit == resource.RLIM_INFINITY else limit


# ---------------------------------------------------------------------------------------------------------------------
# What cluster-train left on this node


def read_state(root):
    """What is complete below `root`. Names that begin with a dot or end in .part are still being made."""
    envs = [name for name in directories(root, "envs") if is_complete_env(os.path.join(root, "envs", name))]
    return {
        "agents": directories(root, "agent"),
        "envs": envs,
        "unusable": [one for name in envs for one in unusable_in(os.path.join(root, "envs", name))],
        "wheels": [name for name in directories(root, "wheelhouse") if holds_one_wheel(os.path.join(root, "wheelhouse", name))],
        "jobs": directories(root, "jobs"),
        "runs": directories(root, "runs"),
        "uv": os.access(os.path.join(root, "bin", "uv"), os.X_OK),
        "nonce_dir_id": directory_id(root),
    }


def directories(root, kind):
    """The names of the finished directories in <root>/<kind>, sorted."""
    directory = os.path.join(root, kind)
    finished = [name for name in list_names(directory) if not name.startswith(".") and not name.endswith(".part")]
    return sorted(name for name in finished if os.path.isdir(os.path.join(directory, name)))


def is_complete_env(directory):
    """The installer writes complete.json last; an interpreter that has gone since (install.py says so) makes no environment."""
    python = os.path.join(directory, "bin", "python")
    return os.path.isfile(os.path.join(directory, "complete.json")) and os.access(python, os.X_OK)


def unusable_in(directory):
    """What need not import, and did not when the environment was made; install.py writes it."""
    try:
        with open(os.path.join(directory, "unusable.json")) as stream:
            modules = sorted(json.load(stream).items())
    except (OSError, ValueError, AttributeError):
        return []
    return [{"env": os.path.basename(directory), "module": module, "why": why} for module, why in modules]


def holds_one_wheel(directory):
    return sum(1 for name in list_names(directory) if name.endswith(".whl")) == 1


def list_names(directory):
    try:
        return os.listdir(directory)
    except OSError:
        return []


def directory_id(root):
    """Which directory this is on which file system: nodes that share it over NFS see what one of them writes there."""
    try:
        found = os.stat(root)
    except OSError:
        return None
    return "{}:{}".format(found.st_dev, found.st_ino)


def read_cluster_key(root):
    """The public half of the key that this node's mpirun uses to reach the others; None before it is made."""
    return read_text(os.path.join(root, "ssh", "id_ed25519.pub"))


def authorized_marks(path):
    """The comments of authorized keys that cluster-train put there. A line is: [options] type key [comment]."""
    marks = []
    for line in (read_text(path) or "").splitlines():
        words = line.split()
        keys = [index for index, word in enumerate(words) if word.startswith("AAAA")]
        comment = " ".join(words[keys[0] + 1 :]) if keys else ""
        if comment.startswith(KEY_MARK) and not line.startswith("#"):
            marks.append(comment)
    return marks


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
