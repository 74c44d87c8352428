# SPDX-License-Identifier: Apache-2.0
"""Generation of molecules from the encoder's hidden vectors, optionally with noise added to them.

Noise and sampled tokens are functions of counters (seed, record, perturbation, position), so the molecules of a record
do not depend on the other records of a batch. Shapes: n tokens of a text, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import RandomBits, draw_runs, normal, purpose_key, sample_keys
from bionemo.config.schema import SamplingConfig, TaskConfig
from bionemo.config.schema.infer import SamplingMethod
from bionemo.config.schema_reader import find_out_of_range
from bionemo.inference.batching import DEFAULT_LIMITS, MIN_ROWS, BatchLimits, Ids
from bionemo.inference.outputs import Floats, InferenceModel, check_generates
from bionemo.inference.progress import no_progress
from bionemo.megatron.attention import PackedSequences
from bionemo.megatron.layer_spec import EncoderOutput
from bionemo.models import decoding as decoders
from bionemo.models.decoding import SelectToken, beam_search, make_sampler, select_greedy
from bionemo.models.encoder_decoder import EncoderDecoder

METHODS: tuple[str, ...] = get_args(SamplingMethod)
_TYPICAL_TOKENS = 32  # of a SMILES; converts a limit of tokens to a number of SMILES


@dataclass(frozen=True)
class Decoding:
    """Decoding settings for one output."""

    perturbations: int = 1  # number of perturbed copies of the hidden vectors
    radius: float = 0.0  # standard deviation of the noise
    beams: int = 0  # number of beams; 0: token by token
    kept: int = 1  # number of molecules of each perturbation, the best beams first
    alpha: float = 0.0  # length penalty of the beam search
    seed: int = 0  # seed of noise and sampled tokens
    # Without beams, returns the function that selects tokens, given a key for each perturbation.
    make_select: Callable[[RandomBits], SelectToken] = lambda keys: select_greedy


def decodings(task: TaskConfig) -> dict[str, Decoding]:
    """Return the decoding settings of each generated output of a task.

    Raises:
        UserError: if a value is invalid; names its key.
    """
    found, prefix = {}, "model.downstream_task."
    if "reconstruction" in task.outputs:
        found["reconstruction"] = reconstruction(task.reconstruction_beam_size, f"{prefix}reconstruction_beam_size")
    if "samples" in task.outputs:
        found["samples"] = sampling(task.sampling, f"{prefix}sampling.")
    return found


def reconstruction(beam_size: int, key: str = "beam_size") -> Decoding:
    """Return the settings to decode the input itself: greedy for a beam size of 1, else by beam search.

    Raises:
        UserError: if the beam size is below 1.
    """
    if beam_size < 1:
        raise UserError(f"{key} is {beam_size}, expected at least 1 (greedy)")
    return Decoding(beams=beam_size if beam_size > 1 else 0)


def sampling(config: SamplingConfig, prefix: str = "") -> Decoding:
    """Return the settings of one of v1's sampling methods; `prefix` precedes the names of keys in errors.

    Raises:
        UserError: if a value is invalid; names its key.
    """
    _check(config, prefix)
    number, radius, seed, alpha = config.num_samples, config.scaled_radius, config.seed, config.beam_alpha

    def make_select(keys: RandomBits) -> SelectToken:
        top_k, top_p = config.top_k or None, config.top_p or None
        return make_sampler(keys, temperature=config.temperature, top_k=top_k, top_p=top_p)

    search = partial(Decoding, radius=radius, alpha=alpha, seed=seed)
    return {
        "greedy-perturbate": Decoding(number, radius, seed=seed),
        "topkp-perturbate": Decoding(number, radius, seed=seed, make_select=make_select),
        "beam-search-perturbate": search(number, beams=config.beam_size),
        "beam-search-single-sample": search(1, beams=number, kept=number),
        "beam-search-perturbate-sample": search(number, beams=config.beam_size, kept=config.beam_size),
    }[config.sampling_method]


def _check(config: SamplingConfig, prefix: str) -> None:
    method = config.sampling_method
    if method not in METHODS:
        raise UserError(f"{prefix}sampling_method is {method!r}, expected one of {', '.join(METHODS)}")
    for key, hint in get_type_hints(SamplingConfig, include_extras=True).items():
        if expected := find_out_of_range(getattr(config, key), hint):
            raise UserError(f"{prefix}{key} is {getattr(config, key)}, expected {expected}")


def generate(
    model: InferenceModel, sequences: Sequence[Ids], decoding: Decoding, numbers: NDArray[np.int64] | None = None,
    limits: BatchLimits = DEFAULT_LIMITS, advance: Callable[[int], object] = no_progress,
) -> list[list[str]]:  # fmt: skip
    """Decode molecules from each input.

    The noise is determined by `numbers`, the record numbers [N]; None: positions in `sequences`. `advance` is called
    with the number of finished inputs.

    Returns:
        For each input `perturbations * kept` SMILES, grouped by perturbation.

    Raises:
        UserError: if the model does not decode molecules.
    """
    check_generates(model.network, "generation")
    owners = np.repeat(np.arange(len(sequences)), decoding.perturbations)
    perturbations = np.tile(np.arange(decoding.perturbations), len(sequences))
    records = owners if numbers is None else np.asarray(numbers, np.int64)[owners]
    noise, tokens = (
        sample_keys(purpose_key(decoding.seed, purpose), perturbations, records) for purpose in ("perturb", "write")
    )
    beams = max(decoding.beams, 1)
    rows = max(min(limits.tokens // _TYPICAL_TOKENS, limits.sequences or limits.tokens), MIN_ROWS)
    size, min_size = max(rows // beams, 1), -(-MIN_ROWS // beams)
    found: list[list[str]] = [[] for _ in sequences]
    for begin in range(0, len(owners), size):
        part = slice(begin, begin + size)
        ours = owners[part]
        (hiddens,) = model.compute_per_token(sequences[ours[0] : ours[-1] + 1], "hiddens", limits=limits)
        perturbed = [
            _perturb(hiddens[owner - ours[0]], decoding.radius, key)
            for owner, key in zip(ours, noise[part], strict=True)
        ]
        padding = max(min_size - len(perturbed), 0)
        keys = np.pad(tokens[part], (0, padding), "edge")
        encoder_output = _encoder_output([*perturbed, *perturbed[-1:] * padding], model.device)
        for owner, smiles in zip(ours, _decode(model, encoder_output, decoding, keys), strict=False):
            found[owner] += smiles
        advance(int((perturbations[part] == decoding.perturbations - 1).sum()))
    return found


def _perturb(hidden_nD: Floats, radius: float, key: np.uint64) -> Floats:
    """Add normal noise that is a function of the key."""
    if radius == 0:
        return hidden_nD
    bits = draw_runs(np.array([key], np.uint64), np.array([-(-hidden_nD.size // 2)]))
    noise = normal(bits)[: hidden_nD.size].reshape(hidden_nD.shape)
    return hidden_nD + (radius * noise).astype(np.float32)


def _encoder_output(hiddens: list[Floats], device: torch.device) -> EncoderOutput:
    """Pack hidden vectors as the encoder output that the decoder attends to."""
    lengths = tuple(map(len, hiddens))
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    hidden_S1D = torch.from_numpy(np.concatenate(hiddens)).to(device)[:, None]
    return EncoderOutput(hidden_S1D, PackedSequences(lengths, boundaries, max(lengths)))


@torch.no_grad()
def _decode(
    model: InferenceModel, encoder_output: EncoderOutput, decoding: Decoding, keys: RandomBits
) -> list[list[str]]:
    """Return the SMILES decoded from each sequence of the encoder output, the best beam first."""
    network = model.network
    assert isinstance(network, EncoderDecoder)
    with model.autocast():
        if decoding.beams:
            found = beam_search(network, encoder_output, decoding.beams, alpha=decoding.alpha)
        else:
            found = [
                [each]
                for each in decoders.generate(
                    network, encoder_output, decoding.make_select(keys), min_batch_size=MIN_ROWS
                )
            ]
    return [[network.vocabulary.decode(each.tokens) for each in beams[: decoding.kept]] for beams in found]
