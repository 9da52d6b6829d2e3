"""The whole launch as one value: who runs where, the files of the run, the mpirun line. Pure; `--dry-run` prints it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import PreflightError
from orchestrator.planning.arguments import Translation, translate, with_precision
from orchestrator.planning.compat import StackChoice
from orchestrator.planning.hops import hops_from_head, known_hosts, ssh_config, wrapper
from orchestrator.planning.mpirun import LAUNCH_VARIABLE, PROGRAM, STOP_SIGNAL, Flavour, MpiCommand, MpiRequest, mpi_command
from orchestrator.planning.network import NetworkChoice
from orchestrator.planning.placement import PlacementNode, place, ranks_per_node
from orchestrator.planning.ports import master_ports, shares
from orchestrator.planning.restarts import RestartPlan, plan_restarts
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock
from orchestrator.specs.run import RankPlan
from orchestrator.specs.setvars import SetvarsEffect

# The kernel takes no environment variable longer than this (MAX_ARG_STRLEN, 32 pages).
LONGEST_VARIABLE_BYTES = 131_072
LIMITS = ("start_timeout_s", "run_timeout_s", "stall_timeout_s", "stall_action")
MOST_BEAT_PORTS = 16  # that are tried: other runs may have some
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Everything that the launch follows from.

    Args:
        nodes: facts in the inventory's order, the head first.
        network: where the ranks talk, and each node's address there.
        lock, choice: the stack in the environment.
        agent_dir: absolute path of our scripts on the nodes.
        job_dir: absolute path of the script's directory on the nodes; `script` is relative to it.
        script_text: the script's source, from which is told whether it is a Trainer script.
        host_keys: node name to the host key that we verified; None where SSH was not used.
        identity: the head's private key for the other nodes, or None for its own defaults.
        mpi: (flavour, absolute path of its launcher on the head); None takes the one in the environment.
        setvars: what the bindings' setvars.sh does, for the backend ccl.
    """

    inventory: Inventory
    nodes: Sequence[NodeFacts]
    network: NetworkChoice
    lock: Lock
    choice: StackChoice
    agent_dir: str
    job_dir: str
    script: str
    script_text: str
    run_id: str
    host_keys: Mapping[str, str | None]
    identity: str | None
    mpi: tuple[Flavour, str] | None
    setvars: SetvarsEffect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be carried out or printed.

    Args:
        document: what every rank reads (the launch document).
        files: name in the run's directory to (text, mode).
        command: mpirun's hostfile, argument vector and environment.
        limits: how long the run's phases may take, for the supervisor.
        restarts: what happens after a failure.
        from_run: the earlier run from whose newest complete checkpoint this one goes on.
    """

    run_id: str
    run_dir: str
    ranks: tuple[RankPlan, ...]
    network: NetworkChoice
    translation: Translation
    setvars: SetvarsEffect | None
    document: Mapping[str, Any]
    files: Mapping[str, tuple[str, int]]
    command: MpiCommand
    limits: Mapping[str, float | str]
    restarts: RestartPlan
    from_run: str | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that have ranks, the head first."""
        return tuple(ranks_per_node(self.ranks))

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """The ranks of one node."""
        return tuple(rank.rank for rank in self.ranks if rank.node == node)

    def start_document(self, label: Mapping[str, Any]) -> dict[str, Any]:
        """What `supervise.py start` reads; `label` is kept with the run's state."""
        return {
            "launch": self.document,
            "files": {name: {"text": text, "mode": mode} for name, (text, mode) in self.files.items()},
            "mpirun": {"argv": list(self.command.argv), "env": dict(self.command.env)},
            "grace_s": self.document["grace_s"],
            "limits": dict(self.limits),
            "restart": self.restarts.to_json(),
            "from_run": self.from_run,
            "label": dict(label),
        }


