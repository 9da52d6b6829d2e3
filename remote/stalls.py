"""Whether a run still gets on: it has stalled when no rank has written anything for the limit.

CPU time tells nothing here: ranks that wait in a collective burn it (oneCCL, MPI) or not (gloo). Each is asked for its stacks.
"""

import re
import time

STACKS_S = 25.0  # for the ranks to tell their stacks
AGAIN_S = 10.0  # until a rank that could not be asked is asked again: its script may not have begun to listen
# The innermost frames of a rank that waits for the others: torch's collectives, its store, MPI, oneCCL.
WAITING = re.compile(
    r"distributed|\b(all_?reduce|all_?gather|reduce_scatter|broadcast|barrier|all_?to_?all|gloo|ccl|mpi4py)\b", re.I
)
INNERMOST_FRAMES = 6


class Stalls:
    """Watches the ranks of a listener; `told` is what stands in the status, None while the run gets on."""

    def __init__(self, listener, timeout_s: float) -> None:
        self.told = None
        self._listener = listener
        self._timeout_s = timeout_s
        self._asked_s = self._asked_last_s = self._since_unix_s = self._known = None

    def look(self) -> bool:
        """Compare; whether `told` has changed."""
        living, now = self._listener.living(), time.monotonic()
        if not self._timeout_s or not living:
            return False
        quiet_s = now - max(rank.logged_s for rank in living)
        if quiet_s < self._timeout_s:
            has_changed, self.told, self._asked_s, self._known = self.told is not None, None, None, None
            return has_changed
        if self._asked_s is None:
            self._asked_s, self._since_unix_s = now, time.time() - quiet_s
            for rank in living:
                rank.stacks = None
            self._ask(living, now)
        elif now - self._asked_last_s > AGAIN_S:
            self._ask([rank for rank in living if rank.stacks and not rank.stacks["by"]], now)
        known = [(rank.number, rank.stacks["by"]) for rank in living if rank.stacks]
        if known == self._known:
            return False
        self._known = known
        self.told = {"since_unix_s": self._since_unix_s, "ranks": [_about(rank, now) for rank in living]}
        return True

    def _ask(self, ranks: list, now_s: float) -> None:
        self._asked_last_s = now_s
        self._listener.send({"stacks": True}, ranks)

    @property
    def is_known(self) -> bool:
        """Whether every rank has told its stacks, or has had the time to."""
        if self._asked_s is None:
            return False
        return all(rank.stacks for rank in self._listener.living()) or time.monotonic() - self._asked_s > STACKS_S

    def summary(self) -> str:
        """The stall in one sentence, with the ranks that the others seem to wait for."""
        text = "no rank has written anything for %g s" % self._timeout_s
        ranks = self.told["ranks"] if self.told else []
        awaited = [rank for rank in ranks if rank["is_waiting"] is False]
        if awaited and len(awaited) < len(ranks):
            named = ", ".join("rank %d on %s" % (rank["rank"], rank["node"]) for rank in awaited)
            text += "; the others seem to wait for %s" % named
        return text


def is_waiting(by: str, stacks: str) -> bool:
    """Whether the main thread's innermost frames are in something that waits for other ranks.

    Both tell the innermost frame of a thread first; the main thread comes first with py-spy, and last with faulthandler.
    """
    threads = re.split(r"\n(?=(?:Thread|Current thread) )", "\n" + stacks.strip())[1:]
    main = threads[0 if by == "py-spy" else -1] if threads else ""
    return bool(WAITING.search("\n".join(main.split("\n")[1 : 1 + INNERMOST_FRAMES])))


def _about(rank, now_s: float) -> dict:
    quiet_s, used_s = now_s - rank.logged_s, rank.cpu_s - rank.cpu_at_log_s
    told = rank.stacks or {"by": None, "text": None}
    return {
        "rank": rank.number,
        "node": rank.node,
        "quiet_s": round(quiet_s, 1),
        "cpu_s": round(used_s, 2),  # since it last wrote something
        "is_waiting": is_waiting(told["by"], told["text"]) if told["by"] else None,
        "by": told["by"],
        "stacks": told["text"],
    }
