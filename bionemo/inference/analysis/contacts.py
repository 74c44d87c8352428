# SPDX-License-Identifier: Apache-2.0
"""Which residues touch, read off the attention of a masked language model by a logistic regression.

Rao et al. 2020, "Transformer protein language models are unsupervised structure learners", sections 3 and 4.
Shapes: n residues, L layers, H heads, d head size, P pairs of residues.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bionemo.common.errors import UserError
from bionemo.inference.analysis.residues import read_protein
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import Advance, silent
from bionemo.interop.huggingface.contacts import ContactHead
from bionemo.megatron.attention import PackedAttention, Segments, rotate

SEPARATION = 6  # residues between i and j of the pairs that a regression is fitted to
LONG_RANGE = 24  # and of those that tell a fold
_STRENGTH = 0.15  # inverse, of the L1 penalty: as the authors of the paper took it (facebookresearch/esm, issue 249)


def predict_contacts(
    model: TrainedModel, sequence: str, head: ContactHead | None = None, name: str = "the sequence"
) -> Floats:
    """Probability that two residues touch (C-beta atoms less than 8 A apart), [n, n] fp32.

    Args:
        model: a masked language model.
        sequence: a protein.
        head: see `fit_contact_head`; None: the model's own.
        name: what the sequence is called in messages.

    Raises:
        UserError: when there is no head, or it is another model's; for a model or a sequence that cannot be used.
    """
    weights_LH, bias = _of(model, head)
    maps_LHnn = corrected_attention(model, sequence, name)
    logits = torch.tensor(bias, device=model.device)
    for w_H, x_Hnn in zip(weights_LH, maps_LHnn, strict=True):
        logits = logits + torch.einsum("h,hij->ij", w_H, x_Hnn)
    found: Floats = logits.sigmoid().cpu().numpy()
    return found


def corrected_attention(model: TrainedModel, sequence: str, name: str = "the sequence") -> Iterator[Tensor]:
    """Attention between residues, symmetrised and corrected for their averages, layer by layer.

    Args:
        model: a masked language model.
        sequence: a protein.
        name: what the sequence is called in messages.

    Yields:
        [H, n, n] fp32, the first layer's first.

    Raises:
        UserError: for a model or a sequence that cannot be used.
    """
    tokens = len(read_protein(model, sequence, name).ids) + 2
    for q_THd, k_THd, scale in _queries_and_keys(model, sequence):
        q_HTd, k_HTd = (x[:tokens].transpose(0, 1).float() for x in (q_THd, k_THd))
        inside_Hnn = (q_HTd @ k_HTd.mT * scale).softmax(-1)[:, 1:-1, 1:-1]
        yield average_product_corrected(inside_Hnn + inside_Hnn.mT)


def average_product_corrected(x_Hnn: Tensor) -> Tensor:
    """Take from each entry what its row and its column let expect: x_ij - sum_i x_ij sum_j x_ij / sum_ij x_ij.

    Dunn et al. 2008, "Mutual information without the influence of phylogeny or entropy", equation 4, with sums for
    means.
    """
    rows, columns, all_of_it = x_Hnn.sum(-1, keepdim=True), x_Hnn.sum(-2, keepdim=True), x_Hnn.sum((-2, -1), True)
    return x_Hnn - rows * columns / all_of_it.clamp_min(torch.finfo(x_Hnn.dtype).tiny)  # a head may look at none


def _queries_and_keys(model: TrainedModel, sequence: str) -> list[tuple[Tensor, Tensor, float]]:
    """What the layers compare, [T, H, d] each, turned by position where the model does so; and their scale."""
    seen: list[tuple[Tensor, Tensor, float]] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(module, PackedAttention)
        segments: Segments = named["packed_seq_params"]
        query, key = (x.squeeze(1) for x in inputs[:2])
        if segments.rotary is not None:
            query, key = rotate(query, *segments.rotary), rotate(key, *segments.rotary)
        seen.append((query, key, module.scale))

    places = [module for module in model.network.modules() if isinstance(module, PackedAttention)]
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in places]
    try:
        model.hiddens([sequence])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def fit_contact_head(
    model: TrainedModel, sequences: Sequence[str], maps: Sequence[NDArray[Any]], advance: Advance = silent
) -> ContactHead:
    """Fit the regression: on pairs six and more residues apart, with an L1 penalty; twenty proteins were enough.

    All features of all pairs are held at once: 4 L H bytes for each.

    Args:
        model: a masked language model.
        sequences: proteins of known structure.
        maps: of each, [n, n]: 1 for a contact, 0 for none, nan where it is not known.
        advance: told of every protein.

    Returns:
        Weights [L * H] and bias, as Hugging Face's ESM-2 has them.

    Raises:
        UserError: when maps and sequences do not agree, or hold no contacts, or no attention head tells contacts; as
            `corrected_attention`.
    """
    from sklearn import __version__ as version
    from sklearn.linear_model import LogisticRegression

    features, targets = [], []
    for number, (sequence, known) in enumerate(zip(sequences, maps, strict=True), 1):
        x_Fnn = torch.cat(list(corrected_attention(model, sequence, f"sequence {number}")))
        i, j = _pairs(as_contacts(known, x_Fnn.shape[-1], f"map {number}"), SEPARATION)
        features.append(x_Fnn[:, i, j].T.cpu().numpy())
        targets.append(np.asarray(known)[i, j] > 0)
        advance(1)
    target_P = np.concatenate(targets) if targets else np.zeros(0, bool)
    if target_P.all() or not target_P.any():
        raise UserError(
            f"of {len(target_P):,} known pairs {SEPARATION} and more residues apart {target_P.sum():,} are contacts: "
            "give maps with contacts and others"
        )
    modern = tuple(map(int, version.split(".")[:2])) >= (1, 8)  # which says L1 in another way
    lasso: dict[str, Any] = {"l1_ratio": 1.0} if modern else {"penalty": "l1"}
    fitted = LogisticRegression(C=_STRENGTH, solver="liblinear", random_state=0, **lasso)
    fitted.fit(np.concatenate(features), target_P)
    if not fitted.coef_.any():
        raise UserError(
            f"none of the model's {fitted.coef_.size} attention heads tells the {target_P.sum():,} contacts among "
            f"{len(target_P):,} known pairs: give more proteins, and check that the maps are those of the sequences"
        )
    return {"weight": fitted.coef_[0].tolist(), "bias": float(fitted.intercept_[0])}


def precision(predicted: Floats, known: NDArray[Any], divisor: int = 1) -> float:
    """Share of contacts among the n / divisor likeliest pairs 24 and more residues apart; nan where there are none.

    Args:
        predicted: [n, n] probabilities.
        known: [n, n]: see `fit_contact_head`.
        divisor: 1 for the precision of the top L, 5 for that of the top L/5.
    """
    i, j = _pairs(np.asarray(known, np.float32), LONG_RANGE)
    best = np.argsort(-predicted[i, j], kind="stable")[: max(1, len(known) // divisor)]
    return float((np.asarray(known)[i, j][best] > 0).mean()) if len(best) else math.nan


def as_contacts(known: NDArray[Any], residues: int, name: str) -> Floats:
    """See that a map is one of contacts.

    Args:
        known: [n, n].
        residues: n, as the sequence has them.
        name: of the map, for messages.

    Raises:
        UserError: when it has another shape, or other values than 0, 1 and nan.
    """
    if np.shape(known) != (residues, residues):
        raise UserError(f"{name} is of shape {np.shape(known)}, its sequence has {residues} residues: give [n, n]")
    if np.asarray(known).dtype.kind not in "buif":
        raise UserError(f"{name} holds no numbers: give 1 for a contact, 0 for none, nan where it is not known")
    contacts = np.asarray(known, np.float32)
    if strange := set(np.unique(contacts[~np.isnan(contacts)])) - {0, 1}:
        raise UserError(f"{name} holds {min(strange):g}: give 1 for a contact, 0 for none, nan where it is not known")
    return contacts


def _pairs(known: Floats, separation: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs i < j so far apart of which something is known."""
    i, j = np.triu_indices(len(known), separation)
    there = ~np.isnan(known[i, j])
    return i[there], j[there]


def _of(model: TrainedModel, head: ContactHead | None) -> tuple[Tensor, float]:
    """Weights [L, H] and bias."""
    head = model.contact_head if head is None else head
    if head is None:
        raise UserError(
            f"{model.path} has no contact head: fit one (`python -m bionemo.analysis contacts-fit`), give it with "
            "--head, or take a model that was imported from Hugging Face with its own"
        )
    config = model.network.config
    layers, heads, found = config.num_layers, config.num_attention_heads, len(head["weight"])
    if found != layers * heads:
        raise UserError(
            f"the contact head has {found} weights, the model {layers} layers of {heads} heads: it is another's"
        )
    return torch.tensor(head["weight"], device=model.device).view(layers, heads), float(head["bias"])
