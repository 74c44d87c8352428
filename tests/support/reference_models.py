# SPDX-License-Identifier: Apache-2.0
"""Independent models with the same weights as ours: transformers' ESM and GPT-2, and models from `torch.nn` layers."""

import torch
from torch import Tensor, nn
from transformers import EsmcConfig, EsmcForMaskedLM, EsmConfig, EsmForMaskedLM, GPT2Config, GPT2LMHeadModel


def split_qkv(fused: Tensor, heads: int, number: int = 3) -> tuple[Tensor, ...]:
    """Split Megatron's fused projection, interleaved by head, into query, key and value with heads in order."""
    rows = fused.shape[0] // (number * heads)
    parts = fused.view(heads, number, rows, *fused.shape[1:])
    return tuple(parts[:, i].reshape(heads * rows, *fused.shape[1:]) for i in range(number))


def hf_names(num_layers: int) -> dict[str, str]:
    """Map our parameter names to those of EsmForMaskedLM, except for the fused projection."""
    names = {
        "word_embeddings.weight": "esm.embeddings.word_embeddings.weight",
        "encoder.final_layernorm.weight": "esm.encoder.emb_layer_norm_after.weight",
        "encoder.final_layernorm.bias": "esm.encoder.emb_layer_norm_after.bias",
        "lm_head.dense.weight": "lm_head.dense.weight",
        "lm_head.dense.bias": "lm_head.dense.bias",
        "lm_head.layer_norm.weight": "lm_head.layer_norm.weight",
        "lm_head.layer_norm.bias": "lm_head.layer_norm.bias",
        "lm_head.bias": "lm_head.bias",
    }
    parts = {
        "input_layernorm": "attention.LayerNorm",
        "self_attention.linear_proj": "attention.output.dense",
        "pre_mlp_layernorm": "LayerNorm",
        "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense",
    }
    for layer in range(num_layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                names[f"encoder.layers.{layer}.{ours}.{kind}"] = f"esm.encoder.layer.{layer}.{theirs}.{kind}"
    return names


def to_hf(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Rename our parameters (or their gradients) and split fused ones."""
    names = hf_names(num_layers)
    result = {names[name]: value for name, value in values.items() if name in names}
    for key in ("esm.embeddings.word_embeddings.weight", "lm_head.bias"):
        result[key] = result[key][:vocab]
    for layer in range(num_layers):
        for kind in ("weight", "bias"):
            fused = values[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"]
            for part, value in zip(("query", "key", "value"), split_qkv(fused, heads), strict=True):
                result[f"esm.encoder.layer.{layer}.attention.self.{part}.{kind}"] = value
    return result


def hf_esm2(config: object, vocab: int, mask_id: int, pad_id: int) -> EsmForMaskedLM:
    """Build an EsmForMaskedLM of the same shape."""
    model = EsmForMaskedLM(
        EsmConfig(
            vocab_size=vocab, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads, intermediate_size=config.ffn_hidden_size,
            max_position_embeddings=config.seq_length + 2, position_embedding_type="rotary", token_dropout=True,
            mask_token_id=mask_id, pad_token_id=pad_id, layer_norm_eps=config.layernorm_epsilon,
            emb_layer_norm_before=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )  # fmt: skip
    return model.eval()


def hf_esm1b(config: object, vocab: int, mask_id: int, pad_id: int) -> EsmForMaskedLM:
    """Build an EsmForMaskedLM of the same shape with learned positions."""
    model = EsmForMaskedLM(
        EsmConfig(
            vocab_size=vocab, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads, intermediate_size=config.ffn_hidden_size,
            max_position_embeddings=config.max_position_embeddings + 2, position_embedding_type="absolute",
            token_dropout=config.embedding_token_dropout, emb_layer_norm_before=config.embedding_layer_norm,
            mask_token_id=mask_id, pad_token_id=pad_id, layer_norm_eps=config.layernorm_epsilon,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )
    )  # fmt: skip
    return model.eval()


def to_hf_esm1b(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Convert like `to_hf`, including position table and layer norm of ESM-1b."""
    names = {
        "position_embeddings.table.weight": "esm.embeddings.position_embeddings.weight",
        "embedding_layernorm.weight": "esm.embeddings.layer_norm.weight",
        "embedding_layernorm.bias": "esm.embeddings.layer_norm.bias",
    }
    found = {theirs: values[ours] for ours, theirs in names.items() if ours in values}
    return to_hf(values, num_layers, heads, vocab) | found


def hf_esmc(config: object, vocab: int) -> EsmcForMaskedLM:
    """Build an EsmcForMaskedLM of the same shape."""
    model = EsmcForMaskedLM(
        EsmcConfig(
            vocab_size=vocab, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads, intermediate_size=config.ffn_hidden_size,
            attn_implementation="eager",
        )
    )  # fmt: skip
    return model.eval()


def to_hf_esmc(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Convert our parameters to the names of EsmcForMaskedLM: queries, keys and values by head, gate and up by row."""
    layer = "encoder.layers.{}.", "esmc.layers.{}."
    names = {
        "word_embeddings.weight": "esmc.embed_tokens.weight", "encoder.final_layernorm.weight": "esmc.norm.weight",
        "lm_head.weight": "lm_head.decoder.weight", "lm_head.bias": "lm_head.decoder.bias",
        **{f"lm_head.{module}.{kind}": f"lm_head.{module}.{kind}"
           for module in ("dense", "layer_norm") for kind in ("weight", "bias")},
    }  # fmt: skip
    parts = {}
    for number in range(num_layers):
        ours, theirs = (prefix.format(number) for prefix in layer)
        for kind in ("weight", "bias"):
            names[f"{ours}input_layernorm.{kind}"] = f"{theirs}input_layernorm.{kind}"
            names[f"{ours}pre_mlp_layernorm.{kind}"] = f"{theirs}post_attention_layernorm.{kind}"
        names[f"{ours}self_attention.query_norm.weight"] = f"{theirs}self_attn.q_norm.weight"
        names[f"{ours}self_attention.key_norm.weight"] = f"{theirs}self_attn.k_norm.weight"
        names[f"{ours}self_attention.linear_proj.weight"] = f"{theirs}self_attn.o_proj.weight"
        names[f"{ours}mlp.linear_fc2.weight"] = f"{theirs}mlp.down_proj.weight"
        mixed = values[f"{ours}self_attention.linear_qkv.weight"]
        for part, name in zip(mixed.unflatten(0, (heads, 3, -1)).unbind(1), "qkv", strict=True):
            parts[f"{theirs}self_attn.{name}_proj.weight"] = part.flatten(0, 1)
        gated = values[f"{ours}mlp.linear_fc1.weight"]
        parts |= {f"{theirs}mlp.gate_proj.weight": gated[::2], f"{theirs}mlp.up_proj.weight": gated[1::2]}
    assert len(names) + 2 * num_layers == len(values)
    return {theirs: values[ours] for ours, theirs in names.items()} | parts


class TorchBert(nn.Module):
    """Pre-LN BERT from torch's TransformerEncoderLayer with learned positions and tied head; no dropout."""

    def __init__(self, config: object, vocab: int) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.words, self.positions = nn.Embedding(vocab, size), nn.Embedding(config.max_position_embeddings, size)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, config.num_attention_heads, config.ffn_hidden_size, dropout=0.0, activation="gelu",
                layer_norm_eps=epsilon, batch_first=True, norm_first=True,
            )
            for _ in range(config.num_layers)
        )  # fmt: skip
        self.norm, self.head_norm = nn.LayerNorm(size, epsilon), nn.LayerNorm(size, epsilon)
        self.dense, self.bias = nn.Linear(size, size), nn.Parameter(torch.zeros(vocab))

    def forward(self, tokens_BL: Tensor, padding_BL: Tensor) -> Tensor:
        """Return logits [B, L, V]."""
        x = self.words(tokens_BL) + self.positions(torch.arange(tokens_BL.shape[1]))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding_BL)
        x = self.head_norm(nn.functional.gelu(self.dense(self.norm(x))))
        return x @ self.words.weight.T + self.bias


