# SPDX-License-Identifier: Apache-2.0
"""What is minimised: sums over tokens, so that averages can be taken over all ranks and micro-batches at once."""

from torch import Tensor

from bionemo.data.batch import PackedBatch
from bionemo.megatron.vocabulary import cross_entropy


def masked_lm(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy at the asked positions, summed in nats, and their number; both scalars on the device."""
    loss = cross_entropy(logits, batch.target_ids)
    return loss, loss.new_tensor(len(batch.target_ids))
