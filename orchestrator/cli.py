"""The command line. The only module that exits.

Exit codes: 0 ok, 1 the job failed, 2 usage or inventory, 3 a node cannot be reached or trusted, 4 provisioning failed,
5 preflight refused, 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from orchestrator import __version__, engine
from orchestrator.actions.attend import Outcome
from orchestrator.actions.claim import Terms
from orchestrator.actions.inventory_file import load_inventory
from orchestrator.actions.lockfile import read_lock, write_lock
from orchestrator.actions.prune import KINDS, Unused
from orchestrator.actions.verify import Verified
from orchestrator.answers import changes_text, dry_run_result, outcome_result, runs_text, status_text
from orchestrator.console import Console
from orchestrator.errors import ClusterTrainError, Interrupted, InventoryError
from orchestrator.planning.logview import LogView, parse_since
from orchestrator.planning.occupancy import Remains
from orchestrator.planning.tables import table
from orchestrator.specs.events import Result
from orchestrator.specs.inventory import Inventory, apply_overrides

DEFAULT_INVENTORY = "inventories/lab.yml"
SCRIPT_KEY = "cluster_train.script"


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


inventory_argument = click.argument(
    "inventory_file", metavar="[INVENTORY]", envvar="CLUSTER_TRAIN_INVENTORY", default=DEFAULT_INVENTORY
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout: one object per line, the last is the result.")
run_option = click.option("--run", "run_id", metavar="ID", help="Which run (default: the newest).")
log_dir_option = click.option(
    "--log-dir", metavar="DIR", help="Where records of runs are kept (default: $XDG_STATE_HOME/cluster-train/runs)."
)

locked_option = click.option(
    "--locked",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Install exactly what this lock (written by `provision --lock`) says; nothing is resolved.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cluster-train")
def cli() -> None:
    """Train a PyTorch model on several CPU machines over SSH.

    Write an inventory (see inventories/lab.yml, or let `cluster-train init HOST...` write one), then:

    \b
        cluster-train up inventories/lab.yml
        cluster-train up inventories/lab.yml -- train.py --epochs 3

    INVENTORY is a YAML file or a plain MPI hostfile; without one, $CLUSTER_TRAIN_INVENTORY, then inventories/lab.yml.
    """


@cli.command(cls=ScriptCommand)
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
    console = Console(as_json=as_json)
    if wait and share:
        raise click.UsageError("--wait and --share exclude each other: wait for the others, or start beside them")
    inventory = _inventory(ctx, inventory_file, console)
    lock = read_lock(locked) if locked else None
    if dry_run:
        console.emit(dry_run_result(inventory, engine.dry_run(inventory, console.emit, locked=lock)))
        return
    terms = Terms(wait=wait, share=share, is_clearing_wanted=_clearing(clean=clean, as_json=as_json))
    outcome = engine.up(inventory, console.emit, detach=detach, log_dir=log_dir, locked=lock, resume=resume, terms=terms)
    if outcome is not None:
        _finish(ctx, outcome, console)


@cli.command(cls=ScriptCommand)
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
    inventory = _inventory(ctx, inventory_file, console)
    if check + repair + prune > 1:
        raise click.UsageError("--check only looks, --repair makes, --prune removes: give one of them")
    lock = read_lock(locked) if locked else None
    if check:
        _show_check(ctx, engine.check(inventory, console.emit, locked=lock), lock_file, console)
        return
    if prune:
        removed = engine.prune(inventory, console.emit, partial(_is_prune_wanted, yes=yes), locked=lock)
        gone = sum(len(paths) for paths in removed.values())
        console.emit(Result(document={"removed": removed}, text=f"removed {gone} directories" if gone else "nothing was removed"))
        return
    done = engine.prepare(inventory, console.emit, locked=lock, repair=repair)
    if lock_file:
        write_lock(lock_file, done.lock)
    where = ", ".join(done.installed_on) or "nowhere: every node had it"
    document = {
        "stack": done.lock.digest,
        "installed_on": list(done.installed_on),
        "versions": done.lock.versions,
        "changes": [asdict(change) for change in done.changes],
    }
    console.emit(Result(document=document, text=f"{changes_text(done)}stack {done.lock.digest}, installed on {where}"))


@cli.command()
@inventory_argument
@run_option
@json_option
@click.pass_context
def status(ctx: click.Context, inventory_file: str, run_id: str | None, as_json: bool) -> None:
    """Show a run's state, how far it is, and every rank.

    A run is waiting (for the nodes), provisioning, starting, running, stalled (no rank writes anything any more), stopping, and
    in the end succeeded, failed or stopped; it is lost when its supervisor on node0 is gone, as after a reboot. Of a run that
    failed, what failed first is named. Step, epoch and loss are what the end of rank 0's log says. Ranks that ended show exit
    code or signal, the most memory they used, and their CPU time.
    """
    console = Console(as_json=as_json)
    found = engine.status(_inventory(ctx, inventory_file, console), run_id)
    console.emit(Result(document=found, text=status_text(found)))


@cli.command()
@inventory_argument
@run_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, from where the record on this machine ends.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank (may be repeated).")
@click.option("--node", "nodes", metavar="NAME", multiple=True, help="Only ranks on this node (may be repeated).")
@click.option("--grep", metavar="REGEX", help="Only lines in which this occurs; progress bars are left out.")
@click.option("--since", metavar="TIME", help="Only what was written since: 90s, 10m, 2h ago, or an ISO time.")
@click.option("--tail", "last_lines", metavar="N", type=click.IntRange(min=0), help="Only the last N lines of each file.")
@log_dir_option
@json_option
@click.pass_context
def logs(
    ctx: click.Context,
    inventory_file: str,
    run_id: str | None,
    follow: bool,
    ranks: tuple[int, ...],
    nodes: tuple[str, ...],
    grep: str | None,
    since: str | None,
    last_lines: int | None,
    log_dir: str | None,
    as_json: bool,
) -> None:
    """Show the output of a run's ranks, from the beginning.

    With -f alone it goes on where `up` or an earlier `logs -f` on this machine left: every line is shown once. A connection
    that breaks is made again. All choices may be combined with each other and with -f.

    --since is true to the second: each node notes once a second how long the logs of its ranks are.
    """
    console = Console(as_json=as_json)
    inventory = _inventory(ctx, inventory_file, console)
    if unknown := set(nodes) - {node.name for node in inventory.nodes}:
        raise click.UsageError(f"--node: the inventory has no {', '.join(sorted(unknown))}")
    age_s, since_unix_s = _since(since)
    view = LogView(
        ranks=frozenset(ranks),
        nodes=frozenset(nodes),
        pattern=_pattern(grep),
        age_s=age_s,
        since_unix_s=since_unix_s,
        last_lines=last_lines,
    )
    try:
        outcome = engine.logs(inventory, run_id, console.emit, follow=follow, view=view, log_dir=log_dir)
    except KeyboardInterrupt:
        raise Interrupted("no longer following; the run goes on", advice="cluster-train stop   ends it") from None
    if follow and outcome is not None:
        _finish(ctx, outcome, console)


@cli.command()
@inventory_argument
@run_option
@json_option
@click.pass_context
def stop(ctx: click.Context, inventory_file: str, run_id: str | None, as_json: bool) -> None:
    """End a run on every node: SIGTERM to the ranks, SIGKILL after job.grace_s, then a look at what is left."""
    console = Console(as_json=as_json)
    final = engine.stop(_inventory(ctx, inventory_file, console), run_id, console.emit)
    unsure = [node for node, found in final["swept"].items() if found.get("left") or "unknown" in found]
    clean = [node for node in final["swept"] if node not in unsure]
    said = f"nothing of it is left on {', '.join(clean)}" if clean else ""
    said += f"{'; ' if clean else ''}NOT SURE about {', '.join(unsure)}: see above" if unsure else ""
    console.emit(Result(document=final, text=f"run {final['run_id']}: {final['state']}; {said}"))
    ctx.exit(1 if unsure else 0)


@cli.command()
@inventory_argument
@click.option("--local", is_flag=True, help="Only the records that are kept on this machine; asks no node.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="How many.")
@log_dir_option
@json_option
@click.pass_context
def runs(ctx: click.Context, inventory_file: str, local: bool, limit: int, log_dir: str | None, as_json: bool) -> None:
    """List the runs of a cluster, newest first: how each ended, after how long, on which nodes and stack."""
    console = Console(as_json=as_json)
    found = engine.local_runs(log_dir)[:limit] if local else engine.runs(_inventory(ctx, inventory_file, console), limit)
    console.emit(Result(document={"runs": found}, text=runs_text(found)))


@cli.command()
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
    found = engine.doctor(_inventory(ctx, inventory_file, console), console.emit)
    rows = [("", "node", "finding", "evidence", "remedy")]
    rows += [(finding.severity, finding.node, finding.what, finding.evidence, finding.remedy) for finding in found]
    text = table(rows) if found else "nothing found: `cluster-train up` should work"
    console.emit(Result(document={"findings": [asdict(finding) for finding in found]}, text=text))
    ctx.exit(5 if any(finding.severity == "error" for finding in found) else 0)


@cli.command()
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
    text = engine.init(hosts, {"user": user, "key": key, "port": port}, console.emit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.emit(Result(document={"inventory": str(path)}, text=f"wrote {path}; next: cluster-train up {path} -- train.py"))


@cli.command()
@inventory_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def teardown(ctx: click.Context, inventory_file: str, yes: bool, as_json: bool) -> None:
    """Remove from the nodes all that was put there: environments, wheels, jobs, runs with their logs, and keys."""
    console = Console(as_json=as_json)
    inventory = _inventory(ctx, inventory_file, console)
    if not yes:
        names = ", ".join(node.name for node in inventory.nodes)
        if not _is_agreed(f"Remove everything below {inventory.root} on {names}?"):
            raise click.Abort
    removed = engine.teardown(inventory, console.emit)
    console.emit(Result(document={"removed": removed}, text="nothing of cluster-train is left on the nodes"))


def main() -> None:
    """Entry point: every error of ours is told with its advice and ends with the exit code of its kind."""
    sys.exit(_run(cli))


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


def _inventory(ctx: click.Context, path: str, console: Console) -> Inventory:
    """The inventory with the command line's script in it; its secrets are hidden from then on."""
    inventory = load_inventory(path)
    script = ctx.meta.get(SCRIPT_KEY, [])
    inventory = apply_overrides(inventory, script=script[0] if script else None, args=script[1:])
    console.hide(inventory.secrets)
    return inventory


