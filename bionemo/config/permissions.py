# SPDX-License-Identifier: Apache-2.0
"""Keys that a configuration file may not set, as they run code or send credentials elsewhere.

A file that somebody else wrote must be safe to run. So these keys count only when the user types them, or types
`--trust-config`. Files of this package are trusted: `conf/`, and `conf/` of each example.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from bionemo.common.errors import UserError
from bionemo.common.secret_names import is_secret_name
from bionemo.config.paths import CONF_DIR, EXAMPLES

TRUST = "--trust-config"
# Each key stands for all keys below it.
PROTECTED = {
    "cluster.address": "starts programs on another machine",
    "cluster.additional_parameters": "sets options of sbatch, which run code",
    "cluster.container_image": "chooses the program that runs",
    "cluster.container_mounts": "replaces files of the program that runs",
    "cluster.datasets": "replaces files of the program that runs",
    "cluster.env_vars": "changes what programs load and where they send credentials",
    "cluster.hostfile": "starts programs on other machines",
    "cluster.image": "chooses the program that runs",
    "cluster.interactive": "opens a shell on the machines of the job",
    "cluster.mpirun_args": "sets options of mpirun, which run code",
    "cluster.python": "chooses the program that runs",
    "cluster.srun_args": "sets options of srun, which run code",
    "cluster.workdir": "chooses the code that runs",
    "cluster.workspaces": "replaces files of the program that runs",
    "exp_manager.files_to_copy": "copies files of the user",
    "exp_manager.mlflow_logger_kwargs.artifact_location": "sends credentials to a server",
    "exp_manager.mlflow_logger_kwargs.tracking_uri": "sends credentials to a server",
    "exp_manager.neptune_logger_kwargs": "sends credentials to a server",
    "exp_manager.wandb_logger_kwargs.settings": "sends credentials to a server",
    "hydra": "runs code",
}
# Exceptions: what these do is known, and harmless.
_HARMLESS = re.compile(
    r"hydra\.(searchpath|run|sweep|mode|verbose|output_subdir|job\.(name|chdir))(\..*)?"  # the first is checked apart
    r"|cluster\.additional_parameters\.(qos|constraint|reservation|comment|nice|nodelist|exclude|begin|deadline)"
    r"|cluster\.env_vars\.((TORCH_)?NCCL_(?!\w*(FILE|PLUGIN|CONF|PROFILER))(?!NET$)\w+|OMP_NUM_THREADS"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|HYDRA_FULL_ERROR|TOKENIZERS_PARALLELISM"
    r"|(TRANSFORMERS|HF_HUB)_OFFLINE)"
)


@dataclass(frozen=True)
class UserFile:
    """A file that is not part of this package.

    Attributes:
        path: of the file.
        content: its values, references unresolved.
        package: where Hydra puts them, as the file's header says.
    """

    path: Path
    content: Any
    package: str | None


def is_packaged(path: Path) -> bool:
    """Whether a file is one of `conf/` or of an example's `conf/`."""
    real = path.resolve()
    if real.is_relative_to(CONF_DIR.resolve()):
        return True
    return real.is_relative_to(EXAMPLES.resolve()) and "conf" in real.relative_to(EXAMPLES.resolve()).parts


def check_permissions(files: Iterable[tuple[UserFile, str]], words: Sequence[str]) -> None:
    """Refuse protected keys that come from a file.

    Args:
        files: each with the key below which its values are placed.
        words: of the command line, as Hydra reads them.

    Raises:
        UserError: naming the file, the key, its value, and how to allow it.
    """
    typed = list(_typed(words))
    for file, prefix in files:
        for key, value in _leaves(file.content, prefix):
            reason = _reason(key, value)
            if reason is None or any(key == name or key.startswith(f"{name}.") for name in typed):
                continue
            shown = "***" if is_secret_name(key) else str(value)
            shown = repr(shown[:80] + "..." if len(shown) > 80 else shown)
            raise UserError(
                f"{file.path} sets {key} to {shown}, which {reason}: if you want that, type {key}=... on the command "
                f"line, or {TRUST} to allow it for all files"
            )


def _reason(key: str, value: Any) -> str | None:
    """What a file could do with this value; None where that is harmless."""
    if value in (None, "", [], {}) or _HARMLESS.fullmatch(key) or value in _shipped().get(key, ()):
        return None
    for protected, reason in PROTECTED.items():
        if f"{key}.".startswith(f"{protected}."):
            return reason
        if protected.startswith(f"{key}.") and "${" in str(value):  # a reference in place of a group
            return reason
    return None


def _typed(words: Sequence[str]) -> Iterator[str]:
    """Keys that the command line sets or deletes; of a mapping, which is merged into the file's, those in it."""
    for override in OverridesParser.create().parse_overrides(list(words)):
        if override.is_delete():
            if "." in override.key_or_group:  # else it may be a group, whose deletion leaves the keys of other files
                yield override.key_or_group
        elif "/" not in override.key_or_group and not override.is_sweep_override():
            for key, _ in _leaves(override.value(), override.key_or_group):
                yield key


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Full keys and values; a list is one value, an empty mapping none."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(below, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


@cache
def _shipped() -> dict[str, list[Any]]:
    """Values of `cluster` in the files of this package, so that a copy of one is accepted."""
    values: dict[str, list[Any]] = {}
    for path in (CONF_DIR / "cluster").glob("*.yaml"):
        for key, value in _leaves(yaml.safe_load(path.read_text("utf-8")), "cluster"):
            values.setdefault(key, []).append(value)
    return values
