"""`cluster-train doctor`, `init` and `teardown`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from orchestrator.cli.options import DEFAULT_INVENTORY, inventory_argument, is_agreed, json_option, read_inventory
from orchestrator.console import Console
from orchestrator.engine import survey
from orchestrator.errors import InventoryError
from orchestrator.planning.tables import table
from orchestrator.specs.events import Result


@click.command()
@inventory_argument
@json_option
@click.pass_context
def doctor(ctx: click.Context, inventory_file: str, as_json: bool) -> None:
    """Look for what would make `up` fail or crawl, node by node.

    Looks at the connection, host key and login, the root directory and its disk, Python and the C library, shared memory, open
    files, load, clocks, host names and the common network. Each finding comes with what to do about it; exit 5 if anything
    would make `up` fail.
    """
    console = Console(as_json=as_json)
    found = survey.doctor(read_inventory(ctx, inventory_file, console), console.emit)
    rows = [("", "node", "finding", "evidence", "remedy")]
    rows += [(finding.severity, finding.node, finding.what, finding.evidence, finding.remedy) for finding in found]
    text = table(rows) if found else "nothing found: `cluster-train up` should work"
    console.emit(Result(document={"findings": [asdict(finding) for finding in found]}, text=text))
    ctx.exit(5 if any(finding.severity == "error" for finding in found) else 0)


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("-o", "--output", default=DEFAULT_INVENTORY, show_default=True, help="The file to write; never overwritten.")
@click.option("--user", help="Login name on the hosts.")
@click.option("--key", help="Private key file.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of sshd.")
@json_option
def init(hosts: tuple[str, ...], output: str, user: str | None, key: str | None, port: int | None, as_json: bool) -> None:
    """Look at machines and write an inventory for them. A HOST is an address, or user@address:port; node0 comes first."""
    console = Console(as_json=as_json)
    path = Path(output)
    if path.exists():
        raise InventoryError(f"{path} exists already", advice="name another file with --output")
    text = survey.init(hosts, {"user": user, "key": key, "port": port}, console.emit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.emit(Result(document={"inventory": str(path)}, text=f"wrote {path}; next: cluster-train up {path} -- train.py"))


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
