# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART: an encoder-decoder for SMILES (Chemformer; Irwin et al. 2022). Shapes: T tokens, D hidden size."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bionemo.config.schema import MegaMolBARTConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.molecules.dataset import MoleculeDataset
from bionemo.data.molecules.smiles import same_molecule
from bionemo.formats.nemo_models import NemoModel
from bionemo.megatron.kv_cache import sequence_parallel_disabled
from bionemo.megatron.vocabulary import gather_vocabulary
from bionemo.models import nemo_names
from bionemo.models.decoding import GeneratedSequence, generate
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.models.hugging_face_blenderbot import blenderbot_architecture
from bionemo.tokenizers import SmilesTokenizer
from bionemo.tokenizers.smiles import TOKEN_PATTERN, megamolbart

_METRICS = ("character_accuracy", "molecular_accuracy", "percent_invalid")


class MegaMolBART(EncoderDecoder):
    """An encoder-decoder that reconstructs the SMILES of a molecule, after Chemformer.

    It reads a SMILES with masked spans and generates a SMILES of the same molecule.
    """

    tokenizer = "megamolbart"
    default_config = "megamolbart_small"
    card_tag = "chemistry"
    nemo = NemoModel(
        nemo_class="bionemo.model.molecule.megamolbart.megamolbart_model.MegaMolBARTModel", vocab_size=523,
        names=nemo_names.ENCODER_DECODER, prefix="enc_dec_model.",
        config={**nemo_names.ENCODER_DECODER_CONFIG, "tokenizer": {"library": "regex"}},
    )  # fmt: skip
    hugging_face = blenderbot_architecture(
        "MegaMolBART", lambda settings: settings.get("vocab_size") == megamolbart().vocab_size,
        lambda config: megamolbart(), letters=TOKEN_PATTERN, read_tokenizer=lambda directory: {},
    )  # fmt: skip
    dataset = MoleculeDataset
    config: MegaMolBARTConfig
    vocabulary: SmilesTokenizer

    def decode_smiles(self, sequences: Sequence[GeneratedSequence]) -> list[str]:
        """Return the SMILES of generated sequences."""
        return [self.vocabulary.decode(sequence.tokens) for sequence in sequences]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See Trainable."""
        return _METRICS

    @torch.no_grad()
    def compute_metrics(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return accuracies of the decoder.

        * character_accuracy: fraction of tokens predicted correctly from the true previous tokens.
        * molecular_accuracy: fraction of greedily generated SMILES that are the same molecule as the target.
        * percent_invalid: fraction (not percentage; the name is that of v1) of generated SMILES that RDKit rejects.
        """
        assert batch.source is not None
        device = batch.tokens.device
        if not batch.lengths:
            return {name: torch.zeros(2, device=device) for name in _METRICS}
        with sequence_parallel_disabled(self):
            encoder_output = self.encode(batch.source)
            hidden_T1D = self.decoder(*self.prepare_input(batch), encoder_output)
        logits = gather_vocabulary(self.compute_logits(hidden_T1D.squeeze(1).index_select(0, batch.target_positions)))
        correct = int((logits.argmax(-1) == batch.target_ids).sum())
        generated = self.decode_smiles(generate(self, encoder_output))
        target_ids = np.split(batch.target_ids.cpu().numpy(), np.cumsum(batch.lengths)[:-1])
        targets = [self.vocabulary.decode_output(ids) for ids in target_ids]
        same = [same_molecule(*pair) for pair in zip(generated, targets, strict=True) if pair[1]]
        sums = (correct, len(batch.target_ids)), (same.count(True), len(same)), (same.count(None), len(same))
        return dict(zip(_METRICS, torch.tensor(sums, dtype=torch.float32, device=device), strict=True))
