"""Golden plans: from facts of real machines to the launch that the guides describe."""

from __future__ import annotations

import base64
import json
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import PreflightError
from orchestrator.planning.compat import choose_stack
from orchestrator.planning.launch import LaunchPlan, LaunchRequest, encode_launch, plan_launch
from orchestrator.planning.network import network_of
from orchestrator.planning.script import by_hand, placement_table, ranges
from orchestrator.specs.facts import InterfaceFacts, MachineId, NodeFacts
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.lock import Lock, LockedWheel
from orchestrator.specs.setvars import SetvarsEffect

FACTS = Path(__file__).resolve().parent.parent / "data" / "facts"
EPYC = "x86_64-epyc_7451"
HOST_KEY = "ssh-ed25519 AAAA"


def machine(kept: str, index: int) -> NodeFacts:
    """A real machine's facts, as node number `index` of a lab on 10.0.0.0/24."""
    facts = NodeFacts.from_json(f"node{index}", json.loads((FACTS / f"{kept}.json").read_text()))
    card = InterfaceFacts(
        name=f"eno{index + 1}",
        addresses=(f"10.0.0.{10 + index}/24",),
        up=True,
        loopback=False,
        speed_mbps=10_000,
        kind="physical",
    )
    return replace(
        facts,
        hostname=f"xeon{index}",
        user="trainer",
        root="/home/trainer/.cluster-train",
        arch="x86_64",
        machine=MachineId(boot_id=f"boot{index}", mount_namespace="mnt"),
        interfaces=(card,),
        free_ports=(29501,),
    )


def lock() -> Lock:
    wheels = [("torch", "2.13.0+cpu"), ("transformers", "5.24.0"), ("accelerate", "1.15.0")]
    locked = [LockedWheel(name=n, version=v, filename=f"{n}.whl", sha256="0" * 64, source="") for n, v in wheels]
    return Lock(requirements=(), target="cp311 x86_64", wheels=tuple(locked), installer=None)


def request(nodes: list[NodeFacts], job: dict[str, Any] | None = None, script_text: str = "", **options: Any) -> LaunchRequest:
    inventory = Inventory.model_validate(
        {
            "nodes": [{"name": node.name, "host": node.interfaces[0].addresses[0].split("/")[0]} for node in nodes],
            "job": {"script": "train.py", **(job or {})},
            **options,
        }
    )
    return LaunchRequest(
        inventory=inventory,
        nodes=nodes,
        network=network_of(inventory, nodes),
        lock=lock(),
        choice=choose_stack(inventory.stack, python_version="3.11", machine="x86_64"),
        agent_dir="/home/trainer/.cluster-train/agent/a1",
        job_dir="/home/trainer/.cluster-train/jobs/j1",
        script="train.py",
        script_text=script_text,
        run_id="20260101-000000-lab-0000",
        host_keys={node.name: HOST_KEY for node in nodes},
        identity="/home/trainer/.cluster-train/ssh/id_ed25519",
        mpi=None,
    )


def launch(nodes: list[NodeFacts], job: dict[str, Any] | None = None, script_text: str = "", **options: Any) -> LaunchPlan:
    return plan_launch(request(nodes, job, script_text, **options))


def test_two_dual_socket_machines_get_the_guides_own_launch() -> None:
    """-n 4 -ppn 2, MASTER_ADDR of node0, OMP_NUM_THREADS one less than a socket's cores, one CCL worker."""
    plan = launch([machine(EPYC, 0), machine(EPYC, 1)])
    argv = " ".join(plan.command.argv)
    assert "-n 4 -ppn 2" in argv and "-iface eno1" in argv
    assert "-genv MASTER_ADDR 10.0.0.10 -genv MASTER_PORT 29501 -genv CCL_WORKER_COUNT 1 -genv OMP_NUM_THREADS 23" in argv
    assert plan.command.hostfile == "10.0.0.10:2\n10.0.0.11:2\n"
    assert [rank.cores for rank in plan.ranks[:2]] == [tuple(range(24)), tuple(range(24, 48))]
    assert [rank.env["GLOO_SOCKET_IFNAME"] for rank in plan.ranks] == ["eno1", "eno1", "eno2", "eno2"]
    assert plan.ranks[3].env["CCL_WORKER_AFFINITY"] == "23,47"


def test_one_machine_needs_neither_network_nor_ssh() -> None:
    """-n 2 on loopback; no ssh files."""
    plan = launch([machine(EPYC, 0)])
    assert "-n 2 -ppn 2" in " ".join(plan.command.argv)
    assert plan.document["env"]["MASTER_ADDR"] == "127.0.0.1"
    assert set(plan.files) == {"hostfile"}