def plan_launch(request: LaunchRequest) -> LaunchPlan:
    """Decide everything about a launch; raises PreflightError when it could not work."""
    inventory, nodes = request.inventory, request.nodes
    network = request.network
    slots = {node.name: node.slots for node in inventory.nodes}
    placed = place(
        [PlacementNode(facts=node, slots=slots[node.name]) for node in nodes],
        inventory.job.ppn,
        inventory.job.omp_threads,
        inventory.job.ccl_workers,
    )
    ranks = tuple(_with_env(rank, placed, network, inventory) for rank in placed)
    translation = _translate(request)
    run_dir = f"{nodes[0].root}/runs/{request.run_id}"
    variables = _common_variables(nodes[0], ranks, network, inventory)
    flavour, program = request.mpi or (_flavour(inventory), f"{_env_dir(request)}/bin/{_program(inventory)}")
    document = {**_document(request, run_dir, ranks, translation, variables), "stop_signal": STOP_SIGNAL[flavour]}
    _check_length(document)
    hops = hops_from_head(request.inventory, request.nodes, network.endpoints, request.host_keys, request.identity)
    several, head_address = len(ranks_per_node(ranks)) > 1, network.endpoints[0].address
    command = mpi_command(
        MpiRequest(
            flavour=flavour,
            program=program,
            hosts=_hosts(ranks, network),
            run_dir=run_dir,
            uses_ssh=several,
            interface=network.endpoints[0].interface,
            variables={name: inventory.job.env.get(name, value) for name, value in variables.items()},
            command=(f"{_env_dir(request)}/bin/python", f"{document['agent_dir']}/rank.py"),
            ports=shares(inventory.network.ports) if inventory.network.ports else None,
        )
    )
    files = {"hostfile": (command.hostfile, 0o600)}
    if several:
        files |= {
            "ssh_config": (ssh_config(hops, run_dir, head_address, inventory.ssh.connect_timeout), 0o600),
            "known_hosts": (known_hosts(hops), 0o600),
            "ssh": (wrapper(run_dir, head_address, command.proxy_env), 0o700),
        }
    return LaunchPlan(
        run_id=request.run_id,
        run_dir=run_dir,
        ranks=ranks,
        network=network,
        translation=translation,
        setvars=request.setvars,
        document=document,
        files=files,
        command=command,
        limits={name: getattr(inventory.job, name) for name in LIMITS},
        restarts=plan_restarts(inventory, request.script_text, translation.argv, network.endpoints, tuple(ranks_per_node(ranks))),
    )


def encode_launch(document: Mapping[str, Any]) -> str:
    """The launch document as the text that remote/rank.py decodes: compact JSON, zlib, URL-safe base64."""
    compact = json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.compress(compact, 9)).decode()


def _translate(request: LaunchRequest) -> Translation:
    """The script's arguments as the stack knows them, in the precision that the job asks for."""
    job, text = request.inventory.job, request.script_text
    done = translate(job.args, script_text=text, versions=request.lock.versions, backend=request.choice.backend)
    if job.bf16 != "auto":
        precise = with_precision(done.argv, bf16=job.bf16, script_text=text)
        done = Translation(argv=precise.argv, notes=done.notes + precise.notes)
    if "--bf16" in done.argv and (slow := [node.name for node in request.nodes if not BF16_FLAGS & set(node.cpu.flags)]):
        note = f"--bf16: {', '.join(slow)} computes bfloat16 in software, slower than float32 (no AVX512_BF16, no AMX)"
        done = Translation(argv=done.argv, notes=(*done.notes, note))
    return done


def _common_variables(head: NodeFacts, ranks: Sequence[RankPlan], network: NetworkChoice, inventory: Inventory) -> dict[str, str]:
    """What all ranks share; OMP_NUM_THREADS only where it is one number for all."""
    if not head.free_ports:
        raise PreflightError(
            f"{head.name}: no free port for MASTER_PORT was found",
            advice="see what listens there: ss -ltnp; or name others with `network.ports`",
        )
    variables = {
        "MASTER_ADDR": network.endpoints[0].address,
        "MASTER_PORT": str(head.free_ports[0]),
        "CCL_WORKER_COUNT": str(max(1, inventory.job.ccl_workers)),  # none with a core of its own: it shares the rank's
    }
    threads = {rank.omp_num_threads for rank in ranks}
    return variables | ({"OMP_NUM_THREADS": str(threads.pop())} if len(threads) == 1 else {})


