# SPDX-License-Identifier: Apache-2.0
"""Limits of a YAML file, checked on its events: nothing is built from a file that is too large or too deep."""

from pathlib import Path

import yaml

from bionemo.common.errors import UserError

_LONGEST = 1000  # characters of a text with `${`
_MOST_BYTES, _MOST_NODES, _DEEPEST = 2**18, 5_000, 50


def check_bounds(path: Path) -> None:
    """Refuse a YAML file that is larger than a configuration can be.

    An alias counts as much as the node it repeats, so the limits hold for the expanded document.

    Raises:
        UserError: naming the limit.
        yaml.YAMLError: when the file is not YAML.
    """
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise UserError(f"{path} has {size} bytes, expected at most {_MOST_BYTES} for a configuration file")
    anchors: dict[str, int] = {}  # anchor: nodes below it, itself included
    open_nodes: list[tuple[str | None, int]] = []  # collections not yet ended: anchor, nodes before it
    nodes = 0
    with path.open("rb") as file:
        for event in yaml.parse(file, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in open_nodes):
                    raise UserError(f"{path}, line {event.start_mark.line + 1}: *{event.anchor} contains itself")
                nodes += anchors.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                nodes += 1
                if "${" in event.value and len(event.value) > _LONGEST:  # slow to parse
                    raise UserError(
                        f"{path}, line {event.start_mark.line + 1}: a text with references has at most {_LONGEST} "
                        "characters"
                    )
                if event.anchor:
                    anchors[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, nodes))
                nodes += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor:
                    anchors[anchor] = nodes - before
            if nodes > _MOST_NODES:
                raise UserError(f"{path} has more than {_MOST_NODES} values, aliases expanded")
            if len(open_nodes) > _DEEPEST:
                raise UserError(f"{path}, line {event.start_mark.line + 1}: nested more than {_DEEPEST} levels deep")
