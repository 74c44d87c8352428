# SPDX-License-Identifier: Apache-2.0
"""Outputs of a trained network for token ids: embeddings, hidden vectors, logits and pseudo-perplexities.

Shapes: N sequences, n tokens of one without begin and end, T tokens of a batch with them, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bionemo.checkpoint.tensors import checksum_weights
from bionemo.common.errors import UserError
from bionemo.config.schema.infer import OutputName, split_output
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
from bionemo.megatron.attention import PackedAttention
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
ATTENTIONS = "attentions"  # of a layer, heads x tokens x tokens for each sequence
_ATTENTION_TOKENS = 1 << 11  # in a batch: 80 MB for 20 heads and one sequence of 1,000 tokens
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

    def __repr__(self) -> str:
        parameters = sum(each.numel() for each in self.network.parameters())
        return f"<{type(self.network).__name__} of {self.path}: {parameters:,} parameters, {self.device}>"

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
        layers = len(self.network.blocks()[0].layers)
        for name in wanted:
            if expected := OutputName().expected(name):
                raise UserError(f"unknown output {name!r}: choose {expected}")
            kind, layer = split_output(name)
            first = int(kind == ATTENTIONS)
            if layer is not None and not first <= layer <= layers:
                raise UserError(f"{name}: {name_of_class} has the layers {first} to {layers}")
            if name in GENERATED:
                check_generates(self.network, name)
            if kind == "begin" and not self.network.has_bos_eos:
                raise UserError(
                    f"{name_of_class} has no begin token, as ESM models have: use the mean over tokens (embeddings)"
                )
            if name in ("logits", "pseudo_perplexity") and isinstance(self.network, EncoderDecoder):
                raise UserError(
                    f"{name} is not available for {name_of_class}, whose decoder predicts tokens one after the other: "
                    "use embeddings or hidden states, or ESM2nv or GPT3"
                )
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
            For each name an array: [k, ...] for the k sequences of the batch, or [their tokens, ...], concatenated;
            for attention maps [values], see `split_rows`.

        Raises:
            UserError: if the model does not have an output.
        """
        self.check_outputs(wanted)
        if any(is_attention(name) for name in wanted):
            limits = limits._replace(tokens=min(limits.tokens, _ATTENTION_TOKENS))
        lengths = [len(ids) + 2 * self.network.has_bos_eos for ids in sequences]
        for part in split_batches(lengths, fit_to_device(self.network, limits)):
            yield self._compute(sequences[part], wanted, limits)
            advance(part.stop - part.start)

    def compute_per_token(
        self, sequences: Sequence[Ids], *names: str, limits: BatchLimits = DEFAULT_LIMITS
    ) -> list[list[Floats]]:
        """Compute outputs per token, an array [n, ...] for each sequence, or attention maps, [heads, n, n].

        Returns:
            The arrays of each output.

        Raises:
            UserError: if the model does not have an output.
        """
        found = list(self.compute(sequences, names, limits))
        tokens = np.array([len(ids) for ids in sequences], np.int64)
        return [split_rows(name, np.concatenate([each[name] for each in found]), tokens) for name in names if found]

    @torch.no_grad()
    def _compute(self, sequences: Sequence[Ids], wanted: Sequence[str], limits: BatchLimits) -> OutputArrays:
        network = self.network
        found: dict[str, Tensor] = {}
        if set(wanted) - {"pseudo_perplexity"}:
            batch = pack(network, [add_special_tokens(network, ids) for ids in sequences])
            with self.autocast(), LayerRecord(network, map(split_output, wanted)) as record:
                record.hidden[None] = record.hidden[record.layers] = network.compute_representations(batch)
            hiddens = {layer: hidden_TD.float() for layer, hidden_TD in record.hidden.items()}
            inner = self._inner_positions(batch) if network.has_bos_eos else slice(batch.num_tokens)
            lengths = torch.tensor([len(ids) for ids in sequences], device=self.device)
            for name in wanted:
                kind, layer = split_output(name)
                if kind == "begin":
                    found[name] = hiddens[layer][batch.cu_seqlens[: len(sequences)].long()]
                elif kind == "embeddings":
                    found[name] = torch.segment_reduce(hiddens[layer][inner], "mean", lengths=lengths)
                elif kind == "hiddens":
                    found[name] = hiddens[layer][inner]
                elif kind == ATTENTIONS and layer:
                    found[name] = _attention_maps(*record.attention[layer], batch, int(network.has_bos_eos))
                elif name == "logits":
                    found[name] = self._logits(hiddens[None][inner])
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


