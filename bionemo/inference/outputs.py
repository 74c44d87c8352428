# SPDX-License-Identifier: Apache-2.0
"""Outputs of a trained network for token ids: embeddings, hidden vectors, logits and pseudo-perplexities.

Shapes: N sequences, n tokens of one without begin and end, T tokens of a batch with them, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bionemo.checkpoint.tensors import checksum_weights
from bionemo.common.errors import UserError
from bionemo.data.batch import PackedBatch
from bionemo.inference.batching import (
    DEFAULT_LIMITS,
    MIN_ROWS,
    BatchLimits,
    Ids,
    add_special_tokens,
    fit_to_device,
    pack,
    split_batches,
)
from bionemo.inference.progress import no_progress
from bionemo.megatron.precision import resolve_precision
from bionemo.megatron.sharding import parameter_shards
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.models.language_model import LanguageModel, MissingHead
from bionemo.tokenizers import SmilesTokenizer

Floats = NDArray[np.float32]
OutputArrays = dict[str, Floats]
PER_SEQUENCE = ("embeddings", "begin", "pseudo_perplexity")
PER_TOKEN = ("hiddens", "logits")
GENERATED = ("reconstruction", "samples")  # see generation.py


class InferenceModel:
    """A trained network on one device.

    Sequences are packed without padding. The outputs of a sequence do not depend on the other sequences of the batch.

    Attributes:
        network: the model, in evaluation mode.
        path: file or directory that it was loaded from.
        precision: precision of matrix products.
        contact_head: weights of a contact regression, if the checkpoint has them.
    """

    def __init__(
        self, network: LanguageModel, path: Path, precision: str = "32", contact_head: Mapping[str, Any] | None = None
    ) -> None:
        self.network, self.path, self.contact_head = network, path, contact_head
        self.precision = resolve_precision(precision, gpu=self.device.type == "cuda")

    @cached_property
    def weights_checksum(self) -> str:
        """Checksum of the weights; equal for files of all formats with the same weights."""
        return checksum_weights((shard.name, each) for each, shard in parameter_shards(self.network).items())

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.network.parameters()).device

    @property
    def hidden_size(self) -> int:
        """Hidden size D."""
        return self.network.config.hidden_size

    def convert_weights(self) -> None:
        """Store the weights of linear modules in the type of matrix products; the outputs stay equal bitwise.

        Autocast converts weights that need no gradients again in every batch.
        """
        if self.precision.dtype is not torch.float32:
            self.weights_checksum  # noqa: B018  # of the fp32 weights
            for module in self.network.modules():
                if isinstance(module, nn.Linear):
                    module.to(self.precision.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which matrix products use the precision of the model."""
        context: AbstractContextManager[Any] = self.precision.autocast(self.device)
        return context

    def check_outputs(self, wanted: Sequence[str]) -> None:
        """Raise a UserError that names an output that is unknown or that the model does not have."""
        name_of_class = type(self.network).__name__
        for name in wanted:
            if name not in (known := PER_SEQUENCE + PER_TOKEN + GENERATED):
                raise UserError(f"unknown output {name!r}: choose from {', '.join(known)}")
            if name in GENERATED:
                check_generates(self.network, name)
            if name == "begin" and not self.network.has_bos_eos:
                raise UserError(f"{name_of_class} has no begin token: use the mean over tokens (embeddings)")
            if name in ("logits", "pseudo_perplexity") and isinstance(self.network, EncoderDecoder):
                raise UserError(f"{name} is not available for encoder-decoder models ({name_of_class})")
            if name in ("logits", "pseudo_perplexity") and isinstance(self.network.lm_head, MissingHead):
                raise self.network.lm_head.error()

    def compute(
        self, sequences: Sequence[Ids], wanted: Sequence[str], limits: BatchLimits = DEFAULT_LIMITS,
        advance: Callable[[int], object] = no_progress,
    ) -> Iterator[OutputArrays]:  # fmt: skip
        """Compute outputs of tokenized sequences, batch by batch and in order.

        The sequences have no begin and end tokens. `wanted` contains names from PER_SEQUENCE and PER_TOKEN. `advance`
        is called with the number of sequences of each finished batch.

        Yields:
            For each name an array: [k, ...] for the k sequences of the batch, or [their tokens, ...], concatenated.

        Raises:
            UserError: if the model does not have an output.
        """
        self.check_outputs(wanted)
        lengths = [len(ids) + 2 * self.network.has_bos_eos for ids in sequences]
        for part in split_batches(lengths, fit_to_device(self.network, limits)):
            yield self._compute(sequences[part], wanted, limits)
            advance(part.stop - part.start)

    def compute_per_token(
        self, sequences: Sequence[Ids], name: str, limits: BatchLimits = DEFAULT_LIMITS
    ) -> list[Floats]:
        """Compute an output of PER_TOKEN: an array [n, ...] for each sequence.

        Raises:
            UserError: if the model does not have it.
        """
        found = [columns[name] for columns in self.compute(sequences, [name], limits)]
        return np.split(np.concatenate(found), np.cumsum([len(ids) for ids in sequences])[:-1]) if found else []

    @torch.no_grad()
    def _compute(self, sequences: Sequence[Ids], wanted: Sequence[str], limits: BatchLimits) -> OutputArrays:
        network = self.network
        found: dict[str, Tensor] = {}
        if set(wanted) - {"pseudo_perplexity"}:
            batch = pack(network, [add_special_tokens(network, ids) for ids in sequences])
            with self.autocast():
                hidden_TD = network.compute_representations(batch).float()
            if "begin" in wanted:
                found["begin"] = hidden_TD[batch.cu_seqlens[: len(sequences)].long()]
            inner = self._inner_positions(batch) if network.has_bos_eos else slice(batch.num_tokens)
            inner_MD = hidden_TD[inner]
            if "embeddings" in wanted:
                lengths = torch.tensor([len(ids) for ids in sequences], device=self.device)
                found["embeddings"] = torch.segment_reduce(inner_MD, "mean", lengths=lengths)
            if "hiddens" in wanted:
                found["hiddens"] = inner_MD
            if "logits" in wanted:
                found["logits"] = self._logits(inner_MD)
        if "pseudo_perplexity" in wanted:
            found["pseudo_perplexity"] = self._pseudo_perplexity(sequences, limits)
        return {name: found[name].cpu().numpy() for name in wanted}

    def _inner_positions(self, batch: PackedBatch) -> Tensor:
        """Return the positions of the tokens that are neither begin nor end tokens."""
        ends = np.cumsum(batch.lengths)
        keep = np.ones(int(ends[-1]), bool)
        keep[ends - 1] = keep[ends - np.array(batch.lengths)] = False
        return torch.from_numpy(np.flatnonzero(keep)).to(self.device)

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        """Return logits [M, V] in fp32."""
        padded = F.pad(hidden_MD, (0, 0, 0, max(MIN_ROWS - len(hidden_MD), 0)))
        with self.autocast():
            return self.network.compute_logits(padded)[: len(hidden_MD), : self.network.vocabulary.vocab_size].float()

    def _pseudo_perplexity(self, sequences: Sequence[Ids], limits: BatchLimits) -> Tensor:
        masked = isinstance(self.network, MaskedLanguageModel)
        scores = [self._masked_scores(ids, limits) if masked else self._causal_scores(ids) for ids in sequences]
        return torch.stack([torch.exp(-score.double().mean()).float() for score in scores])

    def _causal_scores(self, ids: Ids) -> Tensor:
        with self.autocast():
            hidden_TD = self.network.compute_representations(pack(self.network, [ids])).float()
        return self._at_tokens(self._logits(hidden_TD[: len(ids) - 1]).log_softmax(-1), ids[1:])

    def _masked_scores(self, ids: Ids, limits: BatchLimits) -> Tensor:
        return self._at_tokens(torch.cat(list(self.masked_log_probabilities(ids, np.arange(len(ids)), limits))), ids)

    def _at_tokens(self, log_probabilities_nV: Tensor, ids: Ids) -> Tensor:
        """Return the log-probability of each token, [n]."""
        index_n1 = torch.from_numpy(ids.astype(np.int64)).to(self.device)[:, None]
        return log_probabilities_nV.gather(1, index_n1).squeeze(1)

    def masked_log_probabilities(
        self, ids: Ids, positions: NDArray[np.integer[Any]], limits: BatchLimits = DEFAULT_LIMITS
    ) -> Iterator[Tensor]:
        """Compute the prediction of a masked language model at positions [k] of ids [n], each masked in its own copy.

        Yields:
            Log-probabilities [batch, V] fp32, in the order of `positions`.
        """
        assert isinstance(self.network, MaskedLanguageModel)
        whole = add_special_tokens(self.network, ids)
        size = self.sequences_per_batch(len(whole), limits)
        for begin in range(0, len(positions), size):
            masked = positions[begin : begin + size] + self.network.has_bos_eos
            rows = np.arange(len(masked))
            copies = np.tile(whole, (len(masked), 1))
            copies[rows, masked] = self.network.vocabulary.mask_id
            yield self.token_log_probabilities(copies, rows, masked)

    def sequences_per_batch(self, tokens: int, limits: BatchLimits = DEFAULT_LIMITS) -> int:
        """Return how many sequences of this length fit the limits of a batch; at least 1."""
        limits = fit_to_device(self.network, limits)
        return max(1, min(limits.tokens // tokens, limits.sequences or limits.tokens))

    @torch.no_grad()
    def token_log_probabilities(
        self, sequences: NDArray[np.integer[Any]], rows: NDArray[np.int64], tokens: NDArray[np.integer[Any]]
    ) -> Tensor:
        """Compute the predictions of a masked language model at some tokens of sequences of equal length.

        Args:
            sequences: [N, T] token ids, with begin and end tokens; a batch of bounded size.
            rows: [P] sequence of each prediction.
            tokens: [P] token of each prediction.

        Returns:
            Log-probabilities [P, V] fp32.
        """
        assert isinstance(self.network, MaskedLanguageModel)
        with self.autocast():
            hidden_TD = self.network.compute_representations(pack(self.network, list(sequences))).float()
        index = torch.from_numpy(rows * sequences.shape[1] + tokens).to(self.device)
        return self._logits(hidden_TD[index]).log_softmax(-1)


def check_generates(network: LanguageModel, output: str) -> None:
    """Raise a UserError, which states what `output` requires, if a model does not decode the molecule it encodes."""
    name = type(network).__name__
    if not isinstance(network, EncoderDecoder):
        raise UserError(f"{name} has no decoder, which {output} needs: use a model of molecules, such as MegaMolBART")
    if not isinstance(network.vocabulary, SmilesTokenizer):
        raise UserError(
            f"{name} decodes masked spans, not whole sequences, which {output} needs: use a model of molecules, such "
            "as MegaMolBART"
        )
