"""What this machine's processors are, and how much of them this process may use.

Everything is read below /proc and /sys, or below `Tree.root`, where a copy of another machine's files may lie. Where a
kernel, a container or a virtual machine does not show a file, the next best source is read; nothing here raises for it.
"""

import os

CPU_DIRECTORY = "/sys/devices/system/cpu"
NODE_DIRECTORY = "/sys/devices/system/node"
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_tile")
UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with the largest multiple of a page

# Of each limit: the controller, then the file's name in the old (v1) and in the new (v2) hierarchy.
CPUSET = ("cpuset", ("cpuset.effective_cpus", "cpuset.cpus"), ("cpuset.cpus.effective",))
QUOTA = ("cpu", ("cpu.cfs_quota_us",), ("cpu.max",))
MEMORY = ("memory", ("memory.limit_in_bytes",), ("memory.max",))


class Tree:
    """The files below /proc and /sys: of this machine (`root` is empty), or of a copy of another one's."""

    def __init__(self, root=""):
        self.root = root.rstrip("/")

    def text(self, path):
        """The file's text without surrounding white space; None where it is missing or cannot be read."""
        try:
            with open(self.root + path, encoding="utf-8", errors="replace") as stream:
                return stream.read().strip()
        except OSError:
            return None

    def first(self, paths):
        """The text of the first of these files that exists; None where none does."""
        for path in paths:
            text = self.text(path)
            if text is not None:
                return text
        return None

    def number(self, path, missing):
        """The whole number in a file, or `missing`."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return missing

    def numbered(self, directory, prefix):
        """The numbers N for which the directory has an entry <prefix>N, ascending."""
        try:
            names = os.listdir(self.root + directory)
        except OSError:
            return []
        return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix) and name[len(prefix) :].isdigit())

    def exists(self, path):
        return os.path.exists(self.root + path)


def parse_cpu_list(text):
    """The CPUs of a kernel list such as "0-3,8,10-11"."""
    cpus = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def parse_cpu_mask(text):
    """The CPUs of a kernel bit mask such as "00ff,ffffffff"."""
    mask = int((text or "0").replace(",", ""), 16)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def read_topology(tree):
    """(CPUs that are online, NUMA nodes).

    A CPU is {"cpu", "socket", "core", "numa"}. `core` is unique within the machine, whatever core ids sockets and dies
    repeat: it is the lowest CPU number among the core's hardware threads that are online. A NUMA node is {"node",
    "cpus", "memory_bytes"}; nodes without memory or CPUs are listed too, and a machine that names none is one node 0.
    """
    online = online_cpus(tree)
    nodes = numa_nodes(tree, online)
    numa_of = {cpu: node["node"] for node in nodes for cpu in node["cpus"]}
    default = nodes[0]["node"]
    places = places_from_sysfs(tree, online) or places_from_cpuinfo(tree, online)
    if clusters_posing_as_sockets(tree, places, nodes):
        places = {cpu: (0, core) for cpu, (_, core) in places.items()}
    cpus = []
    for cpu in sorted(online):
        socket, core = places[cpu]
        cpus.append({"cpu": cpu, "socket": socket, "core": core, "numa": numa_of.get(cpu, default)})
    return cpus, nodes


def online_cpus(tree):
    """The CPUs the kernel runs on. An offline CPU has no topology directory, or is missing from `online`."""
    listed = parse_cpu_list(tree.text(CPU_DIRECTORY + "/online"))
    if listed:
        return listed
    present = tree.numbered(CPU_DIRECTORY, "cpu")
    with_topology = {cpu for cpu in present if tree.exists("{}/cpu{}/topology".format(CPU_DIRECTORY, cpu))}
    in_cpuinfo = {int(block["processor"]) for block in cpuinfo_blocks(tree) if block.get("processor", "").isdigit()}
    counted = 1 if tree.root else os.cpu_count() or 1
    return with_topology or in_cpuinfo or set(range(counted))


def places_from_sysfs(tree, online):
    """{CPU: (socket, core)}; empty where sysfs knows no topology.

    The list of hardware threads says which CPUs share a core. Core ids cannot: they repeat in every socket, in every
    die of some processors, and in every cluster of others.
    """
    if not any(tree.exists("{}/cpu{}/topology".format(CPU_DIRECTORY, cpu)) for cpu in online):
        return {}
    places = {}
    for cpu in sorted(online):
        if cpu not in places:
            topology = "{}/cpu{}/topology/".format(CPU_DIRECTORY, cpu)
            socket = max(0, tree.number(topology + "physical_package_id", 0))  # -1: the firmware does not say
            for sibling in hardware_threads(tree, topology, cpu, online):
                places[sibling] = (socket, cpu)
    return places


def hardware_threads(tree, topology, cpu, online):
    """The online CPUs of one core; the file had another name before Linux 5.2."""
    listed = tree.first((topology + "core_cpus_list", topology + "thread_siblings_list"))
    return (parse_cpu_list(listed) & online) | {cpu}


def places_from_cpuinfo(tree, online):
    """{CPU: (socket, core)} from /proc/cpuinfo; what that does not say is one socket with a core per CPU."""
    told = {block.get("processor"): block for block in cpuinfo_blocks(tree)}
    places, first_cpu = {}, {}
    for cpu in sorted(online):
        block = told.get(str(cpu), {})
        socket = int(block.get("physical id", "0"))
        core = first_cpu.setdefault((socket, block["core id"]), cpu) if "core id" in block else cpu
        places[cpu] = (socket, core)
    return places


def clusters_posing_as_sockets(tree, places, nodes):
    """Whether the "sockets" are clusters of one chip: older kernels number Arm's clusters of unequal cores as packages.

    No machine has sockets of unequal capacity; several NUMA nodes would show that there are several chips all the same.
    """
    several_nodes = sum(1 for node in nodes if node["cpus"]) > 1
    if several_nodes or len({socket for socket, _ in places.values()}) < 2:
        return False
    return len({tree.text("{}/cpu{}/cpu_capacity".format(CPU_DIRECTORY, cpu)) for cpu in places}) > 1


def numa_nodes(tree, online):
    """The NUMA nodes with their online CPUs; one node 0 with everything where the kernel names none."""
    nodes = []
    for node in tree.numbered(NODE_DIRECTORY, "node"):
        directory = "{}/node{}/".format(NODE_DIRECTORY, node)
        listed = tree.text(directory + "cpulist")
        cpus = parse_cpu_list(listed) if listed is not None else parse_cpu_mask(tree.text(directory + "cpumap"))
        memory = meminfo(tree.text(directory + "meminfo")).get("MemTotal", 0)
        nodes.append({"node": node, "cpus": sorted(cpus & online), "memory_bytes": memory})
    total = meminfo(tree.text("/proc/meminfo")).get("MemTotal", 0)
    return nodes or [{"node": 0, "cpus": sorted(online), "memory_bytes": total}]


def meminfo(text):
    """{field: bytes} of a meminfo file; a NUMA node's own lines begin with "Node 0"."""
    fields = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name.split()[-1]] = int(words[0]) * 1024
    return fields


