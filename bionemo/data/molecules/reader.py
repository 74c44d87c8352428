# SPDX-License-Identifier: Apache-2.0
"""Reads records as SMILES."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.shards.source import SequenceSource, read_prefixes

BATCH = 10_000  # records per read when all records are read


class SmilesReader:
    """Reads records as SMILES: one for a molecule, or source and target of a reaction.

    Attributes:
        sizes: integer [n], bytes of each record's longer SMILES, an upper bound of the number of tokens.
        is_empty: bool [n], whether a SMILES of the record is empty.
    """

    def __init__(self, source: SequenceSource, fields: tuple[str, str] | None, label: str) -> None:
        """Open a source; `label` is its name in messages.

        `fields` are the names of the fields with the source and target of reactions, which are all read once; None:
        the text of a record is a molecule.
        """
        self._source, self._fields, self._label = source, fields, label
        self.sizes: NDArray[np.integer] = source.lengths
        self.is_empty: NDArray[np.bool_] = source.lengths == 0
        if fields:
            parts = [np.arange(i, min(i + BATCH, len(source))) for i in range(0, len(source), BATCH)]
            pairs = (pair for part in parts for pair in zip(*self.read(part), strict=True))
            sizes = np.array([[len(text.encode()) for text in pair] for pair in pairs], np.int32).reshape(-1, 2)
            self.sizes, self.is_empty = sizes.max(axis=1), sizes.min(axis=1) == 0

    def read(self, records: NDArray[np.int64]) -> list[list[str]]:
        """Return the SMILES of records [N]: a list of N, or one list for each side of the reactions.

        Raises:
            UserError: if a field is missing.
        """
        if self._fields:
            return [list(side) for side in zip(*map(self._read_pair, records.tolist()), strict=True)] or [[], []]
        letters, starts = read_prefixes(self._source, records)  # 10 times faster than `text`
        data = letters.tobytes()
        return [[data[start:stop].decode().strip() for start, stop in pairwise([*starts.tolist(), len(data)])]]

    def _read_pair(self, record: int) -> tuple[str, ...]:
        assert self._fields
        values = self._source.fields(record)
        try:
            return tuple(values[name].strip() for name in self._fields)
        except KeyError as error:
            raise UserError(
                f"{self._label}: there is no field {error}, only {', '.join(values)}: name the fields of "
                "model.data.input_name and model.data.target_name in data_fields"
            ) from error
