# SPDX-License-Identifier: Apache-2.0
"""SMILES for an encoder-decoder: one reads a molecule, the other writes it, each in the form asked for."""

from collections.abc import Iterable
from dataclasses import asdict, fields
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import Words, draw, purpose_key, sample_keys
from bionemo.config.schema import MegaMolBARTConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import RowSize, Sequences, Tokens
from bionemo.data.files import SplitName, split_files, training_files
from bionemo.data.molecules.augmentation import Form, Forms
from bionemo.data.molecules.infilling import Infilling
from bionemo.data.molecules.mistakes import likely_mistakes
from bionemo.data.molecules.reader import (
    MoleculeTexts,
    evenly,
    fitting,
    refused_molecules,
    shown,
    unknown_in_each,
    unknown_tokens,
    without_empty,
)
from bionemo.data.molecules.smiles import Molecules, rdkit_version
from bionemo.data.shards.columns import SMILES
from bionemo.data.shards.duplicates import duplicate_notices
from bionemo.data.shards.source import SequenceSource, open_shards
from bionemo.tokenizers import SmilesTokenizer

Policy = Literal["skip", "keep", "error"]
_COUNTED = 16
_LOOKED_AT = 1_000  # records, for likely mistakes
_SPARE = 8  # tokens: with a quarter more than there are bytes, hardly one random form in a million needs more