def test_unequal_machines_carry_their_counts_in_the_hostfile() -> None:
    """One socket beside two: three ranks, each with its own number of threads."""
    plan = launch([machine(EPYC, 0), machine("arm-A510-A710-A715-X3", 1)])
    assert plan.command.hostfile == "10.0.0.10:2\n10.0.0.11:1\n"
    assert "-ppn" not in plan.command.argv and "OMP_NUM_THREADS" not in plan.document["env"]
    assert [rank.env["OMP_NUM_THREADS"] for rank in plan.ranks] == ["23", "23", "7"]


def test_what_the_person_sets_wins() -> None:
    """job.env beats everything that was computed, for all ranks."""
    plan = launch([machine(EPYC, 0)], {"env": {"OMP_NUM_THREADS": "5", "MASTER_PORT": "4000", "CCL_KVS_IFACE": "ib0"}})
    assert plan.document["env"]["MASTER_PORT"] == "4000"
    assert {rank.env["OMP_NUM_THREADS"] for rank in plan.ranks} == {"5"} and plan.ranks[0].env["CCL_KVS_IFACE"] == "ib0"
    assert "-genv MASTER_PORT 4000" in " ".join(plan.command.argv)


def test_the_guides_arguments_are_translated_and_told() -> None:
    """On today's stack the documented command line becomes one that it knows."""
    job = {"args": ["--no_cuda", "--ddp_backend", "ccl", "--use_ipex", "--bf16"]}
    script_text = "from transformers import TrainingArguments"
    plan = launch([machine(EPYC, 0)], job, script_text, stack={"backend": "gloo"})
    assert plan.document["argv"] == ["train.py", "--use_cpu", "--ddp_backend", "gloo", "--bf16"]
    assert [note.split(":")[0] for note in plan.translation.notes] == ["--no_cuda", "--ddp_backend ccl", "--use_ipex", "--bf16"]


@pytest.mark.parametrize(
    ("bf16", "args", "passed"),
    [
        ("auto", ["--x"], ["--x"]),
        ("auto", ["--bf16"], ["--bf16"]),
        (True, ["--x"], ["--bf16", "--x"]),
        (False, ["--bf16", "true", "--x"], ["--x"]),
        (False, ["--bf16=True", "--x", "true"], ["--x", "true"]),
    ],
)
def test_bf16_is_the_persons_word(bf16: bool | str, args: list[str], passed: list[str]) -> None:
    """auto changes nothing; true and false decide for a Trainer script, and no other script is touched."""
    assert launch([machine(EPYC, 0)], {"bf16": bf16, "args": args}, "TrainingArguments").document["argv"][1:] == passed
    assert launch([machine(EPYC, 0)], {"bf16": bf16, "args": args}, "argparse").document["argv"][1:] == args


def test_bf16_without_the_hardware_is_told() -> None:
    """The EPYC 7451 has neither AVX512_BF16 nor AMX: bfloat16 is slower there, and a note names the node."""
    notes = launch([machine(EPYC, 0)], {"args": ["--bf16"]}, "TrainingArguments").translation.notes
    assert any("node0 computes bfloat16 in software" in note for note in notes)


def test_the_ranks_read_back_the_document_that_was_encoded() -> None:
    """Arguments of any kind survive the encoding that carries them."""
    plan = launch([machine(EPYC, 0)], {"args": ["two words", "é\n'\"$*", ""]})
    decoded = json.loads(zlib.decompress(base64.urlsafe_b64decode(encode_launch(plan.document))))
    assert decoded == plan.document and decoded["argv"][1:] == ["two words", "é\n'\"$*", ""]


def test_arguments_that_no_environment_can_carry_are_refused_before_the_start() -> None:
    """The kernel's limit on one variable is met with an error that says what to do."""
    source = random.Random(1)
    noise = "".join(chr(source.randrange(33, 0x2FFF)) for _ in range(200_000))
    with pytest.raises(PreflightError, match="too long"):
        launch([machine(EPYC, 0)], {"args": [noise[i : i + 50_000] for i in range(0, 200_000, 50_000)]})


def test_a_second_node_without_a_known_host_key_is_refused() -> None:
    """The head would have to trust a node that we did not verify."""
    nodes = [machine(EPYC, 0), machine(EPYC, 1)]
    with pytest.raises(PreflightError, match="reached without SSH"):
        plan_launch(
            replace(request(nodes), host_keys={"node0": HOST_KEY, "node1": None}),
        )


