# SPDX-License-Identifier: Apache-2.0
"""What ESM-1b and ESM-2 do about tokens that are masked ("token dropout"; Lin et al. 2023, and Rives et al. 2021).

Shapes: T tokens of a pack, N sequences, F fillers, D hidden size.
"""

import torch
from torch import Tensor

from bionemo.data.batch import PackedBatch

# The share of tokens that were replaced by <mask> when the published models were trained: 15 % asked, 80 % of these
# masked. Part of the architecture, not a knob: it is applied at inference too.
MASKED_IN_TRAINING = 0.15 * 0.8


def token_dropout(x_TD: Tensor, batch: PackedBatch, mask_id: int) -> Tensor:
    """Zero the words of masked tokens, then scale each sequence up as dropout would, [T, D].

    Args:
        x_TD: vectors of the words alone.
        batch: the sequences that they are of.
        mask_id: id of <mask>.
    """
    masked_T = batch.tokens == mask_id
    sizes = batch.boundaries.diff().to(x_TD.dtype)  # [N + F]: fillers hold no mask, their scale is of no account
    counts = torch.zeros_like(sizes).index_add_(0, batch.segment_ids, masked_T.to(x_TD.dtype))
    scale = (1 - MASKED_IN_TRAINING) / (1 - counts / sizes).clamp_min(1e-6)
    visible_T = scale.index_select(0, batch.segment_ids) * ~masked_T
    return x_TD * visible_T[:, None]
