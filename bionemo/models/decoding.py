# SPDX-License-Identifier: Apache-2.0
"""Batched generation with an encoder-decoder: greedy, sampling and beam search, with a KV cache.

Shapes: N sequences, K beams of each, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bionemo.common.random_stream import RandomBits, draw, uniform
from bionemo.megatron.kv_cache import CachedDecoder, sequence_parallel_disabled
from bionemo.megatron.layer_spec import EncoderOutput
from bionemo.megatron.vocabulary import gather_vocabulary
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import TokenTable

# (log-probabilities [N, V], indices of the sequences [N], position) -> next tokens [N]
SelectToken = Callable[[Tensor, Tensor, int], Tensor]
_CHECK_INTERVAL = 8  # tokens between checks for finished sequences, each of which synchronizes with the device


@dataclass(frozen=True)
class GeneratedSequence:
    """A generated sequence."""

    tokens: list[int]  # ids without BOS and EOS
    score: float  # log-probability in nats, including EOS; beam search divides it by the length penalty
    complete: bool  # False if the sequence was cut off at the maximum length


def select_greedy(log_probs_NV: Tensor, sequences_N: Tensor, position: int) -> Tensor:
    """Select the most likely token."""
    return log_probs_NV.argmax(-1)


def make_sampler(
    keys: RandomBits, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> SelectToken:
    """Return a function that samples tokens; the draw depends on the key of the sequence and the position only.

    Args:
        keys: uint64 [N], random key of each sequence.
        temperature: divisor of the logits.
        top_k: sample from this many most likely tokens only (Fan et al. 2018).
        top_p: sample from the smallest set of most likely tokens with this total probability (Holtzman et al. 2020).
    """

    def select(log_probs_NV: Tensor, sequences_N: Tensor, position: int) -> Tensor:
        values, tokens = (log_probs_NV.float() / temperature).sort(dim=-1, descending=True, stable=True)
        probs = values.softmax(-1)
        if top_p is not None:
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
        if top_k is not None:
            probs = probs.clone()
            probs[:, top_k:] = 0.0
        cumulative = probs.cumsum(-1)
        uniform_N = torch.from_numpy(uniform(draw(keys, position))).to(sequences_N.device)[sequences_N]
        index = torch.searchsorted(cumulative, uniform_N[:, None] * cumulative[:, -1:], right=True)
        return tokens.gather(-1, index).squeeze(-1)

    return select


@torch.no_grad()
def generate(
    model: EncoderDecoder,
    encoder_output: EncoderOutput,
    select_token: SelectToken = select_greedy,
    max_length: int | None = None,
    min_batch_size: int = 1,
) -> list[GeneratedSequence]:
    """Generate one sequence for each sequence of the encoder output.

    Args:
        model: model in evaluation mode.
        encoder_output: output of `model.encode`, or other vectors in its place.
        select_token: selects the next tokens.
        max_length: maximum number of tokens, including EOS; by default the number of positions of the model.
        min_batch_size: keep at least this many sequences in the batch, including finished ones: matrix products of
            few rows are rounded differently.
    """
    vocabulary, device = model.vocabulary, encoder_output.hidden.device
    count, max_length = len(encoder_output.sequences.lengths), _limit_length(model, max_length)
    tokens = torch.full((count, max_length), vocabulary.pad_id, device=device)
    scores = torch.zeros(count, device=device)
    active = torch.arange(count, device=device)
    with sequence_parallel_disabled(model):
        state = CachedDecoder(model.decoder, encoder_output, max_length)
        last = torch.full((count,), vocabulary.bos_id, device=device)
        for position in range(max_length):
            log_probs_NV = _next_log_probs(model, state, last)
            selected = select_token(log_probs_NV, active, position)
            finished = last == vocabulary.eos_id
            last = torch.where(finished, last, selected)
            tokens[active, position] = torch.where(finished, vocabulary.pad_id, selected)
            scores[active] += log_probs_NV.gather(-1, selected[:, None]).squeeze(-1).masked_fill(finished, 0.0)
            if position % _CHECK_INTERVAL == _CHECK_INTERVAL - 1:
                finished = last == vocabulary.eos_id
                unfinished = int((~finished).sum())
                if not unfinished:
                    break
                kept = finished.argsort(stable=True)[: max(unfinished, min_batch_size)]
                if len(kept) < len(last):
                    state.select(kept)
                    active, last = active[kept], last[kept]
    return [_make_sequence(vocabulary, *pair) for pair in zip(tokens.tolist(), scores.tolist(), strict=True)]


@torch.no_grad()
def beam_search(
    model: EncoderDecoder, encoder_output: EncoderOutput, beams: int, max_length: int | None = None, alpha: float = 0.0
) -> list[list[GeneratedSequence]]:
    """Search for the `beams` most likely sequences for each sequence of the encoder output, best first.

    Beams are ranked by log-probability / ((5 + tokens) / 6)^alpha (Wu et al. 2016, equation 14), where EOS counts as
    a token. Finished beams stay in the ranking.
    """
    vocabulary, device = model.vocabulary, encoder_output.hidden.device
    count, max_length = len(encoder_output.sequences.lengths), _limit_length(model, max_length)
    rows = torch.arange(count, device=device)
    tokens = torch.full((count, beams, max_length), vocabulary.pad_id, device=device)
    scores_NK = torch.full((count, beams), -torch.inf, device=device)
    scores_NK[:, 0] = 0.0  # all beams start as copies of the first
    lengths_NK = torch.zeros((count, beams), device=device)
    last_NK = torch.full((count, beams), vocabulary.bos_id, device=device)
    with sequence_parallel_disabled(model):
        state = CachedDecoder(model.decoder, encoder_output, max_length)
        state.select(rows.repeat_interleave(beams))
        for position in range(max_length):
            log_probs_NKV = _next_log_probs(model, state, last_NK.flatten()).unflatten(0, (count, beams))
            finished_NK = last_NK == vocabulary.eos_id
            log_probs_NKV = log_probs_NKV.masked_fill(finished_NK[..., None], -torch.inf)
            log_probs_NKV[..., vocabulary.pad_id].masked_fill_(finished_NK, 0.0)  # a finished beam has one successor
            total_NKV = scores_NK[..., None] + log_probs_NKV
            lengths_NK = lengths_NK + ~finished_NK
            ranking_NKV = total_NKV / ((5 + lengths_NK[..., None]) / 6) ** alpha
            best = ranking_NKV.flatten(1).topk(beams).indices
            beam, token = best // log_probs_NKV.shape[-1], best % log_probs_NKV.shape[-1]
            source = rows[:, None], beam
            tokens, lengths_NK, finished_NK = tokens[source], lengths_NK[source], finished_NK[source]
            scores_NK = total_NKV.flatten(1).gather(1, best)
            tokens[:, :, position] = token
            last_NK = token.masked_fill(finished_NK, vocabulary.eos_id)
            state.reorder((rows[:, None] * beams + beam).flatten())
            if position % _CHECK_INTERVAL == _CHECK_INTERVAL - 1 and bool((last_NK == vocabulary.eos_id).all()):
                break
    scores_NK = scores_NK / ((5 + lengths_NK) / 6) ** alpha
    return [
        [_make_sequence(vocabulary, *pair) for pair in zip(beam_tokens, scores, strict=True)]
        for beam_tokens, scores in zip(tokens.tolist(), scores_NK.tolist(), strict=True)
    ]


def _limit_length(model: EncoderDecoder, max_length: int | None) -> int:
    positions = model.config.max_position_embeddings
    return positions if max_length is None else min(max_length, positions)


def _next_log_probs(model: EncoderDecoder, state: CachedDecoder, last_N: Tensor) -> Tensor:
    """Return log-probabilities of the tokens after `last_N`, [N, V], in fp32."""
    positions = torch.full_like(last_N, state.length)
    x_ND = model.word_embeddings(last_N) + model.position_embeddings(positions)
    logits_NV = gather_vocabulary(model.compute_logits(state(x_ND)))[:, : model.vocabulary.vocab_size]
    return logits_NV.float().log_softmax(-1)


def _make_sequence(vocabulary: TokenTable, tokens: list[int], score: float) -> GeneratedSequence:
    """Cut tokens at EOS."""
    end = tokens.index(vocabulary.eos_id) if vocabulary.eos_id in tokens else None
    return GeneratedSequence([token for token in tokens[:end] if token != vocabulary.pad_id], score, end is not None)