class TorchSeq2Seq(nn.Module):
    """Pre-LN encoder-decoder from torch's layers with shared word and position embeddings; no dropout."""

    def __init__(self, config: object, vocab: int) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.words, self.positions = nn.Embedding(vocab, size), nn.Embedding(config.max_position_embeddings, size)

        def layers(kind: type[nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(
                kind(
                    size, config.num_attention_heads, config.ffn_hidden_size, dropout=0.0, activation="gelu",
                    layer_norm_eps=epsilon, batch_first=True, norm_first=True,
                )
                for _ in range(config.num_layers)
            )  # fmt: skip

        self.encoder, self.decoder = layers(nn.TransformerEncoderLayer), layers(nn.TransformerDecoderLayer)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(size, epsilon), nn.LayerNorm(size, epsilon)
        if config.share_decoder_tokens_head_embeddings:
            self.bias = nn.Parameter(torch.zeros(vocab))
        else:
            self.output = nn.Linear(size, vocab, bias=False)

    def forward(self, source_BS: Tensor, source_padding: Tensor, tokens_BL: Tensor, padding: Tensor) -> Tensor:
        """Return logits [B, L, V]."""
        memory = self.words(source_BS) + self.positions(torch.arange(source_BS.shape[1]))
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=source_padding)
        memory = self.encoder_norm(memory)
        x = self.words(tokens_BL) + self.positions(torch.arange(tokens_BL.shape[1]))
        later = torch.ones(tokens_BL.shape[1], tokens_BL.shape[1], dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(
                x, memory, tgt_mask=later, tgt_key_padding_mask=padding, memory_key_padding_mask=source_padding
            )  # fmt: skip
        x = self.decoder_norm(x)
        return self.output(x) if hasattr(self, "output") else x @ self.words.weight.T + self.bias


def to_torch_seq2seq(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Rename our parameters (or their gradients) to TorchSeq2Seq's."""
    result = {
        "words.weight": values["word_embeddings.weight"][:vocab],
        "positions.weight": values["position_embeddings.weight"],
    }
    if "lm_head.bias" in values:
        result["bias"] = values["lm_head.bias"][:vocab]
    else:
        result["output.weight"] = values["lm_head.weight"][:vocab]
    parts = {
        "encoder": {
            "input_layernorm": "norm1", "self_attention.linear_proj": "self_attn.out_proj",
            "pre_mlp_layernorm": "norm2", "mlp.linear_fc1": "linear1", "mlp.linear_fc2": "linear2",
        },
        "decoder": {
            "input_layernorm": "norm1", "self_attention.linear_proj": "self_attn.out_proj",
            "pre_cross_attn_layernorm": "norm2", "cross_attention.linear_proj": "multihead_attn.out_proj",
            "pre_mlp_layernorm": "norm3", "mlp.linear_fc1": "linear1", "mlp.linear_fc2": "linear2",
        },
    }  # fmt: skip
    for kind in ("weight", "bias"):
        for stack, renamed in parts.items():
            result[f"{stack}_norm.{kind}"] = values[f"{stack}.final_layernorm.{kind}"]
            for layer in range(num_layers):
                ours, theirs = f"{stack}.layers.{layer}", f"{stack}.{layer}"
                fused = values[f"{ours}.self_attention.linear_qkv.{kind}"]
                result[f"{theirs}.self_attn.in_proj_{kind}"] = torch.cat(split_qkv(fused, heads))
                if stack == "decoder":
                    q, kv = (values[f"{ours}.cross_attention.linear_{part}.{kind}"] for part in ("q", "kv"))
                    result[f"{theirs}.multihead_attn.in_proj_{kind}"] = torch.cat([q, *split_qkv(kv, heads, 2)])
                for one, other in renamed.items():
                    result[f"{theirs}.{other}.{kind}"] = values[f"{ours}.{one}.{kind}"]
    return result


def hf_gpt2(config: object, vocab: int) -> GPT2LMHeadModel:
    """Build a GPT2LMHeadModel of the same shape."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab, n_positions=config.max_position_embeddings, n_embd=config.hidden_size,
            n_layer=config.num_layers, n_head=config.num_attention_heads, n_inner=config.ffn_hidden_size,
            activation_function="gelu_new", layer_norm_epsilon=config.layernorm_epsilon, embd_pdrop=0.0,
            attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        )
    )  # fmt: skip
    return model.eval()


def to_hf_gpt2(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Rename our parameters (or their gradients) to those of GPT2LMHeadModel and transpose matrices."""
    result = {
        "transformer.wte.weight": values["word_embeddings.weight"][:vocab],
        "lm_head.weight": values["word_embeddings.weight"][:vocab],
        "transformer.wpe.weight": values["position_embeddings.weight"],
    }
    parts = {
        "input_layernorm": "ln_1", "self_attention.linear_proj": "attn.c_proj", "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        result[f"transformer.ln_f.{kind}"] = values[f"decoder.final_layernorm.{kind}"]
        for layer in range(num_layers):
            ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
            fused = torch.cat(split_qkv(values[f"{ours}.self_attention.linear_qkv.{kind}"], heads))
            found = {"attn.c_attn": fused, **{other: values[f"{ours}.{one}.{kind}"] for one, other in parts.items()}}
            for name, value in found.items():
                result[f"{theirs}.{name}.{kind}"] = value.T if value.dim() == 2 else value
    return result


def to_torch_bert(values: dict[str, Tensor], num_layers: int, heads: int, vocab: int) -> dict[str, Tensor]:
    """Rename our parameters (or their gradients) to TorchBert's."""
    result = {
        "words.weight": values["word_embeddings.weight"][:vocab],
        "positions.weight": values["position_embeddings.weight"],
        "bias": values["lm_head.bias"][:vocab],
    }
    parts = {
        "input_layernorm": "norm1",
        "self_attention.linear_proj": "self_attn.out_proj",
        "pre_mlp_layernorm": "norm2",
        "mlp.linear_fc1": "linear1",
        "mlp.linear_fc2": "linear2",
    }
    for kind in ("weight", "bias"):
        result[f"norm.{kind}"] = values[f"encoder.final_layernorm.{kind}"]
        result[f"head_norm.{kind}"] = values[f"lm_head.layer_norm.{kind}"]
        result[f"dense.{kind}"] = values[f"lm_head.dense.{kind}"]
        for layer in range(num_layers):
            fused = values[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"]
            result[f"layers.{layer}.self_attn.in_proj_{kind}"] = torch.cat(split_qkv(fused, heads))
            for ours, theirs in parts.items():
                result[f"layers.{layer}.{theirs}.{kind}"] = values[f"encoder.layers.{layer}.{ours}.{kind}"]
    return result
