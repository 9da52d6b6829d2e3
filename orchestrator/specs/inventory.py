"""What a person asks for: the nodes, the stack on them, and the job to run.

The records validate themselves, so an existing `Inventory` is a valid one. Reading YAML or a hostfile, and wording
what is wrong with it, is the part of `planning.inventory_text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Any, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from orchestrator.errors import InventoryError
from orchestrator.specs import inventory_values as v

_SECRET_NAME = re.compile(
    r"(^|_)([A-Z0-9]*(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)|(API|ACCESS|AUTH|PRIVATE)?KEYS?)(_|$)",
    re.IGNORECASE,
)
# A shorter value cannot be masked: it would blank out half of every message.
_SHORTEST_SECRET = 4

_SAME_HOST = "the same host and port as {earlier}; for several ranks on one machine write `slots: 2`"
_SAME_NAME = "the same name as {earlier}; give each node its own `name`"
_SAME_ARRIVAL = "arrives beside the script under the same name as {earlier}"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _key_without_value_takes_its_default(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class SshOptions(_Section):
    """How every node is reached, unless the node says otherwise."""

    user: v.User | None = Field(default=None, description="login name; without it ~/.ssh/config or the local name decides")
    port: v.Port | None = Field(default=None, description="port of sshd; without it ~/.ssh/config decides, else it is 22")
    config: v.PathText | None = Field(default=None, description="an ssh_config file read instead of ~/.ssh/config (as ssh -F)")
    key: v.PathText | None = Field(default=None, description="private key file; without it the agent and ~/.ssh decide")
    known_hosts: v.PathText | None = Field(default=None, description="a known_hosts file read besides ~/.ssh/known_hosts")
    host_keys: v.HostKeys = Field(default="strict", description="strict refuses unknown host keys, accept-new stores them")
    connect_timeout: v.PositiveSeconds = Field(default=10.0, description="seconds to wait for a node to answer")


class Node(_Section):
    """One machine. A plain string, `user@host:port`, stands for a node of which nothing else is said."""

    name: v.Name = Field(default="", description="what logs and commands call the node (default: the host)")
    host: v.Host = Field(description="host name or IP address")
    port: v.Port | None = Field(default=None, description="port of sshd (default: ssh.port)")
    user: v.User | None = Field(default=None, description="login name (default: ssh.user)")
    key: v.PathText | None = Field(default=None, description="private key file (default: ssh.key)")
    via: v.JumpText | None = Field(default=None, description="jump host, as user@host:port; several with commas, nearest first")
    slots: v.Count | None = Field(default=None, description="number of ranks here (default: job.ppn decides)")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            try:
                address = v.parse_address(data)
            except ValueError:
                raise v.expected("host, user@host, host:port, or a mapping with a host") from None
            data = {"host": address.host, "port": address.port, "user": address.user}
        if isinstance(data, Mapping) and data.get("name") is None and isinstance(data.get("host"), str):
            name = re.sub(r"[^A-Za-z0-9._-]", "-", data["host"]).strip("-.")[:64]
            data = {**data, "name": name or None}
        return data


class NetworkOptions(_Section):
    """Where the ranks talk. A plain string stands for `cidr` alone."""

    cidr: v.Network | None = Field(default=None, description="network of the ranks (default: one that all nodes share)")
    ports: v.PortRange | None = Field(
        default=None, description="ports for MASTER_PORT and the launcher, where a firewall opens only these; not gloo's"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        try:
            return {"cidr": v.network(data)}
        except ValueError:
            raise v.expected("a network such as 10.0.0.0/24, or a mapping with cidr and ports") from None


class Stack(_Section):
    """What must be installed in the environment that the ranks run in."""

    python: v.PythonText | None = Field(default=None, description="interpreter on the nodes: version, name or path")
    torch: v.VersionText = Field(default="2.13.0", description="version or range of PyTorch")
    transformers: v.VersionText = Field(default="5.24.0", description="version or range of Transformers")
    accelerate: v.VersionText | None = Field(default=None, description="version or range (default: one that fits)")
    datasets: v.VersionText | None = Field(default=None, description="version or range (default: one that fits)")
    backend: v.Backend = Field(default="auto", description="library of the collectives")
    mpi: v.Flavour = Field(default="impi", description="which MPI starts the ranks; system takes the mpirun found on the nodes")
    ipex: v.AutoOrBool = Field(
        default="auto", description="Intel Extension for PyTorch; auto: together with the retired oneCCL bindings"
    )
    extra: tuple[v.RequirementText, ...] = Field(default=(), description="further requirements, as pip writes them")
    find_links: tuple[v.PathText, ...] = Field(default=(), description="directories or URLs of wheels, tried first")
    extra_index: tuple[v.Url, ...] = Field(default=(), description="further package indexes")


class Job(_Section):
    """What every rank runs. Paths are relative to the current directory, as on a shell's command line."""

    script: v.Script | None = Field(default=None, description="the training script")
    args: tuple[v.Text, ...] = Field(default=(), description="its arguments, handed on as they are written here")
    ppn: v.Ppn = Field(default="auto", description="ranks per node; auto: one per socket, numa: one per NUMA node")
    omp_threads: v.AutoOrCount = Field(default="auto", description="OMP_NUM_THREADS; auto: the rank's cores minus ccl_workers")
    ccl_workers: v.CountFromZero = Field(default=1, description="cores of each rank that are left to communication")
    bf16: v.AutoOrBool = Field(
        default="auto", description="true adds --bf16 to a Trainer script, false takes it away; auto: as job.args say"
    )
    env: Mapping[v.EnvName, v.Text] = Field(default={}, description="environment variables of every rank", repr=False)
    secrets: tuple[v.EnvName, ...] = Field(
        default=(), description="further variables of job.env whose values are never shown (HF_TOKEN and its like never are)"
    )
    sync: tuple[v.PathText, ...] = Field(default=(), description="files and directories copied beside the script")
    fetch: tuple[v.PathBelow, ...] = Field(default=(), description="paths the job writes, brought back when the run ends")
    grace_s: v.Seconds = Field(default=30.0, description="seconds between asking the ranks to stop and killing them")
    heartbeat_timeout_s: v.HeartbeatSeconds = Field(
        default=60.0, description="seconds without a sign of life after which a node is lost; 0: no heartbeats"
    )
    start_timeout_s: v.Seconds = Field(default=300.0, description="seconds within which every rank must start; 0: no limit")
    run_timeout_s: v.LongSeconds = Field(default=0.0, description="seconds that the ranks may run; 0: no limit")
    stall_timeout_s: v.LongSeconds = Field(
        default=600.0, description="seconds in which no rank writes anything, after which the run is called stalled; 0: never"
    )
    stall_action: v.StallAction = Field(default="report", description="what is done about a stalled run: only told, or ended")
    ddp_timeout_s: v.PositiveSeconds | None = Field(
        default=None, description="time limit of the collectives, unless the script names one (default: PyTorch's, 1800)"
    )
    restarts: v.CountFromZero = Field(default=0, description="how often a run that failed is started again by itself")
    checkpoints: v.PathText | None = Field(
        default=None,
        description="pattern of the job's checkpoints in the run's directory (default: Trainer's, below its --output_dir)",
    )
    min_nodes: v.Count | None = Field(
        default=None, description="restart without lost nodes if so many are left (at most all, which is the default)"
    )

    @field_validator("secrets")
    @classmethod
    def _secrets_are_there(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in info.data.get("env", names)]:
            raise v.expected(f"names of variables in job.env, which has no {', '.join(unknown)}")
        return names

    def hides(self, name: str) -> bool:
        """Whether the value of a variable of the job must not be shown."""
        return is_secret_name(name) or name in self.secrets

    @field_validator("sync")
    @classmethod
    def _names_differ(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        # Entries keep their last name beside the script, so of two with one name only one would arrive.
        _refuse_repeats([(PurePosixPath(path).name, _SAME_ARRIVAL)] for path in paths)
        return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What SSH needs to reach one node; None is left to ~/.ssh/config and its defaults."""

    user: str | None
    host: str
    port: int | None
    key: str | None
    via: str | None


class Inventory(_Section):
    """A cluster and its job."""

    cluster: v.Name = Field(default="cluster", description="name of the cluster (default: the file's name)")
    root: v.Root = Field(default="~/.cluster-train", description="directory on the nodes that holds all that is put there")
    ssh: SshOptions = Field(default=SshOptions(), description="how every node is reached, unless the node says otherwise")
    network: NetworkOptions = Field(default=NetworkOptions(), description="where the ranks talk; a plain network stands for cidr")
    nodes: tuple[Node, ...] = Field(description="the machines; the first is node0, where mpirun starts")
    stack: Stack = Field(default=Stack(), description="what is installed for the ranks")
    job: Job = Field(default=Job(), description="what the ranks run")
    parallel: v.Count = Field(default=16, description="how many nodes are worked on at once")

    _hidden: frozenset[str] = PrivateAttr(frozenset())
    _file: str = PrivateAttr("")

    @field_validator("nodes")
    @classmethod
    def _nodes_differ(cls, nodes: tuple[Node, ...], info: ValidationInfo) -> tuple[Node, ...]:
        if not nodes:
            raise v.expected("at least one node")
        default_port = info.data.get("ssh", SshOptions()).port or 22
        _refuse_repeats(
            [((_canonical(node.host), node.port or default_port), _SAME_HOST), (node.name, _SAME_NAME)] for node in nodes
        )
        return nodes

    @field_validator("job")
    @classmethod
    def _there_are_so_many_nodes(cls, job: Job, info: ValidationInfo) -> Job:
        nodes = info.data.get("nodes")
        if nodes and job.min_nodes and job.min_nodes > len(nodes):
            words = f"expected at most {len(nodes)}, the number of nodes, got {job.min_nodes}"
            raise PydanticCustomError("of_key", "{text}", {"key": "min_nodes", "text": words})
        return job

    @property
    def secrets(self) -> frozenset[str]:
        """Values that no message may show: see `hiding`, and all of job.env whose name says so."""
        named = {value for name, value in self.job.env.items() if self.job.hides(name)}
        return frozenset(value for value in named | self._hidden if len(value) >= _SHORTEST_SECRET)

    @property
    def file(self) -> str:
        """The file it was read from, as the person named it; empty where it was not read from one."""
        return self._file

    def read_from(self, file: str) -> Inventory:
        """A copy that knows its file, so that advice can name commands that work."""
        copy = self.model_copy()
        copy._file = file
        return copy

    def hiding(self, values: Iterable[str]) -> Inventory:
        """A copy whose `secrets` hold `values` too."""
        copy = self.model_copy()
        copy._hidden = self._hidden | frozenset(values)
        return copy

    def login(self, node: Node) -> Login:
        """How to reach `node`: its own options before those of `ssh`."""
        return Login(
            user=node.user or self.ssh.user,
            host=node.host,
            port=node.port or self.ssh.port,
            key=node.key or self.ssh.key,
            via=node.via,
        )


SECTIONS: Mapping[str, type[BaseModel]] = {
    "": Inventory,
    "ssh": SshOptions,
    "network": NetworkOptions,
    "nodes": Node,
    "stack": Stack,
    "job": Job,
}


def is_secret_name(name: str) -> bool:
    """Whether a variable so named holds what must not be shown (HF_TOKEN, but not TOKENIZERS_PARALLELISM)."""
    return _SECRET_NAME.search(name) is not None


def apply_overrides(inventory: Inventory, *, script: str | None, args: Sequence[str]) -> Inventory:
    """The inventory with the script and arguments that the command line gives after `--`; without a script, unchanged.

    Raises:
        InventoryError: the script is an option, or one of the words could not be passed to a program.
    """
    if script is None:
        return inventory
    try:
        job = Job.model_validate({**dict(inventory.job), "script": script, "args": tuple(args)})
    except ValidationError as error:
        rows = [f"after --: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        raise InventoryError("\n".join(rows), advice="write -- SCRIPT ARGS…") from None
    return inventory.model_copy(update={"job": job})


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Every key of an inventory: its path, what it accepts, its default and its meaning."""
    for section, model in SECTIONS.items():
        prefix = {"": "", "nodes": "nodes[]."}.get(section, f"{section}.")
        for name, field in model.model_fields.items():
            default = "" if field.is_required() or name in SECTIONS else str(field.default or "")
            yield prefix + name, _accepts(field.annotation, field.metadata), default, field.description or ""


def _accepts(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    for mark in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(mark, v.Expected):
            return mark.text
    inner = get_args(annotation)
    if not inner or isinstance(inner[0], str):
        return v.one_of(inner) if inner else "a mapping"
    return {tuple: "a list of: ", Mapping: "a mapping from "}.get(get_origin(annotation), "") + _accepts(inner[0])


def _canonical(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def _refuse_repeats(items: Iterable[Sequence[tuple[object, str]]]) -> None:
    """Refuse a list of which two items share an identity.

    Args:
        items: each item's identities, the most telling first, with what to say of a repeat;
            `{earlier}` in it stands for the first.
    """
    seen: dict[object, int] = {}
    repeats = []
    for index, identities in enumerate(items):
        repeats += [(index, seen[identity], words) for identity, words in identities if identity in seen][:1]
        for identity, _ in identities:
            seen.setdefault(identity, index)
    if repeats:
        raise PydanticCustomError("repeats", "items repeat earlier ones", {"repeats": repeats})
