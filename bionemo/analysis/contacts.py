# SPDX-License-Identifier: Apache-2.0
"""Contact heads: fit them to proteins of known structure, read and write them, and measure the precision of contacts.

Rao et al. 2020, "Transformer protein language models are unsupervised structure learners", section 4.
Shapes: n residues, L layers, H heads, P pairs of residues.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.analysis.files import staged_file
from bionemo.common.errors import UserError
from bionemo.formats.huggingface.contacts import ContactHead
from bionemo.inference.contacts import corrected_attention
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import Advance, no_progress

SEPARATION = 6  # minimum |i - j| of the pairs that the regression is fitted to
LONG_RANGE = 24  # minimum |i - j| of long-range pairs
_INVERSE_L1 = 0.15  # inverse strength of the L1 penalty, as chosen by the authors (facebookresearch/esm, issue 249)


def fit_contact_head(
    model: TrainedModel, sequences: Sequence[str], maps: Sequence[NDArray[Any]], advance: Advance = no_progress
) -> ContactHead:
    """Fit the regression, with an L1 penalty, to pairs at least SEPARATION residues apart.

    The authors used twenty proteins. The features of all pairs are held in memory: 4 L H bytes for each pair.
    `maps` contains the contacts of each protein, [n, n]: 1 for a contact, 0 for none, nan if unknown.

    Returns:
        Weights [L * H] and bias, as in Hugging Face's ESM-2.

    Raises:
        UserError: if maps and sequences do not match, there are no contacts, or no attention head correlates with
            them; see `tokenize_protein`.
    """
    from sklearn import __version__ as version
    from sklearn.linear_model import LogisticRegression

    features, targets = [], []
    for number, (sequence, known) in enumerate(zip(sequences, maps, strict=True), 1):
        x_Fnn = torch.cat(list(corrected_attention(model, sequence, f"sequence {number}")))
        i, j = _known_pairs(check_contact_map(known, x_Fnn.shape[-1], f"map {number}"), SEPARATION)
        features.append(x_Fnn[:, i, j].T.cpu().numpy())
        targets.append(np.asarray(known)[i, j] > 0)
        advance(1)
    target_P = np.concatenate(targets) if targets else np.zeros(0, bool)
    if target_P.all() or not target_P.any():
        raise UserError(
            f"of {len(target_P):,} known pairs {SEPARATION} and more residues apart {target_P.sum():,} are contacts: "
            "provide maps with contacts and other pairs"
        )
    new_api = tuple(map(int, version.split(".")[:2])) >= (1, 8)
    lasso: dict[str, Any] = {"l1_ratio": 1.0} if new_api else {"penalty": "l1"}
    fitted = LogisticRegression(C=_INVERSE_L1, solver="liblinear", random_state=0, **lasso)
    fitted.fit(np.concatenate(features), target_P)
    if not fitted.coef_.any():
        raise UserError(
            f"none of the model's {fitted.coef_.size} attention heads predicts the {target_P.sum():,} contacts among "
            f"{len(target_P):,} known pairs: add proteins, check that the maps belong to the sequences, or train the "
            "model longer"
        )
    return {"weight": fitted.coef_[0].tolist(), "bias": float(fitted.intercept_[0])}


def precision(
    predicted: Floats, known: NDArray[Any], divisor: int = 1, nearest: int = LONG_RANGE, end: int | None = None
) -> float:
    """Return the share of contacts among the n / divisor most likely pairs; nan if no pair is known.

    Args:
        predicted: probabilities [n, n].
        known: contact map [n, n] as in `fit_contact_head`.
        divisor: 5 gives the precision of the top L/5.
        nearest: smallest |i - j| of the pairs.
        end: |i - j| of the pairs is smaller; None: no limit.
    """
    i, j = _known_pairs(np.asarray(known, np.float32), nearest)
    if end is not None:
        i, j = i[j - i < end], j[j - i < end]
    best = np.argsort(-predicted[i, j], kind="stable")[: max(1, len(known) // divisor)]
    return float((np.asarray(known)[i, j][best] > 0).mean()) if len(best) else math.nan


def check_contact_map(known: NDArray[Any], residues: int, name: str) -> Floats:
    """Return a contact map as fp32.

    Raises:
        UserError: if its shape is not [residues, residues], or it has values other than 0, 1 and nan.
    """
    if np.shape(known) != (residues, residues):
        raise UserError(f"{name} is of shape {np.shape(known)}, its sequence has {residues} residues: expected [n, n]")
    if np.asarray(known).dtype.kind not in "buif":
        raise UserError(f"{name} has no numbers: expected 1 for a contact, 0 for none, nan if unknown")
    contacts = np.asarray(known, np.float32)
    if other := set(np.unique(contacts[~np.isnan(contacts)])) - {0, 1}:
        raise UserError(f"{name} holds {min(other):g}: expected 1 for a contact, 0 for none, nan if unknown")
    return contacts


def _known_pairs(known: Floats, separation: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the known pairs i < j with at least this separation."""
    i, j = np.triu_indices(len(known), separation)
    is_known = ~np.isnan(known[i, j])
    return i[is_known], j[is_known]


def write_contact_head(path: Path, head: ContactHead, weights: str, provenance: Mapping[str, Any]) -> None:
    """Write a head as JSON.

    {"weight": [one for each attention head], "bias": number, "model_weights": checksum, "provenance": {...}}.

    Raises:
        UserError: if the file cannot be written.
    """
    with staged_file(path) as file:
        file.write_text(json.dumps({**head, "model_weights": weights, "provenance": provenance}) + "\n")


def read_contact_head(path: Path) -> tuple[ContactHead, str | None]:
    """Read a head written by `write_contact_head`, and the checksum of its model's weights (None: not stored).

    Raises:
        UserError: if the file is missing or invalid.
    """
    try:
        head = json.loads(path.read_text())
        numbers = np.array([*head["weight"], head["bias"]], np.float64)
        weights = head.get("model_weights")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is not a contact head, {{"weight": [numbers], "bias": number}}') from error
    if not np.isfinite(numbers).all():
        raise UserError(f"{path} holds a number that is not finite: fit the head again")
    return {"weight": numbers[:-1].tolist(), "bias": float(numbers[-1])}, weights