class LayerRecord:
    """Context in which hidden states and queries and keys of the layers of an encoder or decoder are recorded.

    Args:
        network: the model.
        outputs: kinds of outputs and layers, see `split_output`; others are ignored.

    Attributes:
        layers: number of layers.
        hidden: layer -> its output [T, D]; 0: the input of the first layer, as in transformers and fair-esm.
        attention: layer -> queries and keys [T, H, d], with rotary positions, and the module.
    """

    def __init__(self, network: LanguageModel, outputs: Iterable[tuple[str, int | None]]) -> None:
        self._modules, self._outputs = list(network.blocks()[0].layers), list(outputs)
        self.layers = len(self._modules)
        self.hidden: dict[int | None, Tensor] = {}
        self.attention: dict[int, tuple[Tensor, Tensor, PackedAttention]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "LayerRecord":
        for kind, layer in self._outputs:
            if layer == 0:
                self._hooks.append(self._modules[0].register_forward_pre_hook(self._record_input))
            elif kind == ATTENTIONS and layer:
                module = self._modules[layer - 1].self_attention.core_attention
                self._hooks.append(module.register_forward_pre_hook(partial(self._record_attention, layer)))
            elif layer is not None and layer < self.layers:
                self._hooks.append(self._modules[layer - 1].register_forward_hook(partial(self._record, layer)))
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.hidden[0] = inputs[0].squeeze(1)

    def _record(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.hidden[layer] = output.squeeze(1)

    def _record_attention(self, layer: int, module: Any, inputs: tuple[Any, ...]) -> None:
        query, key = (x.squeeze(1) for x in inputs[:2])
        self.attention[layer] = query, key, module


def _attention_maps(q_THd: Tensor, k_THd: Tensor, module: PackedAttention, batch: PackedBatch, ends: int) -> Tensor:
    """Return the attention between the tokens of each sequence, without its `ends` begin and end tokens: [values]."""
    maps, begin = [], 0
    for length in batch.lengths:
        q_HTd, k_HTd = (x[begin : begin + length].transpose(0, 1).float() for x in (q_THd, k_THd))
        begin += length
        scores_HTT = q_HTd @ k_HTd.mT * module.scale
        if module.causal:
            scores_HTT = scores_HTT.masked_fill(scores_HTT.new_ones(length, length).triu(1).bool(), -torch.inf)
        maps.append(scores_HTT.softmax(-1)[:, ends : length - ends, ends : length - ends].flatten())
    return torch.cat(maps)


def is_attention(name: str) -> bool:
    """Return whether an output is attention maps."""
    return split_output(name)[0] == ATTENTIONS


def is_per_token(name: str) -> bool:
    """Return whether an output has a row for each token."""
    return split_output(name)[0] in PER_TOKEN


def split_rows(name: str, values: Floats, tokens: NDArray[np.int64]) -> list[Floats]:
    """Split an output of several sequences, with these numbers of tokens, into those of each sequence.

    Returns:
        Arrays [n, ...] of an output per token, attention maps [heads, n, n], or values of each sequence.
    """
    if is_attention(name):
        heads = len(values) // int((tokens**2).sum())
        maps = np.split(values, (heads * tokens**2).cumsum()[:-1])
        return [each.reshape(heads, count, count) for each, count in zip(maps, tokens, strict=True)]
    return np.split(values, tokens.cumsum()[:-1]) if is_per_token(name) else list(values)


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
