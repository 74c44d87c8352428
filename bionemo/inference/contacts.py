# SPDX-License-Identifier: Apache-2.0
"""Contacts between residues, predicted from the attention of a masked language model by a logistic regression.

Rao et al. 2020, "Transformer protein language models are unsupervised structure learners", section 3.
Shapes: n residues, L layers, H heads, d head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.formats.huggingface.contacts import ContactHead
from bionemo.inference.batching import Ids
from bionemo.inference.outputs import ATTENTIONS, Floats, InferenceModel, LayerRecord
from bionemo.inference.protein import masked_network, tokenize_protein


def predict_contacts(
    model: InferenceModel, sequence: str, head: ContactHead | None = None, name: str = "the sequence"
) -> Floats:
    """Return the probability that two residues are in contact (C-beta atoms less than 8 A apart), [n, n] fp32.

    `head` is by default the contact head of the checkpoint; `name` identifies the sequence in errors.

    Raises:
        UserError: if there is no head, or it belongs to another model; see also `tokenize_protein`.
    """
    masked_network(model)  # raises the error for other models
    head = model.contact_head if head is None else head
    if head is None:
        raise UserError(
            f"{model.path} has no contact head: fit one (`bionemo analysis contacts-fit`) and pass it with "
            "--head (in Python: model.contact_head), or use ESM-1b, ESM-1v or ESM-2 from Hugging Face with its own"
        )
    config = model.network.config
    layers, heads, found = config.num_layers, config.num_attention_heads, len(head["weight"])
    if found != layers * heads:
        raise UserError(
            f"the contact head has {found} weights, the model {layers} layers of {heads} heads: it belongs to another "
            "model"
        )
    weights_LH = torch.tensor(head["weight"], device=model.device).view(layers, heads)
    logits = torch.tensor(float(head["bias"]), device=model.device)
    for w_H, x_Hnn in zip(weights_LH, corrected_attention(model, sequence, name), strict=True):
        logits = logits + torch.einsum("h,hij->ij", w_H, x_Hnn)
    return logits.sigmoid().cpu().numpy()


def corrected_attention(model: InferenceModel, sequence: str, name: str = "the sequence") -> Iterator[Tensor]:
    """Compute the symmetrized, average-product-corrected attention between residues. Errors as in `tokenize_protein`.

    Yields:
        [H, n, n] fp32 for each layer, in order.
    """
    ids = tokenize_protein(model, sequence, name).ids
    tokens = len(ids) + 2
    for q_THd, k_THd, scale in _queries_and_keys(model, ids):
        q_HTd, k_HTd = (x[:tokens].transpose(0, 1).float() for x in (q_THd, k_THd))
        inner_Hnn = (q_HTd @ k_HTd.mT * scale).softmax(-1)[:, 1:-1, 1:-1]
        yield average_product_corrected(inner_Hnn + inner_Hnn.mT)


def average_product_corrected(x_Hnn: Tensor) -> Tensor:
    """Return x_ij - sum_i x_ij sum_j x_ij / sum_ij x_ij.

    Dunn et al. 2008, "Mutual information without the influence of phylogeny or entropy", equation 4, with sums
    instead of means.
    """
    rows, columns, total = x_Hnn.sum(-1, keepdim=True), x_Hnn.sum(-2, keepdim=True), x_Hnn.sum((-2, -1), True)
    return x_Hnn - rows * columns / total.clamp_min(torch.finfo(x_Hnn.dtype).tiny)  # the total of a head may be 0


def _queries_and_keys(model: InferenceModel, ids: Ids) -> list[tuple[Tensor, Tensor, float]]:
    """Return the queries and keys [T, H, d] of each layer, after rotary positions, and their scale."""
    layers = range(1, len(model.network.blocks()[0].layers) + 1)
    with LayerRecord(model.network, [(ATTENTIONS, layer) for layer in layers]) as record:
        model.compute_per_token([ids], "hiddens")
    return [(query, key, module.scale) for query, key, module in map(record.attention.__getitem__, layers)]
