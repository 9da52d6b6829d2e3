"""Locks as files that people keep: written by `--lock`, followed to the letter by `--locked`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from orchestrator.errors import InventoryError
from orchestrator.specs.lock import Lock, LockedWheel

_ADVICE = "write one with `cluster-train provision INVENTORY --lock FILE`"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFile:
    """A lock, and the file that it was read from, for messages."""

    path: Path
    lock: Lock


def write_lock(path: Path, lock: Lock) -> None:
    """Replace the file as a whole; raises InventoryError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(json.dumps(lock.to_json(), indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise InventoryError(f"{path}: the lock cannot be written: {error.strerror}", advice="name another file") from None


def read_lock(path: Path) -> LockFile:
    """The lock of a file; raises InventoryError, naming the file and what is wrong, when it is none.

    The file may come from anywhere, and its names become paths and pip's input: each is checked.
    """
    try:
        lock = Lock.from_json(json.loads(path.read_text(encoding="utf-8")))
        for wheel in lock.all_wheels:
            _check(wheel)
        _check_whole(lock)
    except OSError as error:
        raise InventoryError(f"{path}: the lock cannot be read: {error.strerror}", advice=_ADVICE) from None
    except KeyError as error:
        raise InventoryError(f"{path}: is not a lock: {error} is missing", advice=_ADVICE) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InventoryError(f"{path}: is not a lock: {error}", advice=_ADVICE) from None
    return LockFile(path=path, lock=lock)


def _check(wheel: LockedWheel) -> None:
    """Raise ValueError unless name, version, file name and hash are what they claim to be, and agree."""
    if not all(isinstance(value, str) for value in (wheel.name, wheel.version, wheel.filename, wheel.sha256, wheel.source)):
        raise ValueError(f"{wheel.name}: name, version, filename, sha256 and source are texts")
    if not re.fullmatch("[0-9a-f]{64}", wheel.sha256):
        raise ValueError(f"{wheel.name}: {wheel.sha256!r} is not a SHA-256")
    try:
        name, version, _, _ = parse_wheel_filename(wheel.filename)
        agree = (name, version) == (wheel.name, Version(wheel.version)) and "/" not in wheel.filename
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise ValueError(f"{wheel.name}: {error}") from None
    if not agree:
        raise ValueError(f"{wheel.filename} is not a wheel of {wheel.name} {wheel.version}")


def _check_whole(lock: Lock) -> None:
    names = [wheel.name for wheel in lock.all_wheels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it has two wheels of {', '.join(twice)}")
    if not all(isinstance(text, str) for text in (lock.target, *lock.requirements)):
        raise ValueError("target and requirements are texts")
