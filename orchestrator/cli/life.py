"""`cluster-train status`, `logs`, `stop` and `runs`."""

from __future__ import annotations

import re

import click

from orchestrator.actions.attend import Outcome
from orchestrator.answers import outcome_result, runs_text, status_text
from orchestrator.cli.options import inventory_argument, json_option, log_dir_option, raw_option, read_inventory, run_option
from orchestrator.console import Console
from orchestrator.engine import life
from orchestrator.errors import Interrupted
from orchestrator.planning.logview import LogView, parse_since
from orchestrator.specs.events import Result


@click.command()
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
    found = life.status(read_inventory(ctx, inventory_file, console), run_id)
    console.emit(Result(document=found, text=status_text(found)))


@click.command()
@inventory_argument
@run_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, from where the record on this machine ends.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank (may be repeated).")
@click.option("--node", "nodes", metavar="NAME", multiple=True, help="Only ranks on this node (may be repeated).")
@click.option("--grep", metavar="REGEX", help="Only lines in which this occurs; progress bars are left out.")
@click.option("--since", metavar="TIME", help="Only what was written since: 90s, 10m, 2h ago, or an ISO time.")
@click.option("--tail", "last_lines", metavar="N", type=click.IntRange(min=0), help="Only the last N lines of each file.")
@raw_option
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
    raw: bool,
    log_dir: str | None,
    as_json: bool,
) -> None:
    """Show the output of a run's ranks, from the beginning.

    With -f alone it goes on where `up` or an earlier `logs -f` on this machine left: every line is shown once. A connection
    that breaks is made again. All choices may be combined with each other and with -f.

    --since is true to the second: each node notes once a second how long the logs of its ranks are.
    """
    console = Console(as_json=as_json, raw=raw)
    inventory = read_inventory(ctx, inventory_file, console)
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
        outcome = life.logs(inventory, run_id, console.emit, follow=follow, view=view, log_dir=log_dir)
    except KeyboardInterrupt:
        raise Interrupted("no longer following; the run goes on", advice="cluster-train stop   ends it") from None
    if follow and outcome is not None:
        finish(ctx, outcome, console)


@click.command()
@inventory_argument
@run_option
@json_option
@click.pass_context
def stop(ctx: click.Context, inventory_file: str, run_id: str | None, as_json: bool) -> None:
    """End a run on every node: SIGTERM to the ranks, SIGKILL after job.grace_s, then a look at what is left."""
    console = Console(as_json=as_json)
    final = life.stop(read_inventory(ctx, inventory_file, console), run_id, console.emit)
    unsure = [node for node, found in final["swept"].items() if found.get("left") or "unknown" in found]
    clean = [node for node in final["swept"] if node not in unsure]
    said = f"nothing of it is left on {', '.join(clean)}" if clean else ""
    said += f"{'; ' if clean else ''}NOT SURE about {', '.join(unsure)}: see above" if unsure else ""
    console.emit(Result(document=final, text=f"run {final['run_id']}: {final['state']}; {said}"))
    ctx.exit(1 if unsure else 0)


@click.command()
@inventory_argument
@click.option("--local", is_flag=True, help="Only the records that are kept on this machine; asks no node.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="How many.")
@log_dir_option
@json_option
@click.pass_context
def runs(ctx: click.Context, inventory_file: str, local: bool, limit: int, log_dir: str | None, as_json: bool) -> None:
    """List the runs of a cluster, newest first: how each ended, after how long, on which nodes and stack."""
    console = Console(as_json=as_json)
    found = life.local_runs(log_dir, limit) if local else life.runs(read_inventory(ctx, inventory_file, console), limit)
    console.emit(Result(document={"runs": found}, text=runs_text(found)))


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


def finish(ctx: click.Context, outcome: Outcome, console: Console) -> None:
    """Show how a run ended, and exit with 1 unless it went well."""
    console.emit(outcome_result(outcome))
    ctx.exit(0 if outcome.verdict.state == "succeeded" else 1)
