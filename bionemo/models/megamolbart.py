# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART: an encoder-decoder of SMILES (after Chemformer; Irwin et al. 2022)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bionemo.config.schema import MegaMolBARTConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Parts, Stream, assemble
from bionemo.data.molecules.dataset import MoleculeSamples
from bionemo.data.molecules.smiles import same_molecule
from bionemo.megatron.kv_cache import undivided_sequences
from bionemo.megatron.vocabulary import whole_vocabulary
from bionemo.models.decoding import Written, write
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import SmilesTokenizer

_TOLD = ("character_accuracy", "molecular_accuracy", "percent_invalid")


class MegaMolBART(EncoderDecoder):
    """Reads a molecule in one form, with spans masked, and writes it in another."""

    tokenizer = "megamolbart"
    base = "megamolbart_small"
    samples = MoleculeSamples
    config: MegaMolBARTConfig
    vocabulary: SmilesTokenizer

    def __init__(self, config: MegaMolBARTConfig, vocabulary: SmilesTokenizer) -> None:
        super().__init__(config, vocabulary)

    def source_of(self, texts: Sequence[str]) -> PackedBatch:
        """SMILES as the encoder reads them; `<MASK>` in a text stands for any stretch of it, also for none.

        Raises:
            ValueError: when one has more tokens than there are positions.
        """
        ids = [self._masked(text) for text in texts]
        lengths = np.array([len(each) for each in ids], np.int64)
        most = self.config.max_position_embeddings
        if lengths.max(initial=0) > most:
            raise ValueError(f"{texts[int(lengths.argmax())]!r} has {lengths.max()} tokens, of at most {most}")
        stream = Stream(np.concatenate([np.zeros(0, np.uint16), *ids]), lengths, np.zeros(len(ids), np.uint64), most)
        none = np.zeros(0, np.int64)
        return assemble(Parts(stream, none, none)).to(next(self.parameters()).device)

    def _masked(self, text: str) -> np.ndarray:
        mask = np.array([self.vocabulary.mask_id], np.uint16)
        parts = [part for piece in text.split("<MASK>") for part in (mask, self.vocabulary.encode(piece))]
        return np.concatenate(parts[1:])

    def smiles_of(self, written: Sequence[Written]) -> list[str]:
        """Texts of what was written."""
        return [self.vocabulary.decode(each.tokens) for each in written]

    @property
    def measures(self) -> tuple[str, ...]:
        """See Trainable."""
        return _TOLD

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> dict[str, Tensor]:
        """How often it is right.

        * character_accuracy: the likeliest next token is the true one, where all before it are true.
        * molecular_accuracy: what it writes alone, greedily, is the same molecule.
        * percent_invalid: share (sic, as in v1) of what it writes that RDKit refuses.
        """
        assert batch.source is not None
        if not batch.lengths:
            return {name: torch.zeros(2, device=batch.tokens.device) for name in _TOLD}
        with undivided_sequences(self):
            memory = self.encode(batch.source)
            hidden_T1D = self.decoder(*self.read(batch), memory)
        logits = whole_vocabulary(self.logits(hidden_T1D.squeeze(1).index_select(0, batch.target_index)))
        right = int((logits.argmax(-1) == batch.target_ids).sum())
        found = self.smiles_of(write(self, memory))
        answers = np.split(batch.target_ids.cpu().numpy(), np.cumsum(batch.lengths)[:-1])
        wanted = [self.vocabulary.text(answer) for answer in answers]
        verdicts = [same_molecule(*pair) for pair in zip(found, wanted, strict=True) if pair[1]]
        count = len(verdicts)
        told = (right, len(batch.target_ids)), (verdicts.count(True), count), (verdicts.count(None), count)
        sums = torch.tensor(told, dtype=torch.float32, device=batch.tokens.device)
        return dict(zip(_TOLD, sums, strict=True))