def _since(text: str | None) -> tuple[float | None, float | None]:
    try:
        return parse_since(text) if text else (None, None)
    except ValueError:
        raise click.UsageError(f"--since {text}: say 90s, 10m, 2h, 1d, or a time such as 2026-11-30T18:00") from None


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise click.UsageError(f"--grep {text}: no regular expression: {error}") from None


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
    return yes or _is_agreed("Remove them?")


def _is_agreed(question: str) -> bool:
    """The answer of the person at the terminal; without one nothing is removed unasked, and it is said how to do without."""
    if not sys.stdin.isatty():
        raise InventoryError(f"{question} There is no terminal to answer at, and nothing was removed", advice="--yes answers it")
    return click.confirm(question, err=True)


def _show_check(ctx: click.Context, verified: Verified, lock_file: Path | None, console: Console) -> None:
    """Show what the nodes have, and exit with 4 unless that is what the lock says."""
    if lock_file:
        write_lock(lock_file, verified.lock)
    comparison = verified.comparison
    document = {"stack": verified.lock.digest, **comparison.to_json(), "nodes": verified.reports}
    console.emit(Result(document=document, text=comparison.text()))
    ctx.exit(0 if comparison.in_order else 4)


def _finish(ctx: click.Context, outcome: Outcome, console: Console) -> None:
    """Show how a run ended, and exit with 1 unless it went well."""
    console.emit(outcome_result(outcome))
    ctx.exit(0 if outcome.verdict.state == "succeeded" else 1)