def _with_env(rank: RankPlan, placed: Sequence[RankPlan], network: NetworkChoice, inventory: Inventory) -> RankPlan:
    """The rank with its own variables. What the person sets wins."""
    endpoint = next(endpoint for endpoint in network.endpoints if endpoint.node == rank.node)
    computed = {
        "OMP_NUM_THREADS": str(rank.omp_num_threads),
        "GLOO_SOCKET_IFNAME": endpoint.interface,
        "CCL_KVS_IFACE": endpoint.interface,
        "FI_TCP_IFACE": endpoint.interface,
        "CCL_WORKER_AFFINITY": _worker_affinity([other for other in placed if other.node == rank.node], inventory),
        "CLUSTER_TRAIN_NODE": rank.node,
    }
    chosen = {name: inventory.job.env.get(name, value) for name, value in computed.items() if value}
    return replace(rank, env=chosen)


def _worker_affinity(local: Sequence[RankPlan], inventory: Inventory) -> str:
    """oneCCL takes the cores of all ranks of the node, in order; empty where a worker has no core of its own."""
    cores = [core for rank in local for core in rank.comm_cores]
    complete = all(len(rank.comm_cores) == inventory.job.ccl_workers for rank in local) and len(set(cores)) == len(cores)
    return ",".join(map(str, cores)) if complete else ""


def _document(
    request: LaunchRequest,
    run_dir: str,
    ranks: Sequence[RankPlan],
    translation: Translation,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    job, setvars = request.inventory.job, request.setvars
    hostnames = {node.name: node.hostname for node in request.nodes}
    return {
        "schema": 1,
        "run_id": request.run_id,
        "run_dir": run_dir,
        "agent_dir": request.agent_dir,
        "python": f"{_env_dir(request)}/bin/python",
        "job_dir": request.job_dir,
        "argv": [request.script, *translation.argv],
        "env": {**(setvars.variables if setvars else {}), **variables, **job.env},
        "prepend": {name: value for name, value in setvars.prepended.items() if name not in job.env} if setvars else {},
        "world_size": len(ranks),
        "grace_s": job.grace_s,
        "beat": _beat(request, variables),
        "bootstrap": {
            "backend": request.choice.backend,
            "asked_backend": request.choice.asked_backend,
            "ddp_timeout_s": job.ddp_timeout_s,
        },
        "ranks": [
            {
                "rank": rank.rank,
                "local_rank": rank.local_rank,
                "local_world_size": rank.local_world_size,
                "node": rank.node,
                "hostname": hostnames[rank.node],
                "cores": list(rank.cores),
                "env": dict(rank.env),
            }
            for rank in ranks
        ],
    }


def _beat(request: LaunchRequest, variables: Mapping[str, str]) -> dict[str, Any]:
    """Where the supervisor listens for heartbeats: beside MASTER_PORT, where the inventory names ports."""
    beat = {"address": request.network.endpoints[0].address, "timeout_s": request.inventory.job.heartbeat_timeout_s}
    ports = master_ports(request.inventory.network.ports)
    if ports is None:
        return beat
    taken = request.inventory.job.env.get("MASTER_PORT", variables["MASTER_PORT"])
    free = [port for port in range(ports[0], ports[1] + 1) if str(port) != taken]
    return {**beat, "ports": free[:MOST_BEAT_PORTS]}


def _check_length(document: Mapping[str, Any]) -> None:
    if len(encode_launch(document)) + len(LAUNCH_VARIABLE) + 1 > LONGEST_VARIABLE_BYTES:
        raise PreflightError(
            "the script's arguments and environment are too long to be carried to the ranks",
            advice="put long lists into a file and name it in `job.sync`",
        )


def _hosts(ranks: Sequence[RankPlan], network: NetworkChoice) -> tuple[tuple[str, int], ...]:
    addresses = {endpoint.node: endpoint.address for endpoint in network.endpoints}
    return tuple((addresses[node], count) for node, count in ranks_per_node(ranks).items())


def _env_dir(request: LaunchRequest) -> str:
    return f"{request.nodes[0].root}/envs/{request.lock.digest}"


def _flavour(inventory: Inventory) -> Flavour:
    mpi = inventory.stack.mpi
    if mpi == "system":
        raise PreflightError("mpi: system: no mpirun was found on the head", advice="load its module there, or use `mpi: impi`")
    return mpi


def _program(inventory: Inventory) -> str:
    return PROGRAM[_flavour(inventory)]
