"""`cluster-train doctor`, `init` and `teardown`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator.actions.doctor import Diagnosis
from orchestrator.cli.options import DEFAULT_INVENTORY, inventory_argument, is_agreed, json_option, read_inventory
from orchestrator.console import Console
from orchestrator.engine import survey
from orchestrator.errors import InventoryError
from orchestrator.planning.report import findings_text, nodes_text, ways_text
from orchestrator.specs.events import Result


@click.command()
@inventory_argument
@json_option
@click.pass_context
def doctor(ctx: click.Context, inventory_file: str, as_json: bool) -> None:
    """Look for what would make `up` fail or crawl, node by node and from node to node.

    Looks at the connection, host key and login, the root directory and its disk, Python, shared memory, processors, limits,
    load, clocks, names and remains of runs; then tries every way between nodes that a launch will use: node0's SSH, MASTER_PORT,
    the launcher's port, and random ports in both directions, as gloo opens them. Each finding comes with what to do about it;
    exit 5 if anything would make `up` fail.
    """
    console = Console(as_json=as_json)
    diagnosis = survey.doctor(read_inventory(ctx, inventory_file, console), console.emit)
    console.emit(_diagnosis_result(diagnosis, console))
    ctx.exit(0 if diagnosis.is_fit else 5)


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("-o", "--output", default=DEFAULT_INVENTORY, show_default=True, help="The file to write.")
@click.option("--user", help="Login name on the hosts.")
@click.option("--key", help="Private key file.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of sshd.")
@click.option(
    "--copy-key/--no-copy-key",
    default=None,
    help="Where only a password lets you in: put your public key there, or do not (default: ask).",
)
@click.option("--yes", is_flag=True, help="Overwrite the file if it is there.")
@json_option
def init(
    hosts: tuple[str, ...],
    output: str,
    user: str | None,
    key: str | None,
    port: int | None,
    copy_key: bool | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Look at machines and write a commented inventory of what was found. node0 comes first.

    A HOST is an address, or user@address:port; or the path of a hostfile; or a quoted pattern of host names that your
    ~/.ssh/config knows: `cluster-train init 'node*'`.

    Machines that take none of your keys but a password are asked for it here, on the terminal, once for all; it is not stored.
    Your public key can be put there, so that the other commands get in. `teardown` removes it.
    """
    console = Console(as_json=as_json)
    path = Path(output)
    if path.exists() and not (yes or (sys.stdin.isatty() and is_agreed(f"{path} exists already. Overwrite it?"))):
        raise InventoryError(f"{path} exists already", advice="name another file with --output, or say --yes to overwrite it")
    text = survey.init(
        hosts, {"user": user, "key": key, "port": port}, console.emit, lambda question: _copies_key(copy_key, question)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.emit(Result(document={"inventory": str(path)}, text=f"wrote {path}; next: cluster-train doctor {path}"))


@click.command()
@inventory_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def teardown(ctx: click.Context, inventory_file: str, yes: bool, as_json: bool) -> None:
    """Remove from the nodes all that was put there: environments, wheels, jobs, runs with their logs, and keys."""
    console = Console(as_json=as_json)
    inventory = read_inventory(ctx, inventory_file, console)
    if not yes:
        names = ", ".join(node.name for node in inventory.nodes)
        if not is_agreed(f"Remove everything below {inventory.root} on {names}?"):
            raise click.Abort
    removed = survey.teardown(inventory, console.emit)
    console.emit(Result(document={"removed": removed}, text="nothing of cluster-train is left on the nodes"))


def _copies_key(said: bool | None, question: str) -> bool:
    if said is not None:
        return said
    return sys.stdin.isatty() and click.confirm(question, default=True, err=True)


def _diagnosis_result(diagnosis: Diagnosis, console: Console) -> Result:
    parts = [
        nodes_text(diagnosis.nodes, diagnosis.health, diagnosis.network) if diagnosis.nodes else "",
        ways_text(diagnosis.ways),
        diagnosis.cost.text() if diagnosis.cost else "",
        findings_text(diagnosis.findings, console.colored) if diagnosis.findings else "",
        "`cluster-train up` should work" if diagnosis.is_fit else "`cluster-train up` would fail",
    ]
    document = {
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "nodes": {name: asdict(health) for name, health in diagnosis.health.items()},
        "network": asdict(diagnosis.network) if diagnosis.network else None,
        "backend": diagnosis.backend,
        "ways": [asdict(way) for way in diagnosis.ways],
        "ssh": [asdict(way) for way in diagnosis.ssh],
        "cost": asdict(diagnosis.cost) if diagnosis.cost else None,
    }
    return Result(document=document, text="\n".join(part for part in parts if part))
