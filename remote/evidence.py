"""What is known of the ranks' ends when an attempt is over: heard of, found on the head's disk, or told by mpirun."""

import os
import time

import reasons
import regroup
import terminations
import verdicts


def gather(run, launch: dict, head) -> list:
    """`verdicts.Evidence` of every rank of which something is known, or could be: with heartbeats, also that it never began.

    run: a `runs.Run`. head: the `listener.Listener`, or None.
    """
    now, now_unix_s = time.monotonic(), time.time()
    here = {rank["rank"]: rank["exit"] for rank in run.ranks_here()}
    found = []
    for plan in launch["ranks"]:
        number, node = plan["rank"], plan["node"]
        rank = head.ranks[number] if head else None
        lost_s = rank.lost_s if rank else None
        if rank and rank.ended:
            found.append(verdicts.Evidence(number, node, rank.ended, rank.ended_s, lost_s))
        elif here.get(number):
            at_s = now - (now_unix_s - here[number]["ended_unix_s"])
            found.append(verdicts.Evidence(number, node, here[number], at_s, lost_s))
        elif number in here or (rank and rank.hello):
            missing_s = rank.missing_since(now, head.timeout_s) if rank else None
            found.append(verdicts.Evidence(number, node, None, None, missing_s))
        elif rank and not rank.without:
            found.append(verdicts.Evidence(number, node, None, None, None, has_begun=False))
    return found


def killed_first(run, order: dict, head, found: list, text: str) -> verdicts.Killed:
    """The rank whose outermost process was killed first, by mpirun's own words; None where they tell of none.

    Where they only tell which machine it was on, these are all ranks there that had not begun.
    text: what mpirun wrote in this attempt.
    """
    told = terminations.first(text)
    if told is None:
        return None
    launch = order["launch"]
    nodes = nodes_at(told["host"], launch, hostfile(order))
    if told["rank"] is not None:
        ranks = [told["rank"]]
    else:
        pids = guard_pids(run, launch, head)
        ranks = [number for number, pid in pids.items() if pid == told["pid"]]
        ranks = ranks if len(ranks) == 1 else [one.rank for one in found if not one.has_begun]
        places = {plan["rank"]: plan["node"] for plan in launch["ranks"]}
        ranks = [rank for rank in ranks if places[rank] in nodes] or ranks
    return verdicts.Killed(ranks, told["signal"]) if ranks else None


def lost_helper(order: dict, text: str) -> str:
    """The node where mpirun has lost its helper, by its own words; "" where it does not tell which, None where it lost none."""
    told, launch = terminations.lost_helper(text), order["launch"]
    if told is None:
        return None
    nodes = regroup.nodes_of(launch)
    if told["number"] is not None:
        found = nodes[told["number"] :][:1]
    else:
        found = nodes_at(told["host"] or told["remote"], launch, hostfile(order))
        found = [node for node in found if node != nodes[0] or not told["remote"]]
    return found[0] if len(found) == 1 else ""


def hostfile(order: dict) -> str:
    """The text of mpirun's hostfile."""
    return order.get("files", {}).get("hostfile", {}).get("text", "")


def logs(run_dir: str) -> list:
    """Where mpirun's own output goes."""
    return [os.path.join(run_dir, name) for name in ("mpirun.out", "mpirun.err")]


def last_texts(run_dir: str, began_bytes: list) -> list:
    """The end of what mpirun wrote in this attempt, to stdout and to stderr."""
    return [reasons.last_text(path, began_bytes[place]) for place, path in enumerate(logs(run_dir))]


def guard_pids(run, launch: dict, head) -> dict:
    """rank -> the number of the process that mpirun knows it by, as far as it has begun."""
    found = {rank["rank"]: rank["pid"] for rank in run.ranks_here() if "pid" in rank}
    for plan in launch["ranks"] if head else []:
        hello = head.ranks[plan["rank"]].hello
        if hello:
            found[plan["rank"]] = hello["guard_pid"]
    return found


def nodes_at(host: str, launch: dict, hostfile: str) -> list:
    """The nodes that mpirun means by a name: a host name, or the address in the hostfile."""
    at = {plan["node"] for plan in launch["ranks"] if host and plan.get("hostname") == host}
    addresses = [address for address, _ in regroup.hosts_of(hostfile)]
    return sorted(at | {node for place, node in enumerate(regroup.nodes_of(launch)) if addresses[place : place + 1] == [host]})
