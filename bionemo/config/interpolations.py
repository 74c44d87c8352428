# SPDX-License-Identifier: Apache-2.0
"""Restrict `${...}` in the user's files: references to keys and the resolvers oc.env, multiply, sum and now."""

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
_MAX_LOOKUPS = 100_000  # limit for a whole configuration; those of the package need about 1,000
_VARIABLE_NAME = re.compile(r"\w+", re.ASCII)
_OPENING = re.compile(r"(\\*)\$\{")


def check_interpolations(value: Any, file: str) -> None:
    """Raise a UserError that quotes any `${...}` that is not permitted in a configuration file.

    `value` is its content as unresolved plain containers.
    """
    for text in _texts(value):
        if "${" in text:
            shown = f"{file}: {text[:80]!r}"
            if "\\${" in text:
                raise UserError(f"{shown}: \\${{ is not allowed in a configuration file")
            try:
                keys, calls = _parse(text)
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
    if resolver == "oc.env" and not _VARIABLE_NAME.fullmatch(name):
        raise UserError(f"{shown}: the name of an environment variable consists of letters, digits and _")
    if resolver == "oc.env" and is_secret_name(name):
        raise UserError(
            f"{shown}: a configuration file may not read the secret {name}: the program that needs it reads it from "
            "the environment; otherwise set the key on the command line"
        )


def check_lookups(tree: Any) -> None:
    """Refuse references whose number multiplies, as in `a: ${b}${b}`, `b: ${c}${c}` and so on.

    `tree` is the whole configuration as plain containers, unresolved.

    Raises:
        UserError: if resolving it would take too long.
    """
    if _LookupCounter(tree).count(()) > _MAX_LOOKUPS:
        raise UserError(f"the references in this configuration need more than {_MAX_LOOKUPS} lookups: use fewer")


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in every text of plain containers, so that OmegaConf returns the text unchanged."""
    if isinstance(value, dict):
        return {name: escape_interpolations(child) for name, child in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(child) for child in value]
    return _OPENING.sub(lambda match: match[1] * 2 + "\\${", value) if isinstance(value, str) else value


class _LookupCounter:
    """Counts the values that are read to resolve a node."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, path: tuple[str, ...]) -> int:
        """Return the number of values read for the node at `path`; 1 if it does not exist."""
        if path not in self._counts:
            self._counts[path] = 1  # ends a cycle, which OmegaConf reports
            node = self._node(path)
            if isinstance(node, dict | list):
                names = node if isinstance(node, dict) else range(len(node))
                total = sum(self.count((*path, str(name))) for name in names)
            else:
                total = sum(self.count(self._target(path, key)) for key in _referenced_keys(node))
            self._counts[path] = 1 + total
        return self._counts[path]

    @staticmethod
    def _target(path: tuple[str, ...], key: str) -> tuple[str, ...]:
        """Return the path of a reference at `path`; each leading dot of the key goes up one level."""
        dots = len(key) - len(key.lstrip("."))
        names = tuple(name for name in re.split(r"[.\[\]]+", key[dots:]) if name)
        return (*path[: len(path) - dots], *names) if dots else names

    def _node(self, path: tuple[str, ...]) -> Any:
        """Return the node at `path`, following references on the way."""
        node = self._tree
        for depth, name in enumerate(path):
            if isinstance(node, str) and (keys := _referenced_keys(node)):
                return self._node((*self._target(path[:depth], keys[0]), *path[depth:]))
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict):
                node = node.get(name)
            else:
                return None
        return node


def _referenced_keys(value: Any) -> tuple[str, ...]:
    """Return the keys that a value refers to; none if OmegaConf cannot parse the text, which it reports itself."""
    if not isinstance(value, str) or "${" not in value:
        return ()
    try:
        return _parse(value)[0]
    except GrammarParseError:
        return ()


@cache
def _parse(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the keys that a text refers to, and the name and arguments of each resolver that it calls."""
    keys: list[str] = []
    calls: list[tuple[str, str]] = []
    pending = [parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, Grammar.InterpolationNodeContext):
            keys.append(node.getText()[2:-1].strip())
        elif isinstance(node, Grammar.InterpolationResolverContext):
            name, _, arguments = node.getText()[2:-1].partition(":")
            calls.append((name.strip(), arguments))
        pending += [node.getChild(number) for number in range(node.getChildCount())]
    return tuple(keys), tuple(calls)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _texts(name)
            yield from _texts(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child)
    elif isinstance(value, str):
        yield value