class MoleculeSamples:
    """Molecules or reactions as samples of an encoder-decoder; see `Samples`.

    The encoder has the tokens alone; the decoder reads them behind a begin token and is asked at every one for the
    next, the end token last. A form of more tokens than there is room for gives way to the SMILES as it stands; where
    that is too long, it is cut and never given to RDKit, whose recursion ends the process at some 20,000 atoms.
    """

    def __init__(
        self,
        source: SequenceSource,
        tokenizer: SmilesTokenizer,
        forms: Forms,
        *,
        sides: tuple[str, str] | None = None,
        seed: int,
        seq_length: int,
        long_sequences: Literal["truncate", "drop", "error"],
        on_invalid: Policy,
        on_unknown: Policy,
        random_forms: bool,
        where: str,
    ) -> None:
        """Look at the data.

        Args:
            source: SMILES as text, or, for reactions, as fields.
            tokenizer: turns SMILES into ids.
            forms: what is read and written.
            sides: for reactions, the fields that encoder and decoder have; all records are read once to see sizes.
            seed: of forms and masks; with the epoch and the record it decides both.
            seq_length: the most tokens a decoder reads, begin token included.
            long_sequences: what becomes of SMILES of more tokens.
            on_invalid: what becomes of SMILES that RDKit refuses, if it is needed for the forms.
            on_unknown: what becomes of records with tokens outside the vocabulary.
            random_forms: random forms are others in each epoch, otherwise those of epoch 0.
            where: names the data in messages ("train data").

        Raises:
            UserError: the data are refused by a policy, or none are left.
        """
        self._tokenizer, self._forms, self._seed, self._random_forms = tokenizer, forms, seed, random_forms
        self._seq_length = seq_length
        self._on_invalid, self._on_unknown, self._where = on_invalid, on_unknown, where
        self._infill = Infilling(tokenizer.mask_id, forms.mask_prob, forms.span_lambda)
        matched = sides is None and forms.writes == "stored"  # both sides have one form
        self._written_forms = (forms.reads,) if matched else (forms.reads, forms.writes)
        self._molecules = Molecules()
        self._texts = MoleculeTexts(source, sides, where)

        self.clusters = None
        self.records, self._long, line = fitting(self._texts, tokenizer, seq_length - 1, long_sequences, where)
        self.records, empty = without_empty(self._texts, self.records, where)
        notices = [each for each in (empty, line) if each]
        looked = evenly(self.records, _LOOKED_AT)
        notices += likely_mistakes([text for side in self._texts(looked) for text in side], where)
        notices += unknown_tokens(self._texts, self.records, tokenizer, on_unknown, where)
        parsed = [side for side, form in enumerate(self._written_forms) if form != "stored"]
        if parsed:
            which = parsed if sides else [0]
            notices += refused_molecules(self._texts, self.records, self._long, which, on_invalid, where)
        self.notices = tuple(notices)
        most = self._texts.sizes
        if parsed or forms.encoder_mask or forms.decoder_mask:
            most = most + most // 4 + _SPARE
        self.lengths = np.minimum(most, seq_length - 1) + 1
        self.counted = np.minimum(self._texts.sizes, seq_length)  # letters: a tenth more than tokens
        switches = asdict(forms)
        del switches["canonicalize_target_smile"]
        self.identity: dict[str, Any] = {
            "kind": "molecules",
            **switches,
            "sides": list(sides or ()),
            "seed": seed,
            "random_forms": random_forms,
            "long_sequences": long_sequences,
            "on_invalid": on_invalid,
            "on_unknown": on_unknown,
            "rdkit": rdkit_version() if parsed else "",
        }

    @classmethod
    def open(cls, config: MegaMolBARTConfig, vocabulary: SmilesTokenizer, name: SplitName) -> "MoleculeSamples":
        """Open a split; see `Samples`."""
        data, where = config.data, f"{name} data"
        split = getattr(data, name)
        sides = None
        if data.input_name is not None and data.target_name is not None:
            sides = data.input_name, data.target_name
        paths = split_files(data, name)
        source = open_shards(split, paths, keys=f"model.data.{name}", kind=SMILES, sequences=sides)
        if not len(source):
            raise UserError(f"{where} holds no molecule: check model.data.dataset.{name}")
        samples = cls(
            source, vocabulary, Forms(**{field.name: getattr(data, field.name) for field in fields(Forms)}),
            sides=sides, seed=split.seed, seq_length=config.seq_length, long_sequences=data.long_sequences,
            on_invalid=data.on_invalid, on_unknown=data.on_unknown, random_forms=name == "train", where=where,
        )  # fmt: skip
        training = training_files(data) if name != "train" else []
        samples.notices += tuple(duplicate_notices(name, paths, training))
        return samples

    @property
    def row(self) -> RowSize:
        """Tokens of a row."""
        return RowSize(self._seq_length, self._seq_length)

    @staticmethod
    def reference_losses(
        train: "MoleculeSamples", val: "MoleculeSamples", batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """What the frequencies of tokens alone give, those of what the first batches of validation ask."""
        counts = np.zeros(0, np.int64)
        for batch in islice(batches, _COUNTED):  # a run does not wait for all of them
            more = np.bincount(batch.target_ids.numpy(), minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        shares = counts[counts > 0] / max(counts.sum(), 1)
        return {"token frequencies alone": float(-(shares * np.log(shares)).sum())}

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Make samples [N] into tokens, uint16; see `Samples`.

        Raises:
            UserError: a record is refused by a policy.
        """
        stored = (self._texts(records) * 2)[: len(self._written_forms)]
        written, usable = self._written(stored, epochs, records)
        room = self.lengths[records].astype(np.int64) - 1
        sides = [self._tokens(new, old, room) for new, old in zip(written, stored, strict=True)]
        unknown = np.sum([unknown_in_each(side, self._tokenizer.unk_id) for side in sides], axis=0)
        if self._on_unknown != "keep" and unknown.any():
            if self._on_unknown == "error":
                self._refuse(records, stored, unknown > 0, "has tokens outside the vocabulary", "on_unknown")
            usable &= unknown == 0
        if not usable.all():
            sides = [_cut(side, np.where(usable, side.lengths, 0)) for side in sides]

        source, inputs = sides[0], sides[-1]
        if self._forms.encoder_mask:
            source = _cut(self._infill(source, self._keys("mask", epochs, records)), room)
        if self._forms.decoder_mask:
            inputs = _cut(self._infill(inputs, self._keys("decoder mask", epochs, records)), room)
        ends = inputs.lengths.cumsum()
        begun = np.insert(inputs.ids, (ends - inputs.lengths)[usable], self._tokenizer.bos_id)
        return Tokens(
            inputs=Sequences(begun, inputs.lengths + usable),
            target_index=np.arange(len(begun)),
            target_ids=np.insert(inputs.ids, ends[usable], self._tokenizer.eos_id),
            keys=self._keys("dropout", epochs, records),
            unknown=unknown,
            source=source,
        )

    def targets(self, records: NDArray[np.int64]) -> list[str]:
        """What decoded SMILES are to be compared with: for each record [N] the canonical form, or as it stands."""
        stored = self._texts(records)[-1]
        if not self._forms.canonicalize_target_smile:
            return stored
        long = np.isin(records, self._long).tolist()
        write = self._molecules.canonical
        return [text if as_it_stands else write(text) or text for text, as_it_stands in zip(stored, long, strict=True)]

    def _written(
        self, stored: list[list[str]], epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[list[list[str]], NDArray[np.bool_]]:
        """SMILES of each side in its form, and which samples are usable, bool [N]."""
        forms = self._written_forms
        usable = np.ones(len(records), bool)
        if set(forms) == {"stored"}:
            return stored, usable
        words = self._keys("form", epochs if self._random_forms else np.zeros_like(epochs), records)
        keys = [draw(words, side).tolist() for side in range(len(forms))]
        long = np.isin(records, self._long).tolist()
        rows = [  # a molecule's forms one after the other: it is read once
            texts if cut else [self._write(*each) for each in zip(forms, texts, numbers, strict=True)]
            for texts, numbers, cut in zip(zip(*stored, strict=True), zip(*keys, strict=True), long, strict=True)
        ]
        refused = np.array([None in row for row in rows], bool)
        if self._on_invalid == "error":
            self._refuse(records, stored, refused, "cannot be read by RDKit", "on_invalid")
        elif self._on_invalid == "skip":
            usable = ~refused
        written = [
            [row[side] or old for row, old in zip(rows, texts, strict=True)] for side, texts in enumerate(stored)
        ]
        return written, usable

    def _write(self, form: Form, text: str, key: int) -> str | None:
        if form == "stored":
            return text
        return self._molecules.canonical(text) if form == "canonical" else self._molecules.randomised(text, key)

    def _tokens(self, texts: list[str], stored: list[str], room: NDArray[np.int64]) -> Sequences:
        """Tokens of SMILES, at most `room` [N] of each; stored ones stand in for those that have more."""
        tokens = Sequences(*self._tokenizer.encode_all(texts))
        long = tokens.lengths > room
        if not long.any():
            return tokens
        if texts is not stored:
            texts = [old if use else new for old, new, use in zip(stored, texts, long.tolist(), strict=True)]
            tokens = Sequences(*self._tokenizer.encode_all(texts))
        return _cut(tokens, room)

    def _refuse(
        self, records: NDArray[np.int64], stored: list[list[str]], bad: NDArray[np.bool_], problem: str, policy: str
    ) -> None:
        for at in np.flatnonzero(bad)[:1].tolist():
            texts = " and ".join(dict.fromkeys(shown(side[at]) for side in stored))
            raise UserError(
                f"{self._where}: record {records[at]:,} ({texts}) {problem}: mend it, or set model.data.{policy} to "
                "skip or keep"
            )

    def _keys(self, purpose: str, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Words:
        return sample_keys(purpose_key(self._seed, purpose), epochs, records)


def _cut(tokens: Sequences, room: NDArray[np.int64]) -> Sequences:
    """Leave at most `room` [N] tokens of each sequence, from its beginning."""
    lengths = np.minimum(tokens.lengths, room)
    if (lengths == tokens.lengths).all():
        return tokens
    places = np.arange(len(tokens.ids)) - np.repeat(tokens.lengths.cumsum() - tokens.lengths, tokens.lengths)
    return Sequences(tokens.ids[places < np.repeat(lengths, tokens.lengths)], lengths)
