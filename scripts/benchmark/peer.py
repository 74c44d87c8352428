# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers of Hugging Face's transformers for benchmarks, with random weights."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from proteins import ESM2_TOKENS, SIZES


def build(size: str) -> Any:
    """Return a masked language model of a size in SIZES."""
    layers, hidden, heads = SIZES[size]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    torch.manual_seed(0)
    if size.startswith("ESMC"):
        from transformers import EsmcConfig, EsmcForMaskedLM

        inner = -(-hidden * 8 // (3 * 256)) * 256
        return EsmcForMaskedLM(EsmcConfig(
            vocab_size=64, intermediate_size=inner, num_key_value_heads=heads, head_dim=hidden // heads,
            max_position_embeddings=2048, attn_implementation="sdpa", **sizes,
        ))  # fmt: skip
    from transformers import EsmConfig, EsmForMaskedLM

    return EsmForMaskedLM(EsmConfig(
        vocab_size=33, intermediate_size=4 * hidden, max_position_embeddings=1026, position_embedding_type="rotary",
        token_dropout=True, mask_token_id=32, pad_token_id=1, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, emb_layer_norm_before=False, attn_implementation="sdpa", **sizes,
    ))  # fmt: skip


def tokenizer(esmc: bool) -> Any:
    """Return the tokenizer of ESMC or ESM-2."""
    if esmc:
        from transformers import EsmcTokenizer

        return EsmcTokenizer()
    from transformers import EsmTokenizer

    with TemporaryDirectory() as directory:
        vocabulary = Path(directory) / "vocab.txt"
        vocabulary.write_text("\n".join(ESM2_TOKENS))
        return EsmTokenizer(str(vocabulary))
