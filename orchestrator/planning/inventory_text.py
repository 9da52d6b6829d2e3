"""The text of an inventory -> `Inventory`, or one error that names every mistake: file, line, key, what was meant.

Reads no file and no environment of its own: both are handed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import PurePath

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.planning.inventory_hostfile import is_hostfile, read_hostfile
from orchestrator.planning.inventory_source import Data, KeyPath, Problem, Source, key_text, refusal, shown
from orchestrator.planning.inventory_yaml import Unreadable, read_yaml
from orchestrator.specs.inventory import SECTIONS, Inventory
from orchestrator.specs.inventory_values import one_of

_YAML_SUFFIXES = (".yml", ".yaml")
_MAPPING = "a mapping (lines of `key: value`)"
_KINDS = {"tuple_type": "a list", "model_type": _MAPPING, "mapping_type": _MAPPING, "dict_type": _MAPPING}


def parse_inventory(text: str, *, file: str, environment: Mapping[str, str]) -> Inventory:
    """Read an inventory in YAML, or a plain hostfile (in any file that is not called .yml or .yaml).

    Args:
        text: what the file holds.
        file: its name as the person knows it; for messages, and its stem for the default cluster name.
        environment: what `${NAME}` is expanded from.

    Raises:
        InventoryError: one line `file:line: key: what is wrong` per mistake.
    """
    try:
        source = _read(text, file, environment)
    except Unreadable as error:
        raise refusal(file, [error.problem]) from None
    if not isinstance(source.data, dict):
        raise refusal(file, source.problems or [Problem(line=1, text=_not_a_mapping(source.data, text))])
    data = source.data if source.data.get("cluster") else {**source.data, "cluster": _cluster_name(file)}
    try:
        inventory = Inventory.model_validate(data)
    except ValidationError as error:
        raise refusal(file, [*source.problems, *_problems(error, source)]) from None
    if source.problems:
        raise refusal(file, source.problems)
    return inventory.hiding(source.secrets)


def _read(text: str, file: str, environment: Mapping[str, str]) -> Source:
    if PurePath(file).suffix.lower() in _YAML_SUFFIXES or not is_hostfile(text):
        return read_yaml(text, environment)
    source = read_hostfile(text)
    if source.problems:
        raise refusal(file, source.problems)
    return source


def _not_a_mapping(data: Data, text: str) -> str:
    if data is None:
        return "nothing in it; an inventory names at least its nodes (`nodes: [HOST, HOST]`)"
    hint = "; a hostfile must not be called .yml" if is_hostfile(text) else ""
    return f"expected {_MAPPING}, got {_kind(data)}{hint}"


def _cluster_name(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(file).stem).strip("-.")[:64] or "cluster"


def _problems(error: ValidationError, source: Source) -> Iterator[Problem]:
    known = {(problem.path, problem.line) for problem in source.problems}
    for detail in error.errors(include_url=False):
        path = detail["loc"][:3]  # deeper are only pydantic's own marks, such as "[key]"
        if any((path[:depth], source.line(path[:depth])) in known for depth in range(1, len(path) + 1)):
            continue  # a consequence of what is already reported
        if detail["type"] == "repeats":
            yield from _repeats(path, detail["ctx"]["repeats"], source)
        elif detail["type"] == "of_key":  # one key of a section that does not go with another section
            path = (*path, detail["ctx"]["key"])
            yield Problem(line=source.line(path), path=path, text=detail["msg"])
        else:
            yield Problem(line=source.line(path), path=path, text=_wording(path, detail, source.secrets))


def _repeats(path: KeyPath, repeats: Iterable[tuple[int, int, str]], source: Source) -> Iterator[Problem]:
    for index, earlier, words in repeats:
        first = f"{key_text((*path, earlier))} (line {source.line((*path, earlier))})"
        yield Problem(line=source.line((*path, index)), path=(*path, index), text=words.format(earlier=first))


def _wording(path: KeyPath, detail: ErrorDetails, secrets: Iterable[str]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return f"missing ({_section(path)[str(path[-1])].description})"
    got = _got(path, detail["input"], secrets)
    if kind == "literal_error":
        legal = re.findall(r"'([^']*)'", context["expected"])
        return f"expected {one_of(legal)}, got {got}{_nearest(str(detail['input']), legal)}"
    return f"expected {context['text'] if kind == 'expected' else _KINDS.get(kind, detail['msg'])}, got {got}"


def _unknown_key(path: KeyPath) -> str:
    key, legal = str(path[-1]), _section(path)
    elsewhere = [f"{section}.{key}" for section, model in SECTIONS.items() if section and key in model.model_fields]
    hint = f'; did you mean "{elsewhere[0]}"?' if elsewhere else _nearest(key, legal)
    return f'unknown key "{shown(key)[1:-1]}"' + (hint or f"; legal here: {', '.join(legal)}")


def _section(path: KeyPath) -> Mapping[str, FieldInfo]:
    return SECTIONS[str(path[0]) if len(path) > 1 else ""].model_fields


def _nearest(word: str, legal: Iterable[str]) -> str:
    near = get_close_matches(word[:60].lower(), list(legal), 1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _got(path: KeyPath, value: object, secrets: Iterable[str]) -> str:
    if not isinstance(value, str):
        return _kind(value)
    if (path[:2] == ("job", "env") and value != path[-1]) or any(secret and secret in value for secret in secrets):
        return "a value that is not shown here"
    return shown(value)


def _kind(value: object) -> str:
    kinds = {list: "a list", dict: "a mapping", str: "text", type(None): "nothing"}
    return "an empty list" if value == [] else kinds.get(type(value), repr(value))
