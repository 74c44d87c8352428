# SPDX-License-Identifier: Apache-2.0
"""Clusters of records: a sample is a cluster, represented in each epoch by a randomly selected member."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.mapped import MappedFile
from bionemo.common.random_stream import draw, integers_below, purpose_key, sample_keys


@dataclass(frozen=True)
class Clusters:
    """The member records of each cluster."""

    starts: NDArray[np.int64]  # [clusters], index of the first member
    counts: NDArray[np.int64]  # [clusters], number of members; 0 if the cluster is not used
    seed: int  # seed of the selection
    members: NDArray[np.int64] | None = None  # [members], record of each member; None: member i is record i
    files: tuple[MappedFile, ...] = ()  # mapped files of the arrays

    def sample(self, epochs: NDArray[np.int64], clusters: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the record of a uniformly selected member of each cluster, int64 [k].

        The selection depends only on the seed, the epoch and the cluster. Errors as in `MappedFile.check`.
        """
        for file in self.files:
            file.check()
        bits = draw(sample_keys(purpose_key(self.seed, "member"), epochs, clusters))
        chosen = self.starts[clusters] + integers_below(bits, self.counts[clusters])
        return chosen if self.members is None else self.members[chosen]

    def only(self, records: NDArray[np.int64]) -> "Clusters":
        """Return the clusters restricted to these member records, which are in ascending order."""
        first, last = (np.searchsorted(records, edge) for edge in (self.starts, self.starts + self.counts))
        return Clusters(first, last - first, self.seed, records)


def open_clusters(directory: Path, seed: int, clusters: int | None, records: int) -> Clusters:
    """Open `starts.mmap` and `counts.mmap` (uint64), which the preparation of UniRef50/90 writes.

    `clusters` is the number of clusters to use, from the first on (None: all), `records` that of member records.

    Raises:
        UserError: if files are missing or damaged, or refer to other clusters or members.
    """
    files = tuple(_map_file(directory / f"{name}.mmap") for name in ("starts", "counts"))
    starts, counts = (np.frombuffer(file.data, np.int64) for file in files)
    if len(starts) != len(counts) or len(counts) < (clusters or 1):
        raise UserError(
            f"{directory}: starts.mmap has {len(starts):,} clusters, counts.mmap has {len(counts):,}, the shards have "
            f"{clusters or 'at least one'}: prepare the data again with do_preprocessing=True"
        )
    starts, counts = starts[:clusters], counts[:clusters]
    if counts.min() < 1 or starts.min() < 0 or (end := int((starts + counts).max())) > records:
        problem = (
            f"{end:,} members, but the UniRef90 shards have {records:,}" if counts.min() > 0 else "empty clusters"
        )
        raise UserError(
            f"{directory}/starts.mmap and counts.mmap have {problem}: choose all shards with "
            "model.data.train.uf90.dataset.uf90_csvs, or prepare the data again with do_preprocessing=True"
        )
    return Clusters(starts, counts, seed, files=files)


def _map_file(path: Path) -> MappedFile:
    try:
        file = MappedFile(path)
        if len(file) % np.dtype(np.int64).itemsize:
            raise ValueError(f"its size, {len(file):,} bytes, is not a multiple of 8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): prepare the data with do_preprocessing=True, or set "
            "model.data.train.sample_from_map=False to train on UniRef50 alone"
        ) from error
    return file