def test_secrets_are_not_in_the_printed_script() -> None:
    """A token is asked for by name; neither it nor its encoded form is printed."""
    plan = launch([machine(EPYC, 0)], {"env": {"HF_TOKEN": "hf_secret_value"}})
    script = by_hand(plan, ["HF_TOKEN"], [])
    payload = next(line.split("=", 1)[1] for line in script.splitlines() if line.startswith("export CLUSTER_TRAIN_LAUNCH="))
    assert "hf_secret_value" not in script and b"hf_secret" not in zlib.decompress(base64.urlsafe_b64decode(payload))
    assert "${HF_TOKEN:?" in script


def test_secrets_in_arguments_are_masked_before_they_are_encoded() -> None:
    """Nobody could mask them afterwards; the script says that it is not complete."""
    plan = launch([machine(EPYC, 0)], {"args": ["--url=db://hunter2@h", "plain"], "env": {"A": "x-hunter2"}})
    script = by_hand(plan, [], ["hunter2"])
    payload = next(line.split("=", 1)[1] for line in script.splitlines() if line.startswith("export CLUSTER_TRAIN_LAUNCH="))
    document = zlib.decompress(base64.urlsafe_b64decode(payload)).decode()
    assert "hunter2" not in document and "--url=db://***@h" in document and "plain" in document
    assert "NOT COMPLETE" in script and "NOT COMPLETE" not in by_hand(plan, [], [])


def test_the_table_of_ranks_reads_like_the_kernel_writes() -> None:
    """Cores are shown as ranges."""
    assert ranges([0, 1, 2, 8, 10, 11]) == "0-2,8,10-11"
    assert "24-47" in placement_table(launch([machine(EPYC, 0)]))


def test_the_effect_of_setvars_is_below_all_else() -> None:
    """What a launch computes and what the person sets win; lists of directories are left to the rank, who may have its own."""
    effect = SetvarsEffect(
        module="oneccl_bindings_for_pytorch",
        file="/e/env/setvars.sh",
        variables={"CCL_ROOT": "/e", "CCL_WORKER_COUNT": "7", "FI_PROVIDER_PATH": "/e/prov"},
        prepended={"LD_LIBRARY_PATH": "/e/lib", "CPATH": "/e/include"},
    )
    env = {"FI_PROVIDER_PATH": "/mine", "CPATH": "/my/include"}
    document = plan_launch(replace(request([machine(EPYC, 0)], {"env": env}), setvars=effect)).document
    assert document["env"] | {"CCL_ROOT": "/e", "CCL_WORKER_COUNT": "1", "FI_PROVIDER_PATH": "/mine"} == document["env"]
    assert document["prepend"] == {"LD_LIBRARY_PATH": "/e/lib"}
    assert effect.names == ("CCL_ROOT", "CCL_WORKER_COUNT", "CPATH", "FI_PROVIDER_PATH", "LD_LIBRARY_PATH")
    assert launch([machine(EPYC, 0)]).document["prepend"] == {}


def test_the_limits_of_a_run_reach_the_supervisor_and_the_ranks() -> None:
    """The phases' limits are the supervisor's; those of heartbeats and collectives every rank reads; no secret yet."""
    job = {"heartbeat_timeout_s": 20, "run_timeout_s": 3600, "stall_action": "stop", "ddp_timeout_s": 90}
    plan = launch([machine(EPYC, 0), machine(EPYC, 1)], job)
    assert plan.start_document({})["limits"] == {
        "start_timeout_s": 300.0,
        "run_timeout_s": 3600.0,
        "stall_timeout_s": 600.0,
        "stall_action": "stop",
    }
    assert plan.document["beat"] == {"address": "10.0.0.10", "timeout_s": 20.0}
    assert plan.document["bootstrap"]["ddp_timeout_s"] == 90.0


def test_the_supervisor_listens_beside_master_port_in_a_range_that_is_open() -> None:
    """Not on MASTER_PORT itself, which rank 0 takes later; the launcher has its own share."""
    nodes = [replace(machine(EPYC, 0), free_ports=(29580,)), machine(EPYC, 1)]
    plan = launch(nodes, network={"ports": "29500-29599"})
    ports = plan.document["beat"]["ports"]
    assert ports == [*range(29575, 29580), *range(29581, 29592)]
    assert plan.command.env["I_MPI_PORT_RANGE"] == "29500:29524"
