# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as BioNeMo 2 writes them: ESM-2 of Megatron-Core, saved with Megatron-Core or torch."""

import json
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import EsmForMaskedLM

from tests.support.huggingface import states
from tests.support.parallel_layouts import Layout

ESM2 = "bionemo.esm2.model.model.ESM2Config"
SPEC = "bionemo.llm.model.biobert.transformer_specs.BiobertSpecOption.esm2_bert_layer_with_transformer_engine_spec"
HEADS, LAYERS, HIDDEN, INNER, LENGTH = 4, 2, 32, 96, 98  # those of tests.support.huggingface.theirs
GIVEN: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": INNER,
    "seq_length": LENGTH, "params_dtype": "torch.float32", "biobert_spec_option": SPEC, "kv_channels": None,
    "bias_activation_fusion": False, "optimizer_fn": None,
}  # fmt: skip
_REFERENCES = {"params_dtype", "biobert_spec_option", "activation_func", "core_attention_override"}
_SPLIT = {  # dimension that tensor parallelism divides
    "word_embeddings.weight": 0, "output_layer.bias": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0,
    "linear_proj.weight": 1, "linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1,
}  # fmt: skip


def weights(model: EsmForMaskedLM, rows: int = 128) -> dict[str, Tensor]:
    """Return the weights of EsmForMaskedLM under the names of BioNeMo 2, with a vocabulary of `rows` rows."""
    old = states(model)
    words, bias = old["esm.embeddings.word_embeddings.weight"], old["lm_head.bias"]
    table = torch.cat([words, 7 * torch.ones(rows - len(words), words.shape[1], dtype=words.dtype)])
    new = {
        "embedding.word_embeddings.weight": table,
        "output_layer.bias": torch.cat([bias, 7 * torch.ones(rows - len(bias), dtype=bias.dtype)]),
    }
    for kind in ("weight", "bias"):
        new[f"encoder.final_layernorm.{kind}"] = old[f"esm.encoder.emb_layer_norm_after.{kind}"]
        new[f"lm_head.dense.{kind}"] = old[f"lm_head.dense.{kind}"]
        new[f"lm_head.layer_norm.{kind}"] = old[f"lm_head.layer_norm.{kind}"]
        for number in range(LAYERS):
            before, after = f"esm.encoder.layer.{number}.", f"encoder.layers.{number}."
            parts = [old[f"{before}attention.self.{part}.{kind}"].chunk(HEADS) for part in ("query", "key", "value")]
            new[f"{after}self_attention.linear_qkv.{kind}"] = torch.cat(
                [part[head] for head in range(HEADS) for part in parts]
            )
            for name, theirs in {
                "self_attention.linear_qkv.layer_norm_": "attention.LayerNorm.",
                "self_attention.linear_proj.": "attention.output.dense.", "mlp.linear_fc1.layer_norm_": "LayerNorm.",
                "mlp.linear_fc1.": "intermediate.dense.", "mlp.linear_fc2.": "output.dense.",
            }.items():  # fmt: skip
                new[f"{after}{name}{kind}"] = old[f"{before}{theirs}{kind}"]
    return new


def write_context(path: Path, config_class: str = ESM2, without: str = "", **arguments: Any) -> None:
    """Write context/io.json of `fiddle`, as far as it describes the model."""

    def value(key: str, given: Any) -> dict[str, Any]:
        paths = [f"<root>.model.config.{key}"]
        if key in _REFERENCES:
            parts = given.split(".")
            cut = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
            return {"type": "pyref", "module": ".".join(parts[:cut]), "name": ".".join(parts[cut:]), "paths": paths}
        return {"type": "leaf", "value": given, "paths": paths}

    module, _, name = config_class.rpartition(".")
    items = [
        [f"Attr(name='{key}')", value(key, given)] for key, given in (GIVEN | arguments).items() if key != without
    ]
    kind = {"type": "pyref", "module": "fiddle._src.config", "name": "Config"}
    objects = {
        "about_1": {
            "type": {"type": "pyref", "module": "fiddle._src.config", "name": "BuildableTraverserMetadata"},
            "items": [["Attr(name='fn_or_cls')", {"type": "pyref", "module": module, "name": name}],
                      ["Attr(name='argument_names')", {"type": "ref", "key": "tuple_1"}]],
        },
        "config_1": {"type": kind, "items": items, "metadata": {"type": "ref", "key": "about_1"},
                     "paths": ["<root>.model.config"]},
        "module_1": {"type": kind, "items": [["Attr(name='config')", {"type": "ref", "key": "config_1"}]],
                     "metadata": {"type": "ref", "key": "about_2"}, "paths": ["<root>.model"]},
    }  # fmt: skip
    (path / "context").mkdir(parents=True, exist_ok=True)
    root = {"root": {"type": "ref", "key": "trainer_context_1"}, "objects": objects}
    (path / "context" / "io.json").write_text(json.dumps(root))


def write(path: Path, tensors: dict[str, Tensor], **arguments: Any) -> Path:
    """Write a checkpoint with separate layers, saved with torch, that also contains the state of an optimizer."""
    write_context(path, **arguments)
    state: dict[str, Any] = {f"module.{name}": tensor for name, tensor in tensors.items()}
    state["optimizer.state.exp_avg.module.output_layer.bias"] = torch.ones(3)
    state["module.encoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"] = {"any": "object"}
    dcp.save(state, checkpoint_id=path / "weights", no_dist=True)
    return path


def megatron(layout: Layout, tensors: dict[str, Tensor], fused: bool) -> BertModel:
    """Build Megatron-Core's model with the weights of this rank; called in the processes of a layout."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=INNER, hidden_dropout=0.0,
        attention_dropout=0.0, activation_func=F.gelu, bias_activation_fusion=fused, use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor,
    )  # fmt: skip
    model = BertModel(
        config, 0, bert_layer_local_spec, len(tensors["output_layer.bias"]), LENGTH, add_binary_head=False,
        share_embeddings_and_output_weights=True, position_embedding_type="rope",
    )  # fmt: skip
    rank, state = torch.distributed.get_rank(), {}
    for name, tensor in tensors.items():
        split = next((dim for end, dim in _SPLIT.items() if name.endswith(end)), None)
        local = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        state[local] = tensor if split is None else tensor.chunk(layout.tensor, split)[rank]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("_extra_state" in name for name in missing)
    return model.eval()


def save(layout: Layout, path: Path, tensors: dict[str, Tensor], tokens: Tensor) -> dict[bool, Tensor]:
    """Save Megatron-Core's model as BioNeMo 2 does; called in the processes of a layout.

    Return its logits with the exact and, for True, the fused GELU: [sequences, tokens, rows], without token dropout.
    """
    models = {fused: megatron(layout, tensors, fused) for fused in (False, True)}
    (path / "weights").mkdir(parents=True, exist_ok=True)
    state = {"sharded_state_dict": models[False].sharded_state_dict(prefix="module.")}
    with (  # Megatron assumes a GPU
        patch.multiple(torch.cuda, synchronize=lambda: None, current_device=lambda: "cpu"),
        patch.object(CudaRNGStatesTracker, "fork", lambda self: nullcontext()),
        patch.object(filesystem_async, "_results_queue", Queue()),  # in place of one in another process
        torch.no_grad(),
    ):
        dist_checkpointing.save(state, path / "weights")
        return {fused: model(tokens, (tokens != 1).long())[0] for fused, model in models.items()}
