# SPDX-License-Identifier: Apache-2.0
"""Decoding token by token against the whole model run anew for every token, and against all that could be written."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from bionemo.common.random_stream import Words, purpose_key, sample_keys
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Parts, Stream, assemble
from bionemo.megatron.layer_spec import Memory
from bionemo.models.decoding import Written, beam_search, greedy, sampled, write
from bionemo.models.encoder_decoder import EncoderDecoder
from tests.models.test_parity import LENGTHS, ours, stream

LONGEST = 12


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    found = ours("prott5nv").eval()
    assert isinstance(found, EncoderDecoder)
    with torch.no_grad():  # sharper, so that what comes first is not decided by rounding; and the end comes sometimes
        found.lm_head.bias.add_(2 * torch.randn(found.lm_head.bias.shape, generator=torch.Generator().manual_seed(5)))
        found.lm_head.bias[found.vocabulary.eos_id] += 10.0
    return found


@pytest.fixture(scope="module")
def memory(model: EncoderDecoder) -> Memory:
    source = assemble(Parts(stream(model, LENGTHS, 3, seed=4), *_nothing()))
    with torch.no_grad():
        return model.encode(source)


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(0, dtype=torch.int64).numpy(), torch.zeros(0, dtype=torch.int64).numpy()


def chances(model: EncoderDecoder, memory: Memory, which: int, begun: list[int]) -> Tensor:
    """Log-probabilities [V] of what follows some tokens, by the model as it is trained."""
    tokens = [model.vocabulary.bos_id, *begun]
    lengths = [0] * len(LENGTHS)
    lengths[which] = len(tokens)
    counts = torch.tensor(lengths).numpy()
    inputs = Stream(torch.tensor(tokens).numpy(), counts, counts.astype("uint64"), 96)
    batch: PackedBatch = assemble(Parts(inputs, torch.tensor([len(begun)]).numpy(), torch.tensor([0]).numpy()))
    with torch.no_grad():
        hidden_T1D = model.decoder(*model.read(batch), memory)
        return model.logits(hidden_T1D[-1])[0].log_softmax(-1)


def test_greedy_decoding_is_the_model_run_anew_for_every_token(model: EncoderDecoder, memory: Memory) -> None:
    found = write(model, memory, greedy, LONGEST)
    ends = 0
    for which, written in enumerate(found):
        begun: list[int] = []
        score = 0.0
        for _ in range(LONGEST):
            next_V = chances(model, memory, which, begun)
            token = int(next_V.argmax())
            score += float(next_V[token])
            if token == model.vocabulary.eos_id:
                break
            begun.append(token)
        assert written.tokens == begun
        assert written.complete == (token == model.vocabulary.eos_id)
        assert written.score == pytest.approx(score, rel=1e-4)
        ends += written.complete
    assert ends > 0  # some end, at different places
    assert len({len(written.tokens) for written in found}) > 1


def test_one_beam_is_greedy_and_more_find_no_worse(model: EncoderDecoder, memory: Memory) -> None:
    alone, one, four = (
        write(model, memory, greedy, LONGEST), beam_search(model, memory, 1, LONGEST),
        beam_search(model, memory, 4, LONGEST),
    )  # fmt: skip
    assert [beams[0].tokens for beams in one] == [written.tokens for written in alone]
    for written, beams in zip(alone, four, strict=True):
        scores = [beam.score for beam in beams]
        assert scores == sorted(scores, reverse=True)
        assert len({(*beam.tokens, beam.complete) for beam in beams}) == 4
        assert scores[0] >= written.score - 1e-4


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beams_that_lose_nothing_find_the_best_of_all(model: EncoderDecoder, memory: Memory, alpha: float) -> None:
    """With as many beams as there are beginnings nothing is lost: the best of everything of up to three tokens."""
    words = model.vocabulary.vocab_size
    (found, *_), which = beam_search(model, memory, words, 2, alpha)[3], 3
    best = (-torch.inf, [])
    first = chances(model, memory, which, [])
    end = model.vocabulary.eos_id
    for one in range(words):
        if one == end:
            best = max(best, (float(first[one]), []))
            continue
        second = chances(model, memory, which, [one])
        for two in range(words):
            score = float(first[one] + second[two]) / ((5 + 2) / 6) ** alpha
            best = max(best, (score, [one] if two == end else [one, two]))
    assert found.tokens == best[1]
    assert found.score == pytest.approx(best[0], rel=1e-4)


def keys(seed: int, count: int) -> Words:
    return sample_keys(purpose_key(seed, "test"), np.zeros(count, np.int64), np.arange(count))


def test_samples_come_as_often_as_the_model_says(model: EncoderDecoder, memory: Memory) -> None:
    expected = chances(model, memory, 0, []).exp()
    counts = torch.zeros(len(expected))
    for seed in range(400):
        for number, written in enumerate(write(model, memory, sampled(keys(seed, len(LENGTHS))), 1)):
            if number == 0:
                counts[written.tokens[0] if written.tokens else model.vocabulary.eos_id] += 1
    assert float((counts / 400 - expected).abs().max()) < 0.12
    assert int((counts > 0).sum()) > 1


def test_few_tokens_to_draw_from() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(500, 1).log()
    drawn = {
        name: set(sampled(keys(0, 500), **options)(shares, torch.arange(500), 0).tolist())
        for name, options in {
            "all": {}, "one": {"top_k": 1}, "two": {"top_k": 2}, "most": {"top_p": 0.6}, "least": {"top_p": 0.1},
            "cold": {"temperature": 0.01}, "both": {"top_k": 3, "top_p": 0.99},
        }.items()
    }  # fmt: skip
    assert drawn == {
        "all": {0, 1, 2, 3}, "one": {0}, "two": {0, 1}, "most": {0, 1}, "least": {0}, "cold": {0}, "both": {0, 1, 2},
    }  # fmt: skip


def test_a_sequence_draws_for_itself() -> None:
    """What is drawn is of a sequence and a place, whoever else is still there; other places draw others."""
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(500, 1).log()
    choose = sampled(keys(0, 500))
    whole = choose(shares, torch.arange(500), 3)
    some = torch.tensor([7, 3, 499])
    assert torch.equal(choose(shares[:3], some, 3), whole[some])
    assert 0.2 < float((choose(shares, torch.arange(500), 4) == whole).float().mean()) < 0.55  # by chance 0.365


def test_those_that_have_ended_may_stay(model: EncoderDecoder, memory: Memory) -> None:
    assert [each.tokens for each in write(model, memory, least=6)] == [each.tokens for each in write(model, memory)]


def test_what_is_written_has_neither_begin_nor_end(model: EncoderDecoder, memory: Memory) -> None:
    for written in [*write(model, memory, longest=40), *(w for beams in beam_search(model, memory, 3) for w in beams)]:
        assert isinstance(written, Written)
        special = {model.vocabulary.eos_id, model.vocabulary.pad_id}
        assert not special & set(written.tokens)
        assert len(written.tokens) <= model.config.max_position_embeddings


def test_every_length_and_number_of_memories(model: EncoderDecoder) -> None:
    """What is written for a sequence does not depend on those beside it."""
    together = {}
    for lengths in product((5, 60), repeat=3):
        source = assemble(Parts(stream(model, lengths, 3, seed=4), *_nothing()))
        with torch.no_grad():
            found = write(model, model.encode(source), longest=LONGEST)
        together[lengths] = found[0].tokens
    assert len({tuple(tokens) for (first, *_), tokens in together.items() if first == 5}) == 1
