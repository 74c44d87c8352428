# SPDX-License-Identifier: Apache-2.0
"""What MegaMolBART writes, against the whole model run anew for every token, and what nothing of it depends on."""

import inspect
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bionemo
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import InferConfig, SamplingConfig
from bionemo.inference.batching import Limits
from bionemo.inference.generation import METHODS, way_to_sample, written
from bionemo.inference.model import TrainedModel
from bionemo.inference.text_outputs import as_bytes, from_bytes, tally
from bionemo.models.megamolbart import MegaMolBART
from tests.inference.molecules import KNOWN, ROOM, said
from tests.models.test_parity import ours

OTHERS = ["CCN", "c1ccncc1O", "CC(C)(C)C", "O", "ClCCCl", "CC(=O)Nc1ccccc1CCO"]
FAR = 3.0  # a radius at which something else is written


@pytest.fixture(scope="module")
def model(writer: Path) -> TrainedModel:
    return bionemo.load(writer, "cpu")


def conf(**changes: object) -> SamplingConfig:
    words = ["model.downstream_task.restore_from_path=/m", "model.data.dataset_path=/d"]
    return replace(load("predict", words, schema=InferConfig).model.downstream_task.sampling, **changes)


def step_by_step(network: MegaMolBART, text: str) -> str:
    """Write greedily, the encoder and the whole decoder run anew for every token."""
    tokens: list[int] = []
    while len(tokens) < ROOM:
        with torch.no_grad():
            token = int(network(said(network, [tokens], [text]))[-1, : network.vocabulary.vocab_size].argmax())
        if token == network.vocabulary.eos_id:
            break
        tokens.append(token)
    return "".join(network.vocabulary.tokens[token] for token in tokens)


def test_reconstruction_is_the_model_run_anew_for_every_token(model: TrainedModel) -> None:
    assert isinstance(model.network, MegaMolBART)
    assert model.reconstruct(KNOWN) == KNOWN
    found = model.reconstruct(OTHERS)
    assert found == [step_by_step(model.network, text) for text in OTHERS]
    assert len(set(found)) > 2
    assert model.reconstruct([]) == []


def test_more_beams_find_the_same_of_what_is_known(model: TrainedModel) -> None:
    assert model.reconstruct(KNOWN, beam_size=3) == KNOWN


@pytest.mark.parametrize("method", ["greedy-perturbate", "beam-search-perturbate", "topkp-perturbate"])
def test_without_noise_what_was_read_is_written(method: str, model: TrainedModel) -> None:
    found = model.sample(OTHERS, method, 2, scaled_radius=0, top_k=1, beam_size=3)
    assert found == [[text] * 2 for text in model.reconstruct(OTHERS, 3 if "beam" in method else 1)]


def test_methods_that_mean_the_same_write_the_same(model: TrainedModel) -> None:
    """One token to draw from, one beam, the best of all beams: from the same perturbations."""
    greedy = model.sample(OTHERS, num_samples=3, scaled_radius=FAR)
    assert len({text for texts in greedy for text in texts}) > 6
    assert model.sample(OTHERS, "topkp-perturbate", 3, scaled_radius=FAR, top_k=1, top_p=0) == greedy
    assert model.sample(OTHERS, "beam-search-perturbate", 3, scaled_radius=FAR, beam_size=1) == greedy
    first = [texts[:1] for texts in greedy]
    assert model.sample(OTHERS, "beam-search-single-sample", 1, scaled_radius=FAR) == first
    best = model.sample(OTHERS, "beam-search-perturbate", 3, scaled_radius=FAR, beam_size=2)
    every = model.sample(OTHERS, "beam-search-perturbate-sample", 3, scaled_radius=FAR, beam_size=2)
    assert [texts[::2] for texts in every] == best
    single = model.sample(OTHERS, "beam-search-single-sample", 2, scaled_radius=FAR)
    assert [texts[:2] for texts in every] == single


@pytest.mark.parametrize("method", METHODS)
def test_nothing_depends_on_what_is_written_together(method: str, model: TrainedModel) -> None:
    config = conf(sampling_method=method, num_samples=30, scaled_radius=FAR, temperature=2.0, top_p=0.0, beam_size=2)
    way = way_to_sample(config)
    ids = model.ids(OTHERS)
    whole = written(model, ids, way)
    assert {len(texts) for texts in whole} == {60 if method == "beam-search-perturbate-sample" else 30}
    done: list[int] = []
    for limits in (Limits(64, 1), Limits(100_000, 70), Limits(100_000)):
        assert written(model, ids, way, limits=limits, advance=done.append) == whole
    assert sum(done) == 3 * len(ids)
    alone = written(model, ids[4:5], way, np.array([4]))
    assert alone == whole[4:5]


