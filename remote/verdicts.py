"""What failed first: a pure judgement of what was heard of the ranks, of mpirun's end, and of the limits that were passed.

A verdict is {"kind", "summary", "rank", "node", "exit_code", "signal", "reason", "tail", "tail_of", "ended_unix_s", "others"}.
Kinds: exit, signal, refused, exception, out_of_memory, disk_full, collective_timeout, peer_lost (of a rank); vanished, silent,
node_lost, orphaned, ended, start_timeout, run_timeout, stalled, mpirun, resume. `others`: the ranks that ended because of it.
"""

import collections

EMPTY = {
    "kind": None,
    "summary": "",
    "rank": None,
    "node": None,
    "exit_code": None,
    "signal": None,
    "reason": None,
    "tail": [],
    "tail_of": None,
    "ended_unix_s": None,
    "others": [],
}

# One rank's end as evidence. record: its exit record or None; at_s: when it was heard of; missing_s: since when it is
# missing without a word, or was when the others were ended for it, or None; has_begun: False where nothing was ever heard of it.
Evidence = collections.namedtuple("Evidence", "rank node record at_s missing_s has_begun")
Evidence.__new__.__defaults__ = (True,)
# What mpirun tells of the process of its own that was killed first: the ranks of which it was one, and the signal's name.
Killed = collections.namedtuple("Killed", "ranks signal")

ENDED_BECAUSE = {
    "stop": "stopped",
    "interrupt": "stopped",
    "abort": "ended with the others",
    "orphaned": "without its parent process",
    "cut_off": "cut off from the head, ended by itself",
}


def judge(evidence: list, mpirun: dict, passed: dict) -> dict:
    """The verdict on an attempt; None where nothing failed.

    mpirun: its exit_code, signal, whether `is_ours`: we have forced it, and what it said: `killed`, a Killed or None, and
    `lost_helper`, the node where it lost its helper ("": not known), or None. passed: the verdict of a limit that the
    supervisor has enforced (made by `limit`), or None.
    """
    verdict = passed or first_failure(evidence)
    if verdict is None and mpirun["signal"] and not mpirun["is_ours"]:
        verdict = dict(EMPTY, kind="mpirun", signal=mpirun["signal"], summary="mpirun was killed by %s" % mpirun["signal"])
    killed = first_killed(evidence, mpirun.get("killed"))
    if mpirun["exit_code"] or mpirun["signal"]:
        verdict = verdict or (killed if killed and killed["kind"] == "vanished" else of_unbegun(evidence))
    verdict = verdict or first_peer(evidence) or killed
    verdict = verdict or first_ended(evidence, ("orphaned",))
    ended = first_ended(evidence, tuple(ENDED_BECAUSE))
    if ended or mpirun["exit_code"] or mpirun["signal"]:  # Open MPI ends with 0 where it has lost a node
        verdict = verdict or of_helper(mpirun.get("lost_helper"), mpirun["exit_code"]) or ended
    if verdict is None and mpirun["exit_code"]:
        verdict = dict(EMPTY, kind="mpirun", exit_code=mpirun["exit_code"])
        verdict["summary"] = "mpirun ended with exit code %d and no rank says why" % mpirun["exit_code"]
    unknown = [one for one in evidence if one.record is None and one.has_begun]
    if verdict is None and unknown:
        verdict = dict(EMPTY, kind="vanished", rank=unknown[0].rank, node=unknown[0].node)
        verdict["summary"] = "%s left no record of %s end" % (name_ranks(unknown), "its" if len(unknown) == 1 else "their")
    if verdict is not None:
        verdict["others"] = [other(one) for one in evidence if one.rank != verdict["rank"] and is_other(one, verdict)]
    return verdict


def first_failure(evidence: list) -> dict:
    """The first that failed by itself, or was lost; not a rank that only says that a peer has gone, which may be any of them."""
    failed = [one for one in evidence if one.record and is_failure(one.record) and not is_about_peer(one.record)]
    missing = [one for one in evidence if one.missing_s is not None and one not in failed]
    causes = [(one.at_s, of_rank(one)) for one in failed]
    causes += [(min(one.missing_s for one in those), of_missing(node, those)) for node, those in by_node(missing, evidence)]
    return first(causes)


def first_peer(evidence: list) -> dict:
    """The first that failed because a peer had gone, or did not come in time."""
    return first(
        [(one.at_s, of_rank(one)) for one in evidence if one.record and is_failure(one.record) and is_about_peer(one.record)]
    )


def first_killed(evidence: list, killed: Killed) -> dict:
    """The verdict that a rank's outermost process was killed, which mpirun saw; None where it says nothing, or the rank more."""
    those = [one for one in evidence if killed and one.rank in killed.ranks]
    if not those or any(one.record and not one.record["ended_by"] for one in those):
        return None
    if those[0].record:
        return of_rank(those[0])
    verdict = dict(EMPTY, kind="vanished", signal=killed.signal, **common_place(those))
    begun = "" if those[0].has_begun else " before it had begun"
    verdict["summary"] = "%s was killed by %s%s" % (name_places(those, "one of "), killed.signal, begun)
    return verdict


def of_unbegun(evidence: list) -> dict:
    """The verdict that ranks were never heard of, where others were; None otherwise: then mpirun itself has not worked."""
    those = [one for one in evidence if not one.has_begun]
    return never_began(those) if those and len(those) < len(evidence) else None


def of_helper(node: str, exit_code: int) -> dict:
    """The verdict that mpirun lost what it runs on a node; None where it has lost nothing."""
    if node is None:
        return None
    text = "mpirun lost its helper on %s: it was killed, did not start, or the SSH connection to it broke" % (node or "a node")
    return dict(EMPTY, kind="mpirun", node=node or None, exit_code=exit_code, summary=text)


