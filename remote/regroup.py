"""A run without some of its nodes: ranks renumbered, hostfile and world size anew. Pure, over the order of `supervise.py`."""

import itertools

ACCUMULATION = ("--gradient_accumulation_steps", "--gradient-accumulation-steps")


def without(order: dict, lost: list) -> dict:
    """The order for the nodes that are left; the head must be one of them.

    Ranks keep their logs: an entry's `log` is the number that the rank's files have borne from the first attempt on.
    """
    launch = order["launch"]
    nodes = nodes_of(launch)
    ranks = [dict(rank, log=rank.get("log", rank["rank"])) for rank in launch["ranks"] if rank["node"] not in lost]
    ranks = [dict(rank, rank=number) for number, rank in enumerate(ranks)]
    files = dict(order["files"])
    hosts = hosts_of(files["hostfile"]["text"])
    kept = [lines for place, (_, lines) in enumerate(hosts) if nodes[place] not in lost]
    files["hostfile"] = dict(files["hostfile"], text="".join(kept))
    argv = list(order["mpirun"]["argv"])
    argv[argv.index("-n") + 1] = str(len(ranks))
    return dict(
        order,
        launch=dict(launch, ranks=ranks, world_size=len(ranks)),
        files=files,
        mpirun=dict(order["mpirun"], argv=argv),
    )


def hosts_of(hostfile: str) -> list:
    """(Address, what stands in the file for it) of each node, in the order of the ranks.

    A line is `ADDRESS:2`, `ADDRESS slots=2` (Open MPI), or an IPv6 address alone (Intel), which is repeated where nodes differ.
    """
    found = []
    for line, same in itertools.groupby(hostfile.splitlines(True)):
        word = line.split()[0]
        found.append((word.partition(":")[0] if word.count(":") == 1 else word, "".join(same)))
    return found


def nodes_of(launch: dict) -> list:
    """The nodes that have ranks, each once, the head first."""
    nodes = []
    for rank in launch["ranks"]:
        if rank["node"] not in nodes:
            nodes.append(rank["node"])
    return nodes


def keep_batch(argv: list, before: int, after: int) -> tuple:
    """Arguments with which `after` ranks of a Trainer script see the batch that `before` ranks saw; what to say of it."""
    steps, position, form = find_accumulation(argv)
    if steps is None:
        return argv, other_batch(before, after, "%s is no number" % argv[position])
    if steps * before % after:
        return argv, other_batch(before, after, "%d ranks x %d accumulation steps do not divide by %d" % (before, steps, after))
    wanted = steps * before // after
    end = argv.index("--") if "--" in argv else len(argv)
    given = ["%s=%d" % (ACCUMULATION[0], wanted)] if form == "attached" else [ACCUMULATION[0], str(wanted)]
    changed = {
        "attached": lambda: argv[:position] + given + argv[position + 1 :],
        "apart": lambda: argv[: position - 1] + given + argv[position + 1 :],
        "none": lambda: argv[:end] + given + argv[end:],
    }[form]()
    return changed, "the global batch stays as it was: %s %d instead of %d" % (ACCUMULATION[0], wanted, steps)


def other_batch(before: int, after: int, why: str) -> str:
    """What to say where the global batch changes."""
    return "the global batch becomes %d/%d of what it was (%s)" % (after, before, why)


def find_accumulation(argv: list) -> tuple:
    """(accumulation steps or None, the position of the number, how it is written: attached, apart or none)."""
    end = argv.index("--") if "--" in argv else len(argv)
    found = 1, None, "none"
    for position, word in enumerate(argv[:end]):
        name, is_attached, value = word.partition("=")
        if name in ACCUMULATION and is_attached:
            found = number(value), position, "attached"
        elif name in ACCUMULATION and position + 1 < end:
            found = number(argv[position + 1]), position + 1, "apart"
    return found  # of several, argparse takes the last


def number(text: str) -> int:
    """A whole number above 0, or None."""
    return int(text) if text.isdigit() and int(text) else None
