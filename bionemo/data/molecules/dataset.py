# SPDX-License-Identifier: Apache-2.0
"""Molecules and reactions for an encoder-decoder."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError, shorten
from bionemo.common.random_stream import RandomBits, draw, purpose_key, sample_keys
from bionemo.config.schema import MegaMolBARTConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.columns import SMILES
from bionemo.data.dataset import MaxLengths, TokenizedBatch, TokenSequences
from bionemo.data.files import SplitName, split_files
from bionemo.data.molecules.augmentation import Augmentation, SmilesForm
from bionemo.data.molecules.content_checks import (
    SAMPLED_MOLECULES,
    SAMPLED_TOKENS,
    check_unknown_tokens,
    check_validity,
    count_tokens,
    count_unknown,
)
from bionemo.data.molecules.infilling import TextInfilling
from bionemo.data.molecules.reader import BATCH, SmilesReader
from bionemo.data.molecules.smiles import SmilesRewriter, rdkit_version
from bionemo.data.policies import apply_length_policy, drop_empty, spread_evenly
from bionemo.data.shards.source import SequenceSource, digest_sample, duplicate_notes, open_shards
from bionemo.tokenizers import SmilesTokenizer

Policy = Literal["skip", "keep", "error"]
_REFERENCE_BATCHES = 16
_EXTRA_TOKENS = 8  # with a quarter more than bytes, about one random SMILES in a million has more tokens


class MoleculeDataset:
    """Tokenized molecules or reactions; implements `bionemo.data.dataset.Dataset`.

    The encoder reads the tokens of a SMILES. The decoder reads BOS and the tokens; its targets are the tokens and EOS.
    A random or canonical SMILES with too many tokens is replaced by the stored one. A stored SMILES that is too
    long is truncated and not passed to RDKit, because RDKit's recursion crashes the process at about 20,000 atoms.
    """

    clusters = mixture = None

    def __init__(
        self,
        source: SequenceSource,
        tokenizer: SmilesTokenizer,
        augmentation: Augmentation,
        *,
        field_names: tuple[str, str] | None = None,
        seed: int,
        seq_length: int,
        long_sequences: Literal["truncate", "drop", "error"],
        on_invalid: Policy,
        on_unknown: Policy,
        vary_by_epoch: bool,
        label: str,
    ) -> None:
        """Check the data and plan the lengths of its records.

        Args:
            source: SMILES as text, or, for reactions, as fields.
            tokenizer: maps SMILES to ids.
            augmentation: SMILES forms and masks.
            field_names: fields with the encoder's and the decoder's SMILES of reactions.
            seed: seed of random SMILES and masks, which depend on the epoch and the record too.
            seq_length: maximum number of tokens of the decoder's input, including BOS.
            long_sequences: policy for SMILES of more tokens.
            on_invalid: policy for SMILES that RDKit rejects, if it is needed.
            on_unknown: policy for records with tokens outside the vocabulary.
            vary_by_epoch: draw new random SMILES in each epoch; otherwise use those of epoch 0.
            label: name of the data in messages, such as "train data".

        Raises:
            UserError: if a policy rejects the data, or if no record remains.
        """
        self._tokenizer, self._augmentation, self._seed, self._vary = tokenizer, augmentation, seed, vary_by_epoch
        self._on_invalid, self._on_unknown, self._label = on_invalid, on_unknown, label
        self._infill = TextInfilling(tokenizer.mask_id, augmentation.mask_prob, augmentation.span_lambda)
        encoder_form, decoder_form = augmentation.encoder_form, augmentation.decoder_form
        shared = field_names is None and decoder_form == "stored"  # both sides have the same SMILES
        self._forms: tuple[SmilesForm, ...] = (encoder_form,) if shared else (encoder_form, decoder_form)
        self._rewriter = SmilesRewriter()
        self._reader = SmilesReader(source, field_names, label)
        self.max_lengths = MaxLengths(seq_length, seq_length)

        lengths = count_tokens(self._reader, tokenizer, seq_length - 1)
        self._long = np.flatnonzero(lengths > seq_length - 1)
        self.records, long_note = apply_length_policy(
            lengths, seq_length - 1, long_sequences, label, "SMILES", "tokens", "truncate or drop"
        )
        self.records, empty_note = drop_empty(self._reader.is_empty, self.records, label, "SMILES")
        notes = [note for note in (empty_note, long_note) if note]
        rewritten = [side for side, form in enumerate(self._forms) if form != "stored"]
        invalid: list[str] = []
        if rewritten:
            sides = rewritten if field_names else [0]
            invalid = check_validity(self._reader, self.records, self._long, sides, on_invalid, label)
        samples = self._sample_forms(SAMPLED_MOLECULES if rewritten else SAMPLED_TOKENS)
        notes += check_unknown_tokens(samples, tokenizer, on_unknown, label) + invalid
        self.notes = tuple(notes)
        sizes = self._reader.sizes
        self.token_counts = np.minimum(sizes, seq_length)  # bytes, about a tenth more than tokens
        if rewritten or augmentation.encoder_mask or augmentation.decoder_mask:
            sizes = sizes + sizes // 4 + _EXTRA_TOKENS
        self.lengths = np.minimum(sizes, seq_length - 1) + 1
        self.fingerprint: dict[str, Any] = {
            "kind": "molecules",
            "training molecules": digest_sample(source),
            **asdict(augmentation),
            "sides": list(field_names or ()),
            "seed": seed,
            "random_forms": vary_by_epoch,
            "long_sequences": long_sequences,
            "on_invalid": on_invalid,
            "on_unknown": on_unknown,
            "rdkit": rdkit_version() if rewritten else "",
        }

    @classmethod
    def open(cls, config: MegaMolBARTConfig, vocabulary: SmilesTokenizer, name: SplitName) -> "MoleculeDataset":
        """See DatasetFactory."""
        data, label = config.data, f"{name} data"
        split = getattr(data, name)
        field_names = None
        if data.input_name is not None and data.target_name is not None:
            field_names = data.input_name, data.target_name
        paths = split_files(data, name)
        source = open_shards(split, paths, keys=f"model.data.{name}", expected=SMILES, sequences=field_names)
        if not len(source):
            raise UserError(f"{label} has no molecules: check model.data.dataset.{name}")
        augmentation = Augmentation(**{field.name: getattr(data, field.name) for field in fields(Augmentation)})
        dataset = cls(
            source, vocabulary, augmentation, field_names=field_names, seed=split.seed, seq_length=config.seq_length,
            long_sequences=data.long_sequences, on_invalid=data.on_invalid, on_unknown=data.on_unknown,
            vary_by_epoch=name == "train", label=label,
        )  # fmt: skip
        dataset.notes += tuple(duplicate_notes(data, name, paths))
        return dataset

    @staticmethod
    def reference_losses(
        train: "MoleculeDataset", val: "MoleculeDataset", batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """See DatasetFactory; token frequencies are those of the first validation batches."""
        target_ids = [batch.target_ids.numpy() for batch in islice(batches, _REFERENCE_BATCHES)]
        counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *target_ids]))
        frequencies = counts[counts > 0] / max(counts.sum(), 1)
        return {"token frequencies alone": float(-(frequencies * np.log(frequencies)).sum())}

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """See Dataset; ids are uint16.

        Raises:
            UserError: if a policy rejects a record.
        """
        stored, rewritten, usable = self._read(epochs, records)
        max_tokens = self.lengths[records].astype(np.int64) - 1
        sides = [self._tokenize_side(*texts, max_tokens) for texts in zip(rewritten, stored, strict=True)]
        unknown = np.sum([count_unknown(side, self._tokenizer.unk_id) for side in sides], axis=0)
        if self._on_unknown != "keep" and unknown.any():
            if self._on_unknown == "error":
                self._reject(records, rewritten, unknown > 0, "has tokens outside the vocabulary", "on_unknown")
            usable &= unknown == 0
        usable &= np.all([side.lengths > 0 for side in sides], axis=0)  # records of white space
        if not usable.all():
            sides = [_truncate(side, np.where(usable, side.lengths, 0)) for side in sides]

        source, inputs = sides[0], sides[-1]
        if self._augmentation.encoder_mask:
            source = _truncate(self._infill(source, self._keys("mask", epochs, records)), max_tokens)
        if self._augmentation.decoder_mask:
            inputs = _truncate(self._infill(inputs, self._keys("decoder mask", epochs, records)), max_tokens)
        ends = inputs.lengths.cumsum()
        input_ids = np.insert(inputs.ids, (ends - inputs.lengths)[usable], self._tokenizer.bos_id)
        return TokenizedBatch(
            inputs=TokenSequences(
                input_ids, inputs.lengths + usable, dropout_keys=self._keys("dropout", epochs, records)
            ),
            target_positions=np.arange(len(input_ids)),
            target_ids=np.insert(inputs.ids, ends[usable], self._tokenizer.eos_id),
            unknown_counts=unknown,
            source=source,
        )

    def _sample_forms(self, count: int) -> Iterator[list[list[str]]]:
        """Yield SMILES of records spread over the data set, in the forms of the first epoch."""
        sampled = spread_evenly(self.records, count)
        for i in range(0, len(sampled), BATCH):
            part = sampled[i : i + BATCH]
            yield self._read(np.zeros_like(part), part)[1]

    def _read(
        self, epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[list[list[str]], list[list[str]], NDArray[np.bool_]]:
        """Return the stored SMILES of each side, those in its form, and which samples are usable, bool [N]."""
        stored = (self._reader.read(records) * 2)[: len(self._forms)]
        return stored, *self._rewrite(stored, epochs, records)

    def _rewrite(
        self, stored: list[list[str]], epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[list[list[str]], NDArray[np.bool_]]:
        """Return the SMILES of each side in its form, and which samples are usable, bool [N]."""
        usable = np.ones(len(records), bool)
        if set(self._forms) == {"stored"}:
            return stored, usable
        sample_bits = self._keys("form", epochs if self._vary else np.zeros_like(epochs), records)
        keys = [draw(sample_bits, side).tolist() for side in range(len(self._forms))]
        is_long = np.isin(records, self._long).tolist()
        samples: list[tuple[str | None, ...]] = [  # sample by sample, so that a molecule is parsed once
            texts if long else tuple(map(self._rewrite_text, self._forms, texts, sample_keys))
            for texts, sample_keys, long in zip(
                zip(*stored, strict=True), zip(*keys, strict=True), is_long, strict=True
            )
        ]
        invalid = np.array([None in sample for sample in samples], bool)
        if self._on_invalid == "error":
            self._reject(records, stored, invalid, "cannot be read by RDKit", "on_invalid")
        elif self._on_invalid == "skip":
            usable = ~invalid
        return [
            [sample[side] or text for sample, text in zip(samples, texts, strict=True)]
            for side, texts in enumerate(stored)
        ], usable

    def _rewrite_text(self, form: SmilesForm, text: str, key: int) -> str | None:
        if form == "stored":
            return text
        return self._rewriter.canonicalize(text) if form == "canonical" else self._rewriter.randomize(text, key)

    def _tokenize_side(self, texts: list[str], stored: list[str], max_tokens: NDArray[np.int64]) -> TokenSequences:
        """Tokenize SMILES; replace those of more than `max_tokens` [N] tokens by the stored ones, and truncate."""
        tokens = TokenSequences(*self._tokenizer.encode_all(texts))
        too_long = tokens.lengths > max_tokens
        if too_long.any() and texts is not stored:
            chosen = [old if long else new for new, old, long in zip(texts, stored, too_long, strict=True)]
            tokens = TokenSequences(*self._tokenizer.encode_all(chosen))
        return _truncate(tokens, max_tokens)

    def _reject(
        self, records: NDArray[np.int64], stored: list[list[str]], bad: NDArray[np.bool_], problem: str, policy: str
    ) -> None:
        for i in np.flatnonzero(bad)[:1].tolist():
            texts = " and ".join(dict.fromkeys(shorten(side[i]) for side in stored))
            raise UserError(
                f"{self._label}: record {records[i]:,} ({texts}) {problem}: correct it, or set model.data.{policy} to "
                "skip or keep"
            )

    def _keys(self, purpose: str, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> RandomBits:
        return sample_keys(purpose_key(self._seed, purpose), epochs, records)


def _truncate(tokens: TokenSequences, max_tokens: NDArray[np.int64]) -> TokenSequences:
    """Keep the first `max_tokens` [N] tokens of each sequence."""
    lengths = np.minimum(tokens.lengths, max_tokens)
    if (lengths == tokens.lengths).all():
        return tokens
    positions = np.arange(len(tokens.ids)) - np.repeat(tokens.lengths.cumsum() - tokens.lengths, tokens.lengths)
    return TokenSequences(tokens.ids[positions < np.repeat(lengths, tokens.lengths)], lengths)
