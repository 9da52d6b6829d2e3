"""What is known about a node: the records of what `remote/probe.py` prints there.

Nothing here asks a node. `NodeFacts.from_json` checks the document once, so an existing `NodeFacts` can be believed;
records and reader stand in one module, so that a field and its check change together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from orchestrator.errors import CommandError

SCHEMA = 1

InterfaceKind = Literal["physical", "bridge", "virtual", "loopback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineId:
    """Which machine this is: equal boot id and mount namespace mean one machine (or one container) under two names.

    Empty strings (a copy of another machine's files) identify nothing: see `identifies`.
    """

    boot_id: str
    mount_namespace: str

    @property
    def identifies(self) -> bool:
        """Whether both parts are known, so that equality means something."""
        return bool(self.boot_id and self.mount_namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFacts:
    """The interpreter that ran the probe.

    Args:
        executable: its absolute path.
        version: the full version, such as "3.11.2".
        markers: PEP 508 environment markers by name.
        has_venv: `python -m venv` works.
        others: the minor versions of Python that the node has on its PATH, such as "3.9", this one among them.
    """

    executable: str
    version: str
    markers: Mapping[str, str]
    has_venv: bool
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalCpu:
    """One hardware thread that the node's user may use.

    Args:
        cpu: the kernel's number.
        socket: the physical package.
        core: the physical core, unique within the machine (the lowest CPU number among its hardware threads).
        numa: the NUMA node.
    """

    cpu: int
    socket: int
    core: int
    numa: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """The processors.

    Args:
        model: the first processor's name.
        flags: those of avx2, avx512f, avx512_bf16, avx512_vnni, amx_bf16, amx_int8 and amx_tile that it has.
        logical: the CPUs that are online and allowed to us, at least one.
        online: how many are online on the machine.
        cgroup_cpu_limit: how many CPUs' worth of time the control group grants; None without a limit.
    """

    model: str
    flags: tuple[str, ...]
    logical: tuple[LogicalCpu, ...]
    online: int
    cgroup_cpu_limit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node with its online CPUs, allowed or not; may lack CPUs or memory (0 bytes: none, or not known)."""

    node: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The machine's memory, and the control group's share of it (None without a limit)."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """One network card.

    Args:
        addresses: with prefix length, such as "10.0.0.10/24" and "fe80::1/64".
        up: switched on, and a carrier is there.
        speed_mbps: None where the driver does not know.
        kind: "bridge" only for bridges without a real card; a container's own card is "virtual".
    """

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool
    speed_mbps: int | None
    kind: InterfaceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SshConnection:
    """How the node's sshd saw the connection that ran the probe."""

    client: str
    client_port: int
    server: str
    server_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The file system that holds (or would hold) the root directory."""

    free_bytes: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableModule:
    """A module of an environment that did not import when that was made, and need not."""

    env: str
    module: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RootState:
    """What lies complete below the root directory; `nonce_dir_id` ("device:inode") is None before it exists."""

    agents: tuple[str, ...]
    envs: tuple[str, ...]
    unusable: tuple[UnusableModule, ...]
    wheels: tuple[str, ...]
    jobs: tuple[str, ...]
    runs: tuple[str, ...]
    uv: bool
    nonce_dir_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """All that the probe tells about one node.

    Args:
        name: the node's name in the inventory.
        hostname: what the machine calls itself.
        root: absolute path of cluster-train's directory there.
        libc: kind and version, such as ("glibc", "2.36"); ("", "") where unknown.
        hostname_resolves_to: the addresses the machine finds for its own name.
        ssh_connection: None where the probe was not run over SSH.
        shm_bytes: free in /dev/shm.
        open_files_limit: per process.
        free_ports: TCP ports that were free during the probe.
        cluster_key: public half of the key with which this node reaches the others; None before it is made.
        authorized: comments of the cluster keys that may log in here.
        document: what all this was read from.
    """

    name: str
    hostname: str
    machine: MachineId
    user: str
    home: str
    root: str
    arch: str
    kernel: str
    libc: tuple[str, str]
    python: PythonFacts
    cpu: CpuFacts
    numa: tuple[NumaNode, ...]
    memory: MemoryFacts
    interfaces: tuple[InterfaceFacts, ...]
    hostname_resolves_to: tuple[str, ...]
    ssh_connection: SshConnection | None
    disk: DiskFacts
    shm_bytes: int
    load_1m: float
    time_unix_s: float
    open_files_limit: int
    free_ports: tuple[int, ...]
    state: RootState
    cluster_key: str | None
    authorized: tuple[str, ...]
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_json(cls, node_name: str, document: Mapping[str, Any]) -> NodeFacts:
        """The facts in a document of `remote/probe.py`.

        Raises CommandError naming the node and the field where the document is not what the probe prints.
        """
        fields = _Fields(node=node_name, place="", values=document)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise fields.error("schema", f"{SCHEMA}", schema)
        return replace(_node_facts(fields), document=document)


# ---------------------------------------------------------------------------------------------------------------------
# Reading the document


@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object of the document and, for messages, its place there; every getter checks the type it returns."""

    node: str
    place: str
    values: Mapping[str, Any]

    def text(self, key: str) -> str:
        return str(self._get(key, str, "text"))

    def integer(self, key: str) -> int:
        return int(self._get(key, int, "a whole number"))

    def number(self, key: str) -> float:
        return float(self._get(key, (int, float), "a number"))

    def flag(self, key: str) -> bool:
        return bool(self._get(key, bool, "true or false"))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._items(key, str, "a list of texts"))

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(self._items(key, int, "a list of whole numbers"))

    def one(self, key: str) -> _Fields:
        return _Fields(self.node, self._at(key), self._get(key, Mapping, "an object"))

    def each(self, key: str) -> tuple[_Fields, ...]:
        items = self._items(key, Mapping, "a list of objects")
        return tuple(_Fields(self.node, f"{self._at(key)}[{index}]", item) for index, item in enumerate(items))

    def optional_text(self, key: str) -> str | None:
        return None if self.is_null(key) else self.text(key)

    def optional_integer(self, key: str) -> int | None:
        return None if self.is_null(key) else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.is_null(key) else self.number(key)

    def is_null(self, key: str) -> bool:
        return key in self.values and self.values[key] is None

    def error(self, key: str, wanted: str, found: object) -> CommandError:
        return CommandError(
            f"{self.node}: the probe's answer cannot be used: {self._at(key)} should be {wanted}, but is {found!r}",
            node=self.node,
            command="probe.py",
            advice="the node's copy of the probe does not belong to this version: remove `agent/` under the root "
            "directory there, and try again",
        )

    def _get(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        if key not in self.values:
            raise self.error(key, wanted, None)
        value = self.values[key]
        if not _is_a(value, kind):
            raise self.error(key, wanted, value)
        return value

    def _items(self, key: str, kind: type, wanted: str) -> list[Any]:
        items: list[Any] = self._get(key, list, wanted)
        if not all(_is_a(item, kind) for item in items):
            raise self.error(key, wanted, items)
        return items

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def _is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    """isinstance, but true and false are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _node_facts(fields: _Fields) -> NodeFacts:
    memory, disk, machine = fields.one("memory"), fields.one("disk"), fields.one("machine")
    return NodeFacts(
        name=fields.node,
        hostname=fields.text("hostname"),
        machine=MachineId(boot_id=machine.text("boot_id"), mount_namespace=machine.text("mount_namespace")),
        user=fields.text("user"),
        home=fields.text("home"),
        root=fields.text("root"),
        arch=fields.text("arch"),
        kernel=fields.text("kernel"),
        libc=_libc(fields),
        python=_python(fields.one("python")),
        cpu=_cpu(fields.one("cpu")),
        numa=tuple(_numa_node(node) for node in fields.each("numa")),
        memory=MemoryFacts(
            total_bytes=memory.integer("total_bytes"),
            available_bytes=memory.integer("available_bytes"),
            cgroup_limit_bytes=memory.optional_integer("cgroup_limit_bytes"),
        ),
        interfaces=tuple(_interface(card) for card in fields.each("interfaces")),
        hostname_resolves_to=fields.texts("hostname_resolves_to"),
        ssh_connection=None if fields.is_null("ssh_connection") else _ssh_connection(fields.one("ssh_connection")),
        disk=DiskFacts(free_bytes=disk.integer("free_bytes"), writable=disk.flag("writable")),
        shm_bytes=fields.integer("shm_bytes"),
        load_1m=fields.number("load_1m"),
        time_unix_s=fields.number("time_unix_s"),
        open_files_limit=fields.integer("open_files_limit"),
        free_ports=fields.integers("free_ports"),
        state=_root_state(fields.one("state")),
        cluster_key=fields.optional_text("cluster_key"),
        authorized=fields.texts("authorized"),
    )


def _libc(fields: _Fields) -> tuple[str, str]:
    parts = fields.texts("libc")
    if len(parts) != 2:
        raise fields.error("libc", "a kind and a version", list(parts))
    return parts[0], parts[1]


def _python(fields: _Fields) -> PythonFacts:
    markers = fields.one("markers")
    return PythonFacts(
        executable=fields.text("executable"),
        version=fields.text("version"),
        markers={name: markers.text(name) for name in markers.values},
        has_venv=fields.flag("has_venv"),
        others=fields.texts("others"),
    )


def _cpu(fields: _Fields) -> CpuFacts:
    logical = tuple(
        LogicalCpu(cpu=cpu.integer("cpu"), socket=cpu.integer("socket"), core=cpu.integer("core"), numa=cpu.integer("numa"))
        for cpu in fields.each("logical")
    )
    if not logical:
        raise fields.error("logical", "a list of at least one CPU", [])
    return CpuFacts(
        model=fields.text("model"),
        flags=fields.texts("flags"),
        logical=logical,
        online=fields.integer("online"),
        cgroup_cpu_limit=fields.optional_number("cgroup_cpu_limit"),
    )


def _numa_node(fields: _Fields) -> NumaNode:
    return NumaNode(node=fields.integer("node"), cpus=fields.integers("cpus"), memory_bytes=fields.integer("memory_bytes"))


def _interface(fields: _Fields) -> InterfaceFacts:
    kinds: dict[str, InterfaceKind] = {kind: kind for kind in get_args(InterfaceKind)}
    kind = fields.text("kind")
    if kind not in kinds:
        raise fields.error("kind", " or ".join(kinds), kind)
    return InterfaceFacts(
        name=fields.text("name"),
        addresses=fields.texts("addresses"),
        up=fields.flag("up"),
        loopback=fields.flag("loopback"),
        speed_mbps=fields.optional_integer("speed_mbps"),
        kind=kinds[kind],
    )


def _ssh_connection(fields: _Fields) -> SshConnection:
    return SshConnection(
        client=fields.text("client"),
        client_port=fields.integer("client_port"),
        server=fields.text("server"),
        server_port=fields.integer("server_port"),
    )


def _root_state(fields: _Fields) -> RootState:
    return RootState(
        agents=fields.texts("agents"),
        envs=fields.texts("envs"),
        unusable=tuple(
            UnusableModule(env=one.text("env"), module=one.text("module"), why=one.text("why")) for one in fields.each("unusable")
        ),
        wheels=fields.texts("wheels"),
        jobs=fields.texts("jobs"),
        runs=fields.texts("runs"),
        uv=fields.flag("uv"),
        nonce_dir_id=fields.optional_text("nonce_dir_id"),
    )
