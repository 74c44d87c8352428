# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of a task: its files and columns, and the head that answers it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema.downstream import DownstreamDataConfig, HeadConfig
from bionemo.config.schema.model import DownstreamDatasetConfig
from bionemo.data.shards.ranges import shard_paths
from bionemo.finetuning.heads import Head, SequenceHead, TokenHead
from bionemo.finetuning.task import Columns, Kind, Split, classes_of, encode, read

TaskConfig = DownstreamDataConfig | DownstreamDatasetConfig


def read_splits(config: TaskConfig, key: str, names: Sequence[str]) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Read the splits of a task.

    Args:
        config: of the task.
        key: where it stands in the whole configuration, for messages.
        names: of the splits; `train` is the first.

    Returns:
        The splits by their names, and the classes, none where a number is asked for.

    Raises:
        UserError: for files that are missing, do not fit, or hold labels that the training split does not have.
    """
    columns = _columns(config, key)
    files = {
        name: shard_paths(Path(config.dataset_path), name, getattr(config.dataset, name), ".csv") for name in names
    }
    examples = {name: read(paths, columns) for name, paths in files.items()}
    classes: tuple[str, ...] = ()
    if columns.kind != "regression":
        classes = classes_of(examples["train"], columns, config.target_sizes[0] if config.target_sizes else None)
    return {name: encode(each, columns, classes) for name, each in examples.items()}, classes


def _columns(config: TaskConfig, key: str) -> Columns:
    target = _single(f"{key}.target_column", config.target_column)
    if target is None:
        raise UserError(f"{key}.target_column names no column: give the one that holds the target")
    return Columns(config.task_type, config.sequence_column, target, _single(f"{key}.mask_column", config.mask_column))


def _single(key: str, given: str | list[str] | None) -> str | None:
    names = [given] if isinstance(given, str) else given or []
    if len(names) > 1:
        raise UserError(f"{key}={names}: one target at a time: start a run for each")
    return names[0] if names else None


def make_head(
    kind: Kind, hidden_size: int, classes: int, *, width: int, sizes: tuple[int, ...], dropout: float
) -> Head:
    """A new head for a task.

    Args:
        kind: of the task.
        hidden_size: of the vectors.
        classes: how many; 0: a number is asked for.
        width: channels between the convolutions of a token's head.
        sizes: layers between, of a sequence's head.
        dropout: of either.
    """
    if kind == "token-level-classification":
        return TokenHead(hidden_size, classes, width, dropout)
    return SequenceHead(hidden_size, max(classes, 1), sizes, dropout)


def head_of(config: HeadConfig, kind: Kind, hidden_size: int, classes: int) -> Callable[[], Head]:
    """What makes new heads for a task, as the configuration says."""
    width = config.hidden_layer_size
    sizes = (width,) if isinstance(width, int) else tuple(width)
    return partial(make_head, kind, hidden_size, classes, width=config.cnn_dim, sizes=sizes, dropout=config.dropout)
