"""The command line. The only module that exits.

Exit codes: 0 ok, 1 the job failed, 2 usage or inventory, 3 a node cannot be reached or trusted, 4 provisioning failed,
5 preflight refused, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from orchestrator import __version__, engine
from orchestrator.actions.attend import Outcome
from orchestrator.actions.doctor import Diagnosis
from orchestrator.actions.inventory_file import load_inventory
from orchestrator.actions.lockfile import read_lock, write_lock
from orchestrator.actions.provision import Provisioned
from orchestrator.actions.prune import KINDS, Unused
from orchestrator.actions.verify import Verified
from orchestrator.console import Console
from orchestrator.errors import ClusterTrainError, Interrupted, InventoryError
from orchestrator.planning.launch import LaunchPlan
from orchestrator.planning.report import findings_text, nodes_text, ways_text
from orchestrator.planning.script import by_hand, mpirun_line, placement_table
from orchestrator.planning.tables import table
from orchestrator.planning.verdict import Verdict
from orchestrator.specs.events import Result
from orchestrator.specs.inventory import Inventory, apply_overrides, is_secret_name

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
@locked_option
@log_dir_option
@json_option
@click.pass_context
def up(
    ctx: click.Context,
    inventory_file: str,
    dry_run: bool,
    detach: bool,
    locked: Path | None,
    log_dir: str | None,
    as_json: bool,
) -> None:
    """Make the nodes ready, start the training on all of them, and stream every rank's log.

    A second `up` finds nothing to install and starts at once. Ctrl-C stops the run on every node; a second Ctrl-C ends it
    without waiting. Losing the connection does not stop it: `cluster-train logs -f` picks it up again.
    """
    console = Console(as_json=as_json)
    inventory = _inventory(ctx, inventory_file, console)
    lock = read_lock(locked) if locked else None
    if dry_run:
        console.emit(_dry_run_result(inventory, engine.dry_run(inventory, console.emit, locked=lock)))
        return
    outcome = engine.up(inventory, console.emit, detach=detach, log_dir=log_dir, locked=lock)
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
    console.emit(Result(document=document, text=f"{_changes_text(done)}stack {done.lock.digest}, installed on {where}"))


@cli.command()
@inventory_argument
@run_option
@json_option
@click.pass_context
def status(ctx: click.Context, inventory_file: str, run_id: str | None, as_json: bool) -> None:
    """Show a run's state, and every rank's.

    A run is starting, running, stopping, and in the end succeeded, failed or stopped; it is lost when its supervisor on node0
    is gone. Of a run that failed, the rank that failed first is named. Ranks that ended show exit code or signal, the most
    memory they used, and their CPU time.
    """
    console = Console(as_json=as_json)
    found = engine.status(_inventory(ctx, inventory_file, console), run_id)
    console.emit(Result(document=found, text=_status_text(found)))


@cli.command()
@inventory_argument
@run_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank (may be repeated).")
@log_dir_option
@json_option
@click.pass_context
def logs(
    ctx: click.Context,
    inventory_file: str,
    run_id: str | None,
    follow: bool,
    ranks: tuple[int, ...],
    log_dir: str | None,
    as_json: bool,
) -> None:
    """Show the output of a run's ranks, from the beginning."""
    console = Console(as_json=as_json)
    inventory = _inventory(ctx, inventory_file, console)
    try:
        outcome = engine.logs(inventory, run_id, console.emit, follow=follow, ranks=ranks or None, log_dir=log_dir)
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
    console.emit(Result(document=final, text=f"run {final['run_id']}: {final['state']}"))


