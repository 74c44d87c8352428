# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART's generation equals decoding without a cache, and does not depend on the batch."""

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
from bionemo.inference.batching import BatchLimits
from bionemo.inference.generation import METHODS, generate, sampling
from bionemo.inference.model import TrainedModel
from bionemo.inference.text_outputs import decode_texts, encode_texts, summarize_molecules
from bionemo.models.megamolbart import MegaMolBART
from tests.inference.molecules import KNOWN, ROOM, make_batch
from tests.support.models import build_model

OTHERS = ["CCN", "c1ccncc1O", "CC(C)(C)C", "O", "ClCCCl", "CC(=O)Nc1ccccc1CCO"]
FAR = 3.0  # a radius that changes the generated molecules


@pytest.fixture(scope="module")
def model(writer: Path) -> TrainedModel:
    return bionemo.load(writer, "cpu")


def conf(**changes: object) -> SamplingConfig:
    overrides = ["model.downstream_task.restore_from_path=/m", "model.data.dataset_path=/d"]
    return replace(load("predict", overrides, schema=InferConfig).model.downstream_task.sampling, **changes)


def step_by_step(network: MegaMolBART, text: str) -> str:
    """Decode greedily, running encoder and decoder from scratch for every token."""
    tokens: list[int] = []
    while len(tokens) < ROOM:
        with torch.no_grad():
            token = int(network(make_batch(network, [tokens], [text]))[-1, : network.vocabulary.vocab_size].argmax())
        if token == network.vocabulary.eos_id:
            break
        tokens.append(token)
    return "".join(network.vocabulary.tokens[token] for token in tokens)


def test_reconstruction_equals_decoding_without_a_cache(model: TrainedModel) -> None:
    assert isinstance(model.network, MegaMolBART)
    assert model.reconstruct(KNOWN) == KNOWN
    found = model.reconstruct(OTHERS)
    assert found == [step_by_step(model.network, text) for text in OTHERS]
    assert len(set(found)) > 2
    assert model.reconstruct([]) == []


def test_beam_search_reconstructs_training_molecules(model: TrainedModel) -> None:
    assert model.reconstruct(KNOWN, beam_size=3) == KNOWN


@pytest.mark.parametrize("method", ["greedy-perturbate", "beam-search-perturbate", "topkp-perturbate"])
def test_generation_without_noise_reconstructs_the_input(method: str, model: TrainedModel) -> None:
    found = model.sample(OTHERS, method, 2, scaled_radius=0, top_k=1, beam_size=3)
    assert found == [[text] * 2 for text in model.reconstruct(OTHERS, 3 if "beam" in method else 1)]


def test_equivalent_methods_generate_equal_molecules(model: TrainedModel) -> None:
    """Top-1 sampling, one beam, and the best of all beams agree for equal perturbations."""
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
def test_generation_does_not_depend_on_the_batch(method: str, model: TrainedModel) -> None:
    config = conf(sampling_method=method, num_samples=30, scaled_radius=FAR, temperature=2.0, top_p=0.0, beam_size=2)
    way = sampling(config)
    ids = model.ids(OTHERS)
    whole = generate(model, ids, way)
    assert {len(texts) for texts in whole} == {60 if method == "beam-search-perturbate-sample" else 30}
    done: list[int] = []
    for limits in (BatchLimits(64, 1), BatchLimits(100_000, 70), BatchLimits(100_000)):
        assert generate(model, ids, way, limits=limits, advance=done.append) == whole
    assert sum(done) == 3 * len(ids)
    alone = generate(model, ids[4:5], way, np.array([4]))
    assert alone == whole[4:5]


def test_generation_is_reproducible_with_a_seed(model: TrainedModel) -> None:
    def drawn(**options: float) -> list[list[str]]:
        return model.sample(OTHERS, "topkp-perturbate", 4, scaled_radius=FAR, **options)

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    same = model.sample(["CCN", "CCN"], num_samples=8, scaled_radius=FAR)
    assert same[0] != same[1]  # each sample has its own noise


