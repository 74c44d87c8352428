# SPDX-License-Identifier: Apache-2.0
"""Restrictions on the user's configuration files, which somebody else may have written.

A file must be safe to use: it is limited in size, and keys that run code or send credentials elsewhere count only on
the command line, or with `--trust-config`. Files of this package (`conf/` and `conf/` of each example) are trusted.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.common.secret_names import is_secret_name
from bionemo.config.paths import CONF_DIR, EXAMPLES
from bionemo.config.text_values import read_yaml

TRUST_FLAG = "--trust-config"
_MAX_BYTES, _MAX_NODES, _MAX_DEPTH = 2**18, 5_000, 50
_MAX_INTERPOLATION = 1000  # characters of a text with `${`, which is slow to parse
# Each key includes all keys below it.
PROTECTED = {
    "cluster.address": "starts programs on another machine",
    "cluster.additional_parameters": "sets options of sbatch, which run code",
    "cluster.container_image": "selects the program that runs",
    "cluster.container_mounts": "replaces files of the program that runs",
    "cluster.datasets": "replaces files of the program that runs",
    "cluster.env_vars": "changes what programs load and where they send credentials",
    "cluster.hostfile": "starts programs on other machines",
    "cluster.image": "selects the program that runs",
    "cluster.interactive": "opens a shell on the machines of the job",
    "cluster.mpirun_args": "sets options of mpirun, which run code",
    "cluster.python": "selects the program that runs",
    "cluster.srun_args": "sets options of srun, which run code",
    "cluster.workdir": "selects the code that runs",
    "cluster.workspaces": "replaces files of the program that runs",
    "exp_manager.files_to_copy": "copies files of the user",
    "exp_manager.mlflow_logger_kwargs.artifact_location": "sends credentials to a server",
    "exp_manager.mlflow_logger_kwargs.tracking_uri": "sends credentials to a server",
    "exp_manager.neptune_logger_kwargs": "sends credentials to a server",
    "exp_manager.wandb_logger_kwargs.settings": "sends credentials to a server",
    "hydra": "runs code",
}
# Keys below protected ones that cannot do harm. hydra.searchpath has a check of its own in hydra_setup.py.
_HARMLESS = re.compile(
    r"hydra\.(searchpath|run|sweep|mode|verbose|output_subdir|job\.(name|chdir))(\..*)?"
    r"|cluster\.additional_parameters\.(qos|constraint|reservation|comment|nice|nodelist|exclude|begin|deadline)"
    r"|cluster\.env_vars\.((TORCH_)?NCCL_(?!\w*(FILE|PLUGIN|CONF|PROFILER))(?!NET$)\w+|OMP_NUM_THREADS"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|HYDRA_FULL_ERROR|TOKENIZERS_PARALLELISM"
    r"|(TRANSFORMERS|HF_HUB)_OFFLINE)"
)


@dataclass(frozen=True)
class UserFile:
    """A configuration file that is not part of this package."""

    path: Path  # location of the file
    content: Any  # its values, unresolved
    package: str | None  # key below which Hydra places the values, from the header of the file


def is_packaged(path: Path) -> bool:
    """Return whether a file is in `conf/` or in `conf/` of an example."""
    real, examples = path.resolve(), EXAMPLES.resolve()
    return real.is_relative_to(CONF_DIR.resolve()) or (
        real.is_relative_to(examples) and "conf" in real.relative_to(examples).parts
    )


def check_yaml_limits(path: Path) -> None:
    """Refuse a YAML file that is too large or too deeply nested, without building its content.

    The limits hold for the document with aliases expanded.

    Raises:
        UserError: if a limit is exceeded.
        yaml.YAMLError: if the file is not YAML.
    """
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise UserError(f"{path} has {size} bytes, expected at most {_MAX_BYTES} for a configuration file")
    anchors: dict[str, int] = {}  # anchor -> number of nodes, including its own
    open_nodes: list[tuple[str | None, int]] = []  # enclosing collections: anchor, number of nodes before it
    nodes = 0
    with path.open("rb") as file:
        for event in yaml.parse(file, Loader=yaml.SafeLoader):
            location = f"{path}, line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in open_nodes):
                    raise UserError(f"{location}: *{event.anchor} contains itself")
                nodes += anchors.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                nodes += 1
                if "${" in event.value and len(event.value) > _MAX_INTERPOLATION:
                    raise UserError(f"{location}: a text with references has at most {_MAX_INTERPOLATION} characters")
                if event.anchor:
                    anchors[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, nodes))
                nodes += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor:
                    anchors[anchor] = nodes - before
            if nodes > _MAX_NODES:
                raise UserError(f"{path} has more than {_MAX_NODES} values, aliases expanded")
            if len(open_nodes) > _MAX_DEPTH:
                raise UserError(f"{location}: nested more than {_MAX_DEPTH} levels deep")


def check_permissions(files: Iterable[tuple[UserFile, str]], overrides: Sequence[str]) -> None:
    """Refuse protected keys in files, unless the command line sets them too.

    Args:
        files: each file with the key below which its values are placed.
        overrides: overrides of the command line in Hydra's syntax.

    Raises:
        UserError: if a file sets a protected key.
    """
    overridden = list(_overridden_keys(overrides))
    for file, prefix in files:
        for key, value in _leaves(file.content, prefix):
            reason = _reason_to_refuse(key, value)
            if reason is None or any(key == name or key.startswith(f"{name}.") for name in overridden):
                continue
            shown = "***" if is_secret_name(key) else str(value)
            shown = repr(shown[:80] + "..." if len(shown) > 80 else shown)
            raise UserError(
                f"{file.path} sets {key} to {shown}, which {reason}: to allow it, add {key}=... to the command line, "
                f"or {TRUST_FLAG} to allow everything in all files"
            )


def _reason_to_refuse(key: str, value: Any) -> str | None:
    """Return what the value of a protected key can do; None if it is harmless."""
    if value in (None, "", [], {}) or _HARMLESS.fullmatch(key) or value in _packaged_cluster_values().get(key, ()):
        return None
    for protected, reason in PROTECTED.items():
        if f"{key}.".startswith(f"{protected}."):
            return reason
        if protected.startswith(f"{key}.") and "${" in str(value):  # a reference that replaces a group
            return reason
    return None


def _overridden_keys(overrides: Sequence[str]) -> Iterator[str]:
    """Yield keys that the command line sets or deletes; of a mapping, which is merged into the file's, its leaves."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete():
            if "." in override.key_or_group:  # else it may be a group; other files may set keys in the same place
                yield override.key_or_group
        elif "/" not in override.key_or_group and not override.is_sweep_override():
            for key, _ in _leaves(override.value(), override.key_or_group):
                yield key


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield full keys and values. A list is one value; an empty mapping has none."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _leaves(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


@cache
def _packaged_cluster_values() -> dict[str, list[Any]]:
    """Return the values in `conf/cluster`, so that a copy of one of these files is accepted."""
    values: dict[str, list[Any]] = {}
    for path in (CONF_DIR / "cluster").glob("*.yaml"):
        for key, value in _leaves(OmegaConf.to_container(read_yaml(path), resolve=False), "cluster"):
            values.setdefault(key, []).append(value)
    return values