@cli.command()
@inventory_argument
@click.option("--local", is_flag=True, help="Only the records that are kept on this machine; asks no node.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="How many.")
@log_dir_option
@json_option
@click.pass_context
def runs(ctx: click.Context, inventory_file: str, local: bool, limit: int, log_dir: str | None, as_json: bool) -> None:
    """List the runs of a cluster, newest first."""
    console = Console(as_json=as_json)
    if local:
        found = [{**run, **(run["status"] or {"state": "unknown"})} for run in engine.local_runs(log_dir)[:limit]]
    else:
        found = engine.runs(_inventory(ctx, inventory_file, console), limit)
    console.emit(Result(document={"runs": found}, text=_runs_text(found)))


@cli.command()
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
    diagnosis = engine.doctor(_inventory(ctx, inventory_file, console), console.emit)
    console.emit(_diagnosis_result(diagnosis, console))
    ctx.exit(0 if diagnosis.is_fit else 5)


@cli.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("-o", "--output", default=DEFAULT_INVENTORY, show_default=True, help="The file to write.")
@click.option("--user", help="Login name on the hosts.")
@click.option("--key", help="Private key file.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of sshd.")
@click.option("--yes", is_flag=True, help="Overwrite the file if it is there.")
@json_option
def init(
    hosts: tuple[str, ...], output: str, user: str | None, key: str | None, port: int | None, yes: bool, as_json: bool
) -> None:
    """Look at machines and write a commented inventory of what was found. node0 comes first.

    A HOST is an address, or user@address:port; or the path of a hostfile; or a quoted pattern of host names that your
    ~/.ssh/config knows: `cluster-train init 'node*'`.
    """
    console = Console(as_json=as_json)
    path = Path(output)
    if path.exists() and not (yes or (sys.stdin.isatty() and _is_agreed(f"{path} exists already. Overwrite it?"))):
        raise InventoryError(f"{path} exists already", advice="name another file with --output, or say --yes to overwrite it")
    text = engine.init(hosts, {"user": user, "key": key, "port": port}, console.emit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.emit(Result(document={"inventory": str(path)}, text=f"wrote {path}; next: cluster-train doctor {path}"))


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
    verdict = outcome.verdict
    lines = [f"run {outcome.run_id} {verdict.state}: {verdict.summary}", f"record: {outcome.record}"]
    if outcome.tail and verdict.state == "failed":
        whose = "mpirun" if verdict.rank is None else f"rank {verdict.rank}"
        lines[1:1] = [f"last lines of {whose}:", *(f"    {line}" for line in outcome.tail)]
    lines[1:1] = _consequences(verdict)
    document = {
        "run_id": outcome.run_id,
        **verdict.to_json(),
        "record": str(outcome.record),
        "tail": list(outcome.tail) if verdict.state == "failed" else [],
    }
    console.emit(Result(document=document, text="\n".join(lines)))
    ctx.exit(0 if verdict.state == "succeeded" else 1)


def _consequences(verdict: Verdict) -> list[str]:
    """What became of the other ranks, each kind of end on a line."""
    ranks: dict[str, list[str]] = {}
    for other in verdict.others:
        ranks.setdefault(other["summary"], []).append(str(other["rank"]))
    return [f"because of it, rank{'s' * (len(those) > 1)} {', '.join(those)}: {end}" for end, those in ranks.items()]


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
        "ways": [asdict(way) for way in diagnosis.ways],
        "ssh": [asdict(way) for way in diagnosis.ssh],
        "cost": asdict(diagnosis.cost) if diagnosis.cost else None,
    }
    return Result(document=document, text="\n".join(part for part in parts if part))


def _dry_run_result(inventory: Inventory, plan: LaunchPlan) -> Result:
    secret_names = [name for name in inventory.job.env if is_secret_name(name) or inventory.job.env[name] in inventory.secrets]
    script = by_hand(plan, secret_names)
    text = [
        *(f"note: {note}" for note in plan.translation.notes),
        "# hostfile",
        plan.command.hostfile.rstrip(),
        "",
        "# ranks",
        placement_table(plan),
        "",
        "# environment of all ranks",
        *(f"{name}={value}" for name, value in plan.document["env"].items()),
        *(f"{name}={value}:${name}" for name, value in plan.document["prepend"].items()),
        "",
        "# mpirun",
        mpirun_line(plan),
        "",
        f"# the same by hand, on {plan.nodes[0]} after `cluster-train provision`; ranks log into {plan.run_dir}",
        script,
    ]
    document = {
        "hostfile": plan.command.hostfile,
        "mpirun": list(plan.command.argv),
        "mpirun_env": dict(plan.command.env),
        "env": plan.document["env"],
        "ranks": plan.document["ranks"],
        "argv": plan.document["argv"],
        "notes": list(plan.translation.notes),
        "network": plan.network.reason,
        "script": script,
    }
    return Result(document=document, text="\n".join(text))


def _status_text(found: Mapping[str, Any]) -> str:
    verdict = found.get("verdict")
    lines = [f"run {found['run_id']}: {found['state']}" + (f": {verdict['summary']}" if verdict else "")]
    lines.append(f"since {_when(found['started_unix_s'])}, {_duration(found)}, script {found['label'].get('script')}")
    lines += _what_is_heard(found)
    rows = [("rank", "node", "state", "pid", "max memory", "CPU time")]
    rows += [_rank_row(rank) for rank in found["ranks"]]
    return "\n".join([*lines, table(rows)])


def _what_is_heard(found: Mapping[str, Any]) -> list[str]:
    """Nodes of which nothing is heard, and what the ranks of a stalled run are doing."""
    heard = found.get("nodes") or {}
    lines = [f"{node}: {state}" for node, state in heard.items() if state == "quiet" or state.startswith("no heartbeat")]
    lines += found.get("notices") or []
    stall = found.get("stall")
    if stall:
        lines.append(f"no rank has written anything since {_when(stall['since_unix_s'])}")
    for rank in stall["ranks"] if stall else ():
        lines.append(
            f"rank {rank['rank']} on {rank['node']}, {rank['cpu_s']:.1f} s of CPU time since then, {rank['by'] or 'no stacks'}:"
        )
        lines += [f"    {line}" for line in (rank["stacks"] or "").splitlines()]
    return lines


def _rank_row(rank: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    ended = rank.get("exit")
    if not ended:
        return str(rank["rank"]), rank["node"], "running", str(rank["child"]["pid"]), "", ""
    state = f"killed by {ended['signal']}" if ended["signal"] else f"exit code {ended['exit_code']}"
    memory, seconds = ended.get("max_rss_bytes"), ended.get("cpu_s")
    return (
        str(rank["rank"]),
        rank["node"],
        state + (" (stopped)" if ended["stopped"] else ""),
        "",
        f"{memory / 1e6:.0f} MB" if memory else "",
        f"{seconds:.1f} s" if seconds is not None else "",
    )


def _runs_text(found: list[dict[str, Any]]) -> str:
    rows = [("run", "state", "since", "duration", "script")]
    rows += [
        (
            run["run_id"],
            run["state"],
            _when(run["started_unix_s"]),
            _duration(run),
            str(run.get("label", run).get("script")),
        )
        for run in found
    ]
    return table(rows) if found else "no runs yet"


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def _duration(run: Mapping[str, Any]) -> str:
    seconds = (run.get("ended_unix_s") or time.time()) - run["started_unix_s"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
