"""What several commands take, and how they read it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.actions.inventory_file import load_inventory
from orchestrator.console import Console
from orchestrator.errors import InventoryError
from orchestrator.specs.inventory import Inventory, apply_overrides

DEFAULT_INVENTORY = "inventories/lab.yml"
SCRIPT_KEY = "cluster_train.script"
inventory_argument = click.argument(
    "inventory_file", metavar="[INVENTORY]", envvar="CLUSTER_TRAIN_INVENTORY", default=DEFAULT_INVENTORY
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout: one object per line, the last is the result.")
run_option = click.option("--run", "run_id", metavar="ID", help="Which run (default: the newest).")
raw_option = click.option("--raw", is_flag=True, help="Show escape sequences in the ranks' output as they are (colours).")
log_dir_option = click.option(
    "--log-dir", metavar="DIR", help="Where records of runs are kept (default: $XDG_STATE_HOME/cluster-train/runs)."
)
locked_option = click.option(
    "--locked",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Install exactly what this lock (written by `provision --lock`) says; nothing is resolved.",
)


class ScriptCommand(click.Command):
    """A command that takes everything after `--` as the training script and its arguments, untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            ctx.meta[SCRIPT_KEY] = args[split + 1 :]
            args = args[:split]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SCRIPT ARGS...]"]


def read_inventory(ctx: click.Context, path: str, console: Console) -> Inventory:
    """The inventory with the command line's script in it; its secrets are hidden from then on."""
    inventory = load_inventory(path)
    script = ctx.meta.get(SCRIPT_KEY, [])
    inventory = apply_overrides(inventory, script=script[0] if script else None, args=script[1:])
    console.hide(inventory.secrets)
    return inventory


def is_agreed(question: str) -> bool:
    """The answer of the person at the terminal; without one nothing is removed unasked, and it is said how to do without."""
    if not sys.stdin.isatty():
        raise InventoryError(f"{question} There is no terminal to answer at, and nothing was removed", advice="--yes answers it")
    return click.confirm(question, err=True)