def cpuinfo_blocks(tree):
    """/proc/cpuinfo as one mapping per processor. Slow to make on big machines: only where sysfs says nothing."""
    return [cpuinfo_fields(block) for block in (tree.text("/proc/cpuinfo") or "").split("\n\n")]


def cpuinfo_fields(block):
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def model_and_flags(tree):
    """The first processor's name, and those of CPU_FLAGS that it has.

    Reads the beginning of /proc/cpuinfo only: the kernel makes that file processor by processor while it is read.
    """
    try:
        with open(tree.root + "/proc/cpuinfo", "rb", buffering=0) as stream:
            beginning = stream.read(8192).decode("utf-8", "replace")
    except OSError:
        return "", []
    fields = cpuinfo_fields(beginning.strip().partition("\n\n")[0])
    flags = set(fields.get("flags", "").split())
    return model_name(fields), [flag for flag in CPU_FLAGS if flag in flags]


def model_name(fields):
    """x86 says "model name", POWER "cpu"; Arm only says numbers."""
    if "CPU part" in fields and "model name" not in fields:
        return "implementer {} part {}".format(fields.get("CPU implementer", "?"), fields["CPU part"])
    return fields.get("model name") or fields.get("cpu") or ""


# ---------------------------------------------------------------------------------------------------------------------
# The control groups this process is in: the smallest limit on the way up to the root counts


def cgroup_cpus(tree):
    """The CPUs our control groups allow; None where they do not restrict."""
    allowed = None
    for _, text in cgroup_values(tree, CPUSET):
        cpus = parse_cpu_list(text)
        if cpus:
            allowed = cpus if allowed is None else allowed & cpus
    return allowed


def cgroup_cpu_limit(tree):
    """How many CPUs' worth of time our control groups may use (a float), or None without a limit."""
    limits = []
    for directory, text in cgroup_values(tree, QUOTA):
        words = text.split()
        quota_us = words[0] if words else "max"
        period_us = words[1] if len(words) > 1 else tree.text(directory + "/cpu.cfs_period_us") or "100000"
        if quota_us != "max" and int(quota_us) > 0 and int(period_us) > 0:
            limits.append(int(quota_us) / int(period_us))
    return min(limits) if limits else None


def cgroup_memory_limit(tree):
    """The memory our control groups may use in bytes, or None without a limit."""
    texts = [text for _, text in cgroup_values(tree, MEMORY)]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED_BYTES]
    return min(limits) if limits else None


def cgroup_values(tree, limit):
    """[(directory, text)] of a limit's file in each control group from ours to the root, in both hierarchies."""
    controller, old_names, new_names = limit
    values = []
    for hierarchy, names in ((controller, old_names), ("", new_names)):
        for directory in cgroup_directories(tree, hierarchy):
            text = tree.first([directory + "/" + name for name in names])
            if text is not None:
                values.append((directory, text))
    return values


def cgroup_directories(tree, hierarchy):
    """Our control group's directory and all above it, in the v1 hierarchy of a controller or ("") the unified one."""
    mount_root, mount_point = cgroup_mount(tree, hierarchy)
    path = cgroup_path(tree, hierarchy)
    if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
        path = path[len(mount_root) :]  # a container without its own cgroup namespace sees the host's names
    parts = [] if ".." in path else [part for part in path.split("/") if part]
    return [mount_point + "".join("/" + part for part in parts[:depth]) for depth in range(len(parts), -1, -1)]


def cgroup_mount(tree, hierarchy):
    """(which group is mounted, where); the usual place where mountinfo does not tell."""
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        fields, _, kind = line.partition(" - ")
        kind_words = kind.split()
        if kind_words[:1] == ["cgroup2"] and not hierarchy:
            return tuple(fields.split()[3:5])
        if kind_words[:1] == ["cgroup"] and hierarchy in kind_words[-1].split(","):
            return tuple(fields.split()[3:5])
    return "/", "/sys/fs/cgroup" + (hierarchy and "/" + hierarchy)


def cgroup_path(tree, hierarchy):
    """Our group's name in a hierarchy: lines "4:cpu,cpuacct:/name" (v1) and "0::/name" (unified)."""
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if hierarchy in controllers.split(","):
            return path
    return "/"
