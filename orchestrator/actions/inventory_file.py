"""Reading an inventory's file: the one effect that an inventory needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import InventoryError
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.specs.inventory import Inventory

# Ten thousand nodes fit; a checkpoint named by mistake is not read to its end.
_LARGEST_BYTES = 1 << 20
_ADVICE = "name an inventory, or write one with `cluster-train init HOST…`"


def load_inventory(path: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Inventory:
    """Read and validate the inventory or hostfile at `path`.

    Args:
        path: the file, as the person named it.
        environment: what `${NAME}` is expanded from; None stands for this process's own.

    Raises:
        InventoryError: the file cannot be read, or `parse_inventory` refuses what it holds.
    """
    file = os.fspath(path)
    text = _text(file, _content(file))
    return parse_inventory(text, file=file, environment=os.environ if environment is None else environment).read_from(file)


def _content(file: str) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise InventoryError(f"{file}: no such file", advice=_ADVICE) from None
    except IsADirectoryError:
        raise InventoryError(f"{file}: a directory, not an inventory", advice="name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InventoryError(f"{file}: cannot be read: {reason}", advice=_ADVICE) from None
    if len(content) > _LARGEST_BYTES:
        raise InventoryError(f"{file}: larger than any inventory ({_LARGEST_BYTES >> 20} MiB)", advice=_ADVICE)
    return content


def _text(file: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"{file}:{line}: not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise InventoryError(message, advice="save the file as UTF-8") from None
