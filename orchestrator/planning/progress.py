"""How far a training is, read from the end of its log: Trainer's dictionaries and progress bars. Pure."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

_DICT = re.compile(r"\{[^{}]*['\"](?:loss|eval_loss|train_loss)['\"][^{}]*\}")
# tqdm's " 12%|█▏        | 12/300 [00:10<04:10,  1.15it/s]"; a bar with a name before it is of something else than training.
_BAR = re.compile(r"(?:^|[\r\n])\s*\d+%\|[^|\r\n]*\|\s*(\d+)/(\d+)\s*\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the log says last, each None where it does not say; `step` of `steps` comes from the training's own bar."""

    step: int | None = None
    steps: int | None = None
    epoch: float | None = None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in `status --json`."""
        return asdict(self)

    def text(self) -> str:
        """For people; empty where nothing is known."""
        parts = [f"step {self.step}" + (f" of {self.steps}" if self.steps else "")] if self.step is not None else []
        parts += [f"epoch {self.epoch:g}"] if self.epoch is not None else []
        parts += [f"loss {self.loss:g}"] if self.loss is not None else []
        return ", ".join(parts)


def read_progress(out: str, err: str) -> Progress:
    """The last values in the ends of a rank's stdout and stderr.

    Evaluation has a bar too, shorter than that of the training: the last one of the largest total counts.
    """
    told = [found for text in (out, err) for match in _DICT.finditer(text) if (found := _numbers(match.group()))]
    loss = next((found["loss"] for found in reversed(told) if "loss" in found), None)
    epoch = next((found["epoch"] for found in reversed(told) if "epoch" in found), None)
    step = next((found["step"] for found in reversed(told) if "step" in found), None)
    bars = [(int(done), int(total)) for text in (err, out) for done, total in _BAR.findall(text)]
    longest = max((total for _, total in bars), default=None)
    done, total = next(((done, total) for done, total in reversed(bars) if total == longest), (None, None))
    if step is not None:
        done, total = int(step), total if done == int(step) else None
    return Progress(step=done, steps=total, epoch=epoch, loss=loss)


def _numbers(text: str) -> dict[str, float]:
    """The numbers of a printed dictionary, as Python or as JSON writes it; Trainer writes some of them as text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        try:
            found = json.loads(text)
        except ValueError:
            return {}
    numbers: dict[str, float] = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError):
            pass
    return numbers