def test_a_seed_draws_the_same_again(model: TrainedModel) -> None:
    def drawn(**options: float) -> list[list[str]]:
        return model.sample(OTHERS, "topkp-perturbate", 4, scaled_radius=FAR, **options)

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    same = model.sample(["CCN", "CCN"], num_samples=8, scaled_radius=FAR)
    assert same[0] != same[1]  # each has noise of its own


def test_tokens_are_drawn_beside_the_noise(model: TrainedModel) -> None:
    """From unchanged vectors: more at a higher temperature, and fewer where few tokens are drawn from."""

    def count(**options: float) -> int:
        return len(set(model.sample(["CCN"], "topkp-perturbate", 64, scaled_radius=0, **options)[0]))

    assert count(temperature=3.0, top_p=0) > count(top_p=0) >= count(top_k=1) == 1


def test_defaults_are_those_of_the_configuration() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(TrainedModel.sample).parameters.items()
        if name not in ("self", "texts")
    }
    assert defaults == asdict(conf())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampling_method": "greedy"}, "sampling_method is 'greedy', expected one of greedy-perturbate, topkp"),
        ({"num_samples": 0}, "num_samples is 0, expected at least 1"),
        ({"scaled_radius": -1.0}, "scaled_radius is -1.0, expected 0 or more"),
        ({"scaled_radius": float("nan")}, "scaled_radius is nan, expected 0 or more"),
        ({"top_p": 1.5}, "top_p is 1.5, expected a probability, or 0 (all tokens)"),
        ({"top_k": -1}, "top_k is -1, expected 0 (all tokens) or more"),
        ({"temperature": 0.0}, "temperature is 0.0, expected more than 0"),
        ({"beam_size": 0}, "beam_size is 0, expected at least 1"),
    ],
)
def test_mistakes(options: dict[str, object], told: str, model: TrainedModel) -> None:
    with pytest.raises(UserError) as caught:
        model.sample(KNOWN, **options)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("esm2nv", "ESM2nv has no decoder, and so no samples: take a model of molecules, such as MegaMolBART"),
        ("prott5nv", "ProtT5nv writes what is hidden of a sequence, not the sequence, and has no samples"),
    ],
)
def test_models_that_do_not_write_what_they_read(name: str, told: str) -> None:
    model = TrainedModel(ours(name).eval(), Path("x"))
    with pytest.raises(UserError, match=told):
        model.sample(["MKT"])
    with pytest.raises(UserError, match="reconstruction"):
        model.reconstruct(["MKT"])
    with pytest.raises(UserError, match="reconstruction"):
        model.see_that_it_has(["reconstruction"])


def test_too_few_beams_and_too_long_texts(model: TrainedModel) -> None:
    with pytest.raises(UserError, match="beam_size is 0, expected at least 1"):
        model.reconstruct(KNOWN, 0)
    with pytest.raises(UserError, match=f"sequence 0 has 25 tokens, the model reads {ROOM} at most"):
        model.reconstruct(["C" * 25])


def test_texts_as_bytes() -> None:
    texts = [["CCO", ""], ["", "[C@@H]"], ["é", "x"]]
    values = as_bytes(texts)
    assert (values.dtype, values.shape) == (np.uint8, (3, 2, 6))
    assert from_bytes(values).tolist() == texts
    assert from_bytes(values[:, 0]).tolist() == ["CCO", "", "é"]
    assert from_bytes(as_bytes([["", ""]])).tolist() == [["", ""]]
    assert as_bytes([]).shape == (0, 1, 1)
    floats = np.zeros((2, 3), np.float32)
    assert from_bytes(floats) is floats


def test_what_is_told_of_molecules() -> None:
    """By hand: ethanol in two forms, benzene, an open ring, nothing."""
    pairs = [("CCO", ["OCC", "CCO"]), ("CCN", ["c1ccccc1", "C1CC"]), ("C", [""])]
    assert tally("samples", pairs) == "samples: 5 molecules, 60.0 % valid, 66.7 % of these unique"
    told = tally("reconstruction", [("CCO", ["OCC"]), ("CCN", ["CCC"])])
    assert told.endswith(": 2 molecules, 100.0 % valid, 100.0 % of these unique, 50.0 % the molecule that was read")
    assert tally("samples", [("C", ["C("])]) == "samples: 1 molecules, 0.0 % valid"
