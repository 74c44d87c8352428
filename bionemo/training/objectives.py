# SPDX-License-Identifier: Apache-2.0
"""What is minimised: sums over tokens, so that averages can be taken over all ranks and micro-batches at once."""

import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.data.batch import PackedBatch


def masked_lm(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy at the asked positions, summed in nats, and their number; both scalars on the device."""
    logits_MV = model(batch)
    loss = F.cross_entropy(logits_MV.float(), batch.target_ids, reduction="sum")
    return loss, loss.new_tensor(len(batch.target_ids))