def test_sampling_without_noise(model: TrainedModel) -> None:
    """From unperturbed encoder outputs: higher temperature gives more molecules, smaller top-k gives fewer."""

    def count(**options: float) -> int:
        return len(set(model.sample(["CCN"], "topkp-perturbate", 64, scaled_radius=0, **options)[0]))

    assert count(temperature=3.0, top_p=0) > count(top_p=0) >= count(top_k=1) == 1


def test_defaults_come_from_the_configuration() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(TrainedModel.sample).parameters.items()
        if name not in ("self", "texts")
    }
    assert defaults == asdict(conf())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_method": "greedy"}, "sampling_method is 'greedy', expected one of greedy-perturbate, topkp"),
        ({"num_samples": 0}, "num_samples is 0, expected at least 1"),
        ({"scaled_radius": -1.0}, "scaled_radius is -1.0, expected at least 0"),
        ({"scaled_radius": float("nan")}, "scaled_radius is nan, expected a finite number"),
        ({"top_p": 1.5}, "top_p is 1.5, expected from 0 to 1"),
        ({"top_k": -1}, "top_k is -1, expected at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0, expected above 0"),
        ({"beam_size": 0}, "beam_size is 0, expected at least 1"),
    ],
)
def test_mistakes(options: dict[str, object], message: str, model: TrainedModel) -> None:
    with pytest.raises(UserError) as caught:
        model.sample(KNOWN, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("esm2nv", "ESM2nv has no decoder, which samples needs: use a model of molecules, such as MegaMolBART"),
        ("prott5nv", "ProtT5nv decodes masked spans, not whole sequences, which samples needs"),
    ],
)
def test_models_that_cannot_reconstruct_their_input(name: str, message: str) -> None:
    model = TrainedModel(build_model(name).eval(), Path("x"))
    with pytest.raises(UserError, match=message):
        model.sample(["MKT"])
    with pytest.raises(UserError, match="reconstruction"):
        model.reconstruct(["MKT"])
    with pytest.raises(UserError, match="reconstruction"):
        model.check_outputs(["reconstruction"])


def test_few_beams_and_long_inputs(model: TrainedModel) -> None:
    with pytest.raises(UserError, match="beam_size is 0, expected at least 1"):
        model.reconstruct(KNOWN, 0)
    with pytest.raises(UserError, match=f"sequence 0 has 25 tokens, but the model accepts at most {ROOM}"):
        model.reconstruct(["C" * 25])


def test_encode_texts() -> None:
    texts = [["CCO", ""], ["", "[C@@H]"], ["é", "x"]]
    values = encode_texts(texts)
    assert (values.dtype, values.shape) == (np.uint8, (3, 2, 6))
    assert decode_texts(values).tolist() == texts
    assert decode_texts(values[:, 0]).tolist() == ["CCO", "", "é"]
    assert decode_texts(encode_texts([["", ""]])).tolist() == [["", ""]]
    assert encode_texts([]).shape == (0, 1, 1)
    floats = np.zeros((2, 3), np.float32)
    assert decode_texts(floats) is floats


def test_molecule_statistics() -> None:
    """Expected values are computed by hand: ethanol in two forms, benzene, an open ring, an empty string."""
    pairs = [("CCO", ["OCC", "CCO"]), ("CCN", ["c1ccccc1", "C1CC"]), ("C", [""])]
    assert summarize_molecules("samples", pairs) == "samples: 5 molecules, 60.0 % valid, 66.7 % of these unique"
    summary = summarize_molecules("reconstruction", [("CCO", ["OCC"]), ("CCN", ["CCC"])])
    assert summary.endswith(": 2 molecules, 100.0 % valid, 100.0 % of these unique, 50.0 % equal to the input")
    assert summarize_molecules("samples", [("C", ["C("])]) == "samples: 1 molecules, 0.0 % valid"
