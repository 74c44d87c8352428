# SPDX-License-Identifier: Apache-2.0
"""Clusters of records: a sample is a cluster, and one of its members that is drawn anew in every epoch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.mapped import MappedFile
from bionemo.common.random_stream import below, draw, purpose_key, sample_keys


@dataclass(frozen=True)
class Clusters:
    """Which records are the members of each cluster.

    Attributes:
        starts: int64 [clusters], first member of each.
        counts: int64 [clusters], members of each; 0 where none takes part.
        seed: of the draws.
        members: int64 [members], the record of each member; None: a member's number is its record's.
        files: mapped files that hold the arrays.
    """

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    seed: int
    members: NDArray[np.int64] | None = None
    files: tuple[MappedFile, ...] = ()

    def sample(self, epochs: NDArray[np.int64], clusters: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw a member of each cluster, uniformly: its record, int64 [k].

        The draw depends on the seed, the epoch and the cluster alone, so it is the same wherever it is made.

        Raises:
            UserError: see `MappedFile.check`.
        """
        for file in self.files:
            file.check()
        words = draw(sample_keys(purpose_key(self.seed, "member"), epochs, clusters))
        chosen = self.starts[clusters] + below(words, self.counts[clusters])
        return chosen if self.members is None else self.members[chosen]

    def only(self, records: NDArray[np.int64]) -> "Clusters":
        """Leave out the members that are not among these records, which ascend."""
        first, last = (np.searchsorted(records, edge) for edge in (self.starts, self.starts + self.counts))
        return Clusters(first, last - first, self.seed, records)


def open_clusters(directory: Path, seed: int, clusters: int | None, records: int) -> Clusters:
    """Open `starts.mmap` and `counts.mmap` (uint64), as the preparation of UniRef50/90 writes them.

    Args:
        directory: where they are.
        seed: of the draws.
        clusters: how many are wanted, from the first on; None: all.
        records: how many member records there are.

    Raises:
        UserError: files that are missing or broken, or that speak of other clusters or members.
    """
    files = tuple(_mapped(directory / f"{name}.mmap") for name in ("starts", "counts"))
    starts, counts = (np.frombuffer(file.data, np.int64) for file in files)
    if len(starts) != len(counts) or len(counts) < (clusters or 1):
        raise UserError(
            f"{directory}: starts.mmap tells of {len(starts):,} clusters, counts.mmap of {len(counts):,}, the shards "
            f"of {clusters or 'at least one'}: prepare the data again with do_preprocessing=True"
        )
    starts, counts = starts[:clusters], counts[:clusters]
    if counts.min() < 1 or starts.min() < 0 or (most := int((starts + counts).max())) > records:
        held = f"{most:,} members, the UniRef90 shards hold {records:,}" if counts.min() > 0 else "empty clusters"
        raise UserError(
            f"{directory}/starts.mmap and counts.mmap speak of {held}: choose all shards with "
            "model.data.train.uf90.dataset.uf90_csvs, or prepare the data again with do_preprocessing=True"
        )
    return Clusters(starts, counts, seed, files=files)


def _mapped(path: Path) -> MappedFile:
    try:
        file = MappedFile(path)
        if len(file) % np.dtype(np.int64).itemsize:
            raise ValueError(f"it has {len(file):,} bytes, no multiple of 8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): prepare the data with do_preprocessing=True, or set "
            "model.data.train.sample_from_map=False to train on UniRef50 alone"
        ) from error
    return file
