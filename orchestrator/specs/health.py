"""What a doctor learns of a node beside its facts, and of the ways between nodes: what `remote/doctor.py` answers, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceHealth:
    """A directory, or the nearest one above it that exists.

    Args:
        filesystem: its kind, such as "ext4"; empty where unknown.
        is_remote: other machines may see the same files.
    """

    path: str
    filesystem: str
    is_remote: bool


PERSONS = ":login"  # ends the comment of a person's own key, that of a cluster's key ends with the head's address


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKey:
    """A key that cluster-train put into a node's authorized_keys; `origin` is the only address it is accepted from."""

    comment: str
    is_restricted: bool
    origin: str

    @property
    def is_persons(self) -> bool:
        """Whether it is a person's own, which `init` put there, and not a cluster's."""
        return self.comment.endswith(PERSONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A living process of a run."""

    pid: int
    run_id: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """One node as `remote/examine.py` and our connection to it see it.

    Args:
        root_error, shm_error: why nothing can be written to the root directory and to /dev/shm; None where it can.
        free_inodes: how many files can still be made below the root; None where that is not counted.
        has_smt: hardware threads are switched on.
        governors: of the CPUs' frequency, each once; empty where the kernel shows none.
        limits: open_files, locked_bytes and processes, soft; None for no limit.
        has_rdma: there is a card such as InfiniBand.
        programs: name to path on the PATH of a non-interactive login.
        busiest: command and user of the process that has used most CPU time and runs; empty where none can be seen.
        skew_s: how far its clock is ahead of the head's; `skew_error_s` is how much of that may be the way there and back.
        sessions: how many channels could be opened at once, of those tried.
        noise: what the login shell's start-up files printed.
    """

    home: PlaceHealth
    root: PlaceHealth
    root_error: str | None
    free_inodes: int | None
    shm_total_bytes: int
    shm_error: str | None
    has_smt: bool
    governors: tuple[str, ...]
    limits: Mapping[str, int | None]
    has_rdma: bool
    programs: Mapping[str, str]
    path: str
    processes: tuple[RunProcess, ...]
    keys: tuple[ClusterKey, ...]
    busiest: str
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    sessions: int | None = None
    noise: str = ""

    @classmethod
    def from_json(cls, node: str, document: Mapping[str, Any]) -> NodeHealth:
        """Raises CommandError naming the node where the document is not what `remote/examine.py` makes."""
        try:
            return _health(document)
        except (KeyError, TypeError, AttributeError) as error:
            raise CommandError(f"{node}: the doctor's answer cannot be used: {error!r}", node=node, command="doctor.py") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One attempt of a node to reach a port of another one.

    Args:
        use: what goes this way in a run: "MASTER_PORT", "launcher" or "gloo".
        state: open, dropped (no answer), rejected, stranger (somebody else answered), stuck (large packets are
            lost) or failed.
        latency_s: there and back, the best of some; None where nothing came through.
        bytes_per_s: while all nodes of the ring were sending at once; None where it was not measured.
        seen_as: our address as the other node saw it.
    """

    source: str
    target: str
    use: str
    port: int
    state: str
    error: str = ""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    seen_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshWay:
    """The head's own SSH to another node, with the configuration that mpirun will use; `code` is None after no answer in time."""

    target: str
    code: int | None
    stderr: str
    seconds: float
    is_authorized: bool


def _health(document: Mapping[str, Any]) -> NodeHealth:
    root, shm, busiest = document["root"], document["shm"], document["busiest"]
    return NodeHealth(
        home=_place(document["home"]),
        root=_place(root),
        root_error=root["error"],
        free_inodes=root["free_inodes"],
        shm_total_bytes=shm["total_bytes"],
        shm_error=shm["error"],
        has_smt=document["smt"],
        governors=tuple(document["governors"]),
        limits={name: soft for name, (soft, _) in document["limits"].items()},
        has_rdma=document["has_rdma"],
        programs=dict(document["programs"]),
        path=document["path"],
        processes=tuple(RunProcess(pid=one["pid"], run_id=one["run_id"], command=one["command"]) for one in document["ours"]),
        keys=tuple(
            ClusterKey(comment=key["comment"], is_restricted=key["is_restricted"], origin=key["from"]) for key in document["keys"]
        ),
        busiest=f"{busiest['user']}: {busiest['command']}" if busiest else "",
    )


def _place(document: Mapping[str, Any]) -> PlaceHealth:
    return PlaceHealth(path=document["path"], filesystem=document["filesystem"], is_remote=document["is_remote"])
