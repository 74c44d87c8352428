# SPDX-License-Identifier: Apache-2.0
"""What `${...}` in a configuration file may do: refer to other keys, read variables, multiply, add, tell the time."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from omegaconf.errors import GrammarParseError
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser as Grammar
from omegaconf.grammar_parser import parse

from bionemo.common.errors import UserError
from bionemo.common.secret_names import is_secret_name

RESOLVERS = ("oc.env", "multiply", "sum", "now")
_MOST_LOOKUPS = 100_000  # in the whole configuration; shipped ones need about 1,000
_VARIABLE = re.compile(r"\w+", re.ASCII)
_OPENING = re.compile(r"(\\*)\$\{")


def check_references(value: Any, where: str) -> None:
    """Refuse references that a configuration file may not make.

    Args:
        value: a container or scalar of a file, with its references unresolved.
        where: the file, for the message.

    Raises:
        UserError: naming the text.
    """
    for text in _texts(value):
        if "${" in text:
            shown = f"{where}: {text[:80]!r}"
            if "\\${" in text:
                raise UserError(f"{shown}: \\${{ is not allowed in a configuration file")
            try:
                keys, calls = _parsed(text)
            except GrammarParseError as error:
                raise UserError(f"{shown}: {str(error).splitlines()[0]}") from error
            if any("${" in key for key in keys):
                raise UserError(f"{shown}: a configuration file may not compute the name of a key")
            for resolver, arguments in calls:
                _check_call(shown, resolver, arguments)


def _check_call(shown: str, resolver: str, arguments: str) -> None:
    if resolver not in RESOLVERS:
        raise UserError(f"{shown}: a configuration file may use {', '.join(RESOLVERS)}, not {resolver}")
    name = arguments.split(",", maxsplit=1)[0].strip(" \t'\"")
    if resolver == "oc.env" and not _VARIABLE.fullmatch(name):
        raise UserError(f"{shown}: the name of an environment variable has letters, digits and _")
    if resolver == "oc.env" and is_secret_name(name):
        raise UserError(
            f"{shown}: a configuration file may not read the secret {name}: the program that needs it reads the "
            "environment by itself; or type the key on the command line"
        )


def check_lookups(tree: Any) -> None:
    """Refuse references to references that multiply, as `a: ${b}${b}`, `b: ${c}${c}` and so on do.

    Args:
        tree: the whole configuration as plain containers, with its references unresolved.

    Raises:
        UserError: when resolving it would take too long.
    """
    if _Lookups(tree).count(()) > _MOST_LOOKUPS:
        raise UserError(f"the references in this configuration need more than {_MOST_LOOKUPS} lookups: use fewer")


def as_literals(value: Any) -> Any:
    """Escape `${` in every text of plain containers, so that OmegaConf gives it back as it is."""
    if isinstance(value, dict):
        return {name: as_literals(below) for name, below in value.items()}
    if isinstance(value, list):
        return [as_literals(below) for below in value]
    return _OPENING.sub(lambda match: match[1] * 2 + "\\${", value) if isinstance(value, str) else value


class _Lookups:
    """Counts how many values are read to resolve a node."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, path: tuple[str, ...]) -> int:
        """Values that are read for the node at `path`, or 1 where there is none."""
        if path not in self._counts:
            self._counts[path] = 1  # OmegaConf itself reports a cycle
            node = self._at(path)
            if isinstance(node, dict | list):
                names = node if isinstance(node, dict) else range(len(node))
                total = sum(self.count((*path, str(name))) for name in names)
            else:
                total = sum(self.count(self._target(path, key)) for key in _keys(node))
            self._counts[path] = 1 + total
        return self._counts[path]

    @staticmethod
    def _target(path: tuple[str, ...], key: str) -> tuple[str, ...]:
        """The path that a reference at `path` names: relative to its parent with a dot, and further up with more."""
        dots = len(key) - len(key.lstrip("."))
        names = tuple(name for name in re.split(r"[.\[\]]+", key[dots:]) if name)
        return (*path[: len(path) - dots], *names) if dots else names

    def _at(self, path: tuple[str, ...]) -> Any:
        """The node at `path`; a reference in the middle is followed."""
        node = self._tree
        for depth, name in enumerate(path):
            if isinstance(node, str) and (keys := _keys(node)):
                return self._at((*self._target(path[:depth], keys[0]), *path[depth:]))
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict):
                node = node.get(name)
            else:
                return None
        return node


def _keys(value: Any) -> tuple[str, ...]:
    """Keys that a value refers to; none for a text that OmegaConf cannot parse, which it reports itself."""
    if not isinstance(value, str) or "${" not in value:
        return ()
    try:
        return _parsed(value)[0]
    except GrammarParseError:
        return ()


@cache
def _parsed(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Keys that a text refers to, and the calls of resolvers in it: name and arguments."""
    keys: list[str] = []
    calls: list[tuple[str, str]] = []
    waiting = [parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Grammar.InterpolationNodeContext):
            keys.append(node.getText()[2:-1].strip())
        elif isinstance(node, Grammar.InterpolationResolverContext):
            name, _, arguments = node.getText()[2:-1].partition(":")
            calls.append((name.strip(), arguments))
        waiting += [node.getChild(number) for number in range(node.getChildCount())]
    return tuple(keys), tuple(calls)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _texts(name)
            yield from _texts(below)
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below)
    elif isinstance(value, str):
        yield value
