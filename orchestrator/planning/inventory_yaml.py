"""YAML text -> `Source`: composed without guessing types, variables expanded, every piece with its line.

YAML would turn `5e-05` into a float, `2.10` into 2.1 and `no` into false. Here a scalar stays the text that was
written; the schema knows better than its spelling what it is. Only the safe part of YAML is read: no tags, no objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml
from yaml.reader import ReaderError

from orchestrator.planning.inventory_source import Data, KeyPath, Problem, Source, shown
from orchestrator.specs.inventory import is_secret_name

_CORE = "tag:yaml.org,2002:"
_NULL, _MERGE = f"{_CORE}null", f"{_CORE}merge"
_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "merge", "seq", "map")}
# An inventory is four levels deep; what is much deeper, or blown up by aliases, is none.
_DEEPEST = 32
_LARGEST = 1_000_000

_VARIABLE = re.compile(r"\$\$|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\})?")
# Variables that say where and who, not what is secret: masking their values would make every path unreadable.
_HARMLESS = frozenset({"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"})
# Where text is handed on as it is: here `~` and `null` are text, too.
_VERBATIM = (("job", "args"), ("job", "env"))
_SYNTAX_ADVICE = {
    r"'\t'": "; indent with spaces, not with tabs",
    "but got '{'": '; inside [ ] and { } write "${NAME}" in quotes',
    "mapping values are not allowed": '; a value that holds ": " needs quotes',
    "cannot start any token": "; a value that starts with this character needs quotes",
    "chomping or indentation": "; a value that starts with > or | needs quotes",
    "expected <block end>": "; check the indentation, and quote a value that starts with [, {, * or &",
}


class Unreadable(Exception):
    """The text cannot be read any further; `problem` says where and why."""

    def __init__(self, line: int, text: str, path: KeyPath = ()) -> None:
        super().__init__(text)
        self.problem = Problem(line=line, path=path, text=text)


def read_yaml(text: str, environment: Mapping[str, str]) -> Source:
    """Read YAML, expanding `${NAME}` and `${NAME:-default}` from `environment`.

    Raises:
        Unreadable: the text is not YAML, or is too deep or too large to be an inventory.
    """
    reader = _Reader(environment)
    root = _compose(text)
    data = reader.value(root, ()) if root is not None else None
    problems = tuple(reader.problems.values())
    return Source(data=data, lines=reader.lines, problems=problems, secrets=frozenset(reader.secrets))


class _Loader(yaml.SafeLoader):
    """Composes nodes; of all plain scalars only nothing (null) and the merge key are more than text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the base class's own way to say it
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable(self.line + 1, "nested too deeply for an inventory")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])


def _compose(text: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)
        root: yaml.Node | None = loader.get_single_node()
        return root
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(line, f"not YAML: the character {shown(text[error.position])} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        raise Unreadable(*_syntax(error)) from None
    except (ValueError, OverflowError):  # PyYAML converts "\U99999999" and %YAML numbers unchecked
        raise Unreadable(loader.line + 1 if loader else 1, "not YAML: a number or escape out of range") from None
    finally:
        if loader:
            loader.dispose()


def _syntax(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    context = f"{error.context} (line {error.context_mark.line + 1}): " if error.context and error.context_mark else ""
    text = f"not YAML: {context}{error.problem}"
    advice = next((advice for part, advice in _SYNTAX_ADVICE.items() if part in text), "")
    return (mark.line + 1 if mark else 1), text + advice


class _Reader:
    """Walks composed nodes once, collecting lines, problems and secrets on the way."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: dict[tuple[int, str], Problem] = {}
        self.secrets: set[str] = set()
        self._environment = environment
        self._left = _LARGEST

    def value(self, node: yaml.Node, path: KeyPath) -> Data:
        line = self.lines.setdefault(path, _line(node))
        self._spend(node, path)
        if node.tag not in _TAGS:
            self._wrong(line, path, f"the tag {shown(node.tag)} means nothing here; leave it out")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _spend(self, node: yaml.Node, path: KeyPath) -> None:
        # An alias may contain itself, or stand a million times for a large value.
        self._left -= 1 + len(node.value)
        if len(path) > _DEEPEST or self._left < 0:
            raise Unreadable(_line(node), "too deep or too large for an inventory; does an alias contain itself?")

    def _mapping(self, node: yaml.Node, path: KeyPath) -> Data:
        entries = self._entries(node, path)
        self.lines.update({(*path, key): line for key, (line, _) in entries.items()})
        return {key: self.value(value, (*path, key)) for key, (_, value) in entries.items()}

    def _entries(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[int, yaml.Node]]:
        """The mapping's values by key, with the keys' lines; keys of its own win over merged ones."""
        own: dict[str, tuple[int, yaml.Node]] = {}
        merged: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                self._merge(value, (*path, "<<"), merged)
            elif not isinstance(key, yaml.ScalarNode):
                self._wrong(_line(key), path, "a key must be text; does a value that starts with [ or { lack quotes?")
            elif key.value in own:
                first = own[key.value][0]
                self._wrong(_line(key), (*path, key.value), f"written twice; the first is on line {first}")
            else:
                own[key.value] = _line(key), value
        return merged | own

    def _merge(self, node: yaml.Node, path: KeyPath, merged: dict[str, tuple[int, yaml.Node]]) -> None:
        """Add to `merged` what `node`, one mapping or several, holds; the first to name a key wins."""
        self._spend(node, path)
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            self._spend(source, path)
            if isinstance(source, yaml.MappingNode):
                for key, entry in self._entries(source, path).items():
                    merged.setdefault(key, entry)
            else:
                self._wrong(_line(source), path, "only a mapping can be merged")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Data:
        if len(path) == 3 and path[:2] in _VERBATIM:
            if node.value == "" and node.style is None:
                self._wrong(self.lines[path], path, 'no value; write "" for an empty one')
            return self._expanded(node.value, path)
        # Nothing, also as the outcome of ${NAME:-}, means: take the default.
        return None if node.tag == _NULL else self._expanded(node.value, path) or None

    def _expanded(self, text: str, path: KeyPath) -> str:
        return _VARIABLE.sub(lambda match: self._variable(match, path), text)

    def _variable(self, match: re.Match[str], path: KeyPath) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$$":
            return "$"
        if name is None:
            self._wrong(self.lines[path], path, "expected ${NAME} or ${NAME:-default}; write $$ for a dollar sign")
            return match[0]
        value = self._environment.get(name, "")
        if not value and default is not None:
            return default
        if name not in self._environment:
            self._wrong(self.lines[path], path, f"${{{name}}} is not set in the environment (${{{name}:-…}} gives a default)")
        if is_secret_name(name) or (path[:2] == ("job", "env") and name not in _HARMLESS):
            self.secrets.add(value)
        return value

    def _wrong(self, line: int, path: KeyPath, text: str) -> None:
        # What is wrong in an anchored mapping is met again at each of its aliases.
        self.problems.setdefault((line, text), Problem(line=line, path=path, text=text))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
