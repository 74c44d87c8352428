# SPDX-License-Identifier: Apache-2.0
"""What an encoder-decoder writes, all sequences of a batch at a time: greedily, at random, or by beam search.

Shapes: N sequences, K beams of each, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bionemo.common.random_stream import Words, draw, uniform
from bionemo.megatron.kv_cache import IncrementalDecoder, undivided_sequences
from bionemo.megatron.layer_spec import Memory
from bionemo.megatron.vocabulary import whole_vocabulary
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import TokenTable

# From log-probabilities [N, V], the numbers of the sequences [N] and of the place, the next tokens [N].
Choose = Callable[[Tensor, Tensor, int], Tensor]
_LOOK = 8  # tokens between looks at which sequences have ended


@dataclass(frozen=True)
class Written:
    """A sequence.

    Attributes:
        tokens: without begin and end.
        score: its log-probability, the end included, in nats; of a beam divided by its length penalty.
        complete: False where it was cut off before its end.
    """

    tokens: list[int]
    score: float
    complete: bool


def greedy(log_probabilities_NV: Tensor, sequences_N: Tensor, place: int) -> Tensor:
    """The likeliest token."""
    return log_probabilities_NV.argmax(-1)


def sampled(keys: Words, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Choose:
    """Draw tokens at random, each as a function of its sequence's key and of its place.

    Args:
        keys: uint64 [N], one for each sequence.
        temperature: divides the logits: below 1 likely tokens become likelier.
        top_k: only so many of the likeliest tokens are drawn from (Fan et al. 2018).
        top_p: only the likeliest tokens that together have this probability are (Holtzman et al. 2020).
    """

    def choose(log_probabilities_NV: Tensor, sequences_N: Tensor, place: int) -> Tensor:
        values, tokens = (log_probabilities_NV.float() / temperature).sort(dim=-1, descending=True, stable=True)
        shares = values.softmax(-1)
        if top_p is not None:
            shares = shares.masked_fill(shares.cumsum(-1) - shares >= top_p, 0.0)
        if top_k is not None:
            shares = shares.clone()
            shares[:, top_k:] = 0.0
        reached = shares.cumsum(-1)
        drawn_N = torch.from_numpy(uniform(draw(keys, place))).to(sequences_N.device)[sequences_N]
        which = torch.searchsorted(reached, drawn_N[:, None] * reached[:, -1:], right=True)
        return tokens.gather(-1, which).squeeze(-1)

    return choose


@torch.no_grad()
def write(
    model: EncoderDecoder, memory: Memory, choose: Choose = greedy, longest: int | None = None, least: int = 1
) -> list[Written]:
    """Write one sequence for each that the memory holds.

    Args:
        model: in evaluation mode.
        memory: what `model.encode` gives, or vectors of another origin in its place.
        choose: the next tokens.
        longest: most tokens to write, the end included; by default what there are positions for.
        least: so many sequences stay side by side, if need be some that have ended: products of few rows end in
            other bits.
    """
    vocabulary, device = model.vocabulary, memory.hidden.device
    count, longest = len(memory.segments.lengths), _room(model, longest)
    tokens = torch.full((count, longest), vocabulary.pad_id, device=device)
    scores = torch.zeros(count, device=device)
    alive = torch.arange(count, device=device)
    with undivided_sequences(model):
        state = IncrementalDecoder(model.decoder, memory, longest)
        last = torch.full((count,), vocabulary.bos_id, device=device)
        for place in range(longest):
            chances_NV = _next(model, state, last)
            chosen = choose(chances_NV, alive, place)
            ended = last == vocabulary.eos_id  # these say nothing any more
            last = torch.where(ended, last, chosen)
            tokens[alive, place] = torch.where(ended, vocabulary.pad_id, chosen)
            scores[alive] += chances_NV.gather(-1, chosen[:, None]).squeeze(-1).masked_fill(ended, 0.0)
            if place % _LOOK == _LOOK - 1:  # to see which have ended is to wait for the device
                ended = last == vocabulary.eos_id
                going = int((~ended).sum())
                if not going:
                    break
                left = ended.argsort(stable=True)[: max(going, least)]
                if len(left) < len(last):
                    state.select(left)
                    alive, last = alive[left], last[left]
    return [_until_end(vocabulary, *pair) for pair in zip(tokens.tolist(), scores.tolist(), strict=True)]


@torch.no_grad()
def beam_search(
    model: EncoderDecoder, memory: Memory, beams: int, longest: int | None = None, alpha: float = 0.0
) -> list[list[Written]]:
    """Search for the likeliest sequences, `beams` of them for each that the memory holds, the best first.

    Sequences are compared by log-probability / ((5 + tokens) / 6)^alpha (Wu et al. 2016, equation 14), the end among
    the tokens; those that have ended stay in the comparison.
    """
    vocabulary, device = model.vocabulary, memory.hidden.device
    count, longest = len(memory.segments.lengths), _room(model, longest)
    rows = torch.arange(count, device=device)
    tokens = torch.full((count, beams, longest), vocabulary.pad_id, device=device)
    scores_NK = torch.full((count, beams), -torch.inf, device=device)
    scores_NK[:, 0] = 0.0  # there is one way to begin
    lengths_NK = torch.zeros((count, beams), device=device)
    last_NK = torch.full((count, beams), vocabulary.bos_id, device=device)
    with undivided_sequences(model):
        state = IncrementalDecoder(model.decoder, memory, longest)
        state.select(rows.repeat_interleave(beams))
        for place in range(longest):
            chances_NKV = _next(model, state, last_NK.flatten()).unflatten(0, (count, beams))
            ended_NK = last_NK == vocabulary.eos_id
            chances_NKV = chances_NKV.masked_fill(ended_NK[..., None], -torch.inf)
            chances_NKV[..., vocabulary.pad_id].masked_fill_(ended_NK, 0.0)  # one way to go on saying nothing
            reached_NKV = scores_NK[..., None] + chances_NKV
            lengths_NK = lengths_NK + ~ended_NK
            compared_NKV = reached_NKV / ((5 + lengths_NK[..., None]) / 6) ** alpha
            best = compared_NKV.flatten(1).topk(beams).indices
            beam, token = best // chances_NKV.shape[-1], best % chances_NKV.shape[-1]
            at = rows[:, None], beam
            tokens, lengths_NK, ended_NK = tokens[at], lengths_NK[at], ended_NK[at]
            scores_NK = reached_NKV.flatten(1).gather(1, best)
            tokens[:, :, place] = token
            last_NK = token.masked_fill(ended_NK, vocabulary.eos_id)
            state.follow((rows[:, None] * beams + beam).flatten())
            if place % _LOOK == _LOOK - 1 and bool((last_NK == vocabulary.eos_id).all()):
                break
    scores_NK = scores_NK / ((5 + lengths_NK) / 6) ** alpha
    return [
        [_until_end(vocabulary, *pair) for pair in zip(found, scores, strict=True)]
        for found, scores in zip(tokens.tolist(), scores_NK.tolist(), strict=True)
    ]


def _room(model: EncoderDecoder, longest: int | None) -> int:
    positions = model.config.max_position_embeddings
    return positions if longest is None else min(longest, positions)


def _next(model: EncoderDecoder, state: IncrementalDecoder, last_N: Tensor) -> Tensor:
    """Log-probabilities of what follows the last tokens, [N, V], in fp32."""
    place = torch.full_like(last_N, state.written)
    x_ND = model.word_embeddings(last_N) + model.position_embeddings(place)
    logits_NV = whole_vocabulary(model.logits(state(x_ND)))[:, : model.vocabulary.vocab_size]
    return logits_NV.float().log_softmax(-1)


def _until_end(vocabulary: TokenTable, tokens: list[int], score: float) -> Written:
    end = tokens.index(vocabulary.eos_id) if vocabulary.eos_id in tokens else None
    return Written([token for token in tokens[:end] if token != vocabulary.pad_id], score, end is not None)
