"""How a run ended: as its supervisor has judged, or without that from its state and its ranks' exit records. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FINAL_STATES = frozenset({"succeeded", "failed", "stopped", "lost"})
SHOWN_LINES = 20
# Intel MPI's hydra; the exit code is ssh's, which is that of what it ran, or 255.
_UNABLE = re.compile(r"[Uu]nable to run bstrap_proxy on (\S+) \(pid \d+, exit code (\d+)\)")
_EXIT_CODES = {
    3: "it cannot call back to this machine: see the firewall, and that both are on one network",
    126: "it is there, but cannot be run",
    127: "it is not there",
    255: "ssh could not log in",
}
# An exception of an environment that is not whole, raised while Python runs the module-level code of a package in it.
_NOT_WHOLE = re.compile(r"(ImportError|ModuleNotFoundError|OSError|FileNotFoundError)\b")
_IMPORTING = re.compile(r'^  File "[^"]*/envs/[0-9a-f]+/lib/[^"]*/site-packages/[^"]+", line \d+, in <module>')
_ABSENT = re.compile(r"ModuleNotFoundError: No module named '(torch|transformers|accelerate|datasets|numpy|safetensors)\b")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # which torch puts before every line of a traceback
REPAIR = "the environment may be damaged: cluster-train provision --repair   looks, and installs it anew from the wheels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a run.

    Args:
        state: succeeded, failed, stopped or lost.
        summary: one sentence for people.
        kind: what sort of failure came first (see remote/verdicts.py); None where nothing failed, or nobody has judged.
        rank, node, exit_code, signal: what failed first, or None where no rank did.
        reason: {"kind", "text"} where the system knows why.
        tail: the end of that rank's log, or of mpirun's; `tail_of` says of which file.
        others: the ranks that ended because of it.
        advice: what to do next, where that is known.
    """

    state: str
    summary: str
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    kind: str | None = None
    reason: Mapping[str, Any] | None = None
    tail: tuple[str, ...] = ()
    tail_of: str | None = None
    others: tuple[Mapping[str, Any], ...] = ()
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The verdict as it stands in records and `--json`."""
        return {
            "state": self.state,
            "summary": self.summary,
            "rank": self.rank,
            "node": self.node,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "kind": self.kind,
            "reason": dict(self.reason) if self.reason else None,
            "others": [dict(other) for other in self.others],
            "advice": self.advice,
        }


def judge(status: Mapping[str, Any], exits: Iterable[Mapping[str, Any]]) -> Verdict:
    """What failed first, if anything did; ranks that were ended because another had failed are told apart.

    The supervisor knows more than the records say (what it heard first, which node it lost): its own verdict holds. Of a run
    that has none (its supervisor was killed), the records are all there is.
    """
    state = str(status["state"])
    attempt = status.get("attempt", 1)
    if state in ("succeeded", "stopped"):
        well = "every rank ended well" + (f", in attempt {attempt}" if attempt > 1 else "")
        return Verdict(state=state, summary=well if state == "succeeded" else "the run was stopped")
    if status.get("verdict"):
        return _judged(state, status["verdict"])
    if state == "lost":
        return Verdict(state=state, summary=_without_rank(status))
    records = [record for record in exits if record.get("attempt", 1) == attempt]
    own = [record for record in records if not record["stopped"] and _is_failure(record)]
    # A rank whose parent or mpirun was killed from outside ends as an orphan: the first of those is the next best answer.
    culprits = own or [record for record in records if record.get("ended_by") == "orphaned"]
    if not culprits:
        return Verdict(state=state, summary=_without_rank(status))
    first = min(culprits, key=lambda record: record["ended_unix_s"])
    return Verdict(
        state=state,
        summary=f"rank {first['rank']} on {first['node']} {_how(first)}",
        rank=first["rank"],
        node=first["node"],
        exit_code=first["exit_code"],
        signal=first["signal"],
    )


def _judged(state: str, found: Mapping[str, Any]) -> Verdict:
    return Verdict(
        state=state,
        summary=(_helper_that_did_not_start(found["tail"]) if found["tail_of"] == "mpirun" else "") or found["summary"],
        rank=found["rank"],
        node=found["node"],
        exit_code=found["exit_code"],
        signal=found["signal"],
        kind=found["kind"],
        reason=found["reason"],
        tail=tuple(found["tail"]),
        tail_of=found["tail_of"],
        others=tuple(found["others"]),
        advice=_advice(found["reason"], found["tail"]),
    )


def _advice(reason: Mapping[str, Any] | None, tail: Sequence[str]) -> str:
    """What mends the reason, as far as it can be told from the end of the log: here, an import that failed."""
    said = reason["text"] if reason and reason["kind"] == "exception" else ""
    is_importing = any(_IMPORTING.match(_RANK_PREFIX.sub("", line)) for line in tail)
    return REPAIR if _ABSENT.match(said) or (_NOT_WHOLE.match(said) and is_importing) else ""


def _helper_that_did_not_start(lines: Sequence[str]) -> str:
    """What hydra's own words on this mean, which never say why; the words of ssh, or of the other node, stand among them."""
    failed = next((match for line in lines if (match := _UNABLE.search(line))), None)
    if failed is None:
        return ""
    code = int(failed[2]) >> 8  # as wait() returns it
    said = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("[mpiexec@")]
    why = said[-1] if said else _EXIT_CODES.get(code, f"exit code {code}")
    return f"mpirun could not start its helper on {failed[1]}: {why}"


def _is_failure(record: Mapping[str, Any]) -> bool:
    return bool(record["signal"]) or record["exit_code"] != 0


def _how(record: Mapping[str, Any]) -> str:
    if record.get("error"):
        return f"could not go on: {record['error']}"
    if record.get("ended_by") == "orphaned":
        return "lost its parent process: mpirun or its helper was killed there"
    return f"was killed by {record['signal']}" if record["signal"] else f"ended with exit code {record['exit_code']}"


def _without_rank(status: Mapping[str, Any]) -> str:
    if status.get("reason"):
        return str(status["reason"])
    return f"mpirun ended with exit code {status.get('mpirun_exit')} and no rank says why; see its own output above"
