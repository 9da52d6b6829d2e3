"""`cluster-train up`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from orchestrator.actions.claim import Terms
from orchestrator.actions.lockfile import read_lock
from orchestrator.answers import dry_run_result
from orchestrator.cli.life import finish
from orchestrator.cli.options import (
    ScriptCommand,
    inventory_argument,
    json_option,
    locked_option,
    log_dir_option,
    raw_option,
    read_inventory,
)
from orchestrator.console import Console
from orchestrator.engine import train
from orchestrator.planning.occupancy import Remains


@click.command(cls=ScriptCommand)
@inventory_argument
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the hostfile, each rank's environment and cores, and the mpirun line; start nothing.",
)
@click.option("--detach", is_flag=True, help="Return once the run has started; it goes on by itself.")
@click.option(
    "--resume",
    metavar="ID",
    help="Go on from the newest complete checkpoint of an earlier run on these nodes, or of the `newest`.",
)
@click.option("--wait", is_flag=True, help="Wait while other runs are on the nodes, in the order of asking.")
@click.option("--share", is_flag=True, help="Start whoever else is on the nodes.")
@click.option("--clean", is_flag=True, help="End what crashed runs of yours left on the nodes, without asking.")
@raw_option
@locked_option
@log_dir_option
@json_option
@click.pass_context
def up(
    ctx: click.Context,
    inventory_file: str,
    dry_run: bool,
    detach: bool,
    resume: str | None,
    wait: bool,
    share: bool,
    clean: bool,
    raw: bool,
    locked: Path | None,
    log_dir: str | None,
    as_json: bool,
) -> None:
    """Make the nodes ready, start the training on all of them, and stream every rank's log.

    A second `up` finds nothing to install and starts at once. Ctrl-C stops the run on every node; a second Ctrl-C ends it
    without waiting. Losing the connection does not stop it: `cluster-train logs -f` picks it up again.

    The nodes are locked for the run, against everybody who uses cluster-train there. Where another run is on one of them, `up`
    says whose, of what and since when, and exits with 5, unless told to --wait or to --share.
    """
    console = Console(as_json=as_json, raw=raw)
    if wait and share:
        raise click.UsageError("--wait and --share exclude each other: wait for the others, or start beside them")
    inventory = read_inventory(ctx, inventory_file, console)
    lock = read_lock(locked) if locked else None
    if dry_run:
        console.emit(dry_run_result(inventory, train.dry_run(inventory, console.emit, locked=lock)))
        return
    terms = Terms(wait=wait, share=share, is_clearing_wanted=_clearing(clean=clean, as_json=as_json))
    outcome = train.up(inventory, console.emit, detach=detach, log_dir=log_dir, locked=lock, resume=resume, terms=terms)
    if outcome is not None:
        finish(ctx, outcome, console)


def _clearing(*, clean: bool, as_json: bool) -> Callable[[Sequence[Remains]], bool] | None:
    """Whether to end what crashed runs left: yes, or as the person at the terminal says, or no."""
    if clean:
        return lambda remains: True
    if as_json or not sys.stdin.isatty():
        return None

    def ask(remains: Sequence[Remains]) -> bool:
        click.echo("\n".join(found.text() for found in remains), err=True)
        return click.confirm("Nobody watches over these any more. End them?", err=True)

    return ask
