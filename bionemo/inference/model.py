# SPDX-License-Identifier: Apache-2.0
"""A trained model and what it makes of sequences.

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

from bionemo.data.batch import PackedBatch
from bionemo.errors import UserError
from bionemo.inference.tokens import ROWS, USUAL, Ids, Limits, packed, packs, room, token_ids, with_ends
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.models.language_model import LanguageModel
from bionemo.training.precision import precision_for_host

Floats = NDArray[np.float32]
Columns = dict[str, Floats]
PER_SEQUENCE = ("embeddings", "begin", "pseudo_perplexity")
PER_TOKEN = ("hiddens", "logits")


class TrainedModel:
    """A trained model, whole on one device.

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

    def embed(self, texts: Sequence[str], pooling: str = "mean") -> Floats:
        """One vector for each sequence, [N, D] fp32: the mean over its tokens, or that of its `begin` token.

        Raises:
            UserError: for a sequence that is empty, too long, or none; for `begin` where a model reads no such token.
        """
        name = {"mean": "embeddings", "begin": "begin"}.get(pooling)
        if name is None:
            raise UserError(f"pooling={pooling!r} is neither mean nor begin")
        return self._all(texts, name)

    def hiddens(self, texts: Sequence[str]) -> list[Floats]:
        """A vector for each token of each sequence, begin and end left out: N of [n, D] fp32.

        Raises:
            UserError: as `embed`.
        """
        return self._each(texts, "hiddens")

    def logits(self, texts: Sequence[str]) -> list[Floats]:
        """What the head says of each token: N of [n, V] fp32; of a causal model what comes after the token.

        Raises:
            UserError: as `embed`; for an encoder-decoder, whose head speaks of what it writes.
        """
        return self._each(texts, "logits")

    def pseudo_perplexity(self, texts: Sequence[str]) -> Floats:
        """How unlikely a sequence is, [N] fp32: exp(-1/n sum_i log p(x_i | the others)), n passes for each sequence.

        Salazar et al. 2020, "Masked Language Model Scoring", equation 3; of a causal model p(x_i | those before),
        the first token left out.

        Raises:
            UserError: as `logits`.
        """
        return self._all(texts, "pseudo_perplexity")

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Tokens of sequences, without begin and end.

        Raises:
            UserError: for one that is empty, too long, or none.
        """
        found = [token_ids(self.network.vocabulary, text, f"sequence {n}") for n, text in enumerate(texts)]
        most = room(self.network)
        for number, each in enumerate(found):
            if len(each) > most:
                raise UserError(
                    f"sequence {number} has {len(each):,} tokens, the model reads {most:,} at most: cut it, or let "
                    "`python -m bionemo.predict` do so (model.data.long_sequences)"
                )
        return found

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
            if name not in PER_SEQUENCE + PER_TOKEN:
                raise UserError(f"there is no output {name!r}: choose of {', '.join(PER_SEQUENCE + PER_TOKEN)}")
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
            with self._autocast():
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
        with self._autocast():
            return self.network.logits(few)[: len(hidden_MD), : self.network.vocabulary.vocab_size].float()

    def _pseudo_perplexity(self, sequences: Sequence[Ids], limits: Limits) -> Tensor:
        masked = isinstance(self.network, MaskedLanguageModel)
        score = self._masked_scores if masked else self._causal_scores
        return torch.stack([torch.exp(-score(each, limits).double().mean()).float() for each in sequences])

    def _causal_scores(self, ids: Ids, limits: Limits) -> Tensor:
        batch = packed(self.network, [ids])
        with self._autocast():
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
            with self._autocast():
                hidden_TD = self.network.represent(packed(self.network, list(copies))).float()
            index = torch.from_numpy(asked + np.arange(len(asked)) * len(whole)).to(self.device)
            yield self._logits(hidden_TD[index]).log_softmax(-1)

    def _autocast(self) -> Any:
        return self._precision.autocast(self.device)

    def _all(self, texts: Sequence[str], name: str) -> Floats:
        found = [columns[name] for columns in self.compute(self.ids(texts), [name])]
        return np.concatenate(found) if found else np.zeros((0, self.hidden_size), np.float32)

    def _each(self, texts: Sequence[str], name: str) -> list[Floats]:
        ids = self.ids(texts)
        parts = [columns[name] for columns in self.compute(ids, [name])]
        lengths = [len(each) for each in ids]
        return np.split(np.concatenate(parts), np.cumsum(lengths)[:-1]) if parts else []
