# SPDX-License-Identifier: Apache-2.0
"""Cached decoding against the model without a cache, and against exhaustive search."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from bionemo.common.random_stream import RandomBits, purpose_key, sample_keys
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.megatron.layer_spec import EncoderOutput
from bionemo.models.decoding import GeneratedSequence, beam_search, generate, make_sampler, select_greedy
from bionemo.models.encoder_decoder import EncoderDecoder
from tests.support.models import LENGTHS, build_model, random_tokens

MAX_LENGTH = 12


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    found = build_model("prott5nv").eval()
    assert isinstance(found, EncoderDecoder)
    with torch.no_grad():  # sharper, so that rounding does not decide the order, and EOS is generated sometimes
        found.lm_head.bias.add_(2 * torch.randn(found.lm_head.bias.shape, generator=torch.Generator().manual_seed(5)))
        found.lm_head.bias[found.vocabulary.eos_id] += 10.0
    return found


@pytest.fixture(scope="module")
def memory(model: EncoderDecoder) -> EncoderOutput:
    source = TokenizedBatch(random_tokens(model, LENGTHS, 3, seed=4)).unpack()
    with torch.no_grad():
        return model.encode(source)


def next_log_probs(model: EncoderDecoder, memory: EncoderOutput, which: int, begun: list[int]) -> Tensor:
    """Return log-probabilities [V] of the token after a prefix, from the forward pass used in training."""
    tokens = [model.vocabulary.bos_id, *begun]
    lengths = [0] * len(LENGTHS)
    lengths[which] = len(tokens)
    counts = torch.tensor(lengths).numpy()
    inputs = TokenSequences(torch.tensor(tokens).numpy(), counts, 96, counts.astype("uint64"))
    batch: PackedBatch = TokenizedBatch(inputs, torch.tensor([len(begun)]).numpy(), torch.tensor([0]).numpy()).unpack()
    with torch.no_grad():
        hidden_T1D = model.decoder(*model.prepare_input(batch), memory)
        return model.compute_logits(hidden_T1D[-1])[0].log_softmax(-1)


def test_greedy_decoding_agrees_with_the_model_without_a_cache(model: EncoderDecoder, memory: EncoderOutput) -> None:
    found = generate(model, memory, select_greedy, MAX_LENGTH)
    ends = 0
    for which, written in enumerate(found):
        begun: list[int] = []
        score = 0.0
        for _ in range(MAX_LENGTH):
            next_V = next_log_probs(model, memory, which, begun)
            token = int(next_V.argmax())
            score += float(next_V[token])
            if token == model.vocabulary.eos_id:
                break
            begun.append(token)
        assert written.tokens == begun
        assert written.complete == (token == model.vocabulary.eos_id)
        assert written.score == pytest.approx(score, rel=1e-4)
        ends += written.complete
    assert ends > 0  # some sequences end, at different positions
    assert len({len(written.tokens) for written in found}) > 1


def test_beam_search_is_at_least_as_good_as_greedy_decoding(model: EncoderDecoder, memory: EncoderOutput) -> None:
    alone, one, four = (
        generate(model, memory, select_greedy, MAX_LENGTH), beam_search(model, memory, 1, MAX_LENGTH),
        beam_search(model, memory, 4, MAX_LENGTH),
    )  # fmt: skip
    assert [beams[0].tokens for beams in one] == [written.tokens for written in alone]
    for written, beams in zip(alone, four, strict=True):
        scores = [beam.score for beam in beams]
        assert scores == sorted(scores, reverse=True)
        assert len({(*beam.tokens, beam.complete) for beam in beams}) == 4
        assert scores[0] >= written.score - 1e-4


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beam_search_with_all_beams_is_exhaustive(model: EncoderDecoder, memory: EncoderOutput, alpha: float) -> None:
    """With one beam per token no prefix is lost, so the best sequence of up to two tokens is found."""
    vocab_size = model.vocabulary.vocab_size
    (found, *_), which = beam_search(model, memory, vocab_size, 2, alpha)[3], 3
    best = (-torch.inf, [])
    first = next_log_probs(model, memory, which, [])
    end = model.vocabulary.eos_id
    for one in range(vocab_size):
        if one == end:
            best = max(best, (float(first[one]), []))
            continue
        second = next_log_probs(model, memory, which, [one])
        for two in range(vocab_size):
            score = float(first[one] + second[two]) / ((5 + 2) / 6) ** alpha
            best = max(best, (score, [one] if two == end else [one, two]))
    assert found.tokens == best[1]
    assert found.score == pytest.approx(best[0], rel=1e-4)


def keys(seed: int, count: int) -> RandomBits:
    return sample_keys(purpose_key(seed, "test"), np.zeros(count, np.int64), np.arange(count))


def test_samples_follow_the_distribution_of_the_model(model: EncoderDecoder, memory: EncoderOutput) -> None:
    expected = next_log_probs(model, memory, 0, []).exp()
    counts = torch.zeros(len(expected))
    for seed in range(400):
        for number, written in enumerate(generate(model, memory, make_sampler(keys(seed, len(LENGTHS))), 1)):
            if number == 0:
                counts[written.tokens[0] if written.tokens else model.vocabulary.eos_id] += 1
    assert float((counts / 400 - expected).abs().max()) < 0.12
    assert int((counts > 0).sum()) > 1


def test_top_k_top_p_and_temperature() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(500, 1).log()
    drawn = {
        name: set(make_sampler(keys(0, 500), **options)(shares, torch.arange(500), 0).tolist())
        for name, options in {
            "all": {}, "one": {"top_k": 1}, "two": {"top_k": 2}, "most": {"top_p": 0.6}, "least": {"top_p": 0.1},
            "cold": {"temperature": 0.01}, "both": {"top_k": 3, "top_p": 0.99},
        }.items()
    }  # fmt: skip
    assert drawn == {
        "all": {0, 1, 2, 3}, "one": {0}, "two": {0, 1}, "most": {0, 1}, "least": {0}, "cold": {0}, "both": {0, 1, 2},
    }  # fmt: skip


def test_draws_depend_on_sequence_and_position_only() -> None:
    """The draw of a sequence does not depend on which others are active; other positions have other draws."""
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(500, 1).log()
    choose = make_sampler(keys(0, 500))
    whole = choose(shares, torch.arange(500), 3)
    some = torch.tensor([7, 3, 499])
    assert torch.equal(choose(shares[:3], some, 3), whole[some])
    assert 0.2 < float((choose(shares, torch.arange(500), 4) == whole).float().mean()) < 0.55  # 0.365 by chance


def test_min_batch_size_does_not_change_tokens(model: EncoderDecoder, memory: EncoderOutput) -> None:
    assert [each.tokens for each in generate(model, memory, min_batch_size=6)] == [
        each.tokens for each in generate(model, memory)
    ]


def test_generated_tokens_exclude_special_tokens(model: EncoderDecoder, memory: EncoderOutput) -> None:
    for written in [
        *generate(model, memory, max_length=40),
        *(w for beams in beam_search(model, memory, 3) for w in beams),
    ]:
        assert isinstance(written, GeneratedSequence)
        special = {model.vocabulary.eos_id, model.vocabulary.pad_id}
        assert not special & set(written.tokens)
        assert len(written.tokens) <= model.config.max_position_embeddings


def test_generation_does_not_depend_on_other_sequences(model: EncoderDecoder) -> None:
    """Vary the lengths of the other sequences."""
    together = {}
    for lengths in product((5, 60), repeat=3):
        source = TokenizedBatch(random_tokens(model, lengths, 3, seed=4)).unpack()
        with torch.no_grad():
            found = generate(model, model.encode(source), max_length=MAX_LENGTH)
        together[lengths] = found[0].tokens
    assert len({tuple(tokens) for (first, *_), tokens in together.items() if first == 5}) == 1
