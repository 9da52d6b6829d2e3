"""How many parameters the job's model has, where that can be seen without loading it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

LARGEST_HEADER_BYTES = 100_000_000  # as the format itself allows
MODEL_OPTION = "--model_name_or_path"


def parameter_count(args: Sequence[str]) -> int | None:
    """Of the model that the script's arguments name: a directory here, or one in the hub's cache. None where it is neither."""
    for index, word in enumerate(args):
        if word == MODEL_OPTION and index + 1 < len(args):
            return _count(args[index + 1])
        if word.startswith(f"{MODEL_OPTION}="):
            return _count(word.partition("=")[2])
    return None


def _count(name: str) -> int | None:
    for directory in (Path(name).expanduser(), *_cached(name)):
        try:
            if weights := sorted(directory.glob("*.safetensors")):
                return sum(_in_header(path) for path in weights)
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return None


def _cached(name: str) -> list[Path]:
    """The snapshots of a model of the hub, as huggingface_hub lays them down."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return sorted((home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))


def _in_header(path: Path) -> int:
    """A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, which is JSON."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER_BYTES:
            raise ValueError(path)
        header = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
