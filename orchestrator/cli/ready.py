"""`cluster-train provision`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from orchestrator.actions.lockfile import read_lock, write_lock
from orchestrator.actions.provision import Provisioned
from orchestrator.actions.prune import KINDS, Unused
from orchestrator.actions.verify import Verified
from orchestrator.cli.options import ScriptCommand, inventory_argument, is_agreed, json_option, locked_option, read_inventory
from orchestrator.console import Console
from orchestrator.engine import ready
from orchestrator.planning.tables import table
from orchestrator.specs.events import Result


@click.command(cls=ScriptCommand)
@inventory_argument
@click.option("--check", is_flag=True, help="Only look: what every node really has, against the lock; exit 4 where it differs.")
@click.option("--repair", is_flag=True, help="Look first, and install damaged environments anew.")
@locked_option
@click.option(
    "--lock",
    "lock_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the lock (every wheel's version, hash and source) to this file.",
)
@click.option("--prune", is_flag=True, help="Free the nodes of what the last 10 runs do not use; shows sizes and asks first.")
@click.option("--yes", is_flag=True, help="With --prune: do not ask.")
@json_option
@click.pass_context
def provision(
    ctx: click.Context,
    inventory_file: str,
    check: bool,
    repair: bool,
    locked: Path | None,
    lock_file: Path | None,
    prune: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring every node to the same environment, and the job's files onto it.

    The wheels are resolved once, here, with your own pip configuration, and carried to the nodes: those need no internet, no
    pip and no root. An environment is named by a digest of what is in it and never changed.

    --check imports the stack on every node, reads the versions of all that is installed and starts the MPI launcher: a table of
    nodes and packages with every difference marked, and what to do about it.
    """
    console = Console(as_json=as_json)
    inventory = read_inventory(ctx, inventory_file, console)
    if check + repair + prune > 1:
        raise click.UsageError("--check only looks, --repair makes, --prune removes: give one of them")
    lock = read_lock(locked) if locked else None
    if check:
        _show_check(ctx, ready.check(inventory, console.emit, locked=lock), lock_file, console)
        return
    if prune:
        removed = ready.prune(inventory, console.emit, partial(_is_prune_wanted, yes=yes), locked=lock)
        gone = sum(len(paths) for paths in removed.values())
        console.emit(Result(document={"removed": removed}, text=f"removed {gone} directories" if gone else "nothing was removed"))
        return
    done = ready.prepare(inventory, console.emit, locked=lock, repair=repair)
    if lock_file:
        write_lock(lock_file, done.lock)
    where = ", ".join(done.installed_on) or "nowhere: every node had it"
    document = {
        "stack": done.lock.digest,
        "backend": done.choice.backend,
        "installed_on": list(done.installed_on),
        "versions": done.lock.versions,
        "changes": [asdict(change) for change in done.changes],
    }
    console.emit(
        Result(
            document=document,
            text=f"{_changes_text(done)}stack {done.lock.digest}, backend {done.choice.backend}, installed on {where}",
        )
    )


def _is_prune_wanted(unused: Mapping[str, Unused], *, yes: bool) -> bool:
    """Show what could go from each node, and ask."""
    rows = [("node", "what", "how many", "size", "names")]
    for node, found in unused.items():
        for kind, items in found.sizes.items():
            size = f"{sum(size_bytes for _, size_bytes in items) / 1e6:.1f} MB"
            names = ", ".join(name[:16] for name, _ in items[:3]) + (", …" if len(items) > 3 else "")
            rows += [(node, KINDS[kind], str(len(items)), size, names)] if items else []
        rows.append((node, "given back to the disk", "", f"{found.freed_bytes / 1e6:.1f} MB", ""))
    click.echo(table(rows), err=True)
    return yes or is_agreed("Remove them?")


def _show_check(ctx: click.Context, verified: Verified, lock_file: Path | None, console: Console) -> None:
    """Show what the nodes have, and exit with 4 unless that is what the lock says."""
    if lock_file:
        write_lock(lock_file, verified.lock)
    comparison = verified.comparison
    backend = verified.choice.backend
    document = {"stack": verified.lock.digest, "backend": backend, **comparison.to_json(), "nodes": verified.reports}
    console.emit(Result(document=document, text=f"stack {verified.lock.digest}, backend {backend}\n{comparison.text()}"))
    ctx.exit(0 if comparison.in_order else 4)


def _changes_text(done: Provisioned) -> str:
    """What was brought to each node, from where, and how long it took; empty where nothing had to be done."""
    if not done.changes:
        return ""
    rows = [("node", "wheels", "from", "copied in", "installed in")]
    for change in done.changes:
        got = change.delivery
        rows.append(
            (
                change.node,
                f"{got.wheels}, {got.size_bytes / 1e6:.0f} MB" if got.wheels else "had them",
                (got.sender or "here") if got.wheels else "",
                f"{got.seconds:.1f} s" if got.wheels else "",
                f"{change.install_s:.1f} s",
            )
        )
    return table(rows) + "\n"
