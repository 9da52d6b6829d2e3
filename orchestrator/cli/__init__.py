"""The command line. The only module that exits.

Exit codes: 0 ok, 1 the job failed, 2 usage or inventory, 3 a node cannot be reached or trusted, 4 provisioning failed,
5 preflight refused, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from orchestrator import __version__
from orchestrator.console import Console
from orchestrator.errors import ClusterTrainError, Interrupted

# Pydantic would look through all installed packages for plugins, of which we want none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

MODULE_OF = {
    "up": "train",
    "provision": "ready",
    "status": "life",
    "logs": "life",
    "stop": "life",
    "runs": "life",
    "doctor": "survey",
    "init": "survey",
    "teardown": "survey",
}
# Importing leaves no garbage to speak of, and looking for it after every 700 objects is a fifth of the time that it takes.
ALLOCATIONS_PER_COLLECTION = 50_000


class Commands(click.Group):
    """Imports a command's module when the command is wanted: what the others need costs a tenth of a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULE_OF:
            return None
        command: click.Command = getattr(import_module(f"orchestrator.cli.{MODULE_OF[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cluster-train")
def cli() -> None:
    """Train a PyTorch model on several CPU machines over SSH.

    Write an inventory (see inventories/lab.yml, or let `cluster-train init HOST...` write one), then:

    \b
        cluster-train up inventories/lab.yml
        cluster-train up inventories/lab.yml -- train.py --epochs 3

    INVENTORY is a YAML file or a plain MPI hostfile; without one, $CLUSTER_TRAIN_INVENTORY, then inventories/lab.yml.
    """


def main() -> None:
    """Entry point: every error of ours is told with its advice and ends with the exit code of its kind."""
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    code = _run(cli)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it has gone
            stream.flush()
    # All is closed and written. What the interpreter would now free object by object, the system frees at once; and a thread
    # that waits for a node that has died keeps nobody waiting.
    os._exit(code)


def _run(command: Callable[..., Any]) -> int:
    console = Console(as_json="--json" in sys.argv[1:])
    try:
        code = command(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        console.error(Interrupted("interrupted"))
        return Interrupted.exit_code
    except ClusterTrainError as error:
        console.error(error)
        return error.exit_code