def never_began(those: list) -> dict:
    """The verdict on ranks of which nothing was ever heard."""
    text = "%s never began: nothing was ever heard of %s" % (name_places(those), "it" if len(those) == 1 else "them")
    return dict(EMPTY, kind="vanished", summary=text, **common_place(those))


def first_ended(evidence: list, why: tuple) -> dict:
    """The first rank that was ended by somebody else in one of these ways, where nothing else has failed."""
    return first([(one.at_s, of_rank(one)) for one in evidence if one.record and one.record["ended_by"] in why])


def first(causes: list) -> dict:
    """The earliest of (time, verdict); None where there is none."""
    return min(causes, key=lambda cause: cause[0])[1] if causes else None


def of_rank(one: Evidence) -> dict:
    """The verdict that this rank's end was what failed first."""
    record = one.record
    verdict = dict(EMPTY, rank=one.rank, node=one.node)
    for field in ("exit_code", "signal", "ended_unix_s", "tail", "tail_of", "reason"):
        verdict[field] = record.get(field) or verdict[field]
    reason = record.get("reason")
    if reason:
        verdict["kind"] = reason["kind"]
    elif record.get("error"):
        verdict["kind"] = "refused"
    elif record["ended_by"]:
        verdict["kind"] = "orphaned" if record["ended_by"] == "orphaned" else "ended"
    else:
        verdict["kind"] = "signal" if record["signal"] else "exit"
    verdict["summary"] = "rank %d on %s %s" % (one.rank, one.node, how(record))
    return verdict


def of_missing(node: str, those: list) -> dict:
    """The verdict that a node, or some rank on a node that lives, was lost."""
    is_node = node is not None
    verdict = dict(EMPTY, kind="node_lost" if is_node else "vanished", node=those[0].node)
    if is_node:
        verdict["summary"] = "%s was lost: nothing is heard of its %s" % (node, name_ranks(those))
    elif those[0].record:
        silence_s = those[0].at_s - those[0].missing_s
        text = "%s was not heard of for %.0f s although it ran: it was frozen or starved of CPU time, or the network cut"
        verdict.update(kind="silent", rank=those[0].rank, summary=text % (name_places(those), silence_s))
    else:
        verdict["rank"] = those[0].rank
        verdict["summary"] = "%s on %s vanished without a record of its end" % (name_ranks(those), those[0].node)
    return verdict


def limit(kind: str, summary: str, **facts: object) -> dict:
    """The verdict that the run has passed a limit, or never began."""
    return dict(EMPTY, kind=kind, summary=summary, **facts)


def by_node(missing: list, evidence: list) -> list:
    """(node, its missing ranks) where nothing of the node is left; (None, [rank]) where others on its node still spoke."""
    found = []
    for node in sorted({one.node for one in missing}):
        those = [one for one in missing if one.node == node]
        since_s = min(one.missing_s for one in those)
        spoke = [one for one in evidence if one.node == node and one not in those and one.record and one.at_s > since_s]
        spoke = spoke or [one for one in those if one.record]
        found += [(None, [one]) for one in those] if spoke else [(node, those)]
    return found


def how(record: dict) -> str:
    """A rank's end in words, with its reason."""
    if record.get("error"):
        return "could not go on: %s" % record["error"]
    if record["ended_by"] == "orphaned":
        return "lost its parent process: mpirun or its helper was killed there"
    if record["ended_by"]:
        return "was %s, and nobody had asked for that" % ENDED_BECAUSE[record["ended_by"]]
    text = "was killed by %s" % record["signal"] if record["signal"] else "ended with exit code %d" % record["exit_code"]
    return text + (": " + record["reason"]["text"] if record.get("reason") else "")


def other(one: Evidence) -> dict:
    """A rank that ended because of the first failure, for the record."""
    record = one.record or {}
    text = ENDED_BECAUSE.get(record.get("ended_by")) or (how(record) if record else "left no record of its end")
    ended = {field: record.get(field) for field in ("exit_code", "signal", "ended_by")}
    return dict(ended, rank=one.rank, node=one.node, summary=text)


def is_other(one: Evidence, verdict: dict) -> bool:
    """Whether this end is a consequence: all but a good one, and but those that were lost with their node."""
    if one.record is None:
        return one.has_begun and not (verdict["kind"] == "node_lost" and one.node == verdict["node"])
    return bool(one.record["ended_by"]) or is_failure(one.record)


def is_failure(record: dict) -> bool:
    """Whether a rank failed by itself."""
    return not record["ended_by"] and (bool(record["signal"]) or record["exit_code"] != 0)


def is_about_peer(record: dict) -> bool:
    """Whether it failed because another rank was not there any more, or did not come in time."""
    return bool(record.get("reason")) and record["reason"]["kind"] in ("peer_lost", "collective_timeout")


def common_place(those: list) -> dict:
    """The rank and the node of a verdict on these, as far as it is one."""
    nodes = {one.node for one in those}
    return {"rank": those[0].rank if len(those) == 1 else None, "node": those[0].node if len(nodes) == 1 else None}


def name_places(those: list, several: str = "") -> str:
    """`rank 2 on node1`, or `ranks 2 on node1, 4 on node2`; `several` stands before more than one."""
    if len(those) == 1:
        return "rank %d on %s" % (those[0].rank, those[0].node)
    return "%sranks %s" % (several, ", ".join("%d on %s" % (one.rank, one.node) for one in sorted(those)))


def name_ranks(those: list) -> str:
    """`rank 1` or `ranks 0, 1`."""
    numbers = ", ".join(str(one.rank) for one in sorted(those))
    return ("rank %s" if len(those) == 1 else "ranks %s") % numbers
