# SPDX-License-Identifier: Apache-2.0
"""What a trained network gives of tokens: vectors, logits, and how unlikely it finds them.

Shapes: N sequences, n tokens of one without begin and end, T tokens of a pack with them, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.data.batch import PackedBatch
from bionemo.inference.batching import ROWS, USUAL, Ids, Limits, packed, packs, with_ends
from bionemo.megatron.precision import precision_for_host
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import SmilesTokenizer

Floats = NDArray[np.float32]
Columns = dict[str, Floats]
PER_SEQUENCE = ("embeddings", "begin", "pseudo_perplexity")
PER_TOKEN = ("hiddens", "logits")
WRITTEN = ("reconstruction", "samples")  # generation.py


class Outputs:
    """A trained network, whole on one device, and what it computes.

    Sequences are computed end to end, without padding; what comes out for one does not depend on what is beside it.

    Attributes:
        network: the model, in evaluation mode.
        path: where it was read from.
        contact_head: of a regression on its attention, if one came with it.
    """

    def __init__(
        self, network: LanguageModel, path: Path, precision: str = "32", contact_head: Mapping[str, Any] | None = None
    ) -> None:
        self.network, self.path, self.contact_head = network, path, contact_head
        self._precision = precision_for_host(precision)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.network.parameters()).device

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.network.config.hidden_size

    def compute(
        self,
        sequences: Sequence[Ids],
        wanted: Sequence[str],
        limits: Limits = USUAL,
        advance: Callable[[int], object] = lambda count: None,
    ) -> Iterator[Columns]:
        """Compute outputs of tokenised sequences, some at a time, in order.

        Args:
            sequences: tokens without begin and end.
            wanted: of PER_SEQUENCE and PER_TOKEN.
            limits: of what is computed together.
            advance: told how many sequences are done.

        Yields:
            Under each name an array: [k, ...] for k sequences, or [their tokens, ...], one after the other.

        Raises:
            UserError: when the model has no such output.
        """
        self.see_that_it_has(wanted)
        lengths = [len(each) + 2 * self.network.ends for each in sequences]
        for part in packs(lengths, limits):
            yield self._compute(sequences[part], wanted, limits)
            advance(part.stop - part.start)

    def see_that_it_has(self, wanted: Sequence[str]) -> None:
        """Refuse outputs that a model of this kind does not have.

        Raises:
            UserError: naming one.
        """
        kind = type(self.network).__name__
        for name in wanted:
            if name not in (known := PER_SEQUENCE + PER_TOKEN + WRITTEN):
                raise UserError(f"there is no output {name!r}: choose of {', '.join(known)}")
            if name in WRITTEN:
                see_that_it_writes(self.network, name)
            if name == "begin" and not self.network.ends:
                raise UserError(f"{kind} reads no token of its own before a sequence: take the mean (embeddings)")
            if name in ("logits", "pseudo_perplexity") and isinstance(self.network, EncoderDecoder):
                raise UserError(f"{kind} speaks of what it writes, not of what it reads: it has no {name}")

    @torch.no_grad()
    def _compute(self, sequences: Sequence[Ids], wanted: Sequence[str], limits: Limits) -> Columns:
        network = self.network
        found: dict[str, Tensor] = {}
        if set(wanted) - {"pseudo_perplexity"}:
            batch = packed(network, [with_ends(network, each) for each in sequences])
            with self.autocast():
                hidden_TD = network.represent(batch).float()
            if "begin" in wanted:
                found["begin"] = hidden_TD[batch.boundaries[: len(sequences)].long()]
            inside = hidden_TD[self._inside(batch)] if network.ends else hidden_TD[: batch.num_tokens]
            if "embeddings" in wanted:
                counts = torch.tensor([len(each) for each in sequences], device=self.device)
                found["embeddings"] = torch.segment_reduce(inside, "mean", lengths=counts)
            if "hiddens" in wanted:
                found["hiddens"] = inside
            if "logits" in wanted:
                found["logits"] = self._logits(inside)
        if "pseudo_perplexity" in wanted:
            found["pseudo_perplexity"] = self._pseudo_perplexity(sequences, limits)
        return {name: found[name].cpu().numpy() for name in wanted}

    def _inside(self, batch: PackedBatch) -> Tensor:
        """Numbers of the tokens that are neither begin nor end."""
        ends = np.cumsum(batch.lengths)
        keep = np.ones(int(ends[-1]), bool)
        keep[ends - 1] = keep[ends - np.array(batch.lengths)] = False
        return torch.from_numpy(np.flatnonzero(keep)).to(self.device)

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        """[M, V] fp32."""
        few = F.pad(hidden_MD, (0, 0, 0, max(ROWS - len(hidden_MD), 0)))
        with self.autocast():
            return self.network.logits(few)[: len(hidden_MD), : self.network.vocabulary.vocab_size].float()

    def _pseudo_perplexity(self, sequences: Sequence[Ids], limits: Limits) -> Tensor:
        masked = isinstance(self.network, MaskedLanguageModel)
        score = self._masked_scores if masked else self._causal_scores
        return torch.stack([torch.exp(-score(each, limits).double().mean()).float() for each in sequences])

    def _causal_scores(self, ids: Ids, limits: Limits) -> Tensor:
        batch = packed(self.network, [ids])
        with self.autocast():
            hidden_TD = self.network.represent(batch).float()
        said = self._logits(hidden_TD[: len(ids) - 1]).log_softmax(-1)
        return said.gather(1, torch.from_numpy(ids[1:].astype(np.int64)).to(self.device)[:, None]).squeeze(1)

    def _masked_scores(self, ids: Ids, limits: Limits) -> Tensor:
        places = np.arange(len(ids))
        said = torch.cat(list(self.masked_log_probabilities(ids, places, limits)))
        return said.gather(1, torch.from_numpy(ids.astype(np.int64)).to(self.device)[:, None]).squeeze(1)

    @torch.no_grad()
    def masked_log_probabilities(
        self, ids: Ids, places: NDArray[np.integer[Any]], limits: Limits = USUAL
    ) -> Iterator[Tensor]:
        """What a masked language model says of single places, each masked by itself.

        Args:
            ids: [n] tokens of a sequence, without begin and end.
            places: [k] numbers of tokens, from 0.
            limits: of what is computed together.

        Yields:
            Log-probabilities [some, V] fp32, in the order of the places.
        """
        assert isinstance(self.network, MaskedLanguageModel)
        whole = with_ends(self.network, ids)
        each = max(1, min(limits.tokens // len(whole), limits.sequences or len(places)))
        for begin in range(0, len(places), each):
            asked = places[begin : begin + each] + self.network.ends
            copies = np.tile(whole, (len(asked), 1))
            copies[np.arange(len(asked)), asked] = self.network.vocabulary.mask_id
            with self.autocast():
                hidden_TD = self.network.represent(packed(self.network, list(copies))).float()
            index = torch.from_numpy(asked + np.arange(len(asked)) * len(whole)).to(self.device)
            yield self._logits(hidden_TD[index]).log_softmax(-1)

    def autocast(self) -> Any:
        """Within it, products are of the model's precision."""
        return self._precision.autocast(self.device)


def see_that_it_writes(network: LanguageModel, wanted: str) -> None:
    """Refuse models that do not write what they have read.

    Raises:
        UserError: saying what `wanted` needs.
    """
    kind = type(network).__name__
    if not isinstance(network, EncoderDecoder):
        raise UserError(f"{kind} has no decoder, and so no {wanted}: take a model of molecules, such as MegaMolBART")
    if not isinstance(network.vocabulary, SmilesTokenizer):
        raise UserError(
            f"{kind} writes what is hidden of a sequence, not the sequence, and has no {wanted}: take a model of "
            "molecules, such as MegaMolBART"
        )
