"""What the setvars.sh of the retired oneCCL bindings does to an environment, as `remote/setvars.py` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SetvarsEffect:
    """The effect of sourcing one setvars.sh.

    Args:
        module: the bindings' module, which brought the script.
        file: absolute path of the script on the nodes.
        variables: what it sets.
        prepended: per list of directories, what it puts before the rank's own (LD_LIBRARY_PATH, PATH).
    """

    module: str
    file: str
    variables: Mapping[str, str]
    prepended: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Every variable that it changes."""
        return tuple(sorted({*self.variables, *self.prepended}))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SetvarsEffect:
        """The effect in a document of `remote/setvars.py`; raises KeyError where it is none."""
        return cls(
            module=document["module"],
            file=document["file"],
            variables=dict(document["set"]),
            prepended=dict(document["prepended"]),
        )
