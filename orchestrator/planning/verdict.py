"""How a run ended, from its state and its ranks' exit records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SHOWN_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a run.

    Args:
        state: succeeded, failed, stopped or lost.
        summary: one sentence for people.
        rank, node, exit_code, signal: what failed first, or None where no rank did.
    """

    state: str
    summary: str
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    signal: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The verdict as it stands in records and `--json`."""
        return {
            "state": self.state,
            "summary": self.summary,
            "rank": self.rank,
            "node": self.node,
            "exit_code": self.exit_code,
            "signal": self.signal,
        }


def judge(status: Mapping[str, Any], exits: Iterable[Mapping[str, Any]]) -> Verdict:
    """What failed first, if anything did; ranks that were ended because another had failed are told apart."""
    state = str(status["state"])
    if state in ("succeeded", "stopped"):
        return Verdict(state=state, summary="every rank ended well" if state == "succeeded" else "the run was stopped")
    own = [record for record in exits if not record["stopped"] and _is_failure(record)]
    if not own:
        return Verdict(state=state, summary=_without_rank(status))
    first = min(own, key=lambda record: record["ended_unix_s"])
    how = f"was killed by {first['signal']}" if first["signal"] else f"ended with exit code {first['exit_code']}"
    return Verdict(
        state=state,
        summary=f"rank {first['rank']} on {first['node']} {how}",
        rank=first["rank"],
        node=first["node"],
        exit_code=first["exit_code"],
        signal=first["signal"],
    )


def _is_failure(record: Mapping[str, Any]) -> bool:
    return bool(record["signal"]) or record["exit_code"] != 0


def _without_rank(status: Mapping[str, Any]) -> str:
    if status.get("reason"):
        return str(status["reason"])
    return f"mpirun ended with exit code {status.get('mpirun_exit')} and no rank says why; see its own output above"
