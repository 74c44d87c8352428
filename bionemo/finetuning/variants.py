# SPDX-License-Identifier: Apache-2.0
"""Features of variants of one protein: the mutated sites, and the hidden states of the mutated residues.

The mean over all residues, the feature of other sequences, hardly changes with a mutation.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from bionemo.common.errors import UserError
from bionemo.inference.batching import BatchLimits, Ids, max_tokens, tokenize, too_long_error
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import Advance, no_progress
from bionemo.tokenizers import Alphabet


def compute_variant_vectors(
    model: TrainedModel, wild_type: str, variants: Sequence[Ids], locations: Sequence[str], limits: BatchLimits,
    advance: Advance = no_progress,
) -> Iterator[Floats]:  # fmt: skip
    """Yield the features of variants, in order: arrays [k, L + D] fp32 for L residues and the hidden size D.

    The first L values are 1 at mutated sites and 0 elsewhere. The others are the sum over the mutated residues of the
    differences between the hidden states of the variant and of the wild type. All are 0 for the wild type.

    `locations` name the variants in errors.

    Raises:
        UserError: if a variant has another length than the wild type, or the model cannot read it.
    """
    if not isinstance(model.network.vocabulary, Alphabet):
        raise UserError(f"model.data.wild_type: {model.path} does not read proteins: remove it")
    ids = tokenize(model.network.vocabulary, wild_type, "the wild type")
    if len(ids) > max_tokens(model.network):
        raise too_long_error("the wild type", len(ids), max_tokens(model.network), "increase model.seq_length")
    for location, variant in zip(locations, variants, strict=True):
        if len(variant) != len(ids):
            raise UserError(
                f"{location}: the sequence has {len(variant):,} residues and model.data.wild_type {len(ids):,}: only "
                "substitutions are supported"
            )
    ((reference,),) = model.compute_per_token([ids], "hiddens", limits=limits)
    first = 0
    for columns in model.compute(variants, ["hiddens"], limits, advance):
        hiddens = columns["hiddens"].reshape(-1, *reference.shape)
        is_mutated = np.stack(variants[first : first + len(hiddens)]) != ids
        first += len(hiddens)
        differences = np.einsum("vn,vnd->vd", is_mutated, hiddens - reference)
        yield np.concatenate([is_mutated, differences], axis=1).astype(np.float32)
