"""A lock: exactly which wheels make one environment, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LAYOUT = 1  # raised when the same wheels would be installed in another way


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One wheel; `source` is where the resolver found it, without credentials."""

    name: str
    version: str
    filename: str
    sha256: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What wheels are chosen for: one interpreter on one platform.

    Args:
        python_version: "3.11".
        implementation: "cp".
        platforms: wheel platform tags, best first ("manylinux_2_36_x86_64", …).
        markers: the PEP 508 marker environment of that interpreter.
    """

    python_version: str
    implementation: str
    platforms: tuple[str, ...]
    markers: Mapping[str, str]

    @property
    def label(self) -> str:
        """Short text for people, "cp311 x86_64"."""
        return f"{self.implementation}{self.python_version.replace('.', '')} {self.markers.get('platform_machine', '')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The resolved set for one target; `installer` is uv's own wheel, which is not part of the environment."""

    requirements: tuple[str, ...]
    target: str
    wheels: tuple[LockedWheel, ...]
    installer: LockedWheel | None

    @property
    def digest(self) -> str:
        """The environment's name: 16 hex digits over what is in it and how it is laid out."""
        content = [LAYOUT, self.target, sorted((wheel.name, wheel.sha256) for wheel in self.wheels)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def all_wheels(self) -> tuple[LockedWheel, ...]:
        """What must lie in a node's wheelhouse before it can install."""
        return self.wheels + ((self.installer,) if self.installer else ())

    @property
    def versions(self) -> dict[str, str]:
        """Package name to version."""
        return {wheel.name: wheel.version for wheel in self.wheels}

    def to_json(self) -> dict[str, Any]:
        """The lock as JSON; `from_json` gives it back."""
        return {"schema": 1, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Lock:
        """The lock of a JSON document; raises KeyError, TypeError or ValueError when it is none."""
        if document["schema"] != 1:
            raise ValueError(f"lock schema {document['schema']} is not known")
        installer = document["installer"]
        return cls(
            requirements=tuple(document["requirements"]),
            target=document["target"],
            wheels=tuple(LockedWheel(**wheel) for wheel in document["wheels"]),
            installer=LockedWheel(**installer) if installer else None,
        )
